"""Levers of the tuner that keep copies of weights or choose kernels: never stale, never shared, tried in good order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tessera.runtime.options import ScheduleOptions
from tessera.runtime.tuning import search as searching
from tessera.runtime.tuning.changes import apply_setting
from tessera.runtime.tuning.knobs import CallTraits, find_knobs, watch_call
from tessera.runtime.tuning.parts import (
    FunctionParts,
    NotApplicable,
    WeightCopies,
    WeightDigest,
    find_parts,
    keeps_copies,
)
from tessera.runtime.tuning.plan import Plan, TuningTrial
from tessera.runtime.tuning.search import Knob, TuningGoal, count_settings, search
from tessera.runtime.tuning.tuner import TunedFunction

ENERGY = TuningGoal(policy="energy")
FROZEN = {"compile": "default", "freeze": True}


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """Inductor as it is, but for kernels of its own: those would be built by a C++ compiler for seconds each."""
    import torch._inductor.config as config

    if not hasattr(config, "fallback_by_default"):
        pytest.skip("this Inductor has no fallback_by_default")
    with config.patch(fallback_by_default=True):
        yield


def convolution() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    model[1].running_mean.uniform_(-1, 1)
    return model.eval()


class Scaled(torch.nn.Module):
    """A product whose matrix is computed from weights at every call: frozen, once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, 8))
        self.scale = torch.nn.Parameter(torch.rand(16, 1) + 0.5)

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight * self.scale)


def other_weights(model: Any) -> dict[str, Any]:
    return {k: torch.rand_like(v) + 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}


def copied(model: Any) -> dict[str, Any]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def inferring(model: Any, *shape: int) -> tuple[Any, Any]:
    """A function that infers, and what it gives untouched."""
    x = torch.randn(*shape).to(next(model.parameters()).dtype)

    def infer() -> Any:
        with torch.no_grad():
            return model(x)

    def untouched() -> Any:
        with torch.no_grad():
            kept, model._compiled_call_impl = model._compiled_call_impl, None
            try:
                return type(model).forward(model, x)
            finally:
                model._compiled_call_impl = kept

    return infer, untouched


def apart(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def compilations() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


# -- freeze ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*script_method:DeprecationWarning")
def test_frozen_weights_are_followed(quick_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    model = Scaled().eval()
    infer, untouched = inferring(model, 4, 8)
    first, known = copied(model), find_parts(infer)
    with apply_setting(infer, known, FROZEN, {}) as call:
        made = compilations()
        assert torch.allclose(call(), untouched(), atol=1e-5)
        assert compilations() == made + 1
        before = call()
        model.weight.data.mul_(2)  # torch does not count it: what is frozen goes on with the old ones
        assert torch.equal(call(), before) and not torch.allclose(untouched(), before)
        model.weight.data.mul_(0.5)
        model.load_state_dict(first)  # counted, and the same
        assert torch.equal(call(), before) and compilations() == made + 1
        model.load_state_dict(other_weights(model))
        assert torch.allclose(call(), untouched(), atol=1e-4) and not torch.allclose(call(), before, atol=1e-2)
        assert compilations() == made + 2 and "no longer frozen" not in caplog.text
        model.load_state_dict(first)  # the second change: not compiled a third time with weights in it
        assert torch.allclose(call(), before, atol=1e-5) and "no longer frozen" in caplog.text
        made = compilations()
        model.load_state_dict(other_weights(model))
        assert torch.allclose(call(), untouched(), atol=1e-4) and compilations() == made
    assert model._compiled_call_impl is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*script_method:DeprecationWarning")
def test_frozen_code_is_found_again_for_equal_weights_only(quick_compiler: None) -> None:
    model = Scaled().eval()
    infer, untouched = inferring(model, 4, 8)
    known, first = find_parts(infer), copied(model)
    with apply_setting(infer, known, FROZEN, {}) as call:
        call()
    made = compilations()
    model.load_state_dict(first)  # as after every trial
    with apply_setting(infer, known, FROZEN, {}) as call:
        assert torch.allclose(call(), untouched(), atol=1e-5)
    assert compilations() == made
    model.load_state_dict(other_weights(model))
    with apply_setting(infer, known, FROZEN, {}) as call:
        assert torch.allclose(call(), untouched(), atol=1e-4)
    assert compilations() == made + 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*script_method:DeprecationWarning")
def test_a_plan_in_use_follows_weights_and_gives_up_what_wants_gradients(
    quick_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Scaled().eval()
    x = torch.randn(4, 8)
    fn = TunedFunction(model, ScheduleOptions(policy="energy", cache=False))
    fn.use(Plan(function="model", policy="energy", setting=FROZEN, why={}, trials=[]), x)
    with torch.no_grad():
        before = fn(x)
        model.load_state_dict(other_weights(model))
        after = fn(x)
        assert torch.allclose(after, model.forward(x), atol=1e-4) and not torch.allclose(after, before, atol=1e-2)
    fn(x).sum().backward()
    assert model.weight.grad is not None
    assert fn.plan().setting == {"compile": "default"} and "gradients are on" in fn.plan().notes[0]
    fn.close()
    assert model._compiled_call_impl is None


def test_what_cannot_be_frozen_says_why() -> None:
    model = Scaled().eval()
    known = find_parts(model)
    with pytest.raises(NotApplicable, match="needs compile"), apply_setting(model, known, {"freeze": True}, {}):
        pass
    with pytest.raises(NotApplicable, match="gradients are on"), apply_setting(model, known, FROZEN, {}) as call:
        call(torch.randn(4, 8))
    model.train()
    with pytest.raises(NotApplicable, match="training mode"), apply_setting(model, known, FROZEN, {}):
        pass
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = FunctionParts(modules=known.modules, optimizers=(optimizer,), tensors=())
    with pytest.raises(NotApplicable, match="trained"), apply_setting(model, trained, FROZEN, {}):
        pass
    with torch.inference_mode():
        unseen = torch.nn.Linear(2, 2).eval()
    with pytest.raises(NotApplicable, match="counts no changes"), apply_setting(unseen, find_parts(unseen), FROZEN, {}):
        pass


# -- copies of weights -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_digest_is_of_every_element(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]))
    shape = data.draw(st.sampled_from([(), (1,), (7,), (2, 3, 2, 5)]))
    model = torch.nn.Module()
    model.register_buffer("kept", (torch.randn(shape) * 4).to(dtype))
    weights = WeightDigest(find_parts(model))
    before = weights.digest()
    kept = model.kept
    if kept.dim() == 4:
        kept.data = kept.data.contiguous(memory_format=torch.channels_last)
        assert weights.digest() == before
    at = data.draw(st.integers(0, kept.numel() - 1))
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), kept.shape)) if kept.dim() else ()
    old = kept[place].clone()
    kept[place] = not bool(old) if dtype == torch.bool else old + 1
    assert weights.digest() != before
    kept[place] = old
    assert weights.digest() == before


def test_a_digest_tells_order_shape_and_type() -> None:
    def digest(tensor: Any) -> str:
        model = torch.nn.Module()
        model.register_buffer("kept", tensor)
        return WeightDigest(find_parts(model)).digest()

    a = torch.arange(6, dtype=torch.float32)
    different = [a, a.flip(0), a.view(2, 3), a.view(2, 3).t().contiguous(), a.double(), a.view(torch.int32)]
    assert len({digest(t) for t in different}) == len(different)
    assert digest(a.view(2, 3)) == digest(a.view(2, 3).t().contiguous().t())


def test_copies_are_renewed_when_weights_change_and_only_then() -> None:
    model = torch.nn.Linear(2, 2).eval()
    entered: list[dict[str, Any]] = []
    left: list[int] = []

    @contextlib.contextmanager
    def enter(setting: dict[str, Any]) -> Iterator[Any]:
        entered.append(setting)
        kept = model.weight.detach().clone()  # as a graph, or a compiler, would
        yield lambda: kept
        left.append(len(entered))

    held = WeightCopies(enter, find_parts(model), {"precision": "fp8", "graph": True})
    assert torch.equal(held(), model.weight)
    with torch.no_grad():
        model.weight.add_(0.0)  # counted, and the same
    held()
    assert len(entered) == 1
    for _ in range(3):  # every time: a graph is captured in a second
        with torch.no_grad():
            model.weight.add_(1.0)
        assert torch.equal(held(), model.weight)
    model.weight.data = model.weight.data * 2  # not counted, but other memory
    assert torch.equal(held(), model.weight)
    assert len(entered) == 5 and left == [1, 2, 3, 4]
    held.close()
    assert left == [1, 2, 3, 4, 5]


def test_which_settings_keep_copies() -> None:
    assert keeps_copies(FROZEN) and keeps_copies({"convolutions": "fused", "graph": True})
    assert not any(map(keeps_copies, ({}, {"graph": True}, {"precision": "fp8"}, {"precision": "bf16", "graph": True})))


# -- attention ---------------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.project, self.dropout_p = torch.nn.Linear(16, 48), dropout_p

    def forward(self, x: Any) -> Any:
        query, key, value = self.project(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout_p)


def test_outputs_that_graphs_keep_are_let_go_of(quick_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's trees of graphs are recorded on a GPU alone: these have their shape, and torch's names."""
    from types import SimpleNamespace

    from torch._inductor import cudagraph_trees as trees

    assert {"remove_node_cached_tensors", "reconstruct_outputs"} <= set(dir(trees.CUDAGraphNode))
    cleared: list[str] = []

    def node(name: str, *children: Any) -> Any:
        return SimpleNamespace(children={0: list(children)}, remove_node_cached_tensors=lambda: cleared.append(name))

    manager = SimpleNamespace(roots={0: [node("a", node("b"), node("c", node("d")))], 1: [node("e")]})
    kept = {0: SimpleNamespace(tree_manager=manager), 1: SimpleNamespace(tree_manager=None)}
    monkeypatch.setattr(torch._C, "_is_key_in_tls", lambda name: name == "tree_manager_containers")
    monkeypatch.setattr(trees, "get_obj", lambda local, name: kept)
    infer, untouched = inferring(Attention().eval(), 2, 8, 16)
    for mode, expected in (("default", []), ("reduce-overhead", ["a", "b", "c", "d", "e"])):
        with apply_setting(infer, find_parts(infer), {"compile": mode}, {}):
            pass
        assert sorted(cleared) == expected
    assert untouched().shape == (2, 2, 8, 8)


# -- looking -----------------------------------------------------------------------------------------------------------


def test_a_look_sees_gradients_writes_and_failures() -> None:
    model = Attention().eval()
    infer, _ = inferring(model, 2, 8, 16)
    known, x = find_parts(infer), torch.randn(2, 8, 16)
    assert watch_call(infer, known) == CallTraits(infers=True, attends=True)
    assert not watch_call(lambda: model(x), known).infers
    assert not watch_call(x.sum, known).infers  # no module ran

    def averages() -> Any:
        with torch.no_grad():
            model.project.bias.mul_(0.9)
            return model(x)

    assert not watch_call(averages, known).infers
    assert watch_call(lambda: 1 / 0, known) == CallTraits()
    assert not model._forward_pre_hooks


# -- convolutions, fp8 -------------------------------------------------------------------------------------------------


def test_fused_convolutions() -> None:
    model = convolution()
    infer, untouched = inferring(model, 2, 3, 6, 6)
    known = find_parts(infer)
    with apply_setting(infer, known, {"convolutions": "fused", "layout": "channels_last"}, {}) as call:
        assert "forward" in vars(model) and torch.allclose(call(), untouched(), atol=1e-5)
        model.load_state_dict(other_weights(model))
        assert torch.allclose(call(), untouched(), atol=1e-4)
        model.train()
        with pytest.raises(NotApplicable) as caught:
            call()
        assert caught.value.knob == "convolutions"
        model.eval()
    assert "forward" not in vars(model) and model[0].weight.is_contiguous()
    both = {"convolutions": "fused", "compile": "default"}
    with pytest.raises(NotApplicable, match="exclude compile"), apply_setting(infer, known, both, {}):
        pass
    plain = torch.nn.Linear(4, 4).eval()
    with (
        pytest.raises(NotApplicable, match="no convolution"),
        apply_setting(plain, find_parts(plain), {"convolutions": "fused"}, {}),
    ):
        pass


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize(
    ("compiled", "by_rows"),
    [({}, False), ({}, True), ({"compile": "default"}, False)],
    ids=["eager", "rows", "compiled"],
)
def test_linear_layers_in_fp8(
    quick_compiler: None, compiled: dict[str, Any], by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera.op import casting, lowprec

    monkeypatch.setattr(lowprec, "has_row_scaling", lambda *_: by_rows)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 7))
    infer, untouched = inferring(model.bfloat16().eval(), 64, 32)
    wanted, kept = untouched(), len(casting._weights)
    with apply_setting(infer, find_parts(infer), {"precision": "fp8", **compiled}, {}) as call:
        assert 1e-3 < apart(call(), wanted) < 5e-2
        assert [("forward" in vars(m)) for m in model] == [True, False, False]  # 7 columns are left as they are
        mine = list(casting._weights.values())[kept:]
        assert len(mine) == 1 and mine[0].values.dtype == torch.float8_e4m3fn
        assert mine[0].scale.numel() == (48 if by_rows else 1)
        values = mine[0].values
        assert torch.equal(call(), call()) and mine[0].values is values
        with torch.no_grad():
            model[0].weight.mul_(-1)
        assert apart(call(), wanted) > 0.5
    assert len(casting._weights) == kept and not any("forward" in vars(m) for m in model)
    wide = torch.nn.Linear(16, 16).eval()
    with (
        pytest.raises(NotApplicable, match="no linear layer"),
        apply_setting(wide, find_parts(wide), {"precision": "fp8"}, {}),
    ):
        pass


# -- what is tried, in which order -------------------------------------------------------------------------------------


class OnCuda(FunctionParts):
    """What a function works with, as if it were on a GPU."""

    @property
    def device(self) -> Any:
        return torch.device("cuda", 0)


def on_cuda(*modules: Any, optimizers: tuple[Any, ...] = ()) -> FunctionParts:
    return OnCuda(modules=modules, optimizers=optimizers, tensors=())


def tried(space: list[Knob], saves: dict[str, float], **more: Any) -> list[str]:
    """Settings in the order they are first measured, where each knob saves a share of its own."""
    order: list[str] = []

    def measure(setting: dict[str, Any]) -> TuningTrial:
        order.append("+".join(k if v is True else f"{k}={v}" for k, v in setting.items()) or "as it is")
        joules = math.prod(1 - saves.get(f"{k}={v}", saves.get(k, 0.0)) for k, v in setting.items())
        return TuningTrial(
            setting=setting, time_s=joules, energy_j=joules, prepared_s=40.0 if "compile" in setting else 1.0
        )

    found = search(space, measure, ENERGY, **more)
    return order[: len(found.trials)]  # then what won is measured once more, and the function as it is


def test_inference_of_a_transformer() -> None:
    space = find_knobs(on_cuda(Attention().eval()), traits=CallTraits(infers=True))
    order = tried(space, {"compile=default": 0.2, "compile=reduce-overhead": 0.3, "graph": 0.15, "freeze": 0.05})
    assert order[:5] == [
        "as it is",
        "compile=default",
        "compile=reduce-overhead",
        "compile=default+graph",  # which the graph stands in for; no compiling
        "compile=default+graph+freeze",
    ]
    assert len(order) == len(set(order)) <= count_settings(space)
    assert not any("reduce-overhead" in o and "graph" in o for o in order)
    assert all("compile" in o for o in order if "freeze" in o)


def test_inference_with_convolutions() -> None:
    space = find_knobs(on_cuda(convolution()), traits=CallTraits(infers=True))
    saves = {"compile": 0.2, "convolutions": 0.3, "layout": 0.1, "graph": 0.1, "freeze": 0.1}
    order = tried(space, saves)
    fused = "layout=channels_last+graph+cudnn_benchmark+convolutions=fused"
    assert order[:4] == ["as it is", "compile=default", "compile=reduce-overhead", fused]  # all at once: quick
    assert not any("compile" in o and "convolutions" in o for o in order)
    slow = tried(space, {**saves, "convolutions": -0.5})  # where it does not pay, compiled code is what is improved
    assert "compile=default+graph+freeze" in slow and slow.index("compile=default+graph+freeze") > slow.index(fused)


def test_training_has_neither_frozen_nor_fused_layers() -> None:
    model = torch.nn.Sequential(convolution(), Attention(), torch.nn.Linear(8, 509)).train()
    known = on_cuda(model, optimizers=(torch.optim.AdamW(model.parameters()),))
    names = [k.name for k in find_knobs(known, traits=CallTraits(infers=False), tolerance=0.1)]
    assert names == [
        "compile",
        "layout",
        "graph",
        "padding",
        "optimizer",
        "cudnn_benchmark",
        "precision",
    ]
    order = tried(find_knobs(known), {"compile": 0.3, "graph": 0.1, "padding": 0.1})
    quick, slow = (order.index(f"compile=default+graph+{w}") for w in ("optimizer=fused", "padding"))
    assert quick < slow  # first what the compiled code can be run with


def test_padding_goes_through_the_compiler(quick_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code made without padding is not taken for code with it, and both train alike."""
    from tessera.op import padding

    seen, plain = [], padding.linear_for_compiler
    monkeypatch.setattr(padding, "linear_for_compiler", lambda *a: (seen.append(1), plain(*a))[1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 13), torch.nn.GELU(), torch.nn.Linear(13, 7, bias=False))
    x = torch.randn(5, 16)

    def step() -> Any:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    found, wanted = find_parts(step), step()
    for setting, traced in (({"compile": "default"}, False), ({"compile": "default", "padding": True}, True)):
        with apply_setting(step, found, setting, {}) as call:
            torch.testing.assert_close(call(), wanted)
        assert bool(seen) is traced


def test_fp8_is_offered_where_it_may_differ_that_much(monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.op import casting

    monkeypatch.setattr(casting, "has_fp8_units", lambda index: True)
    known = on_cuda(Attention().bfloat16().eval())
    seen = CallTraits(infers=True)
    by_tolerance = {
        t: [k for k in find_knobs(known, traits=seen, tolerance=t) if k.name == "precision"] for t in (1e-2, 5e-2)
    }
    assert not by_tolerance[1e-2] and by_tolerance[5e-2][0].values == (None, "fp8")
    assert not [k for k in find_knobs(known, traits=CallTraits(), tolerance=0.1) if k.name == "precision"]
    order = tried(find_knobs(known, traits=seen, tolerance=0.1), {"compile": 0.1, "freeze": 0.1})
    assert any("fp8" in o for o in order) and not any("freeze" in o and "fp8" in o for o in order)


def test_no_compiling_that_the_time_left_does_not_allow() -> None:
    space = find_knobs(on_cuda(convolution()), traits=CallTraits(infers=True))
    spent: list[float] = []

    def seconds_left() -> float:
        return 100.0 - sum(spent)

    def measure(setting: dict[str, Any]) -> TuningTrial:
        prepared_s = 40.0 if setting.get("compile") and setting.keys() <= {"compile", "freeze", "layout"} else 1.0
        spent.append(prepared_s)
        return TuningTrial(
            setting=setting, time_s=1.0, energy_j=0.5 if "compile" in setting else 1.0, prepared_s=prepared_s
        )

    found = search(space, measure, ENERGY, seconds_left=seconds_left)
    assert found.cut and sum(spent) <= 100.0
    assert [t.prepared_s for t in found.trials].count(40.0) == 2
    assert any("convolutions" in t.setting for t in found.trials)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_setting_is_tried_in_vain(data: Any) -> None:
    """Whatever needs or excludes what: no setting twice, none that contradicts itself, and small spaces whole."""
    names = "abcde"[: data.draw(st.integers(2, 5))]
    space = []
    for at, name in enumerate(names):
        needs = (data.draw(st.sampled_from(names[:at])),) if at and data.draw(st.booleans()) else ()
        others = [n for n in names[:at] if n not in needs]
        instead = {n: {1: None} for n in others if data.draw(st.integers(0, 3)) == 0}
        gain, recompiles = data.draw(st.floats(0, 0.9)), data.draw(st.booleans())
        values = (None, 1, 2)
        space.append(Knob(name=name, values=values, needs=needs, instead=instead, gain=gain, recompiles=recompiles))
    cost = {(k.name, v): data.draw(st.floats(0.5, 1.5)) for k in space for v in (1, 2)}
    found = search(
        space, lambda s: TuningTrial(setting=s, time_s=1.0, energy_j=math.prod(cost[p] for p in s.items())), ENERGY
    )
    seen = [t.setting for t in found.trials]
    allowed = list(searching._all_settings(space))
    assert all(s in allowed for s in seen)
    assert len({tuple(sorted(s.items())) for s in seen}) == len(seen) <= len(allowed) == count_settings(space)
    if count_settings(space) <= searching.EXHAUSTIVE:
        assert len(seen) == len(allowed)
    assert found.best.energy_j == min(t.energy_j for t in found.trials)
