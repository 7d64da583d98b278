"""What was changed on a GPU, by whom, and what it was: a file written and synced before the hardware is touched.

One file per GPU, `<folder>/<uuid>.json`, replaced whole (write, fsync, rename, fsync of the folder), so that a crash at
any instant leaves the old text or the new. No file: nothing is changed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import ActuatorError

VARIABLE = "TESSERA_RUNTIME_DIR"
"""Environment variable for the folder of locks and journals; containers that share a GPU should share it."""
# Drivers take limits in milliwatts (NVML) or microwatts (AMD SMI); some boards round them to whole watts.
ROUNDING_W = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SAFE = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one holder asks of a GPU. `owner` names the file its process keeps locked while it lives (see lock)."""

    id: str
    owner: str
    pid: int
    cap_w: float | None = None
    clocks_mhz: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChange:
    """The limit was `was_w`; any of `ours_w` is a value we wrote, two of them while a write is under way."""

    was_w: float
    ours_w: tuple[float, ...]

    def wrote(self, limit_w: float) -> bool:
        """Whether this limit is one of ours, or what a driver that rounds to whole watts made of it."""
        return any(abs(limit_w - ours_w) <= ROUNDING_W for ours_w in self.ours_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """The clocks were locked to `was_mhz` (None: not, or it cannot be read); we asked for `ours_mhz`."""

    was_mhz: tuple[int, int] | None
    ours_mhz: tuple[int, int]
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """One GPU's file. `boot` is the kernel's boot: limits and locks do not outlive it."""

    uuid: str
    gpu: str
    vendor: str
    boot: str
    claims: tuple[Claim, ...] = ()
    limit: LimitChange | None = None
    clocks: ClockChange | None = None

    @property
    def changed(self) -> bool:
        """Whether something is to be put back."""
        return self.limit is not None or self.clocks is not None


def boot_id() -> str:
    """The kernel's name for this boot."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # no /proc: then every boot looks the same, and what is stale is seen by the limit's value
        return "unknown"


def place(environ: Mapping[str, str] | None = None) -> Path:
    """Where locks and journals lie: /run/tessera for root, /var/tmp/tessera-UID for others.

    Not XDG_RUNTIME_DIR, which logind removes at logout while a job in tmux still holds a cap.
    """
    given = (os.environ if environ is None else environ).get(VARIABLE)
    if given:
        return Path(given)
    return Path("/run/tessera") if os.geteuid() == 0 else Path(f"/var/tmp/tessera-{os.geteuid()}")


def folder() -> Path:
    """`place`, made if need be, and for its owner alone."""
    path = place()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as exc:
        raise ActuatorError(
            f"the folder for locks and journals cannot be made: {path}", why=str(exc), fix=f"set {VARIABLE}"
        ) from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ActuatorError(
            f"the folder for locks and journals is not ours alone: {path}",
            why="whoever can write there could have us set limits",
            fix=f"rm -r {path} if it is yours, chmod 700 it, or set {VARIABLE}",
        )
    return path


def path_of(uuid: str, suffix: str) -> Path:
    """The file of a GPU in the folder."""
    if not _SAFE.fullmatch(uuid):
        raise ActuatorError(f"{uuid!r} is no UUID of a GPU", why="it would not do as a file's name")
    return folder() / f"{uuid}{suffix}"


def read(uuid: str) -> Journal | None:
    """The journal of a GPU; None if nothing is changed."""
    path = path_of(uuid, ".json")
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=Journal)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise ActuatorError(
            f"the journal {path} cannot be read",
            why=str(exc),
            fix=f"compare `nvidia-smi -q -d POWER,CLOCK` with {path}, put the GPU right, and remove the file",
        ) from exc


def write(journal: Journal) -> None:
    """Replace the journal on disk; when this returns it survives a crash."""
    path = path_of(journal.uuid, ".json")
    draft = path.with_suffix(".draft")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            text = msgspec.json.encode(journal)
            if os.write(fd, text) != len(text):  # as a disk does that fills up
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
            fix=f"make room there, or set {VARIABLE}",
        ) from exc


def remove(uuid: str) -> None:
    """Nothing is changed any more."""
    path = path_of(uuid, ".json")
    try:
        path.unlink(missing_ok=True)
        _sync(path.parent)
    except OSError as exc:
        raise ActuatorError(f"the journal {path} cannot be removed", why=str(exc), fix=f"rm {path}") from exc


def uuids() -> list[str]:
    """The GPUs that have a journal."""
    return sorted(p.stem for p in folder().glob("*.json")) if place().exists() else []


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
