"""What the exporters share: their protocol, and files that are whole or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import ArgumentError

if TYPE_CHECKING:
    from ...recording import Recording


class Exporter(Protocol):
    """Anything that writes a run in another form; says where it went."""

    def write(self, recording: Recording) -> Path | str: ...


@contextlib.contextmanager
def replace_when_written(path: Path) -> Iterator[Path]:
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
