"""Files that are too long, and things that are not files: refused by every reader, in one place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera import read_limits
from tessera.errors import RecordingError, TesseraError
from tessera.estimate import calibration
from tessera.profile.counters import names
from tessera.profile.powerlog import read_power
from tessera.profile.runfile import RunFile, RunWriter
from tessera.runtime.tuning.plan import Plan
from tessera.timeline import kineto

READERS: dict[str, Callable[[Path], object]] = {
    "trace": kineto.read,
    "power": read_power,
    "plan": Plan.load,
    "calibration": lambda path: calibration._read(path, 0, 0, 0),
    "counters": names.text_of,
}


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to: whoever opens it waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_and_not_waited_for(pipe: Path, reader: str) -> None:
    with pytest.raises(RecordingError) as caught:
        READERS[reader](pipe)
    assert "it is a pipe or a device, not a file" in str(caught.value)


def test_a_device_is_refused() -> None:
    with pytest.raises(OSError, match="a pipe or a device"):
        read_limits.open_file(Path("/dev/zero"))


def test_a_pipe_that_the_shell_opened_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"joules")
    os.close(writer)
    assert read_limits.read_bytes(Path(f"/dev/fd/{reader}")) == b"joules"
    os.close(reader)


@pytest.mark.parametrize("side", ["-wal", "-journal"])
def test_a_pipe_beside_a_run_is_not_waited_for(tmp_path: Path, side: str) -> None:
    writer = RunWriter(tmp_path / "a.tessera")
    writer.flush()
    whole = writer.path.read_bytes()
    writer.close()
    other = tmp_path / "b.tessera"
    other.write_bytes(whole)
    os.mkfifo(f"{other}{side}")
    with pytest.raises(TesseraError):
        RunFile(other)
    os.mkfifo(f"{writer.path}{side}")
    with RunFile(writer.path) as run:  # closed, so that what lies beside it is not its own
        assert f"a.tessera{side} beside it is not of this run" in run.notes[0]


@pytest.mark.parametrize("reader", ["plan", "calibration", "counters"])
def test_a_file_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    path = tmp_path / "long.json"
    path.write_bytes(b" " * 5000)
    monkeypatch.setattr(read_limits.read_bytes, "__defaults__", (4000,))
    monkeypatch.setattr(names, "COUNTER_BYTES", 4000)
    with pytest.raises(RecordingError) as caught:
        READERS[reader](path)
    assert "it is longer than 4,000 bytes" in str(caught.value)
