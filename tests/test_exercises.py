"""Exercises have checked solutions and a current table; the examples beside them run on a CPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera import monitor

from models import declare_torchvision

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parent.parent / "examples"
EXERCISES = sorted((EXAMPLES / "exercises").glob("ex*"))


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, on one thread, with the modelled sensor: what a machine without any has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESSERA_SENSORS", "modelled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monitor.use(None)
    yield
    watching = monitor.default()
    monitor.use(None)
    watching.stop()
    torch.set_num_threads(threads)


def load(path: Path) -> Any:
    name = f"exercise_{path.parent.name.replace('-', '_')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    load(path).main()


# -- exercises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", EXERCISES, ids=lambda p: p.name)
def test_the_solution_passes_its_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(folder / "check.py").run(folder / "solution.py") == 0, capsys.readouterr().out


@pytest.mark.parametrize("folder", EXERCISES, ids=lambda p: p.name)
def test_the_starter_does_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = len(re.findall(r"^\d\. ", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert load(folder / "check.py").run(folder / "starter.py") >= tasks
    assert "not done yet" in capsys.readouterr().out


def test_a_window_with_the_first_call_in_it_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commonest mistake: no warm-up."""
    folder = EXERCISES[0]
    answer = (folder / "solution.py").read_text(encoding="utf-8")
    wrong = answer.replace("    work()  # compiles, allocates, wakes the clocks\n", "")
    assert wrong != answer
    (tmp_path / "answer.py").write_text(wrong, encoding="utf-8")
    assert load(folder / "check.py").run(tmp_path / "answer.py") == 1
    assert "is it in your window?" in capsys.readouterr().out


def test_joules_of_a_call_instead_of_a_sample_are_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = EXERCISES[1]
    answer = (folder / "solution.py").read_text(encoding="utf-8")
    wrong = answer.replace("result.energy_per_call_j.value / samples", "result.energy_per_call_j.value")
    assert wrong != answer
    (tmp_path / "answer.py").write_text(wrong, encoding="utf-8")
    assert load(folder / "check.py").run(tmp_path / "answer.py") == 1
    assert "per sample, you have" in capsys.readouterr().out


def test_the_first_solution_runs_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(EXERCISES[0] / "solution.py", monkeypatch)
    out = capsys.readouterr().out
    assert all(word in out for word in ("idle", "light", "medium", "heavy")) and out.count("modelled") == 4


def test_the_ways_of_the_second_agree() -> None:
    solution = load(EXERCISES[1] / "solution.py")
    ways = solution.attention(2, heads=2, length=16, device="cpu")
    assert solution.agree(ways) == []
    rows = solution.compare({"fused": ways["fused"]}, 2, 0.2)
    assert rows[0].joules_per_sample > 0 and rows[0].basis == "modelled"


def test_the_reference_table_is_current() -> None:
    """`python examples/exercises/reference.py --write` brings it up to date."""
    reference = load(EXAMPLES / "exercises" / "reference.py")
    page = (EXAMPLES / "exercises" / "README.md").read_text(encoding="utf-8")
    assert reference.with_table(page, reference.table()) == page


def test_an_interval_ends_at_what_the_board_may_draw() -> None:
    figure = load(EXAMPLES / "exercises" / "reference.py").figure
    assert figure(691.0, 273.0, 700.0) == "691 (418 to 700)"
    assert figure(691.0, 9.0, 700.0) == "691 ± 9"
    assert figure(12.74, 3.86) == "12.7 ± 3.9"


def test_the_reference_keeps_to_physics() -> None:
    """No load draws more than the TDP, nor less than idle; none does more than the peak."""
    from tessera.hardware import lookup

    reference = load(EXAMPLES / "exercises" / "reference.py")
    for chip in ("a100", "h200"):
        device = lookup(chip)
        assert device.tdp_w is not None and device.idle_w is not None
        for name, dtype in reference.FORMATS.items():
            row = reference.predicted(chip, 8192, dtype)
            peak = device.vector["fp32"] if name == "fp32" else device.matrix[name]
            assert device.idle_w.value < row.power_w <= device.tdp_w.value
            assert 0 < row.tflops * 1e12 < peak.value


# -- examples ---------------------------------------------------------------------------------------------------


def test_energy_scope_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(EXAMPLES / "energy_scope_training.py", monkeypatch, "--epochs", "2", "--steps", "60")
    out = capsys.readouterr().out
    assert "epoch 1: loss" in out and "mJ per sample" in out and "step: 120 passes" in out


def test_energy_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(EXAMPLES / "energy_benchmark.py", monkeypatch, "--size", "256", "--max-s", "3", "--target", "0.3")
    assert "TFLOPS/W" in capsys.readouterr().out


def test_tokens_per_joule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(EXAMPLES / "tokens_per_joule.py", monkeypatch, "--slots", "1,4", "--requests", "8", "--layers", "2")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("modelled")]
    assert [int(row[0]) for row in rows] == [1, 4]
    assert int(rows[1][1]) < int(rows[0][1])  # four at once need fewer steps
    assert all(float(row[2]) > 0 and float(row[4]) > 0 for row in rows)


def test_a_decoder_with_slots_answers_as_one_without() -> None:
    """What runs beside a request must not change its answer."""
    example = load(EXAMPLES / "tokens_per_joule.py")
    alone, together = example.requests_of(5), example.requests_of(5)
    sizes = {"layers": 2, "width": 64, "device": "cpu"}
    example.serve(alone, 1, **sizes)
    example.serve(together, 3, **sizes)
    assert [r.answer for r in alone] == [r.answer for r in together]


@pytest.mark.filterwarnings("ignore")
def test_huggingface_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    declare_torchvision()
    pytest.importorskip("accelerate")
    run(EXAMPLES / "huggingface_trainer.py", monkeypatch, "--steps", "12")
    out = capsys.readouterr().out
    assert "mJ per token" in out and "in total" in out and "modelled" in out


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    declare_torchvision()
    pytest.importorskip("pytorch_lightning")
    run(EXAMPLES / "lightning_trainer.py", monkeypatch, "--samples", "960")
    out = capsys.readouterr().out
    assert "mJ per sample" in out and "in total" in out
