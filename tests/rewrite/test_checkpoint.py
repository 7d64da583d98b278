"""Checkpointing: plans that keep to their memory, blocks that recompute without a trace in results and gradients."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessera.errors import ArgumentError, DoesNotFit, RewriteError
from tessera.estimate.predict import predict
from tessera.graph.capture import capture
from tessera.hardware import lookup
from tessera.rewrite import checkpoint
from tessera.rewrite.checkpoint import find_blocks
from tessera.rewrite.checkpoint_search import (
    KEEP,
    RECOMPUTE,
    BlockChoice,
    StepPredictor,
    list_choices,
    solve_knapsack,
)

from models import Block, Residual, vision

PRODUCTS = BlockChoice(name="selective", saves=frozenset({("addmm", 0), ("addmm", 1), ("addmm", 2), ("attention", 0)}))


class Stack(nn.Module):
    """A few transformer blocks with dropout, and a head."""

    def __init__(self, layers: int = 3, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.drops = nn.ModuleList(nn.Dropout(dropout) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = drop(layer(x))
        return self.head(x)


class Noisy(nn.Module):
    """A block that draws random numbers three times around its products."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(self.down(self.drop(torch.tanh(self.up(self.drop(x))))))
        return x + scale * (y if mask is None else y * mask)


class NoisyStack(nn.Module):
    """Blocks called with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(x.dtype)
        for layer in self.layers:
            x = layer(x, scale=0.5, mask=mask)
        return x


def gradients(model: nn.Module, x: torch.Tensor, autocast: bool = False) -> list[torch.Tensor]:
    """The output, the gradients of input and parameters, and the buffers after a step; same random numbers always."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_(x.is_floating_point())
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out.float().square().mean().backward()
    found = [out.detach().clone(), x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
    return [t for t in found if t is not None]


def exactly_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("way", [RECOMPUTE, PRODUCTS], ids=["whole", "selective"])
@pytest.mark.parametrize("autocast", [False, True])
def test_same_results_and_gradients_to_the_last_bit(way, autocast):
    torch.manual_seed(0)
    model, x = Stack(dropout=0.2), torch.randn(2, 8, 32)
    before = gradients(model, x, autocast)
    with checkpoint.apply(model, dict.fromkeys(find_blocks(model), way)):
        assert exactly_equal(before, gradients(model, x, autocast))
    assert exactly_equal(before, gradients(model, x, autocast))


@pytest.mark.parametrize("saves", [frozenset(), frozenset({("addmm", 0)}), frozenset({("addmm", 1), ("tanh", 0)})])
def test_random_numbers_and_keyword_arguments_are_the_same_again(saves):
    torch.manual_seed(0)
    model, x = NoisyStack(), torch.randn(4, 16)
    before = gradients(model, x)
    way = BlockChoice(name="selective", saves=saves) if saves else RECOMPUTE
    with checkpoint.apply(model, dict.fromkeys(find_blocks(model), way)):
        assert exactly_equal(before, gradients(model, x))


def test_every_selective_way_a_plan_may_choose_is_exact():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), torch.randn(2, 8, 32)
    names = tuple(find_blocks(model))
    trial = StepPredictor(model, x, names, lookup("h200"), "sgd", None, "eager")
    kept, whole = (trial.predict(dict.fromkeys(names, way), "") for way in (KEEP, RECOMPUTE))
    ways = [way for way, _ in list_choices(kept, whole, names, selective=True)[names[0]]]
    assert len(ways) > 5
    saved = {name for way in ways for name, _ in way.saves}
    assert "addmm" in saved and not saved & {"native_dropout", "attention"}  # attention has dropout here
    before = gradients(model, x)
    for way in ways:
        with checkpoint.apply(model, dict.fromkeys(names, way)):
            assert exactly_equal(before, gradients(model, x))


def test_batch_norms_count_a_batch_once():
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual(8, 3)), torch.randn(4, 3, 8, 8)
    twin = copy.deepcopy(model)
    expected = gradients(model, x)
    with checkpoint.apply(twin, {"0": RECOMPUTE}):
        assert exactly_equal(expected, gradients(twin, x))
    assert all(n.momentum == 0.1 for n in twin.modules() if isinstance(n, nn.BatchNorm2d))


class Dense(nn.Module):
    """Each layer gets the list of all before it, which grows after it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(4 * (i + 1)) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(found, extra={"scale": x}))
        return torch.cat(found, -1)


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(width, 4), nn.LayerNorm(4)

    def forward(self, found: list[torch.Tensor], extra: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.norm(self.line(torch.cat(found, -1))).tanh() * extra.pop("scale")


def test_lists_and_dicts_are_found_again_as_they_were():
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(3, 4)
    before = gradients(model, x)
    with checkpoint.apply(model, checkpoint.every(model)):
        assert exactly_equal(before, gradients(model, x))


def test_less_is_held_for_backward():
    model, x = Stack(), torch.randn(2, 64, 32)

    def held() -> int:
        kept: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(x)
        out.sum().backward()
        return sum(kept.values())

    plain = held()
    with checkpoint.apply(model, checkpoint.every(model)):
        assert held() < 0.5 * plain


def test_applied_models_copy_pickle_and_come_back():
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(2, 8, 32)
    before = gradients(model, x)
    applied = checkpoint.apply(model, checkpoint.every(model))
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (twin, loaded):
        assert other.layers[0].forward.forward.__self__ is other.layers[0]
        assert exactly_equal(before, gradients(other, x))
    with pytest.raises(RewriteError, match="has already been replaced"):
        checkpoint.apply(model, checkpoint.every(model))
    applied.undo()
    applied.undo()
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_without_gradients_nothing_is_remembered():
    model, x = Stack(), torch.randn(2, 8, 32)
    with torch.no_grad():
        expected = model(x)
        with checkpoint.apply(model, checkpoint.every(model)):
            assert torch.equal(model(x), expected)


def test_a_cache_of_generation_is_not_grown_twice():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, past_key_values: list[torch.Tensor] | None = None) -> torch.Tensor:
            if past_key_values is not None:
                past_key_values.append(x)
                x = torch.stack(past_key_values).sum(0)
            return self.line(x).tanh()

    model = nn.ModuleDict({"a": Cached()})
    with checkpoint.apply(model, {"a": RECOMPUTE}):
        cache: list[torch.Tensor] = []
        model["a"](torch.randn(2, 4), past_key_values=cache).sum().backward()
    assert cache == []


@pytest.mark.parametrize(("kind", "way"), [(NoisyStack, RECOMPUTE), (Stack, PRODUCTS)])
def test_torch_compile_sees_through_it(way, kind):
    torch.manual_seed(0)
    model = kind().eval()  # without dropout: the compiler draws other numbers
    x = torch.randn(2, 8, 32 if kind is Stack else 16)
    before = gradients(model, x)
    torch._dynamo.reset()
    with checkpoint.apply(model, dict.fromkeys(find_blocks(model), way)):
        after = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b)


# -- blocks ---------------------------------------------------------------------------------------------------------


def test_repeated_blocks_are_found():
    assert list(find_blocks(Stack(3))) == ["layers.0", "layers.1", "layers.2"]
    with torch.device("meta"):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 4)
    assert list(find_blocks(encoder)) == [f"layers.{i}" for i in range(4)]
    assert list(find_blocks(Stack(2), ["head"])) == ["head"]


def test_stages_of_a_resnet_are_its_blocks():
    with torch.device("meta"):
        model = vision("resnet18")
    assert list(find_blocks(model)) == [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]


def test_wrong_blocks_are_refused():
    with pytest.raises(RewriteError, match="no blocks"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match=r"did you mean 'layers\.0'"):
        find_blocks(Stack(), ["layer.0"])
    with pytest.raises(ArgumentError, match="inside it"):
        find_blocks(Stack(), ["layers.0", "layers.0.up"])
    with pytest.raises(RewriteError, match="made for"):
        checkpoint.apply(Stack(1), {"layers.7": RECOMPUTE})


# -- the choice -----------------------------------------------------------------------------------------------------


def test_the_knapsack_is_exact_against_brute_force():
    option = st.tuples(st.integers(0, 30).map(float), st.integers(0, 20).map(float))  # bytes and cost

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 90))
    def check(items, budget):
        best = min(
            (
                sum(cost for _, cost in picks)
                for picks in itertools.product(*items)
                if sum(nbytes for nbytes, _ in picks) <= budget
            ),
            default=None,
        )
        found = solve_knapsack(items, budget)
        if best is None:
            assert found is None
            return
        assert found is not None
        chosen = [options[k] for options, k in zip(items, found, strict=True)]
        assert sum(nbytes for nbytes, _ in chosen) <= budget
        assert sum(cost for _, cost in chosen) == best

    check()


@pytest.fixture(scope="module")
def llama_like():
    """Blocks wide enough that the device, not the host, decides; on the meta device."""
    with torch.device("meta"):
        return Stack(layers=4, width=1024), torch.empty(16, 1024, 1024)


@pytest.fixture(scope="module")
def ends(llama_like):
    """What the step costs where everything is kept, and where everything is recomputed."""
    free = checkpoint.plan(*llama_like, on="h200", precision="bf16", selective=False)
    return free.settings["none"], free.settings["all"]


def test_with_memory_to_spare_everything_is_kept(llama_like):
    model, x = llama_like
    plan = checkpoint.plan(model, x, on="h200", precision="bf16")
    assert {b.choice.name for b in plan.blocks} == {"keep"}
    assert plan.settings["chosen"].peak_bytes == plan.settings["none"].peak_bytes
    assert plan.rewrites == []
    # What keeping costs at most is far less than what recomputing would: the reason, in figures.
    assert all(b.bytes_j > 0 for b in plan.blocks)
    assert "keep everything" in str(plan)


@pytest.mark.parametrize("policy", ["energy", "latency"])
def test_a_plan_keeps_to_its_memory_and_beats_recomputing_all(llama_like, ends, policy):
    (model, x), (none, every) = llama_like, ends
    budget = 0.5 * (none.peak_bytes + every.peak_bytes)
    plan = checkpoint.plan(model, x, on="h200", precision="bf16", policy=policy, memory_bytes=budget)
    whole = checkpoint.plan(model, x, on="h200", precision="bf16", policy=policy, memory_bytes=budget, selective=False)
    chosen = plan.settings["chosen"]
    goal = "energy_j" if policy == "energy" else "time_s"
    assert every.peak_bytes < chosen.peak_bytes <= budget < none.peak_bytes
    assert getattr(none, goal) < getattr(chosen, goal) < getattr(every, goal)
    assert getattr(chosen, goal) <= getattr(whole.settings["chosen"], goal)
    assert sum(r.saved_bytes for r in plan.rewrites) > 0 > sum(r.saved_j for r in plan.rewrites)
    assert {r.rule for r in plan.rewrites} == {"checkpoint"}
    assert plan.to_dict()["settings"]["chosen"]["peak_bytes"] == chosen.peak_bytes


def test_what_blocks_are_said_to_cost_sums_to_what_the_step_does(llama_like, ends):
    (model, x), (none, every) = llama_like, ends
    plan = checkpoint.plan(model, x, on="h200", precision="bf16", policy="memory")
    chosen = plan.settings["chosen"]
    assert chosen.peak_bytes <= 1.002 * every.peak_bytes
    spent = sum(b.spent_j for b in plan.blocks)
    assert spent == pytest.approx(chosen.energy_j - none.energy_j, rel=0.1)
    assert sum(b.spent_s for b in plan.blocks) == pytest.approx(chosen.time_s - none.time_s, rel=0.1)


def test_the_first_blocks_are_recomputed_first(llama_like, ends):
    (model, x), peak_bytes = llama_like, sum(end.peak_bytes for end in ends) / 2
    plan = checkpoint.plan(model, x, on="h200", precision="bf16", selective=False, memory_bytes=peak_bytes)
    ways = [b.choice.name for b in plan.blocks]
    assert "recompute" in ways and "keep" in ways
    assert ways == sorted(ways, reverse=True)


def test_a_plan_that_is_a_byte_too_large_is_moved_past(llama_like):
    model, x = llama_like
    names = list(find_blocks(model))
    with checkpoint.apply(model, dict.fromkeys(names[:2], RECOMPUTE)):
        peak = predict(model, x, on="h200", precision="bf16", mode="train").prediction.peak_memory_bytes
    plan = checkpoint.plan(model, x, on="h200", precision="bf16", selective=False, memory_bytes=peak - 1)
    assert [b.choice.name for b in plan.blocks] == ["recompute"] * 3 + ["keep"]
    assert plan.settings["chosen"].peak_bytes < peak


def test_a_plan_that_cannot_fit_says_so(llama_like):
    model, x = llama_like
    with pytest.raises(DoesNotFit, match="every block recomputed"):
        checkpoint.plan(model, x, on="h200", precision="bf16", memory_bytes=1e6)
    with pytest.raises(ArgumentError, match="did you mean 'energy'"):
        checkpoint.plan(model, x, policy="enegry")
    with pytest.raises(ArgumentError, match="memory_bytes"):
        checkpoint.plan(model, x, memory_bytes=-1)


def test_planning_leaves_the_model_alone():
    model, x = Stack(), torch.randn(2, 8, 32)
    before = gradients(model, x)
    checkpoint.plan(model, x, on="h200", memory_bytes=1e9)
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert exactly_equal(before, gradients(model, x))


# -- what the prediction sees ---------------------------------------------------------------------------------------


def test_the_prediction_sees_the_recomputation_and_the_memory(llama_like):
    model, x = llama_like
    plain = capture(model, x, mode="train", precision="bf16")
    with checkpoint.apply(model, checkpoint.every(model)):
        again = capture(model, x, mode="train", precision="bf16")
    forward = sum(op.flops for op in plain.ops if op.phase == "forward" and op.scope.startswith("layers"))
    assert 0.5 * forward < again.flops - plain.flops <= forward  # all but what comes after the last saved tensor
    a, b = (predict(g, on="h200", check_memory=False) for g in (plain, again))
    assert b.total_energy_j > a.total_energy_j
    assert b.prediction.peak_memory_bytes < a.prediction.peak_memory_bytes


def test_recomputed_operators_are_launched_by_python():
    model, x = Stack(), torch.randn(2, 8, 32)
    plain = capture(model, x, mode="train")
    with checkpoint.apply(model, checkpoint.every(model)):
        again = capture(model, x, mode="train")
    assert not any(op.hooked for op in plain.ops)
    recomputed = [op for op in again.ops if op.hooked and op.phase == "backward"]
    assert {op.name for op in recomputed} >= {"aten.addmm", "aten.gelu", "aten.native_layer_norm"}
    assert not any("backward" in op.name for op in recomputed)
    more = len(again.kernels) - len(plain.kernels)
    hosts = [predict(g, on="h200").prediction.host_s for g in (plain, again)]
    assert hosts[1] - hosts[0] > more * 20e-6  # a launch from Python and the hooks, not the 8 us of backward


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_saved_attention_is_not_run_again(llama_like, dtype):
    model, x = llama_like

    def attentions(way: BlockChoice) -> int:
        with checkpoint.apply(model, dict.fromkeys(find_blocks(model), way)):
            graph = capture(model, x, mode="train", precision=dtype)
        return sum(op.name == "tessera.sdpa" for op in graph.ops)

    assert attentions(RECOMPUTE) == 8
    assert attentions(BlockChoice(name="selective", saves=frozenset({("attention", 0)}))) == 4


def test_what_a_captured_plan_saves_is_saved_for_real():
    """The operators a plan names are the ones a run meets: the same numbers of products, forward and again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func._schema.name in ("aten::mm", "aten::addmm")
            return func(*args, **(kwargs or {}))

    model, x = Stack(2), torch.randn(2, 8, 32)
    way = BlockChoice(name="selective", saves=frozenset({("addmm", 0), ("addmm", 2)}))
    with checkpoint.apply(model, dict.fromkeys(find_blocks(model), way)):
        graph = capture(model, x, mode="train")
        with Count() as seen:
            gradients(model, x)
    assert seen.products == sum(op.kind == "gemm" for op in graph.ops)


def test_a_language_model_of_transformers_takes_a_plan():
    transformers = pytest.importorskip("transformers")
    vision("resnet18")  # lets transformers import torchvision
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=50,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 50, (2, 8))

    def loss_and_gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    before = loss_and_gradients()
    plan = checkpoint.plan(model, {"input_ids": ids, "labels": ids}, on="h200", policy="memory")
    assert [b.name for b in plan.blocks] == [f"model.layers.{i}" for i in range(3)]
    with checkpoint.apply(model, plan):
        assert exactly_equal(before, loss_and_gradients())
    model.gradient_checkpointing_enable()
    with pytest.raises(RewriteError, match="itself"):
        checkpoint.apply(model, checkpoint.every(model))


class Writes(nn.Module):
    """Changes its input, which a recomputation would start from."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x.add_(1.0)
        return self.inner(x)


def test_blocks_that_write_into_their_input_are_named_as_the_cause():
    model = nn.Sequential(nn.Linear(8, 8), *(Writes() for _ in range(3)))
    with pytest.raises(RewriteError, match="writes into its input") as caught:
        checkpoint.plan(model, torch.randn(4, 8), on="h200")
    assert "blocks=" in caught.value.fix
