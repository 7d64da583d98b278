"""Answers a process's requests for a profiling configuration until it has left a trace.

libkineto asks every 5 s (ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS of its configuration file), for as long as the process
lives, so the process may be older than the daemon. While there is no daemon, libkineto tries again after 10, 20, 40 ms
and so on up to 5.12 s. The first request therefore comes 1.7 s after we listen on average, and 5.12 s after at worst.

The daemon answers a request only when it has a configuration to send. The empty answer that dynolog sends would tell
the process nothing, and would do harm: libkineto sends the last of its tries but counts it as failed. It would read our
answer to that try at its next request, and every later answer one request late.

A message is a header and a body in one datagram, in the machine's own byte order:

    size_t   size of the body        8 bytes
    char[32] type, NUL-padded       32 bytes     "ctxt" registers, "req" asks for a configuration
    ...      body

    ctxt     int32 gpu, int32 pid, int64 job                       answered by an int32: processes of that job
    req      int32 type, int32 n, int64 job, int32 pids[n]         answered by the configuration's text, or not at all

The daemon's socket is named `dynolog`. It is in the abstract namespace (libkineto counts the NUL behind the name as
part of the name), or it is a file in the directory KINETO_IPC_SOCKET_DIR. libkineto ends its process when an answer
comes from an address it did not expect, so all answers are sent from the bound socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...errors import ArgumentError, MeasurementError, TesseraError
from .process import Target, descends, files_as, owner_of
from .request import Folder, What, config

DAEMON = "dynolog"
REGISTER, REQUEST = "ctxt", "req"
ACTIVITIES = 0x2
"""Bit of a request's type: the process's profiler is free and takes a configuration."""

_HEADER = struct.Struct("@Q32s")
_CONTEXT = struct.Struct("@iiq")
_REQUEST = struct.Struct("@iiq")
_COUNT = struct.Struct("@i")
_CREDENTIALS = struct.Struct("@iII")  # struct ucred: pid, uid, gid
_SCM_CREDENTIALS = 0x02
_MAX_BYTES = 1 << 16  # libkineto's requests have about 100
_MAX_PATH = 107  # sun_path has 108 with its NUL
_MAX_PIDS = 64  # libkineto names itself and up to ten ancestors


class BadMessage(TesseraError):
    """A datagram that does not follow the protocol."""


class SocketTaken(MeasurementError):
    """Another daemon already answers the processes of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datagram:
    """A message and its sender. `pid` and `uid` come from the kernel (SCM_CREDENTIALS), not from the sender."""

    kind: str
    body: bytes
    pid: int
    uid: int
    sender: bytes | str


@dataclass(frozen=True, slots=True)
class Request:
    """What a process asks. `pids` are its own PID and its ancestors', as the process names them."""

    kind: int
    job: int
    pids: tuple[int, ...]

    @property
    def free(self) -> bool:
        """Whether the process's profiler is idle, so that it takes a configuration."""
        return bool(self.kind & ACTIVITIES)


def encode(kind: str, body: bytes) -> bytes:
    """Return a datagram: a header and `body`."""
    return _HEADER.pack(len(body), kind.encode()) + body


def decode(data: bytes) -> tuple[str, bytes]:
    """Return the type and the body of a datagram."""
    if len(data) < _HEADER.size:
        raise BadMessage(f"a datagram of {len(data)} bytes has no header")
    size, name = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if size != len(body):
        raise BadMessage(f"the header says {size} bytes, {len(body)} came")
    return name.split(b"\0", 1)[0].decode("ascii", "replace"), body


def decode_request(body: bytes) -> Request:
    """Read the body of a "req"."""
    if len(body) < _REQUEST.size:
        raise BadMessage(f"a request of {len(body)} bytes is too short")
    kind, count, job = _REQUEST.unpack_from(body)
    if not 0 <= count <= _MAX_PIDS or len(body) < _REQUEST.size + 4 * count:
        raise BadMessage(f"a request that names {count} PIDs in {len(body)} bytes")
    return Request(kind, job, struct.unpack_from(f"@{count}i", body, _REQUEST.size))


def encode_request(kind: int, job: int, pids: tuple[int, ...]) -> bytes:
    """Return the body of a "req" as libkineto makes it, for tests and for trying out a daemon."""
    return _REQUEST.pack(kind, len(pids), job) + struct.pack(f"@{len(pids)}i", *pids)


def encode_context(gpu: int, pid: int, job: int) -> bytes:
    """Return the body of a "ctxt"."""
    return _CONTEXT.pack(gpu, pid, job)


def encode_count(count: int) -> bytes:
    """Return the answer to a "ctxt"."""
    return _COUNT.pack(count)


def address(name: str, folder: str | None) -> str:
    """Return the address of an endpoint: a file in `folder`, or a name in the abstract namespace.

    The text of the folder is not changed, not even a double slash: libkineto compares it with an answer's address.
    """
    if not folder:
        return f"\0{name}\0"
    path = f"{folder}/{name}"
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ArgumentError(f"the socket path {path} is too long", why=f"a socket's path has {_MAX_PATH} bytes at most")
    return path


class Endpoint:
    """The bound socket of a daemon. A socket that is a file can be written by its owner only; closing removes the file.

    The file belongs to the user of the process `owner`, or to our own user where `owner` is None.
    """

    def __init__(self, name: str = DAEMON, *, folder: str | None = None, owner: Target | None = None) -> None:
        self.address = address(name, folder)
        self._path = Path(self.address) if folder else None
        self._owner = owner
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            # Before bind: what arrives earlier would carry no credentials.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with self._as_owner():
                if self._path is not None:
                    _clear_stale(self._path)
                self._bind()
        except OSError as exc:
            self._socket.close()
            if exc.errno == errno.EADDRINUSE:
                raise SocketTaken(
                    f"another daemon owns the socket {format_address(self.address)}", why=str(exc)
                ) from exc
            raise MeasurementError(f"cannot listen at {format_address(self.address)}", why=str(exc)) from exc
        except TesseraError:
            self._socket.close()
            raise

    def _as_owner(self) -> contextlib.AbstractContextManager[None]:
        return files_as(self._owner) if self._owner is not None else contextlib.nullcontext()

    def _bind(self) -> None:
        if self._path is None:
            self._socket.bind(self.address)
            return
        old = os.umask(0o177)  # owner-only from the first moment on
        try:
            self._socket.bind(self.address)
        finally:
            os.umask(old)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(self, timeout_s: float) -> Datagram | None:
        """Return the next message; None if none came in time, it is malformed, or its sender is not known."""
        self._socket.settimeout(timeout_s)
        try:
            data, ancillary, flags, sender = self._socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except TimeoutError:
            return None
        credentials = [d for level, kind, d in ancillary if (level, kind) == (socket.SOL_SOCKET, _SCM_CREDENTIALS)]
        if flags & socket.MSG_TRUNC or not credentials or not sender:
            return None
        pid, uid, _ = _CREDENTIALS.unpack(credentials[0][: _CREDENTIALS.size])
        try:
            kind, body = decode(data)
        except BadMessage:
            return None
        return Datagram(kind=kind, body=body, pid=pid, uid=uid, sender=sender)

    def answer(self, to: Datagram, body: bytes) -> bool:
        """Send an answer of the same type. Return False if the asking process has ended or does not read."""
        try:
            self._socket.sendmsg([encode(to.kind, body)], [], socket.MSG_DONTWAIT, to.sender)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._socket.fileno() == -1:
            return
        self._socket.close()
        if self._path is not None:
            with self._as_owner(), contextlib.suppress(OSError):
                self._path.unlink()


def format_address(where: str) -> str:
    """Return an address as `ss -x` shows it: "@" for the NUL that begins an abstract address."""
    return "@" + where.strip("\0") if where.startswith("\0") else where


def _clear_stale(path: Path) -> None:
    """Remove the socket file of a daemon that has ended; raise SocketTaken if the daemon still runs."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise MeasurementError(
            f"{path} exists and is not a socket", fix="remove it, or set KINETO_IPC_SOCKET_DIR elsewhere"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except PermissionError as exc:
            raise SocketTaken(f"another user's daemon owns the socket {path}", why=str(exc)) from exc
    raise SocketTaken(f"another daemon owns the socket {path}", why="it answers")


SETTLE_S = 2.0
"""A process that asks again sooner has not yet read the configuration we sent; one that asks later has refused it."""
_BEAT_S = 0.1
_MAX_ATTEMPTS = 3


class TraceDaemon:
    """Waits for the requests of one process and tells it what to record. Use it in a `with` block."""

    def __init__(self, target: Target, folder: Folder, what: What) -> None:
        self._target = target
        self._folder = folder
        self._what = what
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-attach", daemon=True)
        self.started_s = time.monotonic()
        self.asked_s: float | None = None
        """When the process first asked (monotonic)."""
        self.sent_s: float | None = None
        """When the process was last sent a configuration (monotonic)."""
        self.attempts = 0
        self.busy = False
        """Whether the process says that something is being profiled in it."""
        self.answered_pid: int | None = None
        self.strangers: set[int] = set()
        """UIDs of other users whose datagrams were refused."""
        self._endpoint = _listen(target)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._endpoint.close()

    @property
    def state(self) -> str:
        """What is being waited for, in one line."""
        if self.asked_s is None:
            return "waiting for the process to ask (it does so every 5 s)"
        if self.sent_s is None:
            return "another profiler is active in the process; waiting for its end"
        return "the process records" if self._folder.has_begun else "the process has its orders"

    def _run(self) -> None:
        while not self._stop.is_set():
            message = self._endpoint.receive(_BEAT_S)
            if message is not None:
                self.handle(message)

    def handle(self, message: Datagram) -> None:
        if message.uid != self._target.uid:
            if len(self.strangers) < 16:  # bounded: any user may write to an abstract socket
                self.strangers.add(message.uid)
            return
        if not self._is_wanted(message.pid):
            return
        if message.kind == REGISTER:
            self._endpoint.answer(message, encode_count(1))
        elif message.kind == REQUEST:
            with contextlib.suppress(BadMessage):
                self._request(message, free=decode_request(message.body).free)

    def _is_wanted(self, pid: int) -> bool:
        """Whether to answer a process: the target itself, or below a launcher or shell the first process that asks."""
        if self.answered_pid is not None:
            return pid == self.answered_pid
        return pid == self._target.pid or (not self._target.torch and descends(pid, self._target.pid))

    def _request(self, message: Datagram, *, free: bool) -> None:
        now = time.monotonic()
        self.asked_s = self.asked_s or now
        self.busy = not free
        if not free or self._folder.has_begun or self.attempts >= _MAX_ATTEMPTS:
            return
        if self.sent_s is not None and now - self.sent_s < SETTLE_S:
            return
        text = config(self._what, self._folder.file, attempt=self.attempts + 1)
        if self._endpoint.answer(message, text.encode()):
            self.answered_pid = message.pid
            self.sent_s = now
            self.attempts += 1


def _listen(target: Target) -> Endpoint:
    try:
        return Endpoint(folder=target.socket_dir, owner=target)
    except SocketTaken as exc:
        where = address(DAEMON, target.socket_dir)
        owner = owner_of(where)
        raise SocketTaken(
            f"the socket {format_address(where)} belongs to {owner or 'another daemon'}",
            why="one daemon can answer the processes of a machine; dynolog, or another tessera-prof, does already",
            fix=f"stop it, or ask it: dyno gputrace --pids {target.pid} --log-file /tmp/trace.json",
        ) from exc
