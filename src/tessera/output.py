"""What leaves for other programs: files that are whole, cells that are not formulas, text that is only text."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from .errors import ArgumentError

_T = TypeVar("_T")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@contextlib.contextmanager
def replace_when_written(path: Path, *, make_folder: bool = False) -> Iterator[Path]:
    """A path to write to, which takes its name once all is written: no reader finds half a file, nor an empty one.

    The path is new and its name cannot be guessed, so that nobody has put a link there. A link that has the final name
    is replaced, not followed. What is named under /dev or /proc (/dev/stdout, /dev/null, /dev/fd/3) is written to as it
    is. A disk or a socket never is, nor a pipe with a name, which would wait for a reader that may never come.
    """
    part = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.part")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if is_stream(path):
            yield path
            return
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        yield part
        part.replace(path)
    except OSError as exc:
        raise cannot_write(path, exc) from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Whether to write to what is there rather than to replace it. Raises OSError for a disk, a socket or a pipe."""
    if not path.exists() and not path.is_symlink():
        return False
    named = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the link
    system = named.is_relative_to("/proc") or (named.is_relative_to("/dev") and not named.is_relative_to("/dev/shm"))
    mode = (path.stat() if system else path.lstat()).st_mode
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and not system):
        raise OSError(errno.EINVAL, "it is a disk, a socket or a pipe, not a file")
    return system or stat.S_ISCHR(mode)


def cannot_write(path: Path, error: OSError) -> ArgumentError:
    """The error for a file that cannot be written, with what to do about it."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not path.parent.is_dir():
        folder = path.parent
        return ArgumentError(f"cannot write {path}", why=f"there is no folder {folder}", fix=f"mkdir -p {folder}")
    return ArgumentError(
        f"cannot write {path}",
        why=error.strerror or str(error),
        fix="give a path that you can write to, on a disk with free space",
    )


def escape_formula(cell: _T) -> _T | str:
    """A CSV cell; a name that a spreadsheet would run as a formula gets an apostrophe before it (OWASP's advice)."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def remove_controls(text: str) -> str:
    """The text with blanks for what would control a terminal: escape sequences, links, turned writing."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
