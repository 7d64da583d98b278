"""Screens of sentences fit their terminal: what is longer goes on in the next line, further right; nothing is cut."""

from __future__ import annotations

import io
import itertools

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tessera.actuators import OutstandingChange
from tessera.cli.main import cli
from tessera.hardware import catalogue
from tessera.report.console import Console, HangingText
from tessera.report.doctor import print_checks, print_health
from tessera.report.hardware import print_device
from tessera.schema import Capability, Domain
from tessera.selftest import judge, skip
from tessera.sensors.health import Health, MachineCheck, SensorHealth
from tessera.sensors.response_store import SensorResponse

LONG = " ".join(f"word{i}" for i in range(40))


def console(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def shown(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("width", [60, 100])
def test_doctor_fits(width: int) -> None:
    domain = Domain(name="gpu0", source="nvml-samples", label="NVIDIA H200", resolution_s=0.02, note=LONG)
    lack = Capability(name="rails", available=False, reason=LONG, fix=LONG)
    sensors = (
        SensorHealth(name="nvml", state="ok", domains=(domain,), lacks=(lack,)),
        SensorHealth(name="rapl", state="missing", reason=LONG, fix=LONG),
    )
    left = OutstandingChange(gpu="gpu0", uuid="GPU-1", dead=("123",), needs_restore=True, action=LONG)
    out = console(width)
    health = Health(sensors=sensors, checks=(MachineCheck(name="clock", ok=False, detail=LONG, fix=LONG),))
    print_health(health, out, [left])
    text = shown(out)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("word39") == 8, "nothing is cut off"
    assert "\n             word" in text, "a reason goes on below where it began"
    assert "\n         word" in text, "and so does a fix"


def test_doctor_says_how_the_sensor_responds_and_from_what_it_is_known() -> None:
    domain = Domain(
        name="gpu0", source="nvml-samples", label="NVIDIA L4", resolution_s=0.02, lag_s=0.016, lag_error_s=0.01,
        blur_s=0.0114,
    )  # fmt: skip
    assumed = SensorHealth(name="nvml", state="ok", domains=(domain,))
    response = SensorResponse(
        lag_s=0.0082, lag_error_s=0.0009, blur_s=0.0061, blur_error_s=0.001, idle_w=38.2, idle_error_w=2.1,
        seconds=61.0, runs=3,
    )  # fmt: skip
    learnt = SensorHealth(name="nvml", state="ok", domains=(response.apply(domain),), responses={"gpu0": response})
    texts = []
    for sensor in (assumed, learnt):
        out = console(200)
        print_health(Health(sensors=(sensor,)), out)
        texts.append(shown(out))
    assert "lag 16 ± 10.0 ms, blur 11 ms (default: fitted on an H200" in texts[0]
    assert "lag 8.2 ± 0.9 ms, blur 6.1 ± 1.0 ms, idle 38.2 ± 2.1 W (learnt from 61 s of 3 runs)" in texts[1]


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("device", list(catalogue().values()), ids=lambda d: d.id)
def test_every_device_fits(device, width: int) -> None:
    out = console(width)
    print_device(device, out)
    text = shown(out)
    assert max(map(len, text.splitlines())) <= width
    for _, figure in device.figures():
        assert "".join(words(figure.source)) in "".join(words(text)), "an address may be longer than a line"


@pytest.mark.parametrize("width", [60, 100])
def test_selftest_fits(width: int) -> None:
    found = [judge("a", "joules of simulated kernels, worst of five", 0.4, 5.0, why=LONG), skip("b", "b", LONG)]
    out = console(width)
    print_checks(found, f"tessera; {LONG}", out)
    text = shown(out)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("word39") == 3
    assert "pass joules of simulated kernels, worst of five 0.4 % (limit 5)" in " ".join(words(text))


@pytest.mark.parametrize("args", [["doctor"], ["hardware", "show", "h200"]], ids=lambda a: a[0])
@pytest.mark.parametrize(("columns", "most"), [(None, 100), ("72", 72)])
def test_the_commands_fit_a_pipe_and_what_columns_says(args, columns, most, monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = CliRunner(env={"COLUMNS": columns}).invoke(cli, args, standalone_mode=False).output
    widest = max(map(cell_len, text.splitlines()))
    assert widest <= most
    assert args == ["doctor"] or widest > most - 10, "what a doctor has to say depends on the machine"


def test_a_number_stays_with_its_unit() -> None:
    out = console(30)
    out.print(HangingText("measured with a context, 82-118 W (driver 580)", 2))
    assert shown(out) == "measured with a context,\n  82-118 W (driver 580)\n"


@given(
    st.lists(st.text("abc±漢0 ", max_size=20), max_size=12).map(" ".join),
    st.integers(2, 60),
    st.integers(0, 70),
)
def test_any_text_fits_any_width_and_keeps_its_letters(text: str, width: int, hang: int) -> None:
    out = console(width)
    out.print(HangingText(Text(text, style="dim"), hang))
    lines = shown(out).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(itertools.chain.from_iterable(map(words, lines))) == "".join(words(text))
