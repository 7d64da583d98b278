"""`tessera watch`: the figures, the screen, the lines, and the terminal left as it was."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len

from tessera.cli.main import main
from tessera.cli.watch import wait_for_look
from tessera.config import Config
from tessera.monitor.snapshot import DomainReading, PowerWatch, Snapshot
from tessera.report.watch import json_line, plain_lines, screen, sparkline, summary
from tessera.schema import Domain, Telemetry
from tessera.sensors.discover import DiscoveredSensors
from warm_command import run_command

from fakes.nvml import Scenario, fake_env, missing_compiler
from fakes.sensor import ScriptSensor

needs_fake = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
SECOND = 1_000_000_000


def tessera(*args: str, scenario: Scenario | None = None) -> subprocess.CompletedProcess[str]:
    return run_command(*args, env=fake_env(scenario) if scenario else None)


def here(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    """The same in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def board(i: int = 0, **changes: object) -> DomainReading:
    telemetry = Telemetry(
        time_ns=0, domain=f"gpu{i}", temperature_c=61.0, memory_temperature_c=70.0, power_limit_w=700.0,
        clocks_mhz={"sm": 1530.0, "memory": 3201.0}, throttle=(), utilization_pct=100.0, sm_activity_pct=93.0,
        memory_used_bytes=76 << 30, memory_total_bytes=140 << 30,
    )  # fmt: skip
    whole = DomainReading(
        domain=f"gpu{i}", label="NVIDIA H200", source="nvml-samples", basis="measured", counted=True,
        resolution_s=0.02, power_w=512.3, age_s=0.031, mean_w=498.2, energy_j=20_913.0, error_j=80.0, coverage=1.0,
        memory_w=71.0, telemetry=telemetry, history_w=[500.0] * 60, cell_s=0.1, top_w=700.0,
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def shot(readings: Sequence[DomainReading], **changes: object) -> Snapshot:
    whole = Snapshot(
        epoch_s=1.79e9, time_s=42.0, readings=readings, power_w=1024.0, mean_w=996.4, energy_j=41_826.0,
        error_j=113.0, basis=readings[0].basis,
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def throttled(reading: DomainReading, *reasons: str) -> DomainReading:
    assert reading.telemetry is not None
    return dataclasses.replace(reading, telemetry=dataclasses.replace(reading.telemetry, throttle=reasons))


# -- sparkline and history -----------------------------------------------------------------------------------


def test_sparkline_scales_from_zero_to_the_top():
    assert sparkline([0, 100, 400, 700], 700) == "▁▁▅█"
    assert sparkline([80 * k for k in range(1, 9)], 640) == "▁▂▃▄▅▆▇█"


def test_sparkline_clips_above_the_top_and_dots_what_is_unknown():
    assert sparkline([915.0, None, 350.0], 700) == "█·▄"
    assert sparkline([1.0, 0.0], 0.0) == "▁▁"
    assert sparkline([], 700) == ""


# -- the screen ----------------------------------------------------------------------------------------------


def test_eight_throttled_gpus_fit_into_80_by_24():
    rows = [throttled(board(i), "power cap", "thermal (software)") for i in range(8)]
    text = screen(shot(rows, missing={"rapl": "no"}), width=80, height=24).plain
    lines = text.split("\n")
    assert len(lines) <= 24 and max(cell_len(x) for x in lines) <= 80
    assert all(f"gpu{i}" in text for i in range(8))
    assert text.count("throttled: power cap, thermal (software)") == 8
    assert lines[-2].startswith("total") and lines[-1] == "not available: rapl (run `tessera doctor` to see why)"


def test_a_short_window_keeps_the_total():
    lines = screen(shot([board(i) for i in range(8)]), width=60, height=10).plain.split("\n")
    assert len(lines) <= 10 and lines[-1].startswith("total") and "more" in lines[-2]


def test_one_board_shows_everything_it_knows():
    text = screen(shot([board()]), width=80).plain
    for part in ("measured", "512 W", "700 W", "20.91 kJ ±0.4%", "498 W", "1530 MHz", "61 °C", "busy 100%", "SM  93%",
                 "mem 3201 MHz", "70 °C", "71 W", "76/140 GiB", "NVIDIA H200", "every 20 ms", "40 ms ago"):  # fmt: skip
        assert part in text, part
    assert "total" not in text and "…" not in text and "throttled" not in text


def test_what_is_missing_is_left_out_not_zero():
    text = screen(shot([board(telemetry=None, memory_w=None, power_w=None, mean_w=None)]), width=80).plain
    assert "—" in text and "MHz" not in text and "°C" not in text and " 0 W" not in text


def test_the_first_line_says_what_is_modelled():
    cpu = board(domain="cpu0", basis="modelled", telemetry=None)
    assert "modelled, not measured" in screen(shot([cpu])).plain.split("\n")[0]
    assert "measured: gpu0; modelled: cpu0" in screen(shot([board(), cpu])).plain.split("\n")[0]
    assert summary(shot([cpu])).endswith("(modelled, not measured)")


def test_a_lost_gpu_says_why_and_the_total_says_without():
    gone = board(1, power_w=None, lost="GPU is\nlost", lost_s=3.2, gaps=1)
    text = screen(shot([board(), gone, board(2, gaps=2, coverage=0.9)])).plain
    assert "no data for 3.2 s: GPU is lost" in text and "without gpu1" in text
    assert "2 gaps, 90.0% of the time covered" in text


def test_money_and_co2_are_shown_where_factors_are_configured():
    cost = Config(price_per_kwh=0.3, currency="EUR", gco2e_per_kwh=380).cost_of(41_826.0)
    whole = shot([board(), board(1)], cost=cost)
    assert "cost" not in screen(shot([board()]), width=100).plain
    assert re.search(r"\ncost +11\.6\d* Wh   0\.0035 EUR   4\.4\d* g CO2e", screen(whole, width=100).plain)
    assert list(plain_lines(whole))[-1].endswith(" cost kwh=0.0116183 cost=0.0034855 gco2e=4.41497 currency=EUR")
    assert "0.0035 EUR" in summary(whole)
    assert json.loads(json_line(whole))["cost"]["cost"] == pytest.approx(0.0034855)


def test_the_watch_takes_the_factors_from_the_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TESSERA_PRICE_PER_KWH", "0.5")
    sensor = ScriptSensor(clock=time.monotonic_ns, domain=Domain(name="gpu0", source="script", resolution_s=0.02))
    with PowerWatch(DiscoveredSensors([sensor], []), 1.0) as watch:
        deadline = time.monotonic() + 600.0
        while (found := watch.take_snapshot()).energy_j == 0.0 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert found.cost is not None and found.cost.cost == pytest.approx(0.5 * found.energy_j / 3.6e6)


def test_plain_lines_are_pairs():
    first, second, total = plain_lines(shot([throttled(board(), "power cap"), board(1)]))
    assert first.startswith("2026-09-21T14:13:20.000Z gpu0 power_w=512.3 mean_w=498.2 energy_j=20913 error_j=80 ")
    assert 'throttle="power cap"' in first and "throttle=none" in second and "sm_mhz=1530" in first
    assert " total power_w=1024 " in total


# -- the command ---------------------------------------------------------------------------------------------


@needs_fake
def test_without_a_terminal_there_is_a_line_per_domain_and_interval():
    scenario = Scenario(gpus=2, wave="const:300", reasons=4)
    done = tessera("watch", "--interval", "200ms", "--duration", "0.6s", scenario=scenario)
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"^\S+ ", "", x) for x in done.stdout.splitlines()]
    assert [x.split()[0] for x in lines] == ["gpu0", "gpu1", "total"] * 3
    pairs = dict(p.split("=") for p in lines[-3].replace('"power cap"', "cap").split()[1:])
    assert float(pairs["power_w"]) == pytest.approx(300, rel=0.05)
    assert float(pairs["energy_j"]) >= 0.75 * 180  # more where the machine is busy and the last interval ends late
    assert pairs["limit_w"] == "700" and pairs["throttle"] == "cap" and pairs["basis"] == "measured"
    assert "\x1b" not in done.stdout


@needs_fake
def test_json_lines():
    done = tessera("watch", "--json", "--interval", "100ms", "--duration", "300ms", scenario=Scenario(hbm="off"))
    rows = [json.loads(x) for x in done.stdout.splitlines()]
    assert len(rows) == 3 and done.stderr == ""
    reading = rows[-1]["readings"][0]
    assert reading["domain"] == "gpu0" and reading["telemetry"]["power_limit_w"] == 700
    assert reading["memory_w"] is None and "history_w" not in reading
    assert rows[0]["energy_j"] <= rows[1]["energy_j"] <= rows[2]["energy_j"]


def test_json_lists_as_many_processes_as_asked():
    done = tessera("watch", "--json", "--once", "--sensor", "modelled", "--processes", "1")
    (row,) = [json.loads(x) for x in done.stdout.splitlines()]
    assert len(row["processes"]) == 1 and row["owners"], "the sums by owner are of all"


def test_once_with_the_model_says_so():
    done = tessera("watch", "--once", "--sensor", "modelled")
    assert done.returncode == 0, done.stderr
    assert "cpu0 " in done.stdout and "basis=modelled" in done.stdout and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--interval", "1ms"], "too short"),
        (["--interval", "5"], "unit"),
        (["--sensor", "nvmll"], "did you mean 'nvml'"),
    ],
)
def test_wrong_arguments_are_answered_with_the_fix(args: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    code, _, errors = here(capsys, "watch", *args)
    assert code == 2 and says in errors and "fix:" in errors


class Terminal:
    """`tessera watch` on a pseudo-terminal of its own."""

    def __init__(self, *args: str, scenario: Scenario) -> None:
        self.ours, theirs = pty.openpty()
        self.theirs = theirs
        termios.tcsetwinsize(theirs, (24, 80))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tessera.cli.main import main; main()", "watch", *args],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=fake_env(scenario, {**os.environ, "TERM": "xterm-256color"}),
        )  # fmt: skip
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def until(self, text: str, timeout_s: float = 120.0) -> None:
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            ready, _, _ = select.select([self.ours], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.ours, 65536).decode(errors="replace")

    def ends(self) -> int:
        self.until("\x1b[?1049l")  # back from the alternate screen
        return self.process.wait(120)

    def canonical(self) -> bool:
        return bool(termios.tcgetattr(self.theirs)[3] & termios.ICANON)


@needs_fake
@pytest.mark.parametrize("way", ["q", signal.SIGINT, signal.SIGTERM])
def test_quitting_restores_the_terminal(way: str | signal.Signals):
    with Terminal(scenario=Scenario(gpus=2, wave="const:300")) as terminal:
        terminal.until("gpu1")
        assert not terminal.canonical(), "keys come at once"
        if isinstance(way, signal.Signals):
            terminal.process.send_signal(way)
        else:
            os.write(terminal.ours, way.encode())
        assert terminal.ends() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert "\x1b[?25h" in terminal.seen, "the cursor is back"


@needs_fake
def test_the_duration_ends_the_screen_too_and_colour_can_be_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with Terminal("--duration", "200ms", scenario=Scenario(reasons=4)) as terminal:
        assert terminal.ends() == 0
        assert "throttled: power cap" in terminal.seen
        terminal.until("on average")
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.seen), "no colour"


def test_the_terminal_is_restored_after_an_exception():
    code = (
        "import sys, termios\nfrom tessera.cli.watch import Quit\nb = termios.tcgetattr(0)\n"
        "try:\n    with Quit(keys=True): 1/0\nexcept ZeroDivisionError: print(b == termios.tcgetattr(0))"
    )
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=theirs, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.stdout == "True\n", done.stderr
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(("whole_after", "waits"), [(0, 1), (3, 4)])
def test_a_single_look_waits_until_all_of_it_is_there(whole_after: int, waits: int) -> None:
    waited: list[float] = []
    quit_: Any = SimpleNamespace(wait=waited.append)
    watch: Any = type("Watch", (), {"is_whole": property(lambda _: len(waited) > whole_after)})()
    wait_for_look(quit_, watch)
    assert len(waited) == waits and waited[0] == 1.2
    waited.clear()
    never: Any = SimpleNamespace(is_whole=False)
    quitting: Any = SimpleNamespace(wait=lambda seconds: waited.append(seconds) or len(waited) > 2)
    wait_for_look(quitting, never)
    assert len(waited) == 3, "the user quits"
