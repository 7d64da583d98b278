"""What reading one file may cost. Every reader of a file that somebody else may have written asks here.

A small file can ask for much: gzip grows a thousandfold, a table can list one page a million times, text that is
damaged in the right way is read again and again. A budget follows from the size of the file alone, and is several times
what any file needs that a profiler wrote.
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
"""The longest JSON that is read without knowing its types: objects take twenty times their text."""
TRACE_BYTES = 1 << 30
"""The longest trace that is taken from a process whole: one of some steps has a few hundred MB."""
COUNTER_BYTES = 256 << 20
"""The longest table of hardware counters: a kernel has a few KB."""
SECONDS, SECONDS_PER_BYTE = 3.0, 1.6e-7
"""CPU seconds for what does not read straight through: SQL, and text that has to be repaired."""
ROWS, BYTES_PER_ROW = 500_000, 6
"""Rows of a timeline. A compressed trace takes about 17 bytes for each."""
RUN_BYTES_PER_ROW = 1.5
"""Of a run file's compressed columns: a kernel of a CUDA graph that is replayed takes 4.5, one of a training 8."""
_ROWS_PER_CHECK = 4096
DEVICES = 4096
"""Devices of one recording; ranks that are merged have their own each."""
INFLATED_BYTES, INFLATION = 32 << 20, 64
"""Bytes that compressed data may become. Traces shrink 10 to 25 times."""
TOML_BYTES, TOML_DOTS = 1 << 20, 4_000_000
"""Settings have a few KB. Python keeps every beginning of a dotted key: 40 KB of `a.a.a` would take 2.4 GB."""

YAML_BYTES, YAML_VALUES = 256 << 10, 100_000
"""A policy has a few hundred bytes and a data centre some tens of KB. Values are counted with aliases written out."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. An OSError refuses pipes and devices, which may keep a reader waiting for ever.

    A pipe that is open already (/dev/stdin, or what a shell passes for `<(command)`) has somebody who writes to it.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # refuses a folder
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and is_descriptor(path)):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    os.set_blocking(file.fileno(), True)
    return file


def is_descriptor(path: Path) -> bool:
    """Whether a path means something that this process has open: /dev/stdout, /dev/fd/3, /proc/self/fd/3."""
    named = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow the link
    return named.startswith(("/dev/fd/", "/dev/std", "/proc/"))


def read_bytes(path: Path, most: int = JSON_BYTES) -> bytes:
    """All of a file; a ValueError where it is longer than `most`."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is longer than {most:,} bytes")
    return data


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file; a ValueError says why it is not read, whatever is wrong with it."""
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
    """The values of a YAML file; a ValueError says why it is not read, whatever is wrong with it.

    A key that stands twice is refused: YAML's own readers keep the last one and say nothing.
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
    """How many values a node has, aliases written out; a ValueError for too many, a loop or a key that stands twice."""
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
    """A value of a file for an error, however long or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


@dataclass(slots=True)
class ReadBudget:
    """What may still be spent on the file `name` of `size` bytes; the checks raise `RecordingError` beyond that."""

    name: str
    size: int
    slow_s: float = 0.0
    _since_s: float = math.inf

    def check_rows(self, rows: int, bytes_per_row: float | None = None) -> None:
        """Refuse so many rows in all; a trace's, unless it says how little a row may take."""
        if rows > ROWS + self.size / (bytes_per_row or BYTES_PER_ROW):
            raise self.refuse(f"it has {rows:,} rows, more than a recording of {self.size:,} bytes can hold")

    def check_row(self, rows: int) -> None:
        """For each row of a reader that takes its time (`slowly`): every few thousand, refuse too many or too slow."""
        if rows % _ROWS_PER_CHECK == 0:
            self.check_rows(rows)
            if self.is_spent:
                raise self.refuse_slow()

    def check_devices(self, numbers: NDArray[np.int64]) -> None:
        """Refuse devices of more numbers than any machine has."""
        if len(numbers) and int(numbers.max()) - int(numbers.min()) > DEVICES:  # else there cannot be so many
            import numpy as np

            count = len(np.unique(numbers))
            if count > DEVICES:
                raise self.refuse(f"it has {count:,} devices, more than any machine")

    def check_inflated(self, count: int) -> None:
        """Refuse so many bytes out of the compressed ones of the file."""
        if count > INFLATED_BYTES + INFLATION * self.size:
            raise self.refuse(f"its {self.size:,} bytes become more than {count:,}: no recording shrinks so well")

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Time what may take long: `is_spent` is asked meanwhile."""
        self._since_s = time.thread_time()  # not the wall clock: a busy machine must not make a file unreadable
        try:
            yield
        finally:
            self.slow_s += time.thread_time() - self._since_s
            self._since_s = math.inf

    @property
    def is_spent(self) -> bool:
        """Whether `slowly` took too long, by now or in all."""
        return self.slow_s + max(0.0, time.thread_time() - self._since_s) > SECONDS + SECONDS_PER_BYTE * self.size

    def refuse_slow(self) -> RecordingError:
        """The error for a file that takes too long."""
        return self.refuse("it takes too long to read for its size: it is damaged, or made to be slow")

    def refuse(self, why: str) -> RecordingError:
        """The error for a file that costs too much."""
        packed = self.name.endswith((".gz", ".gzip"))
        fix = "decompress it first (gunzip), if you trust it" if packed else "record it again; do not trust this file"
        return RecordingError(f"{self.name} is not read to its end", why=why, fix=fix)
