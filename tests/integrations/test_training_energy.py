"""Callbacks of training frameworks, in their real trainers, with a sensor of known watts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.integrations.training_energy import TrainingEnergy
from tessera.schema import EnergyReport

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


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer(tmp_path: Path) -> None:
    declare_torchvision()
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tessera.integrations.huggingface import EnergyCallback

    callback = EnergyCallback()
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, logging_steps=3, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    reported: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            reported.append(dict(logs))

    trainer = Trainer(Small(), args, train_dataset=Numbers(), callbacks=[Reporter()])
    callback.attach(trainer)
    trainer.train()
    assert sum("energy_j" in line for line in reported) == 3
    checked(callback.report, steps=12, samples=48)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4 and "energy_j" not in lines[0]
    for line in lines[1:]:
        assert line["j_per_step"] == pytest.approx(line["energy_j"] / 3, rel=1e-3, abs=1e-5)
        assert line["j_per_sample"] == pytest.approx(line["energy_j"] / 12, rel=1e-3, abs=1e-5)
        assert line["power_w"] > 0


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer(tmp_path: Path) -> None:
    declare_torchvision()
    lightning = pytest.importorskip("pytorch_lightning")
    from tessera.integrations.lightning import EnergyCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.small(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    callback, logger = EnergyCallback(), lightning.loggers.CSVLogger(str(tmp_path))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", log_every_n_steps=3, callbacks=[callback], logger=logger,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Numbers(), batch_size=4))
    checked(callback.report, steps=12, samples=48)
    logger.save()
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "energy/j_per_step" in text and "energy/j_per_sample" in text


def test_a_line_tells_of_the_stretch_before_it() -> None:
    tally = TrainingEnergy("loop")
    assert tally.log() == {} and tally.end() is None
    tally.begin()
    tally.add(step=1, sample=8, token=None)
    assert tally.log() == {}
    tally.add(step=1)
    first = tally.log()
    assert set(first) >= {"energy_j", "j_per_step", "j_per_sample"} and "j_per_token" not in first
    report = tally.end()
    assert report is not None and {w.unit: w.amount for w in report.work} == {"step": 2, "sample": 8}
    assert report.total.energy_j >= first["energy_j"]
