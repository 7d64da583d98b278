"""Work and waiting within one sample of a host's modelled power. Programs are made, so that the truth is known."""

import math

import numpy as np
import pytest

from tessera.attribute.solve import attribute
from tessera.joules import DomainSamples
from tessera.notes import kind_of
from tessera.schema import Domain, Hold
from tessera.timeline import Builder
from tessera.trace import PowerTrace

MS = 1_000_000
T0 = 1_700_000_000_000_000_000
WORK_W = 3.0


def make_run(pieces, *, period_ms=100, waiting_w=0.0, core_w=None):
    """The table of a program of (milliseconds of work, of waiting) pieces; the sensor knows means of a period.

    A third figure is the power of what is not work, in watts.
    """
    build = Builder()
    edges, watts, at = [T0], [], T0
    for work_ms, waiting_ms, *other_w in pieces:
        if work_ms:
            build.add("op", "aten::mm", at, at + round(work_ms * MS), thread=1)
        for ms, power_w in ((work_ms, WORK_W), (waiting_ms, *(other_w or [waiting_w]))):
            at += round(ms * MS)
            edges.append(at)
            watts.append(power_w)
    joules = np.concatenate([[0.0], np.cumsum(np.diff(edges) * 1e-9 * watts)])
    times = np.arange(T0, at + 1, period_ms * MS)
    means = np.diff(np.interp(times - T0, np.array(edges) - T0, joules)) / (period_ms * 1e-3)
    domain = Domain(
        name="cpu0", source="modelled", resolution_s=period_ms * 1e-3, basis="modelled", hold=Hold.MEAN, core_w=core_w
    )
    column = DomainSamples.of(domain, times, np.concatenate([[math.nan], means]))
    power = PowerTrace({"cpu0": column}, start_ns=T0, end_ns=int(times[-1]))
    return attribute(build.build(), power, start_ns=T0, end_ns=int(times[-1]), threads=1)


def check_sums(table):
    assert sum(r.energy_j for r in table.ops) + table.idle_j == pytest.approx(table.energy_j)
    assert table.idle_j >= 0


def is_told(table):
    return any(kind_of(note) == "fitted" for note in table.notes)


@pytest.mark.parametrize("waiting_w", [0.0, 0.6])
@pytest.mark.parametrize("work_ms, waiting_ms", [(12, 60), (120, 500), (7, 41)])
def test_short_work_beside_waiting_has_its_joules(work_ms, waiting_ms, waiting_w):
    table = make_run([(work_ms, waiting_ms)] * 80, waiting_w=waiting_w)
    (mm,) = table.ops
    truth_j = mm.time_s * WORK_W
    assert mm.energy_j == pytest.approx(truth_j, rel=0.15)
    assert abs(mm.energy_j - truth_j) <= mm.error_j
    assert is_told(table)
    check_sums(table)


def test_one_mix_in_every_sample_has_an_interval_that_holds_the_truth():
    table = make_run([(20, 80)] * 60)
    (mm,) = table.ops
    truth_j = mm.time_s * WORK_W  # all of it
    assert mm.energy_j == pytest.approx(0.2 * truth_j, rel=0.01), "nothing tells them apart: by time"
    assert abs(mm.energy_j - truth_j) <= mm.error_j
    assert table.idle_error_j >= 0.8 * truth_j
    check_sums(table)


def test_few_samples_have_an_interval_that_holds_the_truth():
    table = make_run([(12, 60)] * 6)
    (mm,) = table.ops
    assert abs(mm.energy_j - mm.time_s * WORK_W) <= mm.error_j
    check_sums(table)


def test_work_throughout_is_divided_by_time_as_before():
    table = make_run([(40, 0.01)] * 50, waiting_w=WORK_W)
    (mm,) = table.ops
    assert mm.energy_j == pytest.approx(mm.time_s * WORK_W, rel=1e-3)
    assert mm.error_j < 0.02 * mm.energy_j
    assert not is_told(table)
    check_sums(table)


def test_what_a_program_did_before_its_operators_is_no_waiting():
    imports = (0, 3000, WORK_W)
    table = make_run([imports, *[(12, 60)] * 80])
    (mm,) = table.ops
    assert mm.energy_j == pytest.approx(mm.time_s * WORK_W, rel=0.15)
    assert table.idle_j == pytest.approx(3 * WORK_W, rel=0.05)


def test_waiting_has_the_joules_of_its_own_samples():
    """Two regions in waiting of the same kind: the samples say that one of them drew all of it."""
    build, times, watts = Builder(), [T0], [math.nan]
    for k in range(40):
        busy = k % 2
        build.add("op", "aten::mm", T0 + 100 * k * MS, T0 + (100 * k + 10) * MS, thread=1)
        build.add("region", f"{('idle', 'busy')[busy]}", T0 + 100 * k * MS, T0 + 100 * (k + 1) * MS, thread=1)
        times += [T0 + (100 * k + 10) * MS, T0 + 100 * (k + 1) * MS]
        watts += [WORK_W, WORK_W * busy]
    domain = Domain(name="cpu0", source="modelled", resolution_s=0.1, basis="modelled", hold=Hold.MEAN)
    power = PowerTrace({"cpu0": DomainSamples.of(domain, times, watts)}, start_ns=T0, end_ns=times[-1])
    table = attribute(build.build(), power, start_ns=T0, end_ns=times[-1])
    regions = {r.name: r for r in table.regions}
    assert regions["busy"].energy_j == pytest.approx(2.0 * WORK_W, rel=0.05)
    assert regions["idle"].energy_j == pytest.approx(0.2 * WORK_W, rel=0.05)
    assert regions["idle"].wall_s == pytest.approx(regions["busy"].wall_s)
    check_sums(table)


@pytest.mark.parametrize("seed", range(4))
def test_operators_that_wait_for_a_core_keep_their_joules(seed):
    """A busy machine: in each sample the thread has another share of a core, in operators and between them alike."""
    rng = np.random.default_rng(seed)
    build, times, watts, at, truth_j = Builder(), [T0], [math.nan], T0, 0.0
    for _ in range(60):
        share, begin = rng.uniform(0.1, 1.0), at
        for _ in range(8):
            length, gap = round(rng.uniform(1, 6) * MS), round(0.6 * share * MS)
            build.add("op", "aten::mm", at, at + length, thread=1)
            truth_j += share * WORK_W * length * 1e-9
            at += length + gap
        build.add("region", "step", begin, at, thread=1)
        times.append(at)
        watts.append(share * WORK_W)
    domain = Domain(name="cpu0", source="modelled", resolution_s=0.1, basis="modelled", hold=Hold.MEAN)
    power = PowerTrace({"cpu0": DomainSamples.of(domain, times, watts)}, start_ns=T0, end_ns=times[-1])
    table = attribute(build.build(), power, start_ns=T0, end_ns=times[-1])
    (mm,) = table.ops
    assert mm.energy_j == pytest.approx(truth_j, rel=0.1)
    assert abs(mm.energy_j - truth_j) <= mm.error_j
    check_sums(table)


def test_samples_of_waiting_alone_keep_their_joules():
    table = make_run([(1000, 1000)] * 5, waiting_w=2.0)
    assert table.ops[0].energy_j == pytest.approx(5 * WORK_W, rel=0.01)
    assert table.idle_j == pytest.approx(5 * 2.0, rel=0.01)


@pytest.mark.parametrize("core_w, most_w", [(WORK_W, WORK_W), (None, 1.5 * WORK_W)])
def test_an_operator_beside_an_import_draws_no_more_than_its_thread_can(core_w, most_w):
    """A sample of 100 ms had 50 ms of an import, and 0.2 ms of an operator got all of that: 127 W."""
    table = make_run([(0, 450, WORK_W), *[(0.2, 120)] * 25], core_w=core_w)
    (mm,) = table.ops
    assert mm.power_w <= most_w * (1 + 1e-9)
    check_sums(table)
