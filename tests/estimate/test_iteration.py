"""The highest power of an iteration: over the window of a sensor's sample, above the limit only as was recorded."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tessera
from tessera.estimate.iteration import WINDOW_S, SolvedIteration, find_peak, highest_mean_w
from tessera.estimate.ops import OpModel
from tessera.estimate.power import PowerModel
from tessera.estimate.predict import GAP_S, MEMSET_S, estimate
from tessera.graph.capture import capture
from tessera.hardware import lookup

from places import REPOSITORY

WINDOWS = runpy.run_path(str(REPOSITORY / "benchmarks" / "measure" / "limit_windows.py"))
RECORDED, highest_w = WINDOWS["RECORDED"], WINDOWS["highest_w"]


# -- the window ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1000)), min_size=1, max_size=8),
    window=st.integers(1, 300),
)
def test_no_window_has_a_higher_mean_and_one_has_this(pieces: list[tuple[int, int]], window: int) -> None:
    """Pieces of whole milliseconds: every window that begins on one is tried, which is where the highest lies."""
    seconds, watts = (np.array(column, float) for column in zip(*pieces, strict=True))
    found = highest_mean_w(seconds * 1e-3, watts * seconds * 1e-3, window * 1e-3)
    each = np.repeat(watts, seconds.astype(int))
    many = np.tile(each, -(-window // len(each)) + 1)
    means = np.convolve(many, np.ones(window), "valid") / window
    assert found == pytest.approx(means.max(), rel=1e-9, abs=1e-9)


def test_pieces_that_take_no_time_have_no_power() -> None:
    assert highest_mean_w([], []) is None
    assert highest_mean_w([0.0], [0.0]) is None


# -- the limit ----------------------------------------------------------------------------------------------------


def _solved(watts: list[float], seconds: list[float], static_w: float, wait_s: float = 0.0) -> SolvedIteration:
    device = np.array(seconds)
    wait = np.full_like(device, wait_s)
    static = static_w * (device + wait)
    return SolvedIteration(
        device, wait, static, np.array(watts) * device - static_w * device, np.zeros_like(device), 1.0, 0.0
    )


def _of(chip: str, watts: list[float], seconds: list[float], **options: bool) -> tuple[float, str, float]:
    power = PowerModel.from_device(lookup(chip))
    peak_w, notes = find_peak(_solved(watts, seconds, power.static_w), power, **{"measured": False, **options})
    assert peak_w is not None
    return peak_w, " ".join(notes), power.limit_w


def test_only_the_board_whose_limiter_was_recorded_goes_above_its_limit() -> None:
    peak_w, note, limit_w = _of("h200", [850.0, 400.0], [0.05, 0.05], measured=True)
    assert peak_w == pytest.approx(850.0) and "above the power limit" in note
    peak_w, note, limit_w = _of("h200", [1200.0, 100.0], [0.05, 0.05], measured=True)
    assert limit_w < peak_w == pytest.approx(965.0, rel=1e-3)
    peak_w, note, limit_w = _of("a100", [500.0, 100.0], [0.05, 0.05])
    assert peak_w == limit_w < 400.0 and "would draw 500 W" in note and "not measured on this board" in note
    peak_w, note, limit_w = _of("a100", [500.0, 100.0], [0.05, 0.05], burst=True)
    assert peak_w == pytest.approx(500.0) and "a burst ends before the limit acts" in note


def test_what_is_shorter_than_the_window_is_not_the_peak() -> None:
    peak_w, note, _ = _of("a100", [900.0, 100.0], [50e-6, 450e-6])
    assert (peak_w, note) == (pytest.approx(180.0, rel=1e-9), "")


def test_waits_are_at_the_power_of_a_waiting_board() -> None:
    power = PowerModel.from_device(lookup("h200"))
    found = find_peak(_solved([600.0], [0.03], power.static_w, wait_s=0.03), power, measured=True)
    assert found == (pytest.approx(600.0), [])


@pytest.mark.parametrize("chip", ["h200", "a100", "l4", "h100", "mi300x", "jetson-orin@30W"])
@pytest.mark.parametrize("batch", [1, 4096])
def test_no_prediction_passes_the_limit_unsaid(chip: str, batch: int) -> None:
    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.LayerNorm(2048))
    report = tessera.predict(model, torch.empty(batch, 2048, device="meta"), on=chip, precision="bf16")
    tdp = lookup(chip).tdp_w
    assert tdp is not None and report.peak_power_w is not None and report.average_power_w is not None
    assert report.average_power_w <= tdp.value
    assert report.average_power_w <= report.peak_power_w * (1 + 1e-9)
    if report.peak_power_w > tdp.value:
        assert chip == "h200" and any("above the power limit" in note for note in report.notes)


# -- what was recorded --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not RECORDED, reason="the recordings are not here")
def test_the_limiter_is_as_recorded() -> None:
    """As `estimate/iteration.py` says: far above 700 W for a sample, never in the mean over half a second."""
    assert highest_w(WINDOW_S) == pytest.approx(965.0, abs=5.0)
    assert 740.0 < highest_w(0.2) < 780.0
    assert highest_w(0.5) < 700.0
    assert highest_w(1.0) < 690.0


def _idle_s(rows: int, dtype: torch.dtype, times: int) -> float:
    """What a replay of some attentions takes beyond their kernels."""
    q = torch.empty(1, 4, rows, 64, dtype=dtype, device="meta")

    def program() -> list[torch.Tensor]:
        return [nn.functional.scaled_dot_product_attention(q, q, q) for _ in range(times)]

    h200 = lookup("h200")
    found = estimate(capture(program), h200, OpModel(h200), launch="graph")
    return found.solved.seconds - sum(kernel.seconds for kernel in found.kernels)


def test_the_device_idles_around_a_memset_of_a_replayed_graph() -> None:
    each_s = {
        (rows, dtype): (_idle_s(rows, dtype, 9) - _idle_s(rows, dtype, 1)) / 8
        for rows in (1, 64)
        for dtype in (torch.bfloat16, torch.float32)
    }
    # cuDNN's 16-bit attention clears a workspace; one row goes to a kernel that does not, fp32 to another library's.
    assert each_s.pop((64, torch.bfloat16)) == pytest.approx(GAP_S["graph"] + MEMSET_S)
    assert list(each_s.values()) == pytest.approx([GAP_S["graph"]] * 3)
