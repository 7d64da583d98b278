"""The lease of this node: a small file that its daemon (`tessera governor join`) writes for schedules.

The file says when the lease ends. A process that reads it later falls back to the guaranteed share by itself, also if
the daemon was killed. The reader only trusts files that belong to root or to the same user, and that nobody else can
write.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..actuators.locks import runtime_folder
from ..clock import boot_id, read_boot_clock
from ..errors import ScheduleError
from ..output import cannot_write, replace_when_written
from ..sensors.health import MachineCheck
from ..units import ScopedPower, format_duration, format_power

VARIABLE = "TESSERA_GOVERNOR_LEASE"
"""Environment variable for the file's path."""
SYSTEM_PATH = Path("/run/tessera-governor/lease.json")
"""Where a daemon that runs as root writes the lease, for all users of the node."""
_MOST_BYTES = 4096


class NodeLease(msgspec.Struct, frozen=True, kw_only=True):
    """What the node may draw until `end_s` of the clock since boot, and afterwards."""

    cap_w: float
    guaranteed_w: float
    end_s: float
    boot: str

    def allow_w(self, now_s: float) -> float:
        """Return what the node may draw now. A lease from before a reboot has ended."""
        return self.cap_w if now_s < self.end_s and self.boot == boot_id() else self.guaranteed_w


@dataclass(frozen=True, slots=True)
class LeasedPower(ScopedPower):
    """A `node:` cap that follows the lease."""


def lease_path() -> Path:
    """Return the lease file: the one in the environment variable, the one of the whole machine, or the user's own."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    return SYSTEM_PATH if os.geteuid() == 0 or SYSTEM_PATH.exists() else runtime_folder() / "governor-lease.json"


def write_lease(path: Path, lease: NodeLease) -> None:
    """Replace the lease in the file."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as exc:
        raise cannot_write(path, exc) from exc
    with replace_when_written(path) as part:
        part.write_bytes(msgspec.json.encode(lease))
        part.chmod(0o644)


class LeaseReader:
    """Reads the file again when it has changed. If the file is gone, the last lease holds until its end."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or lease_path()
        self._stamp: tuple[int, int] | None = None
        self._lease: NodeLease | None = None

    def read(self) -> NodeLease | None:
        """Return the newest lease; None where no governor has written one yet."""
        self._refresh()
        return self._lease

    def allow_w(self) -> float | None:
        """Return what this node may draw now; None where no governor has written a lease yet."""
        lease = self.read()
        return None if lease is None else lease.allow_w(read_boot_clock())

    def _refresh(self) -> None:
        try:
            status = self.path.stat()
            if (status.st_mtime_ns, status.st_ino) == self._stamp:
                return
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return
        try:
            status = os.fstat(fd)
            ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
            if stat.S_ISREG(status.st_mode) and ours:
                self._lease = msgspec.json.decode(os.read(fd, _MOST_BYTES), type=NodeLease)
                self._stamp = (status.st_mtime_ns, status.st_ino)
        except msgspec.DecodeError:
            return  # not written by us: keep what was read before
        finally:
            os.close(fd)


def check_lease(path: Path | None = None) -> list[MachineCheck]:
    """Check the lease of this node: one that has ended still limits `node:` caps. Nothing where there is none."""
    reader = LeaseReader(path)
    lease = reader.read()
    if lease is None:
        return []
    left_s, allowed = lease.end_s - read_boot_clock(), format_power(lease.allow_w(read_boot_clock()))
    if lease.boot == boot_id() and left_s > 0:
        detail = f"a power governor allows this node {allowed} for {format_duration(left_s, 2)} more"
        return [MachineCheck(name="governor", ok=True, detail=detail)]
    return [
        MachineCheck(
            name="governor",
            ok=False,
            detail=f"the lease of a power governor has ended: `node:` caps are held at its guaranteed share, {allowed}",
            fix=f"start `tessera governor join` again; if this node has no governor any more: rm {reader.path}",
        )
    ]


def find_leased_power() -> LeasedPower:
    """Return the cap of `power_cap="governor"`."""
    path = lease_path()
    power_w = LeaseReader(path).allow_w()
    if power_w is None:
        raise ScheduleError(
            'power_cap="governor": this node has no lease',
            why=f"no daemon has written {path}",
            fix=f"run `tessera governor join` on this node, or set {VARIABLE} to its file",
        )
    return LeasedPower("node", power_w)
