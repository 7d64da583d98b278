"""Power limits, clocks, weight-only formats, and what the screen says of a model: parameters, FLOPs, MFU."""

import re

import pytest
import torch
from torch import nn

import tessera
from tessera.cli.predict import command
from tessera.errors import ArgumentError
from tessera.estimate import power_curve, sweep
from tessera.estimate.search import list_chips, list_limits
from tessera.hardware import catalogue, lookup
from tessera.report.predict import text, work_text

from command_line import invoke


def products(layers: int = 4, size: int = 4096, rows: int = 8192) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))
        return model.bfloat16(), torch.empty(rows, size, dtype=torch.bfloat16)


def test_a_power_limit_holds_and_its_own_changes_nothing() -> None:
    model, x = products()
    own, same, low = (tessera.predict(model, x, on=on, launch="graph") for on in ("h200", "h200@700W", "h200@400W"))
    assert same.total.time_s == own.total.time_s
    assert same.total.energy_j == own.total.energy_j
    assert low.average_power_w <= 400
    assert low.total.time_s > own.total.time_s
    assert low.prediction.device == "h200@400W"
    assert "fitted on an H200" in low.prediction.provenance["power"], "a limit does not make it another chip"


def test_a_limit_below_what_the_lowest_clock_draws_is_that_clock_and_is_told() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.ReLU() for _ in range(4))).bfloat16()  # bound by memory, which has its own clock
        x = torch.empty(2**28, dtype=torch.bfloat16)
    slowest, *limited = (
        tessera.predict(model, x, on=on, launch="graph") for on in ("h200@198MHz", "h200@150W", "h200@116W")
    )
    for low in limited:
        assert low.total.time_s == pytest.approx(slowest.total.time_s, rel=1e-3)
        assert low.average_power_w == pytest.approx(slowest.average_power_w, rel=1e-3)
        assert any("is exceeded" in note for note in low.notes)
    assert not any("is exceeded" in note for note in slowest.notes)


def test_a_clock_holds() -> None:
    model, x = products()
    own, slow = (tessera.predict(model, x, on=on, launch="graph") for on in ("h200", "h200@1200MHz"))
    assert slow.prediction.clock == pytest.approx(1200 / 1980)
    assert slow.total.time_s > own.total.time_s
    assert slow.total.energy_j < own.total.energy_j
    burst = tessera.predict(model, x, on="h200@1200MHz", launch="graph", state="burst")
    assert burst.prediction.clock == pytest.approx(1200 / 1980)


def test_a_burst_under_a_power_limit_is_refused_everywhere() -> None:
    model, x = products()
    said = set()
    for ask in (
        lambda: tessera.predict(model, x, on="h200@400W", state="burst"),
        lambda: sweep(model, x, on=["h200", "h200@400W"], state="burst"),
        lambda: power_curve(model, x, limits_w=[400], state="burst"),
        lambda: raise_code("torch.nn:Identity", "--input", "8", "--on", "h200@400W", "--state", "burst"),
    ):
        with pytest.raises(ArgumentError, match="a burst is the same on h200@400W as on h200") as caught:
            ask()
        said.add(caught.value.fix)
    assert len(said) == 1 and "sustained" in said.pop(), "Python and the command give one answer"


def raise_code(*words: str) -> None:
    raise invoke(command, *words).code


@pytest.mark.parametrize("name", ["h200@50W", "h200@9000W", "h200@3GHz", "h200@banana", "h200@0W"])
def test_limits_that_no_driver_sets(name: str) -> None:
    with pytest.raises(ArgumentError):
        lookup(name)


@pytest.mark.parametrize("wrong", ["h200@40W", "h200@5000W", "h200@50MHz", "h200@9GHz", "gaudi3@5kW", "t4@1W"])
def test_a_limit_out_of_range_is_told_the_range_and_both_its_ends_work(wrong: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        lookup(wrong)
    ends = re.search(r"give one from (\S+) to (\S+)", caught.value.fix or "")
    assert ends is not None
    for name in ends.groups():
        assert lookup(name).id == name
        assert f"more than {name.partition('@')[2][:-1]} W" not in str(caught.value.why), (
            "no end is ruled out by the why"
        )


@pytest.mark.parametrize(("wrong", "fix"), [("m3-max@300W", "it has one only: m3-max"), ("h20@9GHz", "a power limit")])
def test_a_chip_that_takes_no_such_limit_is_offered_none(wrong: str, fix: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        lookup(wrong)
    assert fix in str(caught.value.fix)


def test_power_modes_still_work() -> None:
    assert lookup("jetson-orin@15W").tdp_w.value == 15
    assert lookup("H200@400w").power_limit_w == 400


def test_the_curve_of_limits() -> None:
    curve = power_curve(*products(), on="h200", launch="graph")
    times = [row.time_s for row in curve.rows]
    assert times == sorted(times, reverse=True), "a higher limit is never slower"
    assert curve.rows[-1].on == "h200" == curve.fastest().on
    best = curve.best_batch()
    assert best is not None and best.on != "h200", "products cost fewer joules at a lower clock"
    assert best.energy_j < curve.rows[-1].energy_j
    gain = curve.rows[-1].energy_j - best.energy_j
    assert curve.rows[-1].difference_error(best)[1] < gain, "limits of one board share their errors"
    assert all(lookup(name).power_limit_w for name in list_limits(lookup("a100"))[:-1])


@pytest.mark.parametrize("chip", list_chips())
def test_every_limit_of_a_curve_can_be_set(chip: str) -> None:
    names = list_limits(lookup(chip))
    assert [lookup(name).id for name in names] == names
    watts = [lookup(name).power_limit_w or lookup(name).tdp_w.value for name in names]
    assert watts == sorted(watts)


def test_a_curve_of_a_system_on_a_chip_has_its_modes() -> None:
    modes = [f"jetson-orin@{mode}" for mode in ("15W", "30W", "50W", "60W")]
    assert [row.on for row in power_curve(*products(), on="jetson-orin").rows] == modes
    assert list_limits(lookup("m4-max")) == ["m4-max"], "nothing sets its power"


def test_all_chips() -> None:
    found = sweep(nn.Linear(64, 64), torch.empty(8, 64), on="all", precisions=("fp32",))
    assert [row.on for row in found.rows] == list_chips()
    assert len(found.rows) > 40
    assert all(catalogue()[row.on].kind != "cpu" for row in found.rows)
    assert all(row.feasible or row.reason for row in found.rows)


@pytest.mark.parametrize(
    ("precision", "share"), [("int8wo", 0.5), ("fp8wo", 0.5), ("int4wo", 0.3125), ("fp4wo", 0.28125)]
)
def test_weight_only_formats_read_fewer_bytes(precision: str, share: float) -> None:
    model, x = products(rows=1, size=8192)  # 128 MiB of weights a layer, which come from memory
    wide, narrow = (tessera.predict(model, x, precision=p, launch="graph") for p in ("bf16", precision))
    assert narrow.prediction.hbm_bytes == pytest.approx(share * wide.prediction.hbm_bytes, rel=0.02)
    assert narrow.total.time_s < 0.9 * wide.total.time_s
    assert narrow.prediction.memory_bytes["weights"] == pytest.approx(
        share * wide.prediction.memory_bytes["weights"], rel=0.02
    )
    assert narrow.prediction.error_s / narrow.total.time_s > wide.prediction.error_s / wide.total.time_s
    assert narrow.prediction.flops == wide.prediction.flops
    row = sweep(model, x, on="h200", precisions=(precision,), launch="graph").rows[0]
    assert row.time_s == narrow.total.time_s
    old = tessera.predict(model.half(), x.half(), on="v100", precision=precision, launch="graph", check_memory=False)
    assert old.total.time_s > 0, "no units are needed"


def test_an_embedding_that_is_the_head_keeps_its_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.embed(ids), self.embed.weight)

    ids = torch.zeros(2, 8, dtype=torch.int64)
    wide, narrow = (tessera.predict(Tied(), ids, precision=p) for p in ("bf16", "int8wo"))
    assert narrow.prediction.memory_bytes["weights"] == wide.prediction.memory_bytes["weights"]


def test_parameters_flops_and_mfu() -> None:
    report = tessera.predict(*products(layers=2), launch="graph")
    of = report.prediction
    assert of.parameters == 2 * 4096**2
    assert of.mfu == pytest.approx(of.flops / report.total.time_s / 989e12)
    assert work_text(report)[:2] == ["33.55M parameters", "549.8GFLOP"]
    assert "MFU" in text(report)
    assert tessera.predict(torch.neg, (torch.empty(8),)).prediction.mfu is None


def test_wrong_names_of_formats_and_chips_are_answered_with_what_was_meant() -> None:
    model, x = products()
    with pytest.raises(ArgumentError, match="did you mean 'fp4wo'"):
        tessera.predict(model, x, on="h200", precision="fp4")
    with pytest.raises(ArgumentError, match="is not a format") as served:
        tessera.estimate.serving("llama-3.1-8b", on="h200", dtype="int4wo")
    assert "int4 is that of weights alone" in str(served.value.why)
    with pytest.raises(ArgumentError, match="no device 'cpu'") as chip:
        lookup("cpu")
    assert "epyc-9654" in str(chip.value.fix)
