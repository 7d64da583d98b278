"""`tessera.optimize`: what is rewritten, that it computes the same, and that the trace adds up."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tessera
from tessera import graph
from tessera.errors import ArgumentError, RewriteError
from tessera.hardware import lookup
from tessera.monitor.iteration import IterationMeasurement
from tessera.report.rewrite import optimized_text
from tessera.rewrite import inductor, variants
from tessera.rewrite.compare import compare
from tessera.rewrite.compilation import Compilation, Replacement
from tessera.rewrite.eager_ops import list_eager_ops
from tessera.rewrite.inductor import make_backend
from tessera.rewrite.passes import fuse_attention, make_spectral_pass
from tessera.rewrite.program import Program
from tessera.rewrite.savings import trace_rewrites
from tessera.rewrite.variants import VariantSearch

from rewriting import fresh_compiler, in_turns, make_recorder, without_inductor  # noqa: F401 - fixtures

# Torch's compiler warns of itself (deprecated parts it still imports, recompilations): none of our business here.
pytestmark = pytest.mark.filterwarnings("ignore")
HEADS = (2, 4, 16, 16)


class Block(nn.Module):
    """A transformer's block, its attention as Inductor knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = (t.view(2, 16, 4, 16).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / 4.0).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(2, 16, 64))
        return x + self.down(F.gelu(self.up(self.norm(x))))


# -- attention -----------------------------------------------------------------------------------------------------


def scores(q, k):
    return q @ k.transpose(-2, -1)


def repeated(x):
    return x[:, :, None].expand(2, 2, 2, 16, 16).reshape(HEADS)


def added_triangle(q, k, v):
    return F.softmax(scores(q, k) * 0.25 + torch.triu(torch.full((16, 16), -math.inf), diagonal=1), dim=-1) @ v


def kept_triangle(q, k, v):
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    return torch.where(seen, scores(q, k) * 0.25, -math.inf).softmax(-1) @ v


def grouped(q, k, v):
    k, v = repeated(k[:, :2]), v[:, :2].repeat_interleave(2, dim=1)
    return (torch.matmul(q, k.transpose(2, 3)) * 0.25).softmax(-1, dtype=torch.float32).to(q.dtype).contiguous() @ v


MASK = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.3
OURS = {
    "scaled": (lambda q, k, v: (scores(q, k) / 4.0).softmax(-1) @ v, ""),
    "no scale": (lambda q, k, v: scores(q, k).softmax(-1) @ v, ""),
    "three dimensions": (lambda q, k, v: (torch.bmm(q[0], k[0].transpose(1, 2)) / 4).softmax(-1) @ v[0], ""),
    "scaled, added mask": (lambda q, k, v: (scores(q, k) * 0.25 + MASK.float()).softmax(-1) @ v, " (masked)"),
    "masked_fill": (lambda q, k, v: (scores(q, k) / 4).masked_fill(MASK, -math.inf).softmax(-1) @ v, " (masked)"),
    "where": (lambda q, k, v: torch.where(MASK, scores(q, k) / 4, -1e9).softmax(-1) @ v, " (masked)"),
    "an added triangle": (added_triangle, " (causal)"),
    "a kept triangle": (kept_triangle, " (causal)"),
    "repeated heads": (grouped, " (grouped)"),
}
NOT_OURS = {
    "scaled after the mask": lambda q, k, v: ((scores(q, k) + MASK.float()) * 0.25).softmax(-1) @ v,
    "over the queries": lambda q, k, v: scores(q, k).softmax(-2) @ v,
    "filled with a value": lambda q, k, v: scores(q, k).masked_fill(MASK, -2.0).softmax(-1) @ v,
    "no softmax": lambda q, k, v: scores(q, k).relu() @ v,
}


def qkv(**options):
    return [torch.randn(HEADS, **options) for _ in range(3)]


@pytest.mark.parametrize("form", OURS)
def test_attention_as_people_write_it_becomes_one_call(form):
    fn, how = OURS[form]
    watch, given_ = Compilation(), qkv()
    with torch.no_grad():
        found = torch.compile(fn, backend=make_recorder(watch, [fuse_attention]))(*given_)
    assert [f.after for f in watch.replacements] == [f"scaled_dot_product_attention{how}"]
    torch.testing.assert_close(found, fn(*given_))
    # What it replaced and what it is now are known well enough to be priced.
    assert {p.short for p in watch.replacements[0].ops_before} >= {"bmm", "softmax"}
    assert watch.replacements[0].ops_after[0].kind == "attention"


@pytest.mark.parametrize("form", NOT_OURS)
def test_what_is_left_alone(form):
    watch, given_ = Compilation(), qkv()
    with torch.no_grad():
        found = torch.compile(NOT_OURS[form], backend=make_recorder(watch, [fuse_attention]))(*given_)
    assert watch.replacements == []
    torch.testing.assert_close(found, NOT_OURS[form](*given_))


def test_sizes_that_may_change():
    watch = Compilation()
    fn = torch.compile(OURS["no scale"][0], backend=make_recorder(watch, [fuse_attention]), dynamic=True)
    with torch.no_grad():
        for length in (16, 24):
            given_ = [torch.randn(2, 4, length, 8) for _ in range(3)]
            torch.testing.assert_close(fn(*given_), OURS["no scale"][0](*given_))
    assert len(watch.replacements) == 1, "one graph for both"


def test_weights_that_are_returned_are_not_fused_away():
    watch = Compilation()
    fn = torch.compile(
        lambda q, k, v: (scores(q, k).softmax(-1), scores(q, k).softmax(-1) @ v),
        backend=make_recorder(watch, [fuse_attention]),
    )
    weights, _ = fn(*qkv())
    assert weights.shape == (2, 4, 16, 16)


def test_gradients_of_a_rewritten_attention():
    watch, given_ = Compilation(), qkv(requires_grad=True)
    fn = torch.compile(kept_triangle, backend=make_recorder(watch, [fuse_attention]))
    new = torch.autograd.grad(fn(*given_).square().sum(), given_)
    old = torch.autograd.grad(kept_triangle(*given_).square().sum(), given_)
    assert len(watch.replacements) == 1
    torch.testing.assert_close(new, old)
    assert {p.backward for p in watch.replacements[0].ops_after} == {False, True}


def test_a_pass_keeps_writes_into_tensors():
    kept = torch.zeros(3)

    def fn(x):
        kept.add_(x)
        return scores(x.view(1, 3, 1), x.view(1, 3, 1)).softmax(-1) @ x.view(1, 3, 1)

    torch.compile(fn, backend=make_recorder(Compilation(), [fuse_attention]))(torch.ones(3))
    assert kept.tolist() == [1.0, 1.0, 1.0]


def test_large_kernels_become_spectral():
    conv, x = nn.Conv2d(16, 16, 31, padding=15, groups=16), torch.randn(1, 16, 64, 64)
    watch = Compilation()
    with torch.no_grad():
        found = torch.compile(conv, backend=make_recorder(watch, [make_spectral_pass(lookup("h200"))]))(x)
        torch.testing.assert_close(found, conv(x), rtol=1e-3, atol=1e-4)
    (rewrite,) = watch.replacements
    assert rewrite.rule == "spectral_conv"
    assert rewrite.saved_j > 0
    small, nowhere = Compilation(), Compilation()
    with torch.no_grad():
        torch.compile(nn.Conv2d(3, 8, 3), backend=make_recorder(small, [make_spectral_pass(lookup("h200"))]))(
            torch.randn(1, 3, 8, 8)
        )
        torch.compile(conv, backend=make_recorder(nowhere, [make_spectral_pass(None)]))(x)
    assert small.replacements == nowhere.replacements == []


# -- compiled for real ---------------------------------------------------------------------------------------------


def test_a_model_for_inference_with_inductor():
    model, x, lines = Block().eval(), torch.randn(2, 16, 64), []
    fast = tessera.optimize(model, x, on="h200", budget_s=0, progress=lines.append)
    assert fast.chosen == "default"
    assert lines == ["compiling: default"]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert not fast(x).requires_grad
    rules = {r.rule for r in fast.rewrites}
    assert rules >= {"flash_attention", "fuse_reduction", "fewer_launches"}
    (fused,) = [r for r in fast.rewrites if r.rule == "flash_attention"]
    assert fused.by == "tessera"
    # The scores (2 x 4 x 16 x 16 fp32) are no longer written by bmm, div, softmax nor read by those after them.
    assert fused.saved_bytes > 6 * 2 * 4 * 16 * 16 * 4
    assert fused.saved_j > 0
    assert fused.saved_error_j > 0
    # The lines add up to the difference of the two programs as the model sees them, to a thousandth of the program.
    seen = fast.trace
    assert sum(r.saved_j or 0.0 for r in fast.rewrites) == pytest.approx(seen.before_j - seen.after_j, rel=2e-3)
    assert sum(r.saved_s or 0.0 for r in fast.rewrites) == pytest.approx(seen.before_s - seen.after_s, rel=2e-3)
    assert seen.launches_after < seen.launches_before
    text = str(fast)
    assert "runs as: default" in text
    assert "flash_attention: " in text
    assert "modelled on h200" in text
    assert json.loads(fast.to_json())["chosen"] == "default"
    profile = graph.profile(lambda: fast(x), steps=2, warmup=1)
    assert [r for r in profile.rewrites if r.rule == "flash_attention"] == [fused]
    assert "rewritten: flash_attention: " in str(profile)
    assert ", modelled on h200]" in str(profile)


def test_the_second_program_of_a_process_has_its_rewrites_too():
    """Dynamo would take sizes that differ from the first one's for sizes that change."""
    torch._dynamo.reset()

    def masked(q, k, v):
        i = torch.arange(q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=i[:, None] >= i[None, :])

    for size in (32, 64):
        given = tuple(torch.randn(2, 4, size, 16) for _ in range(3))
        fast = tessera.optimize(masked, given, on="h200", variants=["default"], budget_s=0)
        assert [r.after for r in fast.rewrites if r.rule == "known mask"] == ["scaled_dot_product_attention (causal)"]


def test_a_model_for_training_with_inductor():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x = torch.randn(16, 32)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fast = tessera.optimize(model, x, mode="train", on="h200", budget_s=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    fast(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-4)
    backward = [r for r in fast.rewrites if r.rule == "fuse_reduction" and "backward" in r.before]
    assert backward, "the norm's gradient sums run in one kernel with what is beside them"
    assert fast.trace.notes == ()


def test_without_a_chip_bytes_are_still_counted():
    watch = Compilation()
    with torch.no_grad():
        torch.compile(lambda a: (a.relu() + 1).sin(), backend=make_backend(watch, [], {}))(torch.randn(64, 64))
    found = trace_rewrites(watch, None, replayed=False)
    (line,) = found.rewrites
    assert (line.rule, line.before, line.times) == ("fuse_elementwise", "relu + add + sin", 1)
    assert line.saved_bytes == 4 * 64 * 64 * 4  # two values neither written nor read again
    assert line.saved_j is None
    assert "not in the catalogue" in line.why
    shown = SimpleNamespace(
        chosen="default",
        variants=[],
        rewrites=[line, line],
        trace=found,
        undone=[],
        notes=found.notes,
        in_use=None,
        spent_s=0.0,
    )
    assert optimized_text(shown).count(line.why) == 1  # as a note, not beside each line
    priced = trace_rewrites(watch, lookup("a100"), replayed=True)
    assert "cuda_graph" in {r.rule for r in priced.rewrites}
    assert priced.after_s < priced.before_s


@pytest.fixture(scope="module")
def convolved():
    """A compilation of two convolutions with a batch norm between them, of a program with channels first."""
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)
    ).eval()
    watch = Compilation()
    with torch.no_grad():
        torch.compile(model, backend=make_backend(watch, [], {}))(torch.randn(2, 16, 16, 16))
    return watch


def test_convolutions_that_inductor_lays_out_anew_are_a_line(convolved):
    calls = [k.call for k in convolved.kernels if k.call is not None]
    assert all(t.stride[1] == 1 for call in calls for _, t in call.reads if len(t.shape) == 4)
    (line,) = [r for r in trace_rewrites(convolved, lookup("h200"), replayed=False).rewrites if r.rule == "layout"]
    assert (line.before, line.after, line.times) == ("convolution", "with channels last", 2)


def test_a_batch_norm_with_fixed_statistics_in_a_generated_kernel_is_elementwise(convolved):
    (fused,) = [p for p in convolved.list_ops_after() if any(n.endswith("relu") for n in p.nodes)]
    assert fused.kind == "elementwise"
    assert len(fused.reads) == 1, "its channels' statistics stay in the cache"
    (line,) = [
        r for r in trace_rewrites(convolved, lookup("h200"), replayed=False).rewrites if r.rule.startswith("fuse")
    ]
    assert line.before == "batch_norm + relu"


@pytest.mark.parametrize("times", [1.3, 0.1, 50.0])
def test_the_measured_eager_time_says_how_long_the_device_waits(convolved, times):
    """A step that takes longer than any host would make it, or less than the device alone, says nothing of the host."""
    device = lookup("h200")
    usual = trace_rewrites(convolved, device, replayed=True)
    here = trace_rewrites(convolved, device, replayed=True, eager_s=usual.before_s * times)
    assert here.before_s == pytest.approx(usual.before_s * (times if times == 1.3 else 1.0))
    assert here.after_s == usual.after_s
    assert sum(r.saved_s or 0.0 for r in here.rewrites) == pytest.approx(here.before_s - here.after_s, rel=1e-2)


def test_what_inductor_does_not_say_is_said():
    watch = Compilation(replacements=[Replacement(rule="flash_attention", before="a", after="b")])
    nodes = [object()]
    assert inductor.read_after_fusion(watch, nodes) is nodes
    assert watch.missing[0].startswith("Inductor did not say which operators it fused (AttributeError")
    (line,) = trace_rewrites(watch, lookup("h200"), replayed=False).rewrites
    assert line.saved_j is None
    assert "did not say" in line.why


# -- checking, choosing, undoing -----------------------------------------------------------------------------------


def test_a_rewrite_that_changes_the_result_is_undone(uncompiled):
    def wrong(module):
        changed = [n for n in module.graph.nodes if n.target is F.relu]
        for node in changed:
            node.target, node.kwargs = F.gelu, {}
        return [Replacement(rule="wrong", before="relu", after="gelu") for _ in changed]

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    trial = VariantSearch(
        program=Program(call=model, modules=(model,), optimizers=(), mode="infer"),
        tolerance=None,
        args=(torch.randn(4, 8),),
        kwargs={},
        budget_s=0,
        say=print,
    )
    way = trial.run(["default"], [wrong])
    assert way.ok
    assert way.name == "default, torch's passes alone"
    ((found, why),) = way.undone
    assert found.rule == "wrong"
    assert "relative error" in why


def test_ours_stay_only_where_they_pay(uncompiled, monkeypatch):
    seconds = iter([*in_turns(3.0, 2.0), *in_turns(2.0, 1.0)])  # eager, with ours; with ours, without
    monkeypatch.setattr(
        "tessera.rewrite.variants.measure_iteration", lambda run, within_s: IterationMeasurement(time_s=next(seconds))
    )
    fast = tessera.optimize(OURS["no scale"][0], tuple(qkv()))
    assert fast.chosen == "default, torch's passes alone"
    assert [r.rule for r in fast.undone] == ["flash_attention"]
    assert "does not pay" in fast.undone[0].why
    assert "undone: flash_attention" in str(fast)


def test_nothing_that_works_is_an_error(monkeypatch):
    def broken(watch, passes, options):
        return lambda module, inputs: lambda *given_: [t + 1 for t in module(*given_)]

    monkeypatch.setattr(variants, "make_backend", broken)
    with pytest.raises(RewriteError, match="no variant of this program") as caught:
        tessera.optimize(nn.Linear(4, 4), torch.randn(2, 4))
    assert "result[0]: relative error" in caught.value.why

    def refuses(watch, passes, options):
        def compile_graph(module, inputs):
            raise NotImplementedError("not today")

        return compile_graph

    monkeypatch.setattr(variants, "make_backend", refuses)
    with pytest.raises(RewriteError, match="no variant of this program compiles") as caught:
        tessera.optimize(nn.Linear(4, 4), torch.randn(2, 4))
    assert "did not compile" in caught.value.why
    assert "a part that compiles" in caught.value.fix


def test_a_step_with_dropout_is_checked_in_eval_mode_and_leaves_no_trace(uncompiled):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))

    def step():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    fast = tessera.optimize(step, (), variants=["default"])
    assert any("eval mode" in note for note in fast.notes)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert len(optimizer.state) == 0
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert model.training
    losses = [float(fast()) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_it_behaves_like_the_model(uncompiled):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.note = "mine"
    fast = tessera.optimize(model)
    assert "not optimized yet" in str(fast)
    x = torch.randn(2, 4)
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast(torch.ones(5, 4)), model(torch.ones(5, 4)))
    assert fast.eval() is fast
    assert not model.training
    assert fast.note == "mine"
    fast.note = "yours"
    assert model.note == "yours"
    assert list(fast.state_dict()) == list(model.state_dict())
    fast.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert float(fast(x).abs().sum()) == 0.0
    assert "Optimized(Sequential: " in repr(fast)
    with pytest.raises(AttributeError):
        _ = fast.nothing_like_this
    assert graph.optimize(fast).undo() is model
    assert fast.undo() is model
    assert fast.rewrites == []


def test_wrong_arguments_are_named():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for wrong, said in (
        ({"mode": "trian"}, "did you mean 'train'"),
        ({"tolerance": 0}, "tolerance=0"),
        ({"variants": ["defualt"]}, "did you mean 'default'"),
        ({"variants": ["reduce-overhead"]}, "CUDA device"),
        ({"on": "h20000"}, "h20000"),
    ):
        with pytest.raises(ArgumentError, match=said):
            tessera.optimize(model, x, **wrong)
    with pytest.raises(ArgumentError, match=r"a Tensor of shape \(2, 3\), which cannot be called") as caught:
        tessera.optimize(torch.full((2, 3), 7.0))
    assert "7." not in str(caught.value)  # a tensor may have millions of elements
    with pytest.raises(ArgumentError, match="cannot be called"):
        tessera.optimize(3)


def test_inputs_the_program_does_not_take_are_said():
    model, wrong = nn.Linear(4, 4), torch.randn(2, 5)
    with pytest.raises(RewriteError, match="does not run on these inputs") as caught:
        tessera.optimize(model, wrong)
    assert "RuntimeError: mat1 and mat2" in str(caught.value.why) and "inputs" in str(caught.value.fix)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # a call fails as a call of the model does
        tessera.optimize(model)(wrong)


@settings(max_examples=40, deadline=None)
@given(error=st.floats(1e-9, 1.0), allowed=st.floats(1e-6, 0.5), scale=st.floats(1e-6, 1e6), shape=st.integers(1, 40))
def test_the_check_is_relative(error, allowed, scale, shape):
    old = torch.linspace(1.0, 2.0, shape, dtype=torch.float64) * scale
    found = compare({"a": old}, {"a": old * (1 + error)}, allowed)
    assert found.relative == pytest.approx(error, rel=1e-6)
    assert found.ok == (error <= allowed * (1 + 1e-12)) or error == pytest.approx(allowed, rel=1e-6)


def test_the_check_sees_what_a_norm_hides():
    old = torch.ones(10_000)
    one = old.clone()
    one[0] = 1.5  # relative Frobenius error 5e-3, but one value is half again as large
    assert not compare({"a": old}, {"a": one}, 1e-2).ok
    assert not compare({"a": old}, {"a": old[:10]}).ok
    assert not compare({"a": old}, {}).ok
    assert not compare({"a": old}, {"a": old * math.nan}).ok
    missing = torch.tensor([math.nan, -math.inf, 1.0])
    assert compare({"a": missing}, {"a": missing.clone()}).ok
    # A gradient that is nothing but rounding beside the others does not decide.
    gradients = {"gradient of w": torch.ones(100), "gradient of b": torch.full((4,), 1e-9)}
    assert compare(gradients, {**gradients, "gradient of b": torch.full((4,), -1e-9)}).ok


def test_nodes_of_one_operator_are_one_piece():
    from torch._inductor.decomposition import select_decomp_table

    def fn(x, w):
        return F.gelu(F.layer_norm(x @ w, (8,))).t()

    with torch.fx.traceback.preserve_node_meta():
        made = make_fx(fn, decomposition_table=select_decomp_table())(torch.randn(4, 8), torch.randn(8, 8))
    found = list_eager_ops(made.graph)
    assert [p.short for p in found if p.launches] == ["mm", "layer_norm", "gelu"]
    product, norm, _gelu = (p for p in found if p.launches)
    assert [t.shape for _, t in product.reads] == [(4, 8), (8, 8)]
    assert [t.nbytes for _, t in norm.reads] == [4 * 8 * 4]
    assert not [p for p in found if p.kind == "view" and p.launches]


def test_writes_in_place_are_no_copies_of_their_own():
    def fn(x, y):
        x.add_(y * 2)
        return x.copy_(y)

    from torch.func import functionalize

    made = make_fx(functionalize(fn))(torch.randn(4), torch.randn(4))
    # The copy of what was given is one; that into the argument is how a graph ends what ran in place.
    assert [p.short for p in list_eager_ops(made.graph) if p.launches][:2] == ["mul", "add"]
    assert [p.silent for p in list_eager_ops(made.graph) if p.name.startswith("aten.copy")] == [False, True]


def test_a_first_iteration_that_compiles_for_itself_is_not_explained():
    watch = Compilation()
    with torch.no_grad():
        fn = torch.compile(lambda x: x.sin() + 1, backend=make_backend(watch, [], {}), dynamic=False)
        fn(torch.randn(8))
        fn(torch.randn(16))
        assert watch.graphs == 2
        watch.ran.clear()
        fn(torch.randn(16))
    found = watch.select_graphs_that_ran()
    assert [p.writes[0][1].shape for p in found.ops if p.launches] == [(16,), (16,)]
    assert len(found.kernels) == 1
    assert len(watch.kernels) == 2


def test_a_step_that_loses_its_update_is_seen():
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(*, updates: bool = True, scale: float = 1.0):
        loss = model(x).square().sum() * scale
        loss.backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / scale

    program = Program(call=step, modules=(model,), optimizers=(optimizer,), mode="step")
    whole = program.observe(step, (), {})
    assert set(whole) == {"result[0]", "gradient of weight", "gradient of bias", "size of the update"}
    assert compare(whole, program.observe(step, (), {})).ok
    assert compare(whole, program.observe(step, (), {"updates": False})).where == "size of the update"
    assert compare(whole, program.observe(step, (), {"scale": 2.0})).where == "all gradients"
