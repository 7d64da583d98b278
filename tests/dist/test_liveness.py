"""A rank that dies or stops is named on the others, within the timeout."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from gloo_ranks import GlooRanks
from tessera import dist
from tessera.dist import liveness
from tessera.dist.liveness import CollectiveError
from tessera.dist.reduction import node_groups

TIMEOUT_S = 2.0
"""Of a collective that a rank never comes to. All others have the half hour of `GlooRanks`: a busy machine is slow."""


def wait_for_all_who_live(living: list[int]) -> None:
    """Whoever asks waits for these, however long a busy machine keeps them, and half a second for the others."""
    store, left, answer = liveness._own_store(), "tessera/liveness/left", "tessera/liveness/answer"

    def has_answered(rank: int, questions: int) -> bool:
        keys = [f"{answer}/{number}/{rank}" for number in range(1, questions + 1)]
        return store.check([f"{left}/{rank}"]) or store.check(keys)

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        while not all(has_answered(rank, store.add("tessera/liveness/questions", 0)) for rank in living):
            time.sleep(seconds)

    liveness.ANSWER_S = 0.5
    liveness.time = SimpleNamespace(monotonic=time.monotonic, monotonic_ns=time.monotonic_ns, sleep=sleep)


def shorten_timeout(living: list[int]) -> None:
    wait_for_all_who_live(living)
    world = torch.distributed.group.WORLD
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), world)
    liveness._timeout_s.cache_clear()
    assert liveness._timeout_s(world) == TIMEOUT_S


def reduce_until_one_is_lost(rank: int, lost: int, how: int) -> object:
    dist.all_reduce(torch.ones(10))  # the threads run
    try:
        for i in range(10**6):
            if i == 20:
                if rank == lost:
                    os.kill(os.getpid(), how)
                shorten_timeout([r for r in range(3) if r != lost])
            dist.all_reduce(torch.ones(1000), deterministic=bool(i % 2))
    except CollectiveError as exc:
        return exc.missing, str(exc)
    return None


@pytest.mark.parametrize(("lost", "how"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_rank_is_named_on_the_others(lost: int, how: signal.Signals) -> None:
    results = GlooRanks(3).run_without(lost, reduce_until_one_is_lost, lost, int(how))
    for missing, text in results:
        assert missing == (lost,), text
        assert f"rank {lost} does not answer" in text


def come_late(rank: int, calls_before: int) -> object:
    for _ in range(calls_before):
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(600)
    shorten_timeout([0, 1] if calls_before else [0])  # without a collective rank 1 has no thread yet
    try:
        dist.all_reduce(torch.ones(1))
    except CollectiveError as exc:
        return exc.missing, exc.late, str(exc)
    return None


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_late_rank_is_named_and_not_called_dead(calls_before: int) -> None:
    ((missing, late, text),) = GlooRanks(2).run_without(1, come_late, calls_before)
    assert missing == () and late == (1,)
    assert "rank 1 did not come" in text


class LateStore:
    """Everybody's answer comes while the rank that asked is kept from looking."""

    def __init__(self) -> None:
        self.set: dict[str, bytes] = {"tessera/liveness/here/0": b"", "tessera/liveness/here/1": b""}
        self.now_s = 0.0

    def add(self, key: str, more: int) -> int:
        return more

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        return new.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.set for key in keys)

    def get(self, key: str) -> bytes:
        return self.set[key]

    def sleep(self, _: float) -> None:
        self.set |= {f"tessera/liveness/answer/1/{rank}": b"1 inside" for rank in range(2)}
        self.now_s += 100.0


def test_a_rank_that_looks_late_at_the_answers_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine kept it for longer than it waits: all others were called dead."""
    store = LateStore()
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: store.now_s, sleep=store.sleep))
    assert liveness._ask(store, [0, 1], "0") == {0: "1 inside", 1: "1 inside"}


def leave_one_by_one(rank: int) -> object:
    """Rank 1 is killed, rank 2 fails and ends, and rank 0 finds out afterwards."""
    liveness.ANSWER_S = 1.0
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["tessera/liveness/left/2"])
    try:
        dist.all_reduce(torch.ones(10))
    except CollectiveError as exc:
        if rank == 2:
            os._exit(1)
        return exc.missing, str(exc)
    return None


def test_a_rank_that_left_because_of_the_lost_one_is_not_called_lost() -> None:
    missing, text = GlooRanks(3).run_without(1, leave_one_by_one, wanted=[0])[0]
    assert missing == (1,), text


def read_timeouts(rank: int) -> list[float]:
    mesh = dist.Mesh(["tp", "dp"], 4, (2, 2))
    groups = [mesh.process_group("tp"), mesh.process_group("dp"), *node_groups(torch.distributed.group.WORLD, 2)]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_groups_of_a_mesh_have_the_timeout_of_the_world() -> None:
    with GlooRanks(4, timeout_s=1717.0) as ranks:
        assert ranks.run(read_timeouts) == [[1717.0] * 4] * 4


ENDING = """
import os, sys
import torch.distributed as c10d
import torch
from tessera import dist

dist.all_reduce  # imported once, before the ranks part
children = {}
for how in ("destroy", "leave"):
    read, write = os.pipe()
    for rank in range(3):
        child = os.fork()
        if not child:
            port = int(os.read(read, 5)) if rank else 0  # rank 0 takes a free one
            store = c10d.TCPStore("127.0.0.1", port, 3, rank == 0, wait_for_workers=False)
            if rank == 0:
                os.write(write, f"{store.port:5d}".encode() * 2)
            c10d.init_process_group("gloo", store=store, rank=rank, world_size=3)
            del store
            dist.all_reduce(torch.ones(3))
            if how == "destroy":
                c10d.destroy_process_group()
            sys.exit()
        children[child] = f"{how} {rank}"
for child, name in children.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_ranks_end_as_they_should_after_a_collective() -> None:
    """A thread that came back from the store while the interpreter ended made one exit of six a SIGABRT."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:-1] == [f"{how} {rank} 0" for how in ("destroy", "leave") for rank in range(3)], (
        done
    )
