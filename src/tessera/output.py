"""Makes output safe for other programs: complete files, cells that are not formulas, text without control codes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from .errors import ArgumentError

_T = TypeVar("_T")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@contextlib.contextmanager
def replace_when_written(path: Path, *, make_folder: bool = False) -> Iterator[Path]:
    """Yield a path to write to; rename it to `path` when the block ends, so that no reader finds a partial file.

    The yielded path is new and its name cannot be guessed, so nobody can have put a link there. A link with the final
    name is replaced, not followed. Paths under /dev or /proc (/dev/stdout, /dev/null, /dev/fd/3) are written to
    directly. Disks, sockets and named pipes are refused; a pipe would wait for a reader that may never come.
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
    """Return whether to write into `path` instead of replacing it; raise OSError for a disk, a socket or a pipe."""
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
        fix = shlex.join(["mkdir", "-p", str(folder)])
        return ArgumentError(f"cannot write {path}", why=f"there is no folder {folder}", fix=fix)
    return ArgumentError(
        f"cannot write {path}",
        why=error.strerror or str(error),
        fix="give a path that you can write to, on a disk with free space",
    )


def escape_formula(cell: _T) -> _T | str:
    """Return a CSV cell; put an apostrophe before a text that a spreadsheet would run as a formula (OWASP's advice)."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def remove_controls(text: str) -> str:
    """Replace characters that would control a terminal by blanks: escape sequences, links, reversed writing."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
