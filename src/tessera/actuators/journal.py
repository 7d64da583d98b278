"""A journal for each GPU: what was changed on it, by whom, and what it was before.

The journal is written and synced before the hardware is touched. It is one file per GPU, `<folder>/<uuid>.json`,
replaced as a whole (write, fsync, rename, fsync of the folder), so a crash leaves the old text or the new one. If there
is no file, nothing is changed, unless this process holds something: it keeps its own part in memory, and its watcher
has a copy, because a file can be removed. A writer must have the GPU's lock (`locks.lock_gpu`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ..errors import ActuatorError
from . import locks
from .smoothing import PowerSmoothing, ProfileChange, SmoothingChange

# Drivers take limits in milliwatts (NVML) or microwatts (AMD SMI); some boards round them to whole watts.
ROUNDING_W = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one holder asks of a GPU. `owner` names the file that its process keeps locked while it is alive."""

    id: str
    owner: str
    pid: int
    cap_w: float | None = None
    clocks_mhz: tuple[int, int] | None = None
    smoothing: PowerSmoothing | None = None
    profiles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChange:
    """A changed limit: it was `was_w` before us. `ours_w` are the values we wrote: two while a write is under way."""

    was_w: float
    ours_w: tuple[float, ...]

    def wrote(self, limit_w: float) -> bool:
        """Return whether this limit is one of ours, even if the driver rounded it to whole watts."""
        return any(abs(limit_w - ours_w) <= ROUNDING_W for ours_w in self.ours_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """Changed clocks: they were locked to `was_mhz` (None: not locked, or not readable); we asked for `ours_mhz`."""

    was_mhz: tuple[int, int] | None
    ours_mhz: tuple[int, int]
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The content of one GPU's file. `boot` identifies the kernel's boot: limits and locks end with it."""

    uuid: str
    gpu: str
    vendor: str
    boot: str
    claims: tuple[Claim, ...] = ()
    limit: LimitChange | None = None
    clocks: ClockChange | None = None
    smoothing: SmoothingChange | None = None
    profiles: ProfileChange | None = None

    @property
    def is_changed(self) -> bool:
        """Return whether something on the GPU is not as it was."""
        return any(c is not None for c in (self.limit, self.clocks, self.smoothing, self.profiles))


@dataclass(slots=True)
class _Kept:
    """What this process holds, by the path of the journal, and the pipe to its watcher."""

    kept: dict[Path, Journal] = field(default_factory=dict)
    watcher: int | None = None


_state = _Kept()


def read_journal(uuid: str) -> Journal | None:
    """Return a GPU's journal, with what this process holds even if the file is gone; None if nothing is changed."""
    path = locks.gpu_file(uuid, ".json")
    kept = _state.kept.get(path)
    try:
        journal = msgspec.json.decode(path.read_bytes(), type=Journal)
    except FileNotFoundError:
        return kept
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        if kept is not None:
            return kept
        raise ActuatorError(
            f"the journal {path} cannot be read",
            why=str(exc),
            fix=f"compare `nvidia-smi -q -d POWER,CLOCK` with {path}, correct the GPU, and remove the file",
        ) from exc
    if kept is None or {c.id for c in kept.claims} <= {c.id for c in journal.claims}:
        return journal
    # The file was removed, and somebody who did not know of us wrote a new one: its "what was" may be our value.
    limit = journal.limit or kept.limit
    if journal.limit is not None and kept.limit is not None and kept.limit.wrote(journal.limit.was_w):
        limit = replace(journal.limit, was_w=kept.limit.was_w)
    claims = (*kept.claims, *(c for c in journal.claims if c not in kept.claims))
    return replace(
        journal,
        claims=claims,
        limit=limit,
        clocks=journal.clocks or kept.clocks,
        smoothing=journal.smoothing or kept.smoothing,
        profiles=journal.profiles or kept.profiles,
    )


def write_journal(journal: Journal) -> None:
    """Replace the journal on disk. Once this returns, the journal survives a crash."""
    path = locks.gpu_file(journal.uuid, ".json")
    draft = path.with_suffix(".draft")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            text = msgspec.json.encode(journal)
            if os.write(fd, text) != len(text):  # a disk that fills up writes less
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.rename(path)
        _sync(path.parent)
    except OSError as exc:
        raise ActuatorError(
            f"the journal {path} cannot be written, so {journal.gpu} is not changed",
            why=str(exc),
            fix=f"free some space there, or set {locks.VARIABLE}",
        ) from exc
    own = tuple(c for c in journal.claims if locks.is_ours(c.owner))
    _keep(path, replace(journal, claims=own) if own or not journal.claims else None)


def remove_journal(uuid: str) -> None:
    """Remove a GPU's journal, after everything on the GPU is as it was."""
    path = locks.gpu_file(uuid, ".json")
    try:
        path.unlink(missing_ok=True)
        _sync(path.parent)
    except OSError as exc:
        raise ActuatorError(f"the journal {path} cannot be removed", why=str(exc), fix=f"rm {path}") from exc
    _keep(path, None)


def list_journals() -> list[str]:
    """Return the UUIDs of the GPUs that have a journal, on disk or in memory."""
    folder = locks.folder_path()
    on_disk = locks.runtime_folder().glob("*.json") if folder.exists() else ()
    return sorted({path.stem for path in (*on_disk, *_state.kept) if path.parent == folder})


def _keep(path: Path, journal: Journal | None) -> None:
    """Keep what this process holds of a GPU (None: nothing any more), and tell the watcher."""
    if journal is None:
        _state.kept.pop(path, None)
        locks.unlock_node(path.stem)
    else:
        _state.kept[path] = journal
    if _state.watcher is not None:
        with contextlib.suppress(OSError):  # it was killed, or its pipe is full: only the file is left
            os.write(_state.watcher, msgspec.json.encode((str(path), journal)) + b"\n")


def receive_line(line: bytes) -> None:
    """Take over one line of `_keep`; the watcher calls this."""
    path, journal = msgspec.json.decode(line, type=tuple[str, Journal | None])
    _keep(Path(path), journal)


def connect_watcher(pipe: int) -> None:
    """From now on, tell the watcher at the other end of the pipe what this process holds."""
    os.set_blocking(pipe, False)
    _state.watcher = pipe


def forget() -> None:
    """Forget everything: a forked child holds nothing."""
    if _state.watcher is not None:
        os.close(_state.watcher)
    _state.kept, _state.watcher = {}, None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
