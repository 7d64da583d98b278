"""Callbacks of training frameworks, in their real trainers, with a sensor of known watts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.integrations.training_energy import EVALUATION, TrainingEnergy
from tessera.monitor import Monitor
from tessera.schema import Domain, EnergyReport

from fakes.sensor import ScriptSensor
from models import declare_torchvision


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.full((4,), float(i))
        return {"x": x, "labels": x.sum()}


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        out = self.layer(x / 50).squeeze(-1)
        return {"loss": (out - labels / 200).square().mean(), "logits": out}


def checked(report: EnergyReport | None, steps: int, samples: int) -> None:
    assert report is not None and report.total.energy_j > 0
    assert {w.unit: w.amount for w in report.work} == {"step": steps, "sample": samples}
    regions = {r.name: r.energy for r in report.regions}
    assert set(regions) == {"steps", "evaluation", "saving"}
    assert regions["steps"].energy_j == report.total.energy_j
    assert {r.name for r in report.regions if r.apart} == {"evaluation", "saving"}
    shown = str(report)
    assert shown.count("(not in the total)") == 2 and shown.count("(100%") == 1 + len(report.by_domain)
    for energy in (*regions.values(), *report.by_domain.values()):
        assert energy.error_j >= 0.2 * energy.energy_j * (1 - 1e-9), "no number of windows makes the level surer"


@pytest.fixture
def watts() -> Iterator[Monitor]:
    """A monitor of 100 W: joules are 100 times the seconds, and the sensor's level is known to 20%."""
    domain = Domain(name="gpu0", source="script", resolution_s=0.005, gain_error=0.2)
    sensor = ScriptSensor(lambda t: 100.0, clock=time.monotonic_ns, step_ms=5.0, period_s=0.02, domain=domain)
    monitor = Monitor([sensor]).start()
    yield monitor
    monitor.stop()


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer(tmp_path: Path, watts: Monitor) -> None:
    declare_torchvision()
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tessera.integrations.huggingface import EnergyCallback

    callback = EnergyCallback(watts, least_s=0.0)
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, logging_steps=3, report_to=[],
        save_strategy="steps", save_steps=6, eval_strategy="steps", eval_steps=6, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    reported: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            reported.append(dict(logs))

        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.01)

    trainer = Trainer(Small(), args, train_dataset=Numbers(), eval_dataset=Numbers(), callbacks=[Reporter()])
    callback.attach(trainer)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4 and all("energy_j" in line for line in lines)
    assert sum("energy_j" in line for line in reported) == 4
    assert "evaluation_energy_j" in reported[-1], "the last line has what came after the last steps"
    for line in lines:
        assert line["j_per_step"] == pytest.approx(line["energy_j"] / 3, rel=1e-3, abs=1e-5)
        assert line["j_per_sample"] == pytest.approx(line["energy_j"] / 12, rel=1e-3, abs=1e-5)
        assert line["power_w"] == pytest.approx(100.0, rel=0.01)
    checked(callback.report, steps=12, samples=48)
    assert callback.report is not None
    by_name = {r.name: r for r in callback.report.regions}
    assert (by_name["evaluation"].calls, by_name["saving"].calls) == (2, 2)
    assert by_name["evaluation"].energy.time_s >= 2 * 6 * 0.01, "6 batches of 8, twice"
    assert "evaluation_energy_j" in lines[2] and "saving_energy_j" in lines[2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulated", [1, 3])
def test_lightning_trainer(tmp_path: Path, watts: Monitor, accumulated: int) -> None:
    declare_torchvision()
    lightning = pytest.importorskip("pytorch_lightning")
    from tessera.integrations.lightning import EnergyCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.small(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            time.sleep(0.01)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    callback, logger = EnergyCallback(watts, least_s=0.0), lightning.loggers.CSVLogger(str(tmp_path))
    checkpoint = lightning.callbacks.ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=6 // accumulated, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", log_every_n_steps=5, callbacks=[callback, checkpoint], logger=logger,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulated,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4)
    trainer.fit(Module(), loader, loader)
    checked(callback.report, steps=12 // accumulated, samples=48)
    assert callback.report is not None
    by_name = {r.name: r for r in callback.report.regions}
    assert by_name["saving"].calls == 2
    assert by_name["evaluation"].energy.time_s >= 12 * 0.01
    assert "save_checkpoint" not in vars(trainer)
    logger.save()
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "energy/j_per_step" in text and "energy/j_per_sample" in text and "energy/evaluation_energy_j" in text
    assert len([line for line in text.splitlines()[1:] if line]) >= 3, "steps 5, 10, and the last two"


def test_a_line_tells_of_its_own_steps_and_the_last_one_of_the_rest(watts: Monitor) -> None:
    tally = TrainingEnergy("loop", watts, least_s=0.0)
    assert tally.log() == {} and tally.end() is None
    tally.begin()
    tally.add(step=1, sample=8, token=None)
    first = tally.log()
    assert set(first) == {"energy_j", "error_j", "power_w", "j_per_step", "j_per_sample"}
    assert tally.log() == {}, "no step since"
    tally.add(step=1)
    last = tally.log(last=True)
    report = tally.end()
    assert report is not None and {w.unit: w.amount for w in report.work} == {"step": 2, "sample": 8}
    assert report.total.energy_j == pytest.approx(first["energy_j"] + last["energy_j"], abs=0.5)


def test_evaluation_is_not_charged_to_the_steps(watts: Monitor) -> None:
    tally = TrainingEnergy("loop", watts, least_s=0.0)
    tally.switch(EVALUATION)  # before the training: nothing
    tally.begin()
    tally.add(step=1)
    with tally.phase(EVALUATION):
        time.sleep(0.2)
    line = tally.log()
    report = tally.end()
    assert line["evaluation_energy_j"] >= 100.0 * 0.2
    assert report is not None
    spent = {r.name: r.energy.energy_j for r in report.regions}
    assert spent["evaluation"] == pytest.approx(line["evaluation_energy_j"])
    assert report.total.energy_j == spent["steps"]
    assert report.per_work()[0][1] == pytest.approx(spent["steps"])
    assert report.total.time_s == pytest.approx(sum(r.energy.time_s for r in report.regions if r.name == "steps"))


def test_steps_too_short_to_wait_for_the_sensor_are_in_the_next_line(watts: Monitor) -> None:
    tally = TrainingEnergy("loop", watts, least_s=3600.0)
    tally.begin()
    tally.add(step=1)
    assert tally.log() == {}
    tally.add(step=1)
    line = tally.log(last=True)
    assert line["j_per_step"] == pytest.approx(line["energy_j"] / 2)
