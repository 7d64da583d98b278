"""`%%energy` in a stand-in shell, and in IPython where it is installed."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera import notebook
from tessera.errors import ArgumentError
from tessera.monitor import Monitor, use
from tessera.notebook import CellEnergy
from tessera.schema import Domain, Energy

from fakes.sensor import ScriptSensor


class Shell:
    """What the magic needs of IPython: to be registered, and to run cells."""

    def __init__(self) -> None:
        self.magics: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}
        self.magics_manager = SimpleNamespace(magics={"line": self.magics, "cell": dict(self.magics)})
        self.names: dict[str, Any] = {"time": time}

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        self.magics[magic_name], self.kinds[magic_name] = function, magic_kind
        self.magics_manager.magics["cell"][magic_name] = function

    def run_cell(self, code: str) -> Any:
        try:
            exec(code, self.names)
        except Exception:
            return SimpleNamespace(success=False)
        return SimpleNamespace(success=True)


@pytest.fixture
def shell() -> Shell:
    made = Shell()
    notebook.load_ipython_extension(made)
    return made


@pytest.fixture(autouse=True)
def monitor() -> Iterator[Monitor]:
    """200 W on a sensor of 5 ms."""
    host = Domain(name="cpu0", source="script", resolution_s=0.005)
    sensor = ScriptSensor(lambda _: 200.0, clock=time.monotonic_ns, step_ms=5.0, period_s=0.02, domain=host)
    made = Monitor([sensor]).start()
    use(made)
    yield made
    use(None)


def test_a_cell_is_measured_where_it_runs(shell: Shell) -> None:
    assert shell.kinds == {"energy": "line_cell"}
    found = shell.magics["energy"]("--steps 4", "time.sleep(0.15)\nanswer = 42")
    assert shell.names["answer"] == 42, "the cell runs in the user's namespace"
    assert isinstance(found, CellEnergy) and not found.failed and found.table is None
    assert found.joules == pytest.approx(200.0 * found.energy.time_s, rel=0.05)
    shown = repr(found)
    assert found.energy.time_s >= 0.15
    assert re.search(r"J   200.* W   [\d.]+ m?s   script, 90% intervals", shown)
    assert "per step" in shown
    html = found._repr_html_()
    assert html.startswith("<div") and html.endswith("</div>") and "per step" in html


def test_a_line_is_measured_too(shell: Shell) -> None:
    found = shell.magics["energy"]("""--samples 8 text = "--steps 'x  y'"; time.sleep(0.1)""")
    assert shell.names["text"] == "--steps 'x  y'" and found.work == {"sample": 8.0}


def test_a_cell_that_fails_keeps_its_joules(shell: Shell) -> None:
    found = shell.magics["energy"]("", "time.sleep(0.1)\n1 / 0")
    assert found.failed and found.joules > 10 and "the energy is up to then" in repr(found)


def test_a_profiled_cell_has_a_table(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shell.names["torch"] = pytest.importorskip("torch")
    code = "x = torch.ones(400, 400)\nfor _ in range(60): x = (x @ x).clamp(max=1.0)\ntime.sleep(0.15)"
    found = shell.magics["energy"]("--profile --steps 60", code)
    assert found.path == Path("runs/cell.tessera") and found.path.exists()
    assert found.energy.joules > 0 and "tessera report runs/cell.tessera --open" in repr(found)
    assert found.table is not None and "<table" in found._repr_html_()
    assert shell.magics["energy"]("--profile --path mine.tessera", "time.sleep(0.1)").path == Path("mine.tessera")


@pytest.mark.parametrize(
    ("line", "cell", "match"),
    [
        ("--colour", "x = 1", "unrecognized arguments"), ("--steps many", "x = 1", "invalid float"),
        ("--steps 0", "x = 1", "not a positive number"), ("'", "x = 1", "No closing quotation"),
        ("", "  \n", "nothing"),
        ("--profile", None, "nothing to measure"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(shell: Shell, line: str, cell: str | None, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        shell.magics["energy"](line, cell)


def test_a_cell_that_awaits_is_refused_where_the_loop_of_a_notebook_runs(shell: Shell) -> None:
    shell.should_run_async = lambda code, *, transformed_cell: "await" in code  # type: ignore[attr-defined]

    async def run_cell() -> Any:
        assert not shell.magics["energy"]("", "time.sleep(0.05)").failed
        return shell.magics["energy"]("", "await something()")

    with pytest.raises(ArgumentError, match="cannot run a cell with await outside a function"):
        asyncio.run(run_cell())


def test_modelled_joules_say_so() -> None:
    found = CellEnergy(energy=Energy(energy_j=5.0, error_j=1.0, time_s=1.0, source="<modelled>", basis="modelled"))
    assert "MODELLED, not measured" in repr(found) and "&lt;modelled&gt;" in found._repr_html_()
    unknown = CellEnergy(
        energy=Energy(energy_j=float("nan"), error_j=float("nan"), time_s=1.0, source="x", coverage=0.0)
    )
    assert "unknown J" in repr(unknown)


def test_it_can_be_unloaded(shell: Shell) -> None:
    notebook.unload_ipython_extension(shell)
    assert "energy" not in shell.magics


def test_in_ipython(capsys: pytest.CaptureFixture[str]) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell()
    shell.run_line_magic("load_ext", "tessera.notebook")
    assert shell.run_cell("%%energy --steps 2\nimport time\ntime.sleep(0.1)\nvalue = 7\nvalue + 1").success
    assert isinstance(shell.user_ns["_"], CellEnergy) and shell.user_ns["value"] == 7
    out = capsys.readouterr().out
    assert "8" in out and "90% intervals" in out
    shell.run_cell("%energy time.sleep(0.05)")
    assert shell.user_ns["_"].energy.time_s >= 0.05
    shell.run_cell("%%energy\n1 / 0")
    assert shell.user_ns["_"].failed and "ZeroDivisionError" in capsys.readouterr().out
    shell.run_line_magic("unload_ext", "tessera.notebook")
    assert "energy" not in shell.magics_manager.magics["cell"]


def test_ipython_shows_what_is_wrong_without_a_traceback(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    class UsageError(Exception):
        pass

    for name in ("IPython", "IPython.core", "IPython.core.error"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(UsageError=UsageError))
    shell.show_usage_error = print  # type: ignore[attr-defined]  # what IPython calls for this class alone
    with pytest.raises(UsageError, match="unrecognized arguments: --bogus"):
        shell.magics["energy"]("--bogus", "x = 1")
