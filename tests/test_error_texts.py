"""Every error a user meets, read together: what, and why or the fix; short; no traceback; the right exit code.

The texts stand in data/error_texts.txt, so that a change of one is seen in review. After a change that is meant:

    python tests/test_error_texts.py
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from tessera import errors
from tessera.cli import prof
from tessera.cli.main import cli, main
from tessera.errors import TesseraError
from tessera.profile.runfile import RunWriter
from tessera.profile.runfile_checksum import unseal

from synthetic_run import make

HERE = Path(__file__).parent
SNAPSHOT = HERE / "data" / "error_texts.txt"
MOST_LINES, MOST_WIDTH = 6, 230  # the widest lists the keys of a device file
TESTED_ELSEWHERE = {  # they need a machine in a state that a test cannot make here, or a stand-in for its library
    "SensorPermission": "test_rapl.py, test_ipmi.py",
    "SensorLost": "test_nvml.py, test_redfish.py",
    "ActuatorPermission": "test_actuators.py",
    "NotYours": "test_attach.py",
    "BadMessage": "test_parsers.py",
    "SocketTaken": "test_attach.py",
    "MigrationError": "test_migration.py",
    "RewriteError": "test_optimize.py, test_checkpoint.py, test_fused_conv.py",
}


@dataclass(frozen=True)
class Said:
    """How a command or a call ended."""

    shown: str
    text: str
    code: int | str


@dataclass(frozen=True)
class Case:
    """What a user does wrong: arguments of the command, or a call. `names` must be in the text.

    The exit code is 2 where what was asked cannot be, and 1 where it was tried and failed.
    """

    name: str
    do: str | Callable[[], Any]
    names: str
    code: int = 2


# -- what goes wrong ------------------------------------------------------------------------------------------------

USAGE = [
    Case("no such command", "mesure -- true", "did you mean 'measure'"),
    Case("nothing to measure", "measure", "tessera measure -- python train.py"),
    Case("no such option", "report run.tessera --htlm", "--htlm"),
    Case("a missing argument", "report", "RUN"),
    Case("no such analysis", "analyze bredown trace.json", "did you mean 'breakdown'"),
    Case("a trace that is not there", "analyze breakdown nothing.json", "nothing.json"),
    Case("an option of another analysis", "analyze kernels trace.json --min-bytes 1MB", "--min-bytes"),
    Case("a size that is none", "analyze collectives trace.json --min-bytes 5XB", "5XB"),
    Case("a share that is none", "diff a.json b.json --fail-above lots", "lots"),
    Case("a share of five hundred percent", "diff a.json b.json --fail-above 5", "5%"),
    Case("steps that are none", "run --steps 9:3 train.py", "9:3"),
    Case("a mode that is none", "run --mode fast train.py", "fast"),
    Case("nothing to export", "export run.tessera", "--chrome trace.json"),
    Case("no such subcommand", "hardware shwo h200", "did you mean 'show'"),
    Case("a batch of none", "predict resnet18 --batch 0", "--batch"),
    Case("no chip at all", "predict resnet18 --on ,", "--on"),
    Case("a power log that is not given", "attribute trace.json", "--power"),
    Case("nothing to merge", "merge", "PATHS"),
    Case("a shell that is not known", "completion tcsh", "tcsh"),
    Case("too short a selftest", "selftest --seconds 1", "--seconds"),
    Case("no process", "prof:", "--pid"),
    Case("a limit that is no time", "run --limit -1 train.py", "--limit -1"),
    Case("a flush that is no time", "run --flush nan train.py", "--flush nan"),
    Case("a script is no run", "report train.py", "tessera run train.py"),
    Case("a time of another option", "watch --duration 5parsec", "--duration"),
    Case("a mode that is nearly one", "predict resnet18 --mode trian", "did you mean 'train'"),
    Case("a number that is none", "report run.tessera --top many", "--top"),
    Case("an optimizer without training", "predict resnet18 --optimizer adamw", "--mode train"),
    Case("a trace with a slip in its name", "analyze breakdown trce.json", "did you mean 'trace.json'"),
    Case("an option without its value", "report run.tessera --top", "--top"),
    Case("an argument too many", "report run.tessera a.json", "a.json"),
]
OURS = [
    Case("a governor that is not there", "governor status --url http://127.0.0.1:1", "tessera governor serve", 1),
    Case("a governor without a cap", "governor serve", "--cap 20kW"),
    Case("a token in the clear", "governor status --url http://10.0.0.1:9410", "https"),
    Case("work without its unit", "measure --work 5 -- true", "--unit"),
    Case("a power log that cannot be written", "measure --trace nowhere/power.csv -- true", "nowhere/power.csv"),
    Case("no such sensor", "measure --sensor nvlm -- true", "did you mean 'nvml'"),
    Case("a recording that is not there", "measure --sensor replay:nothing.csv -- true", "nothing.csv"),
    Case("a sensor without its address", "measure --sensor redfish -- true", "TESSERA_REDFISH_URL", 1),
    Case("a program that is not there", "measure --sensor modelled -- no-such-program", "no-such-program", 127),
    Case("no such script", "run nothing.py", "nothing.py"),
    Case("a run that is there already", "run --out run.tessera train.py", "run.tessera"),
    Case("no such run", "report nothing.tessera", "nothing.tessera"),
    Case("a folder is no run", "report .", "folder"),
    Case("a trace has no table of steps in joules", "report trace.json --by steps", "no table of steps"),
    Case("JSON of another kind is no run", "report notes.json", "tessera diff"),
    Case("a text is no run", "report notes.txt", "notes.txt"),
    Case("an empty run", "report empty.tessera", "empty.tessera"),
    Case("somebody else's database", "report other.tessera", "another program"),
    Case("a run of a newer version", "report newer.tessera", "pip install -U"),
    Case("a damaged run", "report damaged.tessera", "damaged"),
    Case("a run to export that is not there", "export nothing.tessera --csv out.csv", "nothing.tessera"),
    Case("an export that cannot be written", "export run.tessera --csv notes.txt/out.csv", "notes.txt/out.csv"),
    Case("an address that is none", "export run.tessera --otlp ftp://host", "ftp://host"),
    Case("a log without watts", "attribute trace.json --power columns.csv", "watts"),
    Case("a log with a bad line", "attribute trace.json --power line.csv", "line 3"),
    Case("nvidia-smi without power", "attribute trace.json --power smi.csv", "power.draw"),
    Case("a log of another time", "attribute trace.json --power early.csv", "trace", 1),
    Case("one rank to merge", "merge trace.json", "rank1.tessera"),
    Case("two runs of one rank to merge", "merge days", "tessera diff days/monday.tessera"),
    Case("an output that is there already", "merge ranks -o run.tessera", "run.tessera"),
    Case("a port that is none", "export run.tessera --otlp http://host:99999", "host:99999"),
    Case("work that is none", "measure --steps -1 -- true", "--steps"),
    Case("figures that no model has", 'predict hf:{"model_type":"gpt2","n_head":"x"}', "n_head"),
    Case("a trace that is none", "analyze breakdown notes.txt", "notes.txt"),
    Case("an order that is none", "analyze kernels trace.json --sort watts", "sort by"),
    Case("a row that is none", "analyze breakdown trace.json --by day", "'device'"),
    Case("a chip that is not known", "analyze roofline trace.json --arch h2000", "h2000"),
    Case("a report that is none", "diff notes.json a.json", "notes.json"),
    Case("nothing to compare", "diff", "tessera diff BEFORE AFTER"),
    Case("one thing to compare", "diff a.json", "one file was given"),
    Case("three things to compare", "diff a.json b.json notes.json", "A1 A2 A3 -- B1 B2 B3"),
    Case("nothing after the dashes", "diff a.json --", "no file after --"),
    Case("a file to compare that is not there", "diff a.json nots.json", "did you mean 'notes.json'"),
    Case("a repeat that is not there", "diff a.json -- nots.json", "did you mean 'notes.json'"),
    Case("a folder that is not there", "diff a.json nowhere/b.json", "there is no folder nowhere"),
    Case("no such chip", "hardware show h2000", "h2000"),
    Case("no such power mode", "hardware show jetson-orin@17W", "jetson-orin@15W"),
    Case("no such model", "predict resnet81", "resnet81"),
    Case("a configuration that is not there", "predict hf:nothing.json", "nothing.json"),
    Case("a configuration that is no JSON", "predict hf:{", "JSON"),
    Case("a module that is not there", "predict nomodule:make", "nomodule"),
    Case("a function that is not there", "predict user_model:mke", "did you mean 'make'"),
    Case("a model that raises", "predict user_model:broken", "user_model.py", 1),
    Case("a model without inputs", "predict user_model:bare", "--input"),
    Case("a precision that is none", "predict user_model:make --precision fp7", "fp7"),
    Case("a precision the chip lacks", "predict user_model:make --on v100 --precision fp8", "fp8", 1),
    Case("a model that does not fit", "predict user_model:huge --on l4", "memory", 1),
    Case("a model that looks at values", "predict user_model:branching", "user_model.py", 1),
    Case("a model of wrong shape", "predict user_model:bare --input 3x5", "[3, 5]", 1),
    Case("too fast a watch", "watch --interval 1ms", "--interval"),
    Case("a time that is none", "watch --interval soon", "soon"),
    Case("an address to listen at that is none", "metrics --listen here", "--listen"),
    Case("an address of another machine", "metrics --listen 203.0.113.7:9400", "203.0.113.7", 1),
    Case("no such process", "prof:--pid 999999999", "999999999", 1),
    Case("one file for two things", "prof:--pid 1 --export a.csv --summary a.csv", "--summary"),
]


def _pandas_missing() -> None:
    with mock.patch.dict(sys.modules, {"pandas": None}):
        from tessera import PowerTrace

        PowerTrace({}, start_ns=0, end_ns=1).to_frame()


def _bad_device() -> None:
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "tessera" / "hardware"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('id = "mine"\nname = "Mine"\nkind = "gpu"\nvendor = "me"\ntpd_w = 3\n')
    try:
        from tessera import hardware

        hardware.lookup("mine")
    finally:
        (folder / "mine.toml").unlink()


def _calibration() -> None:
    from tessera.estimate import calibration

    path = calibration.path_of("h200")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    try:
        calibration.find("h200")
    finally:
        path.unlink()


def _session(**options: Any) -> Any:
    from tessera import profile

    return profile.session(**options)


def _op(name: str, *shapes: tuple[int, ...], **options: Any) -> Any:
    import torch

    from tessera import op

    made = torch.Generator().manual_seed(1)
    return getattr(op, name)(*(torch.rand(shape, generator=made) for shape in shapes), **options)


def _scheduled(**options: Any) -> Any:
    import tessera

    return tessera.schedule(**options)


def _policy() -> Any:
    from tessera.policy import load_policies

    return load_policies("policy.yaml")


def _block() -> None:
    with _scheduled(policy="energy"):
        pass


def _units(kind: str, text: Any) -> Any:
    from tessera import units

    return getattr(units, f"parse_{kind}")(text)


def _redfish(**changes: Any) -> Any:
    from tessera.sensors.redfish import RedfishConfig

    return RedfishConfig(**{"url": "https://bmc", "username": "reader", "password": "hunter2"} | changes)


def _loaded() -> Any:
    from tessera.profile.open_recording import load

    return load("trace.json").energy()


def _benchmark(**options: Any) -> Any:
    from tessera import EnergyBenchmark

    return EnergyBenchmark(**options)


def _capture() -> Any:
    import torch

    from tessera import predict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of scripting
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
    return predict(scripted, torch.empty(1, 2))


def _plan() -> Any:
    from tessera.runtime.tuning.plan import Plan

    return Plan.load("notes.json")


def _bucket() -> Any:
    from tessera.actuators import locks

    with mock.patch.dict(os.environ, {locks.VARIABLE: str(Path("world").absolute())}):
        return locks.runtime_folder()


def _leased() -> Any:
    with mock.patch.dict(os.environ, {"TESSERA_GOVERNOR_LEASE": "lease.json"}):
        return _scheduled(power_cap="governor")


def _governed() -> Any:
    from tessera.fleet import Budget, BudgetPolicy, PowerRequest

    budget = Budget(BudgetPolicy(cap_w=1000.0))
    budget.join(0.0, "node1", 100.0)
    return budget.request(1.0, PowerRequest(job="a", watts={"nod1": 500.0}))


def _unavailable() -> Any:
    from tessera.sensors.rapl import RaplSensor

    Path("cpuinfo").write_text("flags : fpu hypervisor")
    return RaplSensor(root=Path("nowhere"), machine=lambda: "x86_64", cpuinfo=Path("cpuinfo")).start()


CALLS = [
    Case("a power without a unit", lambda: _units("power", "275"), "unit"),
    Case("a unit in the wrong case", lambda: _units("power", "5mw"), "'mW' or 'MW'"),
    Case("a scope that is none", lambda: _units("scoped_power", "noed:1kW"), "did you mean 'node'"),
    Case("a package that is missing", _pandas_missing, "pip install"),
    Case("a device file with a wrong key", _bad_device, "did you mean 'tdp_w'"),
    Case("a calibration that cannot be read", _calibration, "tessera calibrate"),
    Case("a path is no exporter", lambda: _session(exporters=["trace.json"]), 'profile.chrome("trace.json")'),
    Case("one exporter is no list", lambda: _session(exporters="all.csv"), 'exporters=[profile.summary("all.csv")]'),
    Case("a mode of a session that is none", lambda: _session(mode="operatos"), "did you mean 'operators'"),
    Case("an option of a session that is none", lambda: _session(shapes=True), "shapes"),
    Case("an activity that is none", lambda: _session(activities=["gpus"]), "did you mean 'gpu'"),
    Case("a trace without watts", _loaded, "power="),
    Case("a Redfish address without TLS", lambda: _redfish(url="http://bmc"), "https://"),
    Case("a password in an address", lambda: _redfish(url="https://reader:hunter2@bmc"), "separate arguments"),
    Case("a benchmark that ends before it begins", lambda: _benchmark(min_s=9, budget_s=1), "min_s"),
    Case("no counters of the processor", _unavailable, "RAPL"),
    Case("a scripted model", _capture, "nn.Module"),
    Case("a plan that is none", _plan, "notes.json"),
    Case("a folder that others can write", _bucket, "world"),
    Case("a product of unequal shapes", lambda: _op("matmul", (2, 3), (4, 5)), "b"),
    Case("a tile that is none", lambda: _op("matmul", (64, 64), (64, 64), tile_shape=(24, 64, 32)), "24"),
    Case("a precision of an operator that is none", lambda: _op("matmul", (2, 2), (2, 2), precision="fp7"), "fp7"),
    Case("an error that nothing keeps", lambda: _op("matmul", (8, 8), (8, 8), error_tolerance=1e-30), "tolerance"),
    Case("a cap that is none", lambda: _scheduled(power_cap="275"), "unit"),
    Case("a policy for a block", _block, "@schedule"),
    Case("a power policy with a wrong key", _policy, "did you mean 'jitter_ms'"),
    Case("a node that no governor knows", _governed, "did you mean 'node1'"),
    Case("a cap of a governor without a lease", _leased, "tessera governor join"),
    Case("a policy that is none", lambda: _scheduled(policy="enrgy"), "did you mean 'energy'"),
]  # fmt: skip
ALL = [*USAGE, *OURS, *CALLS]


# -- where it goes wrong --------------------------------------------------------------------------------------------

USER_MODEL = """
import torch
from torch import nn

class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def make():
    return nn.Linear(8, 8), torch.empty(1, 8)

def bare():
    return nn.Linear(8, 8)

def broken():
    raise RuntimeError("no weights")

def huge():
    return nn.Sequential(*(nn.Linear(65536, 65536) for _ in range(8))), torch.empty(1, 65536)

def branching():
    return Branching(), torch.empty(1, 8)
"""
TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.79e15, "dur": 50.0,
         "args": {"device": 0, "stream": 7}},
    ],
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Files that are wrong in one way each, and a few that are right."""
    texts = {
        "train.py": "print('hello')\n", "user_model.py": USER_MODEL, "notes.txt": "buy milk\n", "empty.tessera": "",
        "notes.json": '{"total_j": "none"}', "a.json": '{"total_j": "none"}', "b.json": "{}",
        "trace.json": json.dumps(TRACE), "columns.csv": "epoch_us,domain\n1,gpu0\n",
        "line.csv": "epoch_us,domain,watts\n1,gpu0,5\nnow,gpu0,5\n",
        "policy.yaml": "power_shaper: {jiter_ms: [1, 5]}\n",
        "smi.csv": "timestamp, index\n2026/11/15 09:30:00, 0\n",
        "early.csv": "epoch_us,domain,watts\n" + "".join(f"{20_000 * i},gpu0,300\n" for i in range(20)),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    make(steps=2, layers=2).write(folder / "run.tessera").close()
    unseal(folder / "run.tessera")
    whole = (folder / "run.tessera").read_bytes()
    (folder / "newer.tessera").write_bytes(whole[:60] + b"\0\0\0\x63" + whole[64:])  # SQLite keeps user_version there
    db = sqlite3.connect(":memory:")
    db.deserialize(whole)
    db.execute("UPDATE chunks SET data = x'00'")
    db.commit()
    (folder / "damaged.tessera").write_bytes(db.serialize())
    db.close()
    other = sqlite3.connect(folder / "other.tessera")
    other.execute("CREATE TABLE milk (bottles)")
    other.commit()
    other.close()
    for i, name in enumerate(("run", "newer", "damaged", "other", "empty")):  # newest first is how they are listed
        os.utime(folder / f"{name}.tessera", (i, i))
    (folder / "ranks").mkdir()
    for rank in ("rank0", "rank1"):
        shutil.copy(HERE / "data" / "ranks" / f"{rank}.json.gz", folder / "ranks")
    for start_s, day in ((1_000, "monday"), (87_400, "tuesday")):
        with RunWriter(folder / "days" / f"{day}.tessera") as writer:
            writer.add_row("region", "work", start_s * 10**9, (start_s + 5) * 10**9)
    (folder / "world").mkdir()
    (folder / "world").chmod(0o777)
    with gzip.open(folder / "trace.json.gz", "wt") as f:
        f.write(json.dumps(TRACE))


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """In a folder, with no settings of this machine, and output 100 columns wide and plain."""
    gone = {k: v for k, v in os.environ.items() if not k.startswith("TESSERA_")}
    plain = {"XDG_CONFIG_HOME": str(folder / "config"), "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    before = Path.cwd()
    with mock.patch.dict(os.environ, gone | plain, clear=True):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.modules.pop("user_model", None)
            sys.path[:] = [p for p in sys.path if p != str(folder)]


def tried(case: Case, folder: Path) -> Said:
    """What is shown to the user, with the folder's name taken out."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str
    if isinstance(case.do, str):
        attached = case.do.startswith("prof:")
        words = case.do.removeprefix("prof:").split()
        shown = " ".join(["tessera-prof" if attached else "tessera", *words])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            (prof.main if attached else main)(words)
        code, text = int(ended.value.code or 0), err.getvalue()
    else:
        shown = "in Python"
        try:
            case.do()
        except TesseraError as error:
            code, text = type(error).__name__, str(error)
        else:
            code, text = "nothing", "no error"
    return Said(shown, text.replace(str(folder), "TMP"), code)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    return everything(tmp_path_factory.mktemp("errors").resolve())


def everything(folder: Path) -> dict[str, Said]:
    prepare(folder)
    with inside(folder):
        return {case.name: tried(case, folder) for case in ALL}


def rendered(said: dict[str, Said]) -> str:
    head = "# What users are told when something is wrong. Written by: python tests/test_error_texts.py\n"
    parts = [f"\n## {name}\n$ {s.shown}    ({s.code})\n{s.text.rstrip()}\n" for name, s in said.items()]
    # A processor rounds sums in its own order.
    return re.sub(r"(error of fp32), \d\.\de-\d\d", r"\1, (its rounding error)", head + "".join(parts))


# -- what must hold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_it_says_what_is_wrong_and_what_to_do(case: Case, said: dict[str, Said]) -> None:
    found = said[case.name]
    lines = found.text.rstrip("\n").splitlines()
    assert case.names in found.text
    assert "Traceback" not in found.text
    assert not found.text.endswith("\n\n")
    assert len(lines) <= MOST_LINES, found.text
    assert max(map(len, lines)) <= MOST_WIDTH, found.text
    if case in CALLS:
        assert "  why: " in found.text or "  fix: " in found.text, found.text
        return
    assert found.code == case.code, found.text
    assert any(line.startswith("error: ") for line in lines), found.text
    assert "  why: " in found.text or "  fix: " in found.text, found.text
    assert "Usage: " not in found.text


def test_the_texts_are_those_that_were_reviewed(said: dict[str, Said]) -> None:
    now = rendered(said)
    assert now == SNAPSHOT.read_text(encoding="utf-8"), "if this is meant: python tests/test_error_texts.py"


def test_each_exception_is_among_them(said: dict[str, Said]) -> None:
    """By its class: those of the calls here, of the commands by what they raise, and those tested elsewhere."""
    raised = {s.code for s in said.values()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        with inside(folder):
            raised |= {_raised(c) for c in OURS if isinstance(c.do, str) and not c.do.startswith("prof:")}
    ours = {n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TesseraError)}
    assert ours - {str(r) for r in raised} - set(TESTED_ELSEWHERE) == set()
    for files in TESTED_ELSEWHERE.values():
        assert all(any(HERE.rglob(f)) for f in files.split(", "))


def _raised(case: Case) -> str:
    assert isinstance(case.do, str)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(case.do.split(), standalone_mode=False)
        except (TesseraError, click.ClickException) as error:
            return type(error).__name__
    return "none"


@pytest.mark.parametrize("debug", [False, True])
def test_a_file_that_fails_unexpectedly_is_named(
    debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise PermissionError(13, "Permission denied", "/etc/shadow")

    monkeypatch.setattr("tessera.hardware.catalogue", gone)
    with pytest.raises(PermissionError if debug else SystemExit):
        main(["--debug", "hardware", "list"] if debug else ["hardware", "list"])
    if not debug:
        assert capsys.readouterr().err.startswith("error: cannot use /etc/shadow\n  why: Permission denied\n")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(errors.ArgumentError):
        main(["--debug", "hardware", "show", "h2000"])


def test_help_begins_with_usage_and_an_example_comes_early() -> None:
    seen = 0
    for words in _commands(cli, ()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        text = out.getvalue()
        assert (ended.value.code or 0) == 0
        assert text.startswith(f"Usage: tessera {' '.join(words)}".rstrip()), words
        before = text[: text.index("Example")]
        assert before.count("\n") <= 16, f"{words}: the example comes after {before.count(chr(10))} lines"
        example = text[text.index("Example") :].splitlines()[1].strip()
        assert "tessera" in example, words
        seen += 1
    assert seen >= 15


def _commands(group: click.Group, before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield before
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*before, name))
        else:
            yield (*before, name)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        SNAPSHOT.write_text(rendered(everything(Path(name).resolve())), encoding="utf-8")
    sys.stdout.write(f"wrote {SNAPSHOT}\n")
