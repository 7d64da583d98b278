"""What the exporters share: files that are whole or absent, and the joules of windows and of rows."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import ArgumentError

if TYPE_CHECKING:
    from ...attribute.table import EnergyTable
    from ..runfile import RunFile

_GPU = re.compile(r"(?:^|\.)gpu(\d+)(?:\.|$)")  # a merged run puts the host in front: "node7.gpu0"


class Exporter(Protocol):
    """Anything that writes a run in another form; says where it went."""

    def write(self, run: RunFile, table: EnergyTable | None = None) -> Path | str: ...


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path to write to, which takes its name once all is written: no reader finds half a file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as exc:
        raise ArgumentError(
            f"cannot write {path}", why=exc.strerror or str(exc), fix="give a path you may write to, with room on it"
        ) from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def device_of(domain: str) -> int | None:
    """The number of the GPU a domain is of ("gpu3", "gpu3.memory"); None for a CPU's or a node's."""
    found = _GPU.search(domain)
    return int(found[1]) if found else None


def class_power(table: EnergyTable | None) -> dict[tuple[str, str], tuple[float, float]]:
    """Watts of each kernel class while it ran, and their 90% half-width, by (kind, name).

    Watts times a row's seconds are its joules where single rows have none of their own: they sum to the class's.
    """
    rows = table.kernels if table is not None else ()
    return {
        (row.kind, row.name): (row.energy_j / row.time_s, row.energy_error_j / row.time_s)
        for row in rows
        if row.time_s > 0
    }
