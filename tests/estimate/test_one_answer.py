"""One program has one answer and one error: in predict, sweep, `again`, opportunities and diff."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera
from tessera.estimate import sweep
from tessera.estimate.prediction_errors import PredictedCost
from tessera.estimate.search import Sweep, SweepRow
from tessera.graph.capture import capture
from tessera.report.sweep import ties


class WideHead(nn.Module):
    """A model whose head is fp32 on purpose, whatever the rest is cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(256, 256), nn.Linear(256, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(x).float(), self.head.weight.float())


class Masked(nn.Module):
    """Looks at its mask: where it is full, attention needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)[:, None]
        given = None if bool(mask.all()) else mask[:, None, None].bool()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=given)


def wide_head() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return WideHead(), torch.empty(512, 256)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_an_operator_that_is_fp32_on_purpose_stays_so(precision: str) -> None:
    model, x = wide_head()
    one = tessera.predict(model, x, precision=precision, launch="graph")
    head = next(d for d in one.descriptors if d.flops == 2 * 512 * 256 * 4096)
    assert head.device_s > 512 * 256 * 4096 * 2 / 67e12, "the head runs on fp32 units"
    row = sweep(model, x, on="h200", precisions=(precision,), launch="graph").rows[0]
    assert (row.time_s, row.energy_j, row.error_s, row.error_j) == (
        one.total.time_s,
        one.total.energy_j,
        one.prediction.error_s,
        one.total.error_j,
    )
    again = one.prediction.again()
    assert (again.total, again.prediction.error_s) == (one.total, one.prediction.error_s)


def test_a_captured_graph_that_is_cast_says_the_same_as_one_captured_so() -> None:
    model, x = wide_head()
    graph = capture(model, x, precision="bf16")
    assert tessera.predict(graph, precision="bf16").total == tessera.predict(model, x, precision="bf16").total


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_with_values_costs_what_one_without_does(layer: type[nn.RNNBase]) -> None:
    x = torch.randn(12, 4, 16)
    own = layer(16, 32)
    weights = [id(w) for w in own._flat_weights]
    empty = tessera.predict(layer(16, 32, device="meta"), x.to("meta"))
    assert tessera.predict(own, x).total == empty.total
    assert [id(w) for w in own._flat_weights] == weights, "the user's layer keeps its own weights"


def test_a_batch_keeps_the_values_of_integers() -> None:
    ids, mask = torch.zeros(2, 32, dtype=torch.int64), torch.ones(2, 32, dtype=torch.int64)
    own = tessera.predict(Masked(), (ids, mask))
    same = tessera.predict(Masked(), (ids, mask), batch=2)
    assert same.total == own.total
    more = tessera.predict(Masked(), (ids, mask), batch=16)
    assert [d.kind for d in more.descriptors] == [d.kind for d in own.descriptors]
    rows = sweep(Masked(), (ids, mask), on="h200", batches=(None, 2, 16)).rows
    assert [row.time_s for row in rows] == [r.total.time_s for r in (own, same, more)]


def test_an_opportunity_is_as_certain_as_the_diff() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), torch.empty(256, 2048)
    report = tessera.predict(model, x, on="a100", launch="graph")
    found = report.opportunities()
    chip = next(o for o in found if o.kind == "change chip")
    name = chip.action.removeprefix("run it on ")
    other = next(d.id for d in tessera.hardware.catalogue().values() if d.name == name)
    change = report.diff(tessera.predict(model, x, on=other, launch="graph"))
    assert chip.error_j * 256 == pytest.approx(change.total.error_j, rel=1e-6)
    assert (chip.confidence == "medium") == (chip.saves_j > chip.error_j)
    narrow = next(o for o in found if o.kind == "quantise")
    same = report.diff(tessera.predict(model, x, on="a100", precision=narrow.action.split()[2], launch="graph"))
    assert narrow.error_j * 256 == pytest.approx(same.total.error_j, rel=1e-6)


def test_rows_of_one_chip_share_their_errors() -> None:
    with torch.device("meta"):
        small, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16))), torch.empty(4096, 2048)
    one, other = (
        tessera.predict(nn.Sequential(*small[:n]), x, launch="graph", on="h200", precision="bf16") for n in (15, 16)
    )

    def row(report: tessera.EnergyReport, name: str) -> SweepRow:
        cost = PredictedCost.of(report)
        figures = {"time_s": cost.time_s, "error_s": cost.error_s, "energy_j": cost.energy_j, "error_j": cost.error_j}
        return SweepRow(on=name, precision=None, batch=1, **figures, cost=cost)

    rows = [row(one, "fifteen"), row(other, "sixteen")]
    assert (rows[1].time_s - rows[0].time_s) < rows[0].error_s + rows[1].error_s, "independent, they would be tied"
    assert not ties(Sweep(name="layers", mode="infer", launch="graph", rows=rows)), "a layer more is certain"
