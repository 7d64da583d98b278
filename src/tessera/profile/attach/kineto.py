"""Whether libkineto waits for a daemon in a process, and who that daemon is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .ipc import CLIENT_PREFIX
from .process import PROC, SOCKET_VARIABLE, Target, descendants, maps_torch, pids, same, status

DAEMON_VARIABLE = "KINETO_USE_DAEMON"
State = Literal["ready", "starting", "off", "not torch", "unreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kineto:
    """Whether a process can be asked for a Kineto trace; `reason` and `fix` where it cannot."""

    state: State
    reason: str = ""
    fix: str = ""

    @property
    def possible(self) -> bool:
        """Whether it is worth waiting for the process to ask."""
        return self.state in ("ready", "starting")


def kineto(target: Target) -> Kineto:
    """Whether the process waits for a daemon. Its endpoint is the proof; the variable alone says it will have one."""
    restart = f"{DAEMON_VARIABLE}=1 {target.command}"
    if target.socket_dir and not target.socket_dir.startswith("/"):
        return Kineto(
            state="unreachable", reason=f"{SOCKET_VARIABLE}={target.socket_dir} is not an absolute path", fix=restart
        )
    if not target.socket_dir and not same(target.pid, "ns/net"):
        return Kineto(
            state="unreachable",
            reason="it lives in another network namespace (a container), and its socket with it",
            fix=f"run tessera-prof in that container, or start both with {SOCKET_VARIABLE}=/a/shared/folder",
        )
    ours = [target.pid] if target.torch else [target.pid, *descendants(target.pid)]
    if any(has_endpoint(p) for p in ours):
        return Kineto(state="ready")
    if DAEMON_VARIABLE in target.environ:
        return Kineto(
            state="starting",
            reason=f"{DAEMON_VARIABLE} is set, but PyTorch's profiler does not wait for a daemon (yet)",
            fix="is torch imported, and built with Kineto for Linux?",
        )
    if target.torch or any(maps_torch(p) for p in ours[1:]):
        return Kineto(state="off", reason=f"it was not started with {DAEMON_VARIABLE}=1", fix=restart)
    return Kineto(
        state="not torch",
        reason="it is not a PyTorch process (libtorch is not loaded)",
        fix=f"a PyTorch program can be traced when it is started so: {DAEMON_VARIABLE}=1 python train.py",
    )


def has_endpoint(pid: int) -> bool:
    """Whether libkineto has opened its socket in a process: then it asks for a configuration now and then."""
    sockets = _socket_inodes(pid)
    return bool(sockets) and any(inode in sockets for inode, name in _unix_sockets(pid) if CLIENT_PREFIX in name)


def owner_of(address: str) -> str | None:
    """Who has bound a socket, as "name (PID 12)"; None where that cannot be seen."""
    wanted = "@" + address[1:].replace("\0", "@") if address.startswith("\0") else address
    inodes = {inode for inode, name in _unix_sockets(os.getpid()) if name == wanted}
    for pid in pids() if inodes else ():
        if _socket_inodes(pid) & inodes:
            return f"{status(pid).get('Name', '?')} (PID {pid})"
    return None


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for fd in (PROC / str(pid) / "fd").iterdir():
            kind, _, inode = str(fd.readlink()).partition(":[")
            if kind == "socket":
                found.add(inode.rstrip("]"))
    except OSError:  # another user's, or gone meanwhile
        pass
    return found


def _unix_sockets(pid: int) -> Iterator[tuple[str, str]]:
    """Inode and name of the bound sockets that a process's network namespace has."""
    try:
        lines = (PROC / str(pid) / "net" / "unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            yield fields[6], fields[7]
