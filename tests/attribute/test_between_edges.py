"""Regions and steps of a host are known by the samples between their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.attribute.account import account_run
from tessera.attribute.table import EnergyRow
from tessera.joules import DomainSamples
from tessera.schema import Domain, Hold
from tessera.timeline import Builder
from tessera.trace import PowerTrace

MS = 1_000_000
T0 = 1_790_000_000_000 * MS
LEVEL = 0.5
SPREAD_W = np.random.default_rng(7).uniform(0.2, 4.0, 60)  # a machine whose other programs take the cores


def power_of(watts: list[float]) -> PowerTrace:
    """Samples of 100 ms."""
    domain = Domain(
        name="cpu0", source="modelled", resolution_s=0.1, basis="modelled", hold=Hold.MEAN, gain_error=LEVEL, core_w=4.0
    )
    times = [T0 + 100 * i * MS for i in range(len(watts) + 1)]
    return PowerTrace({"cpu0": DomainSamples.of(domain, times, [math.nan, *watts])}, start_ns=T0, end_ns=times[-1])


def run(spans: list[tuple[str, int, int]], op_ms: int) -> dict[str, EnergyRow]:
    """Regions by name, begin and end in milliseconds, where each sample begins with an operator; the rows by name."""
    build = Builder()
    for i in range(len(SPREAD_W)):
        build.add("op", f"aten::op{i % 3}", T0 + 100 * i * MS, T0 + (100 * i + op_ms) * MS, thread=1)
    for name, begin_ms, end_ms in spans:
        build.add("region", name, T0 + begin_ms * MS, T0 + end_ms * MS, thread=1)
    windows = [(T0, T0 + 100 * len(SPREAD_W) * MS)]
    table = account_run(build.build(), power_of(SPREAD_W.tolist()), windows, threads=1)
    return {row.name: row for row in (*table.regions, *table.steps)}


@pytest.mark.parametrize("op_ms", [100, 90])
def test_a_region_of_whole_samples_has_the_error_of_their_level(op_ms: int) -> None:
    names = ["forward", "backward", "step_0"]
    rows = run([(names[i % 3], 100 * i, 100 * (i + 1)) for i in range(6, 54) if i % 3 < 2 or i == 8], op_ms)
    for place, name in enumerate(names):
        truth_j = 0.1 * float(sum(SPREAD_W[i] for i in range(6, 54) if i % 3 == place and (place < 2 or i == 8)))
        assert rows[name].energy_j == pytest.approx(truth_j, rel=1e-6)
        assert rows[name].error_j == pytest.approx(LEVEL * truth_j, rel=1e-3)


def test_passes_that_cut_their_samples_at_one_place_keep_their_doubt() -> None:
    """All of a sample may be of the part that the region has in it, in every pass alike."""
    rows = run([("work", 100 * i, 100 * i + 20) for i in range(60)], 20)
    whole_j = 0.1 * float(SPREAD_W.sum())
    at_most_j = float(np.minimum(0.1 * SPREAD_W, 0.02 * 4.0).sum())  # one thread draws 4 W
    assert rows["work"].energy_j < 0.6 * whole_j
    assert rows["work"].energy_j + rows["work"].error_j >= min(at_most_j, whole_j)
