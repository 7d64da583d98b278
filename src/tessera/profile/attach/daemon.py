"""Answers a process's requests for a profiling configuration until it has left a trace.

libkineto asks every 5 s (ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS of its configuration file), for as long as the process
lives: it need not have been started after the daemon. While there is no daemon it tries again after 10, 20, 40 ms and
so on up to 5.12 s, so that the first request comes 1.7 s after we listen on average and 5.12 s at worst.

Only a configuration is answered. An empty answer, which dynolog sends, tells a process nothing more than none at all;
and the last of those tries is sent but taken for failed, so that its answer is read at the next request, and each
later answer one request late, for ever. Silence to what comes then keeps the two in step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Self

from .ipc import (
    DAEMON,
    REGISTER,
    REQUEST,
    BadMessage,
    Datagram,
    Endpoint,
    SocketTaken,
    address,
    decode_request,
    encode_count,
    format_address,
)
from .kineto import owner_of
from .process import Target, descends
from .request import Folder, What, config

# Sooner than this after a configuration was sent, an idle process has not read it yet; later it has, and refused it.
SETTLE_S = 2.0
_BEAT_S = 0.1
_MAX_ATTEMPTS = 3


class TraceDaemon:
    """Listens for one process and tells it what to record. Use it as a `with` block; `state` says how far it is."""

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
        """When it was last sent a configuration."""
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
        """One line on what is being waited for."""
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
        """Answer one message, or not."""
        if message.uid != self._target.uid:
            if len(self.strangers) < 16:  # anybody may fill this socket
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
        """The process itself; below one without PyTorch (a launcher, a shell) the first that asks."""
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
        return Endpoint(folder=target.socket_dir, owner_uid=target.uid)
    except SocketTaken as exc:
        where = address(DAEMON, target.socket_dir)
        owner = owner_of(where)
        raise SocketTaken(
            f"the socket {format_address(where)} belongs to {owner or 'another daemon'}",
            why="one daemon can answer the processes of a machine; dynolog, or another tessera-prof, does already",
            fix=f"stop it, or ask it: dyno gputrace --pids {target.pid} --log-file /tmp/trace.json",
        ) from exc
