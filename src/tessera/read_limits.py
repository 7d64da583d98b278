"""Limits on what reading one file may cost. Every reader of a file that somebody else may have written uses them.

A small file can demand much: gzip expands a thousandfold, a table can list one page a million times, and cleverly
damaged text is read again and again. A budget depends only on the size of the file, and is several times what any file
from a profiler needs.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import reprlib
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import RecordingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

JSON_BYTES = 16 << 20
"""The longest JSON that is read without known types: its objects take twenty times the memory of its text."""
TRACE_BYTES = 1 << 30
"""The longest trace that is read whole from a process; a trace of some steps has a few hundred MB."""
COUNTER_BYTES = 256 << 20
"""The longest table of hardware counters; a kernel has a few KB."""
SECONDS, SECONDS_PER_BYTE = 3.0, 1.6e-7
"""CPU seconds for what is not read straight through: SQL, and text that has to be repaired."""
ROWS, BYTES_PER_ROW = 500_000, 6
"""Rows of a timeline: this many, plus one per so many bytes. In a compressed trace a row takes about 17 bytes."""
RUN_BYTES_PER_ROW = 1.5
"""The same for a run file's compressed columns: a kernel of a replayed CUDA graph takes 4.5 bytes, of a training 8."""
_ROWS_PER_CHECK = 4096
DEVICES = 4096
"""Most devices of one recording; merged ranks have their own each."""
INFLATED_BYTES, INFLATION = 32 << 20, 64
"""Bytes that compressed data may become: this many, plus so many per byte. Traces shrink 10 to 25 times."""
TOML_BYTES, TOML_DOTS = 1 << 20, 4_000_000
"""Settings have a few KB. Python keeps every beginning of a dotted key, so 40 KB of `a.a.a` would take 2.4 GB."""

YAML_BYTES, YAML_VALUES = 256 << 10, 100_000
"""A policy has a few hundred bytes, a data centre some tens of KB. Values in aliases count each time they are used."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; raise OSError for pipes and devices, which may keep a reader waiting for ever.

    A pipe that is already open (/dev/stdin, or what a shell passes for `<(command)`) is allowed: somebody writes to it.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # raises for a folder
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and is_descriptor(path)):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    os.set_blocking(file.fileno(), True)
    return file


def is_descriptor(path: Path) -> bool:
    """Return whether a path names an open file of this process: /dev/stdout, /dev/fd/3, /proc/self/fd/3."""
    named = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow the link
    return named.startswith(("/dev/fd/", "/dev/std", "/proc/"))


def read_bytes(path: Path, most: int = JSON_BYTES) -> bytes:
    """Read a whole file; raise ValueError if it is longer than `most`."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is longer than {most:,} bytes")
    return data


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the tables of a TOML file; whatever is wrong with the file, raise ValueError with the reason."""
    import tomllib

    if len(data) > TOML_BYTES:
        raise ValueError(f"it is longer than {TOML_BYTES:,} bytes")
    if max(line.count(b".") for line in data.split(b"\n")) * data.count(b".") > TOML_DOTS:
        raise ValueError("its keys have too many parts (a.b.c...)")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError as exc:
        raise ValueError("a number in it has thousands of digits") from exc
    except (RecursionError, MemoryError) as exc:
        raise ValueError("its values are nested too deeply") from exc


def parse_yaml(data: bytes) -> Any:
    """Return the values of a YAML file; whatever is wrong with the file, raise ValueError with the reason.

    A key that appears twice is refused: YAML's own readers silently keep the last one.
    """
    import yaml

    if len(data) > YAML_BYTES:
        raise ValueError(f"it is longer than {YAML_BYTES:,} bytes")
    try:
        loader = yaml.SafeLoader(data)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_yaml(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as exc:
        raise ValueError(" ".join(str(exc).split())) from exc
    except UnicodeDecodeError as exc:
        raise ValueError("it is not UTF-8 text") from exc
    except (RecursionError, MemoryError) as exc:
        raise ValueError("its values are nested too deeply") from exc
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"a value in it has no meaning: {exc}") from exc


def _check_yaml(node: Any, counts: dict[int, int]) -> int:
    """Count the values of a node with aliases expanded; raise ValueError for too many, a loop or a repeated key."""
    known = counts.get(id(node))
    if known is not None:
        if known < 0:
            raise ValueError("a value in it contains itself")
        return known
    counts[id(node)] = -1
    total = 1
    if isinstance(node.value, list):
        pairs = [pair if isinstance(pair, tuple) else (pair,) for pair in node.value]
        seen: set[str] = set()
        for key in (pair[0] for pair in pairs if len(pair) == 2 and isinstance(pair[0].value, str)):
            if key.value in seen:
                raise ValueError(
                    f"the key {quote_value(key.value)} stands twice, again in line {key.start_mark.line + 1}"
                )
            seen.add(key.value)
        total += sum(_check_yaml(child, counts) for pair in pairs for child in pair)
    if total > YAML_VALUES:
        raise ValueError(f"it has more than {YAML_VALUES:,} values")
    counts[id(node)] = total
    return total


def quote_value(value: object) -> str:
    """Return a file's value as short text for an error message, however long or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


@dataclass(slots=True)
class ReadBudget:
    """What may still be spent on the file `name` of `size` bytes; beyond that the checks raise `RecordingError`."""

    name: str
    size: int
    slow_s: float = 0.0
    _since_s: float = math.inf

    def check_rows(self, rows: int, bytes_per_row: float | None = None) -> None:
        """Refuse more rows than the file can have; by default those of a trace."""
        if rows > ROWS + self.size / (bytes_per_row or BYTES_PER_ROW):
            raise self.refuse(f"it has {rows:,} rows, more than a recording of {self.size:,} bytes can hold")

    def check_row(self, rows: int) -> None:
        """Check the number of rows and the time every few thousand rows; for readers that use `slowly`."""
        if rows % _ROWS_PER_CHECK == 0:
            self.check_rows(rows)
            if self.is_spent:
                raise self.refuse_slow()

    def check_devices(self, numbers: NDArray[np.int64]) -> None:
        """Refuse more distinct devices than any machine has."""
        if len(numbers) and int(numbers.max()) - int(numbers.min()) > DEVICES:  # a smaller range cannot have too many
            import numpy as np

            count = len(np.unique(numbers))
            if count > DEVICES:
                raise self.refuse(f"it has {count:,} devices, more than any machine")

    def check_inflated(self, count: int) -> None:
        """Refuse more decompressed bytes than the file can have."""
        if count > INFLATED_BYTES + INFLATION * self.size:
            raise self.refuse(f"its {self.size:,} bytes become more than {count:,}: no recording shrinks so well")

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Measure the CPU time of a block that may take long; `is_spent` may be asked meanwhile."""
        self._since_s = time.thread_time()  # not wall time: a busy machine must not make a file unreadable
        try:
            yield
        finally:
            self.slow_s += time.thread_time() - self._since_s
            self._since_s = math.inf

    @property
    def is_spent(self) -> bool:
        """Whether `slowly` has taken too long, including a block that still runs."""
        return self.slow_s + max(0.0, time.thread_time() - self._since_s) > SECONDS + SECONDS_PER_BYTE * self.size

    def refuse_slow(self) -> RecordingError:
        """Return the error for a file that takes too long."""
        return self.refuse("it takes too long to read for its size: it is damaged, or made to be slow")

    def refuse(self, why: str) -> RecordingError:
        """Return the error for a file that costs too much."""
        packed = self.name.endswith((".gz", ".gzip"))
        fix = "decompress it first (gunzip), if you trust it" if packed else "record it again; do not trust this file"
        return RecordingError(f"{self.name} is not read to its end", why=why, fix=fix)
