"""Training in low precision: dual-precision autodiff, stochastic rounding, the schedule of precisions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tessera import op
from tessera.errors import ArgumentError
from tessera.op import hints, lowprec
from tessera.op.rounding import StochasticRounding, stochastic_round
from tessera.op.training import PrecisionSchedule, PrecisionStage, dual_precision, parse_stages, precision_schedule


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def data(rows: int = 256):
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 16, generator=rng)
    return x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]


def apart(x, y) -> float:
    return float(((x - y).norm() / y.norm()).detach())


# -- what a schedule and an optimizer promise ----------------------------------------------------------------------


@pytest.mark.parametrize("stages", ["fp8 until 3, then fp32", "bf16 until 3, then tf32", [("fp16", 3), ("fp64", None)]])
def test_stages_do_not_go_up(stages):
    with pytest.raises(ArgumentError, match="higher before lower"):
        precision_schedule(stages)


def test_sixteen_bits_may_follow_sixteen_bits():
    assert len(precision_schedule("bf16 until 3, then fp16").stages) == 2


def test_state_that_an_optimizer_made_early_is_fp32_too():
    p, wide = nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), nn.Parameter(torch.ones(64))
    narrow, true = StochasticRounding(torch.optim.Adagrad([p], lr=1e-3)), torch.optim.Adagrad([wide], lr=1e-3)
    for _ in range(2000):  # a sum of 0.01 in bf16 stands still at 4: the next step is under half a unit
        p.grad, wide.grad = torch.full_like(p, 0.1), torch.full_like(wide, 0.1)
        narrow.step()
        true.step()
    found, wanted = narrow.state[p]["sum"], true.state[wide]["sum"]
    assert found.dtype is torch.float32 and apart(found, wanted) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_compiles_for_several_shapes(dtype):
    run = torch.compile(lambda x: stochastic_round(x, dtype), fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 7):
        x = torch.randn(rows, 8)
        assert apart(run(x).float(), x) < 1e-2


# -- dual precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "low", "high"), [("bf16", 5e-4, 1e-2), ("fp8", 5e-3, 0.15), ("fp32", 0.0, 1e-6)])
def test_forward_is_low_and_backward_is_exact(forward, low, high):
    """The backward products themselves are fp32: with the same upstream gradient they equal autograd's."""
    layer, x = nn.Linear(32, 8), torch.randn(16, 32, requires_grad=True)
    want, seed = layer(x), torch.randn(16, 8)
    gradients = torch.autograd.grad(want, (x, layer.weight, layer.bias), seed)
    with dual_precision(layer, forward=forward):
        got = layer(x)
    found = torch.autograd.grad(got, (x, layer.weight, layer.bias), seed)  # outside the scope: the graph remembers
    assert low <= apart(got, want) <= high
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_backward_precision_is_the_one_asked_for():
    x = torch.randn(16, 32, requires_grad=True)
    w, seed = torch.randn(8, 32), torch.randn(16, 8)
    exact = seed @ w
    for backward, least in (("fp32", 0.0), ("bf16", 1e-3), ("fp8", 1e-2)):
        with dual_precision(forward="bf16", backward=backward):
            y = F.linear(x, w)
        assert apart(torch.autograd.grad(y, x, seed)[0], exact) >= least
    assert apart(torch.autograd.grad(F.linear(x, w), x, seed)[0], exact) < 1e-6


def test_the_layers_come_back_as_they_were():
    model, x = network(), data()[0]
    before = model(x)
    marked = model[0]
    marked.forward = lambda x: F.linear(x, marked.weight, marked.bias)  # somebody else's override
    own = marked.forward
    with pytest.raises(KeyError), dual_precision(model, forward="fp8") as scope:
        assert scope.names == ("0", "2")
        assert not torch.equal(model(x), before)
        raise KeyError
    assert marked.forward is own and "forward" not in model[2].__dict__
    assert torch.equal(model(x), before)
    with scope, pytest.raises(ArgumentError, match="already"), scope:
        pass


def test_a_function_and_a_scope_take_every_product():
    a, b, c = torch.randn(4, 8), torch.randn(8, 4), torch.randn(4)
    want = a.bfloat16().float() @ b.bfloat16().float()

    @dual_precision(forward="bf16")
    def products():
        yield_ = [a @ b, torch.matmul(a, b), a.mm(b), torch.bmm(a[None], b[None])[0], F.linear(a, b.T)]
        return [*yield_, torch.addmm(c, a, b) - c, F.linear(a, b.T, bias=c) - c, a.matmul(b)]

    assert products.__name__ == "products"
    for got in products():
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    named = dual_precision(lambda: a @ b, forward="fp8")
    assert torch.equal(named(), lowprec.mm(a, b, "fp8"))
    assert torch.equal(a @ b, torch.matmul(a, b))  # nothing is left behind
    with dual_precision(forward="fp8"):
        assert torch.equal(torch.ones(2, 2).long() @ torch.ones(2, 2).long(), torch.full((2, 2), 2))
        assert torch.equal(a[0] @ b[:, 0], torch.dot(a[0], b[:, 0]))


def test_scopes_nest_and_the_inner_one_counts():
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with dual_precision(forward="fp8"):
        with dual_precision(forward="bf16"):
            assert torch.equal(a @ b, lowprec.mm(a, b, "bf16"))
        assert torch.equal(a @ b, lowprec.mm(a, b, "fp8"))


@pytest.mark.parametrize("wrong", [{"forward": "fp9"}, {"backward": "half"}, {"accumulate": "fp8"}])
def test_wrong_precisions_are_named(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        dual_precision(**wrong)
    with pytest.raises(ArgumentError, match="neither"):
        dual_precision(3)


def losses_of(model, optimizer, steps, scope=None):
    x, y = data()
    losses = []
    for _ in range(steps):
        with scope() if scope else torch.enable_grad():
            loss = F.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_a_small_model_learns_with_low_precision_forward():
    final = {}
    for forward in ("fp32", "bf16", "fp8"):
        model = network()
        with dual_precision(model, forward=forward):
            losses = losses_of(model, torch.optim.Adam(model.parameters(), 1e-2), 120)
            final[forward] = losses[-1] / losses[0]
    assert final["bf16"] == pytest.approx(final["fp32"], rel=0.25)  # the kernels of another processor move it by 11%
    assert final["fp8"] < 0.01  # its own noise, 4% of an output, is the floor


# -- stochastic rounding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [1.0009, -3.3331, 0.3, 0.01234])
def test_rounding_is_right_in_mean_and_variance(dtype, value):
    n = 20_000
    x = torch.full((n,), value)
    y = stochastic_round(x, dtype, generator=torch.Generator().manual_seed(3)).double()
    low, high = y.min(), y.max()
    wide = float(high - low)
    share = (float(x[0]) - float(low)) / wide
    assert set(y.tolist()) == {float(low), float(high)} and 0 < share < 1  # two neighbours, and the value between
    deviation = wide * math.sqrt(share * (1 - share))
    assert abs(float(y.mean()) - float(x[0])) < 5 * deviation / math.sqrt(n)
    assert float(y.std()) == pytest.approx(deviation, rel=0.05)


@given(x=st.floats(width=32, allow_nan=False), seed=st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_rounding_goes_to_a_neighbour_and_leaves_the_exact_alone(x, seed):
    rng = torch.Generator().manual_seed(seed)
    value = torch.tensor([x])
    y = stochastic_round(value, generator=rng)
    assert torch.equal(stochastic_round(y.float(), generator=rng), y)
    if abs(x) <= torch.finfo(torch.bfloat16).max:
        step = max(2.0 ** (math.frexp(x)[1] - 8), 2.0**-133)
        assert abs(float(y.double()) - float(value.double())) < step
    assert math.copysign(1, float(y)) == math.copysign(1, x)


def test_rounding_of_the_ends():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, 1e30])
    y = stochastic_round(x, torch.float16)
    assert y[:2].tolist() == [float("inf"), -float("inf")] and y[2].isnan() and y[3] == 0 and y[4] == 65504
    assert stochastic_round(x, torch.float8_e4m3fn).float()[:3].isnan().all()
    tiny = stochastic_round(torch.full((20_000,), 1e-40), generator=torch.Generator().manual_seed(0)).double()
    assert float(tiny.mean()) == pytest.approx(1e-40, rel=0.02)  # subnormals too
    with pytest.raises(ArgumentError, match="dtype"):
        stochastic_round(x, torch.int8)
    with pytest.raises(ArgumentError, match="x is"):
        stochastic_round(x.half())


def updated(make, rounded: bool, steps: int = 100):
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = make([p])
    if rounded:
        optimizer = StochasticRounding(optimizer, generator=torch.Generator().manual_seed(0))
    address = p.data_ptr()
    for _ in range(steps):
        p.grad = torch.full_like(p, 2.0**-14)
        optimizer.step()
    assert p.dtype == torch.bfloat16 and p.data_ptr() == address and p.grad.dtype == torch.bfloat16
    return float(p.detach().double().mean())


def test_small_updates_are_not_lost_in_the_mean():
    make = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    assert updated(make, rounded=False) == 1.0  # plain bf16 loses every one of them
    assert updated(make, rounded=True) == pytest.approx(1 - 100 * 2.0**-14, abs=2e-4)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_mean_follows_the_same_optimizer_in_fp32(kind):
    make = lambda params: kind(params, lr=1e-4)  # noqa: E731
    p = nn.Parameter(torch.ones(1))
    wide = make([p])
    for _ in range(100):
        p.grad = torch.full_like(p, 2.0**-14)
        wide.step()
    moved = 1 - float(p.detach())
    assert updated(make, rounded=True) == pytest.approx(1 - moved, abs=0.05 * moved + 1e-4)


def test_slices_and_mixed_types_give_what_one_step_gives():
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(n, dtype=t))
        for n, t in ((64, torch.bfloat16), (32, torch.float32), (80, torch.bfloat16))
    ]
    frozen = nn.Parameter(torch.randn(8))
    grads = [torch.randn_like(p) for p in params]
    results = []
    for size in (100, 1 << 30):
        copies = [nn.Parameter(p.detach().clone()) for p in (*params, frozen)]
        inner = torch.optim.AdamW([{"params": copies[:1]}, {"params": copies[1:], "lr": 0.1}], lr=0.01)
        optimizer = StochasticRounding(inner, generator=torch.Generator().manual_seed(1), slice_bytes=size)
        for p, g in zip(copies, grads, strict=False):
            p.grad = g.clone()
        optimizer.step()
        assert [len(g["params"]) for g in optimizer.param_groups] == [1, 3]
        assert optimizer.state[copies[0]]["exp_avg"].dtype == torch.float32
        results.append([p.detach() for p in copies])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(results[0][3], frozen)


def test_a_step_that_raises_leaves_the_weights():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise RuntimeError

    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = StochasticRounding(Broken([p], lr=1.0))
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert p.dtype == torch.bfloat16 and torch.equal(p, torch.ones_like(p)) and p.grad.dtype == torch.bfloat16


def test_state_survives_saving_in_fp32():
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    make = lambda: StochasticRounding(torch.optim.AdamW([p], lr=0.1))  # noqa: E731
    first = make()
    p.grad = torch.full_like(p, 0.1)
    assert first.step(lambda: torch.tensor(3.0)) == 3.0
    second = make()
    second.load_state_dict(first.state_dict())
    assert second.state[p]["exp_avg"].dtype == torch.float32
    assert torch.equal(second.state[p]["exp_avg"], first.state[p]["exp_avg"])
    first.zero_grad()
    assert p.grad is None
    torch.optim.lr_scheduler.StepLR(first.inner, 1)
    with pytest.raises(ArgumentError, match="LBFGS"):
        StochasticRounding(torch.optim.LBFGS([p]))


# -- the schedule --------------------------------------------------------------------------------------------------


def test_words_and_pairs_say_the_same():
    words = parse_stages("fp32 until 100, then bf16 until 500, then fp8")
    assert words == (PrecisionStage("fp32", 100), PrecisionStage("bf16", 500), PrecisionStage("fp8"))
    assert PrecisionSchedule([("fp32", 100), ("bf16", 500), PrecisionStage("fp8")]).stages == words


@pytest.mark.parametrize(
    "wrong",
    [
        "fp32 till 3, fp8",
        "fp32 until 5",
        "fp32, bf16",
        "fp9",
        "fp32 until 9, bf16 until 3, fp8",
        "bf16 until 3, bf16",
        "",
    ],
)
def test_plans_that_cannot_be(wrong):
    with pytest.raises(ArgumentError):
        precision_schedule(wrong)
    with pytest.raises(ArgumentError, match="window"):
        precision_schedule("fp8", window=2)


@pytest.mark.parametrize("wrong", [5, None, [], [5], ["fp32"], [("fp32", "100"), "fp8"], [("fp32", 1, 2)], [(8, None)]])
def test_what_is_no_list_of_stages_is_named(wrong):
    with pytest.raises(ArgumentError, match="stages=") as caught:
        precision_schedule(wrong)
    assert "fp32 until 100, then fp8" in str(caught.value.fix)


def test_a_schedule_prints_its_plan_and_where_it_stands():
    schedule = precision_schedule("fp32 until 1, then fp8")
    assert repr(schedule) == "PrecisionSchedule('fp32 until 1, fp8': step 0 in fp32)"
    schedule.observe(1.0)
    schedule.observe(float("nan"))
    assert repr(schedule) == "PrecisionSchedule('fp32 until 1, fp8': step 2 in fp32, kept higher by the guard)"


@given(ends=st.lists(st.integers(1, 60), min_size=2, max_size=2, unique=True).map(sorted))
@settings(max_examples=30, deadline=None)
def test_the_plan_is_followed_when_all_is_well(ends):
    schedule = PrecisionSchedule([("fp32", ends[0]), ("bf16", ends[1]), ("fp8", None)])
    seen = []
    for step in range(70):
        seen.append(schedule.precision)
        schedule.observe(1.0 / (1 + step))
    assert seen == ["fp32"] * ends[0] + ["bf16"] * (ends[1] - ends[0]) + ["fp8"] * (70 - ends[1])
    assert [(c.step, c.after) for c in schedule.changes] == [(ends[0], "bf16"), (ends[1], "fp8")]
    assert not schedule.is_guarded


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 50.0])
def test_an_alarm_steps_up_holds_and_comes_back(bad):
    schedule = precision_schedule("fp32 until 5, bf16 until 10, then fp8", hold=20)
    for i in range(40):
        schedule.observe(1.0 + 0.01 * (i % 3))
    change = schedule.observe(bad)
    assert (change.before, change.after) == ("fp8", "bf16") and schedule.is_guarded
    assert "one precision up for 20 steps" in change.why
    for i in range(19):
        schedule.observe(1.0 + 0.01 * (i % 3))
        assert schedule.precision == "bf16"
    assert schedule.observe(1.0).after == "fp8" and not schedule.is_guarded
    for i in range(30):
        schedule.observe(1.0 + 0.01 * (i % 3))
    assert "for 40 steps" in schedule.observe(bad).why  # twice as long the second time


def test_alarms_climb_and_stop_at_the_top():
    schedule = precision_schedule("fp32 until 1, bf16 until 2, then fp8", hold=10)
    for _ in range(5):
        schedule.observe(1.0)
    assert schedule.observe(float("nan")).after == "bf16"
    assert schedule.observe(float("nan")).after == "fp32"
    assert schedule.observe(float("nan")) is None and schedule.precision == "fp32"


def test_a_falling_and_a_noisy_loss_raise_no_alarm():
    rng = torch.Generator().manual_seed(0)
    schedule = precision_schedule("fp32 until 10, then bf16")
    for step in range(2000):
        noise = 1 + 0.1 * float(torch.randn((), generator=rng))
        schedule.observe(3 * math.exp(-step / 300) * noise + 0.1)
    assert [c.after for c in schedule.changes] == ["bf16"]


def test_only_every_nth_loss_is_read():
    schedule = precision_schedule("fp32 until 1, then fp8", observe_every=4)
    assert [schedule.observe(float("nan")) is not None for _ in range(8)] == [True] + [False] * 2 + [True] + [False] * 4
    assert schedule.precision == "fp32"


def test_it_applies_to_torch_and_to_our_operators():
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    schedule = precision_schedule("fp32 until 1, bf16 until 2, then fp8")
    for wanted in ("fp32", "bf16", "fp8"):
        with schedule.apply() as precision:
            assert precision == wanted and hints.current().precisions["matmul"] == wanted
            assert torch.equal(a @ b, lowprec.mm(a, b, wanted))
            torch.testing.assert_close(op.matmul(a, b), lowprec.mm(a, b, wanted))
        schedule.observe(1.0)
    assert hints.current().precisions == {}


def test_it_drives_a_dual_scope_and_autocast():
    model = network()
    schedule = precision_schedule("bf16 until 1, then fp8", autocast=True)
    with dual_precision(model) as scope:
        schedule.attach(scope)
        assert scope.forward == "bf16"
        with schedule.apply("cpu"):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
        schedule.observe(1.0)
        assert scope.forward == "fp8"


def test_a_model_that_breaks_in_fp8_is_brought_back():
    """Adding noise of its own to fp8's products makes the loss jump: the guard must leave fp8 and the model recover."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = precision_schedule("fp32 until 30, bf16 until 60, then fp8", hold=1000)
    x, y = data()
    losses = []
    for _ in range(200):
        with schedule.apply():
            out = model(x)
        loss = F.mse_loss(out * (25.0 if schedule.precision == "fp8" else 1.0), y)
        losses.append(float(loss.detach()))
        change = schedule.observe(loss)
        if change is None or change.before != "fp8":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [c.after for c in schedule.changes] == ["bf16", "fp8", "bf16"]
    assert losses[-1] < losses[55] and max(losses[62:]) < 2 * losses[55]


def test_a_format_in_the_place_of_a_module_is_told_where_it_goes():
    with pytest.raises(ArgumentError, match="neither a module") as caught:
        dual_precision("bf16")
    assert caught.value.fix == 'dual_precision(forward="bf16")'
    with pytest.raises(ArgumentError, match="neither a module"):
        dual_precision([1])
