"""`tessera measure` and `tessera doctor` as a user runs them, against the fake NVML and the modelled sensor."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tessera.cli.measure import command
from tessera.errors import ArgumentError
from tessera.joules import sum_domains
from tessera.monitor.command import CommandCpu, CommandRun
from tessera.output import cannot_write
from tessera.report.console import plain_console
from tessera.report.measure import answer, sensors_line
from tessera.schema import Domain, Energy, EnergyReport
from tessera.trace import read_csv
from warm_command import run_command

from command_line import invoke
from fakes.nvml import Scenario, fake_env, missing_compiler

MODULES = ("cli.main", "monitor.command", "profile.cpu_use", "report.measure", "sensors.discover")


def tessera(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run_command(*args, env={"COLUMNS": "200", **(env or {})}, modules=MODULES)


@pytest.fixture
def gpu() -> dict[str, str]:
    reason = missing_compiler()
    if reason:
        pytest.skip(reason)
    return fake_env(Scenario(gpus=2, wave="const:300", before_w=300))


def sleeper(seconds: float) -> list[str]:
    return ["--", sys.executable, "-c", f"import time; time.sleep({seconds})"]


def test_measure_says_joules_watts_seconds(gpu: dict[str, str]) -> None:
    out = tessera("measure", "--json", "--steps", "10", *sleeper(1.0), env=gpu)
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)["report"]
    total = report["total"]
    assert total["energy_j"] / total["time_s"] == pytest.approx(600, rel=0.03)
    assert total["basis"] == "measured"
    assert abs(total["energy_j"] - 600 * total["time_s"]) <= 1.5 * total["error_j"] + 6
    assert report["by_domain"]["gpu0"]["energy_j"] == pytest.approx(total["energy_j"] / 2, rel=0.05)
    assert report["idle_w"] == pytest.approx(600, rel=0.05)
    assert report["peak_w"] == pytest.approx(600, rel=0.05)


def test_measure_answers_in_one_screen_and_names_the_next_command(gpu: dict[str, str]) -> None:
    out = tessera("measure", "--samples", "640", *sleeper(0.8), env=gpu)
    assert out.stdout == "", "the answer goes to stderr, so that pipes keep working"
    assert len(out.stderr.splitlines()) <= 24
    assert re.search(r"per sample\s+[\d.]+ ± [\d.]+ m?J", out.stderr)
    assert re.search(r"[\d.]+ ± [\d.]+ W", out.stderr)
    assert "tessera measure --trace power.csv" in out.stderr


def test_modelled_is_said_on_the_first_line() -> None:
    out = tessera("measure", "--sensor", "modelled", *sleeper(0.3))
    assert out.returncode == 0
    assert out.stderr.splitlines()[0].startswith("MODELLED")


BUSY = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.5: pass"


def test_a_sleeping_command_is_not_charged_for_its_neighbours() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        out = tessera("measure", "--json", "--sensor", "modelled", "--", "sleep", "0.5")
        machine = tessera("measure", "--json", "--sensor", "modelled", "--scope", "machine", "--", "sleep", "0.5")
        neighbour.kill()
    own, whole = (json.loads(run.stdout)["report"] for run in (out, machine))
    assert {d["scope"] for d in own["domains"]} == {"process"}
    assert {d["scope"] for d in whole["domains"]} == {"machine"}
    assert own["total"]["energy_j"] < 0.1 * whole["total"]["energy_j"]


def test_modelled_joules_are_the_cpu_time_of_the_command_and_its_children() -> None:
    argv = ["sh", "-c", f"{sys.executable} -S -c '{BUSY}'; true"]
    out = tessera("measure", "--json", "--sensor", "modelled", "--", *argv)
    report = json.loads(out.stdout)["report"]
    idle_w, full_w = map(float, re.search(r"x ([\d.]+)-([\d.]+) W", report["domains"][0]["note"]).groups())
    second_j = full_w / (os.cpu_count() or 1)
    assert 0.5 * second_j <= report["total"]["energy_j"] <= 0.8 * second_j
    idle_j = report["by_domain"]["cpu0.idle_share"]["energy_j"]
    assert idle_j == pytest.approx(report["total"]["energy_j"] * idle_w / full_w)


def test_the_screen_says_whose_joules_they_are() -> None:
    own = tessera("measure", "--sensor", "modelled", *sleeper(0.1)).stderr
    whole = tessera("measure", "--sensor", "modelled", "--scope", "machine", *sleeper(0.1)).stderr
    assert "the CPU time of the program and its children times a power curve" in own
    assert re.search(r"cpu0 +\S.*the program and its children", own)
    assert re.search(r"cpu0.idle_share .*share of the machine's idle power", own)
    assert "the utilisation of everything on the machine" in whole
    assert re.search(r"cpu0 +\S.*everything on the machine", whole)


def test_exit_code_and_output_pass_through(gpu: dict[str, str]) -> None:
    out = tessera("measure", "--", sys.executable, "-c", "import sys; print('hello'); sys.exit(7)", env=gpu)
    assert out.returncode == 7
    assert out.stdout == "hello\n"


def test_options_after_the_command_belong_to_it(gpu: dict[str, str]) -> None:
    code = "import sys; print(sys.argv[1:])"
    out = tessera("measure", sys.executable, "-c", code, "--steps", "3", "--debug", env=gpu)
    assert out.stdout == "['--steps', '3', '--debug']\n"


def test_death_by_signal_is_128_plus_n(gpu: dict[str, str]) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert tessera("measure", "--", sys.executable, "-c", code, env=gpu).returncode == 128 + signal.SIGKILL


def test_no_such_command() -> None:
    out = tessera("measure", "--sensor", "modelled", "--", "no-such-program-here")
    assert out.returncode == 127
    assert "no-such-program-here" in out.stderr
    assert "fix:" in out.stderr
    assert "Traceback" not in out.stderr


def test_sigterm_still_reports(gpu: dict[str, str]) -> None:
    program = "print('running', flush=True); import time; time.sleep(120)"
    process = subprocess.Popen(
        [sys.executable, "-m", "tessera", "measure", "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **gpu},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(1.0)  # so long that there is power to report
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert re.search(r"± [\d.]+ W", err)


@pytest.mark.parametrize("words", [("measure", "--sensor", "modelled", "--", sys.executable), ("run",)])
def test_a_checkpoint_signal_to_the_whole_job_ends_nobody(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Slurm sends SIGUSR1 to every process of a job; the program saves its state, and the wrapper must outlive it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, time\n"
        "assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, 'as without us'\n"
        "got = []\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, lambda n, _: got.append(n))\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2): os.killpg(0, number)\n"
        "while len(got) < 2: time.sleep(0.01)\n"
        "print('saved', len(got))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tessera", *words, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    assert "saved 2" in done.stdout and re.search(r"\d [mk]?J\b", done.stdout + done.stderr), done.stderr


def test_trace_is_a_csv_that_replays(gpu: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "power.csv"
    first = tessera("measure", "--trace", str(path), *sleeper(1.0), env=gpu)
    assert first.returncode == 0
    columns = read_csv(path)
    assert set(columns) >= {"gpu0", "gpu1"}
    assert columns["gpu0"][1].mean() == pytest.approx(300, rel=0.02)
    again = tessera("measure", "--json", "--sensor", f"replay:{path}", *sleeper(0.5))
    total = json.loads(again.stdout)["report"]["total"]
    assert total["source"].startswith("replay")
    seen_s = total["time_s"] * total["coverage"]  # on a busy machine the program outlasts the recording
    assert total["energy_j"] / seen_s == pytest.approx(600, rel=0.1)


def test_scopes_of_the_program_are_listed(gpu: dict[str, str]) -> None:
    code = (
        "import time\nfrom tessera import monitor\n"
        "for _ in range(3):\n    with monitor.energy_scope('step'):\n        time.sleep(0.1)\n"
    )
    out = tessera("measure", "--json", "--", sys.executable, "-c", code, env=gpu)
    (region,) = json.loads(out.stdout)["report"]["regions"]
    assert (region["name"], region["calls"]) == ("step", 3)
    assert region["energy"]["energy_j"] == pytest.approx(600 * region["energy"]["time_s"], rel=0.05)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["measure"], 2, "no command to measure"),
        (["mesure"], 2, "did you mean 'measure'"),
        (["measure", "--sensor", "nvlm", "--", "true"], 2, "did you mean 'nvml'"),
        (["measure", "--work", "3", "--", "true"], 2, "--unit"),
        (["measure", "--steps", "-3", "--", "true"], 2, "above 0"),
        (["measure", "--sensor", "replay:/nope.csv", "--", "true"], 2, "/nope.csv"),
        (["measure", "--sensor", "rapl", "--sensor", "nvml", "--", "true"], 1, "tessera doctor"),
        (["doctor", "--sensr"], 2, "--sensor"),
    ],
)
def test_wrong_arguments(args: list[str], code: int, words: str) -> None:
    if "rapl" in args and Path("/sys/class/powercap/intel-rapl:0").exists():
        pytest.skip("this machine has RAPL")
    out = tessera(*args)
    assert out.returncode == code, out.stderr
    assert words in out.stderr
    assert "Traceback" not in out.stderr


def test_debug_shows_the_traceback() -> None:
    out = tessera("--debug", "measure", "--sensor", "nvlm", "--", "true")
    assert out.returncode == 1
    assert "Traceback" in out.stderr


def test_doctor_with_a_gpu(gpu: dict[str, str]) -> None:
    out = tessera("doctor", env=gpu)
    assert out.returncode == 0
    assert "nvml-samples" in out.stdout
    assert "20 ms" in out.stdout
    assert "rail voltages" in out.stdout
    assert "clock synchronised" in out.stdout
    assert "performance counters" in out.stdout


def test_doctor_without_any_sensor_names_each_fix() -> None:
    out = tessera("doctor", "--json")
    health = json.loads(out.stdout)
    states = {s["name"]: s for s in health["sensors"]}
    assert set(states) == {"nvml", "amd", "intel", "rapl", "redfish", "ipmi", "modelled"}
    for sensor in states.values():
        assert sensor["state"] == "ok" or (sensor["reason"] and sensor["fix"]), sensor


def test_no_colour_and_no_escape_codes_in_a_pipe(gpu: dict[str, str]) -> None:
    assert "\x1b" not in tessera("doctor", env=gpu).stdout
    assert "\x1b" not in tessera("measure", *sleeper(0.2), env=gpu).stderr


@pytest.mark.parametrize("command", ["doctor", "hardware list"])
def test_head_closes_the_pipe_without_noise(command: str) -> None:
    read, write = os.pipe()
    os.close(read)  # as if head had ended
    words = [sys.executable, "-m", "tessera", *command.split()]
    out = subprocess.run(words, check=False, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert "Traceback" not in out.stderr
    assert "BrokenPipe" not in out.stderr
    assert out.returncode == 0


def test_json_is_alone_on_standard_output(gpu: dict[str, str]) -> None:
    out = tessera("measure", "--json", "--", sys.executable, "-c", "print('hello')", env=gpu)
    assert json.loads(out.stdout)["returncode"] == 0
    assert "hello" in out.stderr


@pytest.mark.parametrize("path", ["/no/such/folder/x.csv", "/proc/x.csv"])
def test_a_trace_that_cannot_be_written_is_said_before_the_command_runs(path: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    out = tessera("measure", "--sensor", "modelled", "--trace", path, "--", "touch", str(marker))
    assert out.returncode == 2
    assert path in out.stderr and "Traceback" not in out.stderr
    assert not marker.exists()


def test_no_next_command_for_a_power_log_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, path: Path) -> None:
        raise cannot_write(path, OSError(28, "No space left on device"))

    monkeypatch.setattr("tessera.trace.PowerTrace.to_csv", full)
    out = invoke(command, "--sensor", "modelled", "--trace", tmp_path / "p.csv", "--", "true")
    assert out.code == 0, out.output
    assert "No space left" in out.stderr and "replay:" not in out.stderr


def test_a_modelled_recording_replays_as_modelled(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    tessera("measure", "--sensor", "modelled", "--trace", str(path), *sleeper(0.5))
    out = tessera("measure", "--json", "--sensor", f"replay:{path}", *sleeper(0.3))
    total = json.loads(out.stdout)["report"]["total"]
    assert total["basis"] == "modelled"
    assert total["error_j"] >= 0.25 * total["energy_j"]
    (cpu,) = (Domain(**d) for d in json.loads(out.stdout)["report"]["domains"] if d["counted"])
    assert sensors_line([cpu]).plain == "MODELLED, not measured: the power of cpu0 was modelled when it was recorded."


def test_the_next_command_names_a_trace_as_the_shell_must_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "power of a run.csv"
    out = invoke(command, "--sensor", "modelled", "--trace", path, "--", "true")
    assert f"tessera measure --sensor 'replay:{path}' -- sleep 1" in out.stderr


def test_the_end_of_a_failed_command_is_said(gpu: dict[str, str]) -> None:
    assert "exit code 3" in tessera("measure", "--", "sh", "-c", "exit 3", env=gpu).stderr
    assert "was interrupted (Ctrl-C)" in tessera("measure", "--", "sh", "-c", "kill -2 $$", env=gpu).stderr
    assert "SIGKILL" in tessera("measure", "--", "sh", "-c", "kill -9 $$", env=gpu).stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--stpes", "5", "--", "true"], "did you mean '--steps'"),
        (["--steps", "inf", "--", "true"], "positive"),
        (["--steps", "3", "--work", "10", "--unit", "step", "--", "true"], "twice"),
        (["--", ""], "no command"),
        (["--", "sleep 0.1"], "without the quotes"),
    ],
)
def test_mistakes_of_a_newcomer(args: list[str], words: str) -> None:
    out = tessera("measure", "--sensor", "modelled", *args)
    assert out.returncode != 0
    assert words in out.stderr
    assert "Traceback" not in out.stderr


def test_a_full_disk_and_an_ascii_terminal_give_no_traceback() -> None:
    command = f"{sys.executable} -m tessera doctor > /dev/full"
    out = subprocess.run(command, shell=True, check=False, capture_output=True, text=True, timeout=300)
    assert out.returncode == 1
    assert "Traceback" not in out.stderr
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "Traceback" not in tessera("doctor", env=ascii_only).stderr


@pytest.mark.parametrize(("waited_s", "others_s", "busy"), [(0.4, 1.5, True), (0.0, 1.5, False), (None, None, False)])
def test_a_busy_machine_is_said(
    monkeypatch: pytest.MonkeyPatch, waited_s: float | None, others_s: float | None, busy: bool
) -> None:
    def play(argv: Any, monitor: Any, **given: Any) -> CommandRun:
        spent = Energy(energy_j=10.0, error_j=0.1, time_s=1.0, source="script")
        cpu = CommandCpu(cpu_s=0.5, over_s=1.0, waited_s=waited_s, others_s=others_s)
        report = EnergyReport(name=argv[0], total=spent, by_domain={})
        return CommandRun(report=report, trace=None, telemetry={}, returncode=0, cpu=cpu)  # type: ignore[arg-type]

    monkeypatch.setattr("tessera.monitor.command.measure_command", play)
    said = " ".join(invoke(command, "--sensor", "modelled", "--", "a").stderr.split())
    assert ("busy machine: other programs used 1.5 cores, and the main thread waited 40.0%" in said) == busy
    use = json.loads(invoke(command, "--sensor", "modelled", "--json", "--", "a").stdout)["cpu_use"]
    assert (use["waited_s"], use["others_s"], use["over_s"]) == (waited_s, others_s, 1.0)


def test_two_commands_in_turns_have_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """With joules that are played: those of real commands scatter as the machine's load does."""

    def play(argv: Any, monitor: Any, **given: Any) -> CommandRun:
        spent = Energy(energy_j={"a": 10.0, "b": 30.0}[argv[0]], error_j=0.1, time_s=1.0, source="script")
        report = EnergyReport(name=argv[0], total=spent, by_domain={}, work=given["work"])
        return CommandRun(report=report, trace=None, telemetry={}, returncode=0)  # type: ignore[arg-type]

    monkeypatch.setattr("tessera.monitor.repeat.measure_command", play)
    words = ("--sensor", "modelled", "--runs", "3", "--samples", "10", "--", "a", "--", "b")
    out = invoke(command, *words)
    assert out.code == 0 and out.stdout == "", out.code
    assert "verdict  B uses 3 times the joules of A" in out.stderr
    assert "per sample" in out.stderr


def test_runs_of_one_command_are_compared_by_diff(gpu: dict[str, str], tmp_path: Path) -> None:
    for name, seconds in (("a", "0.1"), ("b", "0.3")):
        command = ["sh", "-c", f"echo hello; sleep {seconds}"]
        out = tessera("measure", "--json", "--runs", "3", "--show-output", "--", *command, env=gpu)
        assert out.returncode == 0, out.stderr
        assert out.stderr.count("hello") == 3, "JSON is alone on standard output"
        (tmp_path / f"{name}.json").write_text(out.stdout)
    found = tessera("diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json", "--fail-above", "5%")
    assert found.stdout, found.stderr
    told = json.loads(found.stdout)
    assert told["runs"] == [3, 3] and told["verdict"]["known"]
    assert found.returncode == int(told["verdict"]["failed"]), "on a busy machine their joules may not differ"


def test_a_failing_run_shows_what_it_printed_and_passes_its_code_on() -> None:
    out = tessera("measure", "--sensor", "modelled", "--runs", "3", "--", "sh", "-c", "echo broken; exit 4")
    assert out.returncode == 4
    assert "broken" in out.stderr and "A, run 1 failed with exit code 4" in out.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--warmup", "2", "--", "true"], 2, "need --runs"),
        (["--runs", "2", "--trace", "x.csv", "--", "true"], 2, "single run"),
        (["--runs", "2", "--", "--"], 2, "no command"),
        (["--runs", "2", "--", "true", "--"], 2, "no command after a `--`"),
        (["--runs", "2", "--", "true", "--", "--", "true"], 2, "no command after a `--`"),
        (["--runs", "2", "--", "true", "--", "no-such-program-here"], 127, "no-such-program-here"),
    ],
)
def test_wrong_use_of_runs(args: list[str], code: int, words: str) -> None:
    done = invoke(command, "--sensor", "modelled", *args)
    assert words in (done.stderr if code == 127 else str(done.code))
    assert done.code == code or isinstance(done.code, ArgumentError)


@pytest.mark.parametrize(("idle_w", "is_shown"), [(None, False), (0.0, False), (100.0, True)])
def test_the_joules_above_idle_are_shown_where_something_was_drawn_before(idle_w: float | None, is_shown: bool) -> None:
    total = Energy(energy_j=1551.0, error_j=47.0, time_s=3.0, source="nvml")
    report = EnergyReport(name="sleep 3", total=total, by_domain={}, domains=[], idle_w=idle_w)
    assert ("above idle" in plain_console(100).text(answer(report, advice=None, next_command=None))) is is_shown


def test_joules_that_nothing_measured_are_unknown_and_not_zero() -> None:
    node = Energy(energy_j=1551.0, error_j=47.0, time_s=3.0, source="redfish")
    report = EnergyReport(
        name="sleep 3",
        total=sum_domains([], 3.0),
        by_domain={"node": node},
        domains=[Domain(name="node", source="redfish", resolution_s=1.0, counted=False, label="Server")],
    )
    shown = plain_console(100).text(answer(report, advice=None, next_command=None))
    assert shown.startswith("unknown J   unknown W   3 s   none") and "0 J" not in shown.split("node")[0]
    assert "node  1.551 ± 0.047 kJ (not in the total)  Server" in shown
    assert sensors_line(report.domains).plain == "no joules are counted: node cannot say which are the program's"
