"""From ratios of measured to predicted values to the factors of a calibration."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")


from tessera.estimate import calibration
from tessera.estimate.calibration_bench import Sample
from tessera.estimate.calibration_fit import (
    ALONE,
    DATASHEET,
    FITTED,
    HOST,
    Ratio,
    calibration_alone,
    case_of,
    group_scale,
    scale,
    time_ratio,
)
from tessera.estimate.calibration_kernels import kernel_points
from tessera.graph.capture import capture
from tessera.hardware import lookup

from fakes.calibration import make_calibration, scales


def test_the_factor_of_a_group_by_hand() -> None:
    """Two points at 1.21 and 1.0: mean log 0.0953, squares about it 0.01817; three degrees with the two known ones."""
    found = scale([1.21, 1.0], DATASHEET)
    variance = (2 * 0.17**2 + 0.01817) / 3
    weight = 0.25**2 / (0.25**2 + variance / 2)
    assert found.mean == pytest.approx(1.1)
    assert math.log(found.factor) == pytest.approx(weight * math.log(1.1), rel=1e-3)
    off = (1 - weight) * math.log(1.1)
    half = 2.353 * math.sqrt(variance + weight * variance / 2 + off**2)
    assert found.spread == pytest.approx(math.expm1(half), rel=1e-3)


def test_what_was_known_before_decides_how_much_is_believed() -> None:
    shares = [math.log(scale([1.2] * 5, prior).factor) / math.log(1.2) for prior in (FITTED, DATASHEET, HOST)]
    assert shares[0] < 0.5 < 0.95 < shares[1] < shares[2] < 1.0
    shares = [math.log(scale([1.2] * n, FITTED).factor) / math.log(1.2) for n in (1, 2, 5, 50)]
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] > 0.9, "the more points, the more of it"
    scattered = scale([0.9, 1.6, 1.2, 1.44, 1.0], DATASHEET)
    assert scattered.factor < scale([scattered.mean or 1.0] * 5, DATASHEET).factor, "the less they agree, the less"


def test_scatter_widens_the_spread() -> None:
    one = scale([1.1], DATASHEET)
    assert one.spread is None and one.points == 1
    assert 1.0 < one.factor < 1.1
    tight, wide = scale([1.0, 1.02, 0.98, 1.0], DATASHEET), scale([0.6, 1.5, 1.0, 1.1], DATASHEET)
    assert tight.spread is not None and wide.spread is not None
    assert tight.spread < 0.35 < 0.6 < wide.spread <= 0.95
    assert scale([0.5, 2.0], DATASHEET).factor == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1.3], True),  # one point contradicts nobody
        ([1.3, 1.0], True),
        ([1.3, 1.3], False),
        ([1.3, 1.3, 1.0, 1.0], True),  # half of them: by chance once in twenty
        ([1.3, 0.7, 1.3, 1.0, 1.0], False),
    ],
)
def test_few_points_replace_a_fitted_interval_only_if_they_contradict_it(values: list[float], kept: bool) -> None:
    found = group_scale([Ratio(value=v, interval=0.2) for v in values], fitted=True)
    assert (found.spread is None) is kept
    assert found.factor == scale(values, FITTED if kept else DATASHEET).factor
    on_another = group_scale([Ratio(value=v, interval=0.2) for v in values], fitted=False)
    assert (on_another.spread is None) is (len(values) == 1)


def test_kernels_alone_are_faster_than_in_a_model_whatever_was_measured() -> None:
    found = calibration_alone(make_calibration(time_scale=scales({"copy": 1.2})))
    assert found.time_scale["copy"].factor == pytest.approx(1.2 * ALONE)
    assert {s.factor for group, s in found.time_scale.items() if group != "copy"} == {ALONE}
    assert set(found.time_scale) == set(calibration.GROUPS)


def test_the_factor_of_an_uncapped_copy_by_hand() -> None:
    point = next(p for p in kernel_points(lookup("h200")) if p.group == "copy")
    case = case_of(lookup("h200"), capture(*point.make("meta"), launch="graph"), "graph")
    (kernel,) = case.estimate.kernels
    seconds = 1.5 * kernel.seconds + float(case.gaps_s.sum())
    found = time_ratio(case, Sample(seconds=seconds))
    assert found.value == pytest.approx(1.5 / ALONE), "in a model it would have taken longer still"
    assert found.interval == kernel.relative_error
    assert float(case.gaps_s.sum()) == pytest.approx(0.36e-6 + 0.9e-6), "the gap and the replay, as predict counts them"
