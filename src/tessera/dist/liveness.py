"""Why a collective failed: every rank has a thread that answers while its process lives, with what the rank called.

A rank whose collective failed asks through the store of the process group. The threads of living ranks answer at once,
even if their main thread waits in a collective; a rank that was killed or stopped does not answer. The answers tell
which rank has not come yet. A rank that leaves with such an error says so, and is not taken for the lost one.

A second thread asks shortly before a waiting collective times out, so that the answers are there with the error:

::

    rank 0   [ collective waits ········ asks ── error, names rank 1 ]
             0                           T - 4 s  T: the timeout of the group
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as c10d

from ..errors import TesseraError
from .groups import read_timeout, resolve_group

ANSWER_S = 3.0
"""Seconds to wait for answers: long enough that a busy machine does not count as dead."""
_LISTEN, _GLANCE, _FAREWELL = (datetime.timedelta(seconds=s) for s in (3600, 1, 5))
_EARLY_S, _LOOK_S = ANSWER_S + 1.0, 0.5
"""Seconds before a timeout at which the ranks of the collective are asked, and the interval of looks at it."""
_PREFIX = "tessera/liveness"
_OUTSIDE, _STOP = "outside", "stop"


class CollectiveError(TesseraError):
    """A collective failed on this rank; `missing` are the ranks that did not answer, `late` those that did not come."""

    def __init__(
        self, what: str, *, why: str, fix: str, missing: tuple[int, ...] = (), late: tuple[int, ...] = ()
    ) -> None:
        super().__init__(what, why=why, fix=fix)
        self.missing, self.late = missing, late


class _OpenCall:
    """A collective that this rank is in; `answers` are those of the ranks that were asked before it timed out."""

    def __init__(self, group: Any) -> None:
        self.ranks, self.group_name = c10d.get_process_group_ranks(group), group.group_name
        self.due_s = time.monotonic() + max(0.25 * _timeout_s(group), _timeout_s(group) - _EARLY_S)
        self.answers: dict[int, str | None] | None = None
        self._lock = threading.Lock()

    def ask(self) -> dict[int, str | None]:
        """Return what each rank answers; ranks are asked only once."""
        with self._lock:
            if self.answers is None:
                try:
                    self.answers = _ask(_own_store(), self.ranks, self.group_name)
                except RuntimeError:  # the store is in rank 0's process, unless another process (torchrun) keeps it
                    self.answers = {0: None}
            return self.answers


@functools.lru_cache(maxsize=64)
def _timeout_s(group: Any) -> float:
    timeout = read_timeout(group)
    return timeout.total_seconds() if timeout is not None else math.inf


class _Answering:
    """The thread of one process group: when asked, it tells how many collectives of a group this rank has begun.

    It also tells whether the rank is in one: `inside` counts the threads that are, or that ask why theirs failed.
    """

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.inside = 0
        self._store, self._rank = _own_store(), c10d.get_rank()
        # A store that cannot be cloned has one connection: a thread that waits on it keeps others from writing.
        self._bell = _own_store() if hasattr(self._store, "clone") else None
        if self._bell is not None:
            self._bell.set_timeout(_FAREWELL)
        self._ended = False
        self._store.set(f"{_PREFIX}/here/{self._rank}", b"")
        self._store.delete_key(f"{_PREFIX}/left/{self._rank}")  # left over from an earlier group
        self.open: list[_OpenCall] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-liveness", daemon=True)
        self._watch = threading.Thread(target=self._look, name="tessera-timeouts", daemon=True)
        self._thread.start()
        self._watch.start()

    def stop(self) -> None:
        """End the threads before the interpreter ends: one that returned from C++ afterwards would end in SIGABRT."""
        self._ended = True
        self._stopped.set()
        self._watch.join(2 * _FAREWELL.total_seconds())
        with contextlib.suppress(RuntimeError):  # the store is gone, which the thread notices too
            if self._bell is not None:
                _ring(self._bell, self._rank, f"{_STOP} {time.monotonic_ns()}")
        self._thread.join(2 * _FAREWELL.total_seconds())

    def _look(self) -> None:
        """Ask the ranks of collectives that are about to time out."""
        while not self._stopped.wait(_LOOK_S):
            for call in [c for c in self.open if c.due_s <= time.monotonic() and c.answers is None]:
                call.ask()

    def _run(self) -> None:
        number = 1
        while not self._ended:
            key = f"{_PREFIX}/inbox/{self._rank}/{number}"
            try:
                self._store.wait([key], _GLANCE if self._bell is None else _LISTEN)
                question, _, group = self._store.get(key).decode().partition(" ")
                number += 1
                if question != _STOP:
                    answer = f"{self.begun[group]} {'inside' if self.inside else _OUTSIDE}"
                    self._store.set(f"{_PREFIX}/answer/{question}/{self._rank}", answer)
            except c10d.DistStoreError as exc:
                if "timeout" not in str(exc).lower():
                    return
            except RuntimeError:  # the store is gone, and so is the job
                return


_threads: dict[int, tuple[Any, _Answering]] = {}


def start_answering() -> _Answering | None:
    """Return this rank's thread, started once for each process group; None in a dry or simulated run."""
    world = c10d.group.WORLD
    if c10d.get_backend() == "fake":
        return None
    if id(world) not in _threads:
        _stop_answering()
        _threads[id(world)] = (world, _Answering())
    return _threads[id(world)][1]


@atexit.register
def _stop_answering() -> None:
    while _threads:
        _threads.popitem()[1][1].stop()


def _own_store() -> Any:
    """Return a connection of our own, so that waiting on it does not block the group's."""
    store = c10d.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _ring(store: Any, rank: int, message: str) -> None:
    """Put a message into a rank's inbox, at the first free place: several may write at once, and none is lost."""
    counter = f"{_PREFIX}/rung/{rank}"
    number = store.add(counter, 0) + 1  # or below the first free place, if another rank writes
    while store.compare_set(f"{_PREFIX}/inbox/{rank}/{number}", "", message) != message.encode():
        number += 1
    store.add(counter, 1)


def _ask(store: Any, ranks: list[int], group: str) -> dict[int, str | None]:
    """Return what each rank answers: how many collectives it has begun, whether it is in one, or why it left."""
    number = store.add(f"{_PREFIX}/questions", 1)
    for rank in ranks:
        _ring(store, rank, f"{number} {group}")
    answers: dict[int, str | None] = dict.fromkeys(ranks)
    until = time.monotonic() + ANSWER_S
    while True:  # look once more after the deadline: this process itself may have been stopped until then
        over = time.monotonic() >= until
        for rank in [r for r, answer in answers.items() if answer is None]:
            for key in (f"{_PREFIX}/answer/{number}/{rank}", f"{_PREFIX}/left/{rank}"):
                if answers[rank] is None and store.check([key]):
                    answers[rank] = store.get(key).decode()
            if answers[rank] is None and not store.check([f"{_PREFIX}/here/{rank}"]):
                answers[rank] = f"0 {_OUTSIDE}"  # its thread starts with its first collective
        if over or None not in answers.values():
            return answers
        time.sleep(0.02)


@contextlib.contextmanager
def explain_failure(kind: str, group: Any) -> Iterator[None]:
    """Turn the backend's error into one that names the rank which is missing or late."""
    thread = start_answering()
    if thread is None:
        yield
        return
    group = resolve_group(group)
    thread.begun[group.group_name] += 1
    thread.inside += 1
    thread.open.append(call := _OpenCall(group))
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as exc:
        error = _explain(kind, call, thread.begun[group.group_name], why=str(exc).split("\n")[0])
        with contextlib.suppress(RuntimeError):
            _own_store().set(f"{_PREFIX}/left/{c10d.get_rank()}", str(error).split("\n")[0])
        raise error from exc
    finally:
        thread.inside -= 1
        thread.open.remove(call)


def _explain(kind: str, call: _OpenCall, number: int, why: str) -> CollectiveError:
    what = f"{kind} failed on rank {c10d.get_rank()}"
    answers = call.ask()
    missing = tuple(rank for rank, answer in answers.items() if answer is None)
    if missing:
        return CollectiveError(
            f"{what}: {_name(missing)} {'do' if len(missing) > 1 else 'does'} not answer",
            why=why,
            fix="look at the end of its log (killed, out of memory, stopped?), and start the job again",
            missing=missing,
        )
    states = {rank: answer.split() for rank, answer in answers.items() if answer and answer[0].isdigit()}
    outside = tuple(rank for rank, (_, where) in states.items() if where == _OUTSIDE)
    late = outside or tuple(rank for rank, (count, _) in states.items() if int(count) < number)
    if late:
        return CollectiveError(
            f"{what}: {_name(late)} did not come",
            why=why,
            fix="look at what it did meanwhile, or raise the timeout of the process group",
            late=late,
        )
    left = [f" ({answer})" for rank, answer in answers.items() if rank not in states]
    return CollectiveError(
        f"{what}, though all ranks are alive and came",
        why=why + "".join(left[:1]),
        fix="a rank came too late, or called another collective: compare what the ranks do, or raise the timeout",
    )


def _name(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
