"""A rank that dies or stops is named on the others, within the timeout."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from gloo_ranks import GlooRanks
from tessera import dist
from tessera.dist.liveness import CollectiveError

TIMEOUT_S = 8.0


def reduce_until_one_is_lost(rank: int, lost: int, how: int) -> object:
    dist.all_reduce(torch.ones(10))  # the threads run
    begun = time.monotonic()
    try:
        for i in range(10**6):
            if rank == lost and i == 20:
                os.kill(os.getpid(), how)
            dist.all_reduce(torch.ones(1000), deterministic=bool(i % 2))
    except CollectiveError as exc:
        return exc.missing, str(exc), time.monotonic() - begun
    return None


@pytest.mark.parametrize(("lost", "how"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_rank_is_named_on_the_others(lost: int, how: signal.Signals) -> None:
    ranks = GlooRanks(3, timeout_s=TIMEOUT_S)
    results = ranks.run_without(lost, reduce_until_one_is_lost, lost, int(how))
    for missing, text, _seconds in results:
        assert missing == (lost,), text
        assert f"rank {lost} does not answer" in text


def come_late(rank: int) -> object:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
    try:
        dist.all_reduce(torch.ones(1))
    except CollectiveError as exc:
        return exc.missing, str(exc)
    return None


def test_a_late_rank_is_not_called_dead() -> None:
    ranks = GlooRanks(2, timeout_s=TIMEOUT_S / 2)
    ((missing, text),) = ranks.run_without(1, come_late)
    assert missing == ()
    assert "all ranks are alive" in text
