"""The README's Python examples run as they stand, and its commands exist."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click
import pytest

from tessera import monitor
from tessera.cli.main import COMMANDS, cli

from fakes.sensor import ScriptSensor

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_python_example(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor.use(monitor.Monitor([ScriptSensor(lambda t: 300.0, clock=time.monotonic_ns)]).start())
    names: dict[str, Any] = {}
    try:
        exec(compile(code, "README.md", "exec"), names)
        if "energy" in names:
            assert names["energy"].joules > 0
        if "pwr" in names:
            assert (tmp_path / "power.csv").stat().st_size > 0
        if "bench" in names:
            assert names["bench"].results[0].energy_per_call_j.value > 0
    finally:
        monitor.use(None)


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 3


def test_every_command_named_exists_with_its_options() -> None:
    context = click.Context(cli)
    for line in re.findall(r"^tessera (\S+)(.*)$", README, re.MULTILINE):
        command = cli.get_command(context, line[0])
        assert line[0] in COMMANDS and command is not None
        known = {o for p in command.params for o in p.opts}
        given = re.findall(r"(--[a-z][a-z-]*)", re.split(r" -- |#|\.py", line[1])[0])  # not those of a script
        assert set(given) <= known


def test_make_targets_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (Path(__file__).parent.parent / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE)) <= targets


def test_figures_are_those_of_the_results() -> None:
    """The table is generated: running the generator again must not change the README or the proof page."""
    import subprocess
    import sys

    root = Path(__file__).parent.parent
    before = [(root / p).read_text() for p in ("README.md", "benchmarks/README.md")]
    subprocess.run([sys.executable, "benchmarks/page/build.py"], cwd=root, check=True)
    assert [(root / p).read_text() for p in ("README.md", "benchmarks/README.md")] == before
