"""Which rank is missing when a collective fails: every rank has a thread that answers while its process lives.

A rank whose collective failed asks through the store of the process group. The threads of living ranks answer within
a poll, also where their main thread waits in a collective of its own; a rank that was killed or stopped does not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as c10d

from ..errors import TesseraError

POLL_S = 0.25
ANSWER_S = 3.0
"""How long to wait for answers: a dozen polls, so that a busy machine is not called dead."""
_PREFIX = "tessera/liveness"


class CollectiveError(TesseraError):
    """A collective failed on this rank; `missing` are the ranks that did not answer."""

    def __init__(self, what: str, *, why: str, fix: str, missing: tuple[int, ...]) -> None:
        super().__init__(what, why=why, fix=fix)
        self.missing = missing


class _Answering:
    """The thread of one process group: answers "alive" when anybody asks."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._thread = threading.Thread(target=self._run, name="tessera-liveness", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the job
            while True:
                asked = self._store.add(f"{_PREFIX}/asked", 0)
                for number in range(answered + 1, asked + 1):  # several ranks may ask at once
                    self._store.set(f"{_PREFIX}/{number}/{self._rank}", b"alive")
                answered = asked
                time.sleep(POLL_S)


_threads: dict[int, tuple[Any, _Answering]] = {}


def start_answering() -> None:
    """Start this rank's thread, once for each process group."""
    world = c10d.group.WORLD
    if id(world) not in _threads and c10d.get_backend() != "fake":
        _threads.clear()
        _threads[id(world)] = (world, _Answering(_own_store(), c10d.get_rank()))


def _own_store() -> Any:
    """A connection of our own: one that waits must not keep the group's from being used."""
    store = c10d.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def find_missing(ranks: list[int]) -> tuple[int, ...]:
    """The ranks of a list whose threads do not answer. All of them where the store itself does not."""
    try:
        store = _own_store()
        number = store.add(f"{_PREFIX}/asked", 1)
        waiting, until = set(ranks), time.monotonic() + ANSWER_S
        while waiting and time.monotonic() < until:
            waiting -= {r for r in waiting if store.check([f"{_PREFIX}/{number}/{r}"])}
            time.sleep(0.05)
    except RuntimeError:  # it lives in rank 0's process, where nobody else (torchrun) keeps it
        return (0,)
    return tuple(sorted(waiting))


@contextlib.contextmanager
def explain_failure(kind: str, group: Any) -> Iterator[None]:
    """Turn the backend's error into one that names the rank which is missing, or late."""
    start_answering()
    try:
        yield
    except RuntimeError as exc:
        ranks = c10d.get_process_group_ranks(group if group is not None else c10d.group.WORLD)
        missing = find_missing(ranks)
        why = str(exc).split("\n")[0]
        if missing:
            names = ", ".join(map(str, missing))
            raise CollectiveError(
                f"{kind} failed on rank {c10d.get_rank()}: {'ranks' if len(missing) > 1 else 'rank'} {names} "
                f"{'do' if len(missing) > 1 else 'does'} not answer",
                why=why,
                fix="look at the end of its log (killed, out of memory, stopped?), and start the job again",
                missing=missing,
            ) from exc
        raise CollectiveError(
            f"{kind} failed on rank {c10d.get_rank()}, though all ranks are alive",
            why=why,
            fix="a rank came too late, or called another collective: compare what the ranks do, or raise the timeout",
            missing=(),
        ) from exc
