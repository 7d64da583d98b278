"""Programs nobody had tried: each was an error, or an absurd figure, when it was first predicted."""

from __future__ import annotations

import functools
import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tessera
from tessera.errors import CaptureError, DataDependent, PredictionError
from tessera.estimate import kernel_time
from tessera.estimate.ops import UNMODELLED
from tessera.graph.capture import capture
from tessera.graph.ir import Graph


def names(graph: Graph) -> list[str]:
    return [op.name.rpartition(".")[2] for op in graph.kernels]


def on(chip: str, program: Any, inputs: Any, **asked: Any) -> tessera.EnergyReport:
    return tessera.predict(program, inputs, on=chip, launch="graph", calibration=None, check_memory=False, **asked)


# -- values that decide sizes ------------------------------------------------------------------------------------


def test_a_known_mask_selects_as_many_as_it_has():
    mask = torch.zeros(8, 4, dtype=torch.bool)
    mask[:3] = True
    for select in (lambda x, m: x[m], torch.masked_select):
        graph = capture(lambda x, m, select=select: select(x, m) * 2, (torch.randn(8, 4), mask))
        assert names(graph) == ["nonzero", "index", "mul"]
        assert graph.ops[-1].outputs[0].shape == (12,)
        assert graph.kernels[0].sync, "the host waits for the number"


def test_a_known_mask_selects_rows_and_its_gradient_puts_them_back():
    mask = torch.tensor([True, False, True, True])
    x = torch.randn(4, 5, requires_grad=True)
    graph = capture(lambda m: x[m].sum().backward(), (mask,))
    assert names(graph)[:2] == ["nonzero", "index"] and any("index_put" in name for name in names(graph))


def test_a_number_put_where_a_mask_says_is_a_fill():
    def fn(x):
        y = x.clone()
        y[x > 0] = 0.0
        return y

    assert names(capture(fn, torch.randn(8, 4))) == ["clone", "gt", "masked_fill_"]

    def rows(x):
        return torch.index_put(x, (x[:, 0] > 0,), torch.zeros(()))

    assert names(capture(rows, torch.randn(8, 4))) == ["gt", "zeros", "masked_fill"]


def test_unique_counts_and_repeats_of_known_values():
    ids = torch.tensor([3, 1, 3, 0])
    assert capture(lambda x: torch.unique(x) * 2, ids).ops[-1].outputs[0].shape == (3,)
    assert capture(lambda x: torch.unique_consecutive(x) * 2, ids).ops[-1].outputs[0].shape == (4,)
    assert capture(lambda x: torch.bincount(x) * 2, ids).ops[-1].outputs[0].shape == (4,)
    assert capture(lambda x: torch.arange(4).repeat_interleave(x) * 2, ids).ops[-1].outputs[0].shape == (7,)
    for fn in (torch.unique, lambda x: x[x > 0]):
        with pytest.raises(DataDependent, match=r"test_predict_unusual_programs|torch") as caught:
            capture(lambda x, fn=fn: fn(x), torch.randn(8))
        assert "meta_nonzero" not in str(caught.value), "torch's advice on its own switches is of no use here"


def test_masks_of_chosen_experts_are_evenly_full():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 8)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.gate(x).topk(2, dim=-1).indices
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                mask = (chosen == i).any(-1)
                if mask.any():
                    out[mask] += expert(x[mask])
            return out

    graph = capture(Mixture(), torch.randn(64, 16))
    products = [op for op in graph.kernels if op.name == "aten.addmm"]
    assert len(products) == 9, "no expert is left out"
    assert [op.params["m"] for op in products[1:]] == [16] * 8, "2 of 8 for each of 64 tokens"
    assert any("spread evenly" in line for line in graph.assumptions)


def count_one_by_one(chosen: torch.Tensor) -> list[int]:
    return [int((chosen == i).sum()) for i in range(4)]


@pytest.mark.parametrize(
    "count",
    [
        lambda chosen: torch.bincount(chosen.flatten(), minlength=4).tolist(),
        lambda chosen: torch.histc(chosen.float(), 4, 0, 3).int().tolist(),
        lambda chosen: F.one_hot(chosen, 4).sum((0, 1)).tolist(),
        lambda chosen: (chosen[..., None] == torch.arange(4)).sum((0, 1)).tolist(),
        lambda chosen: chosen.new_zeros((len(chosen), 4)).scatter_(1, chosen, 1).sum(0).cpu().numpy().tolist(),
        lambda chosen: torch.zeros(len(chosen), 4).scatter(1, chosen, 1).long().sum(0).tolist(),
        lambda chosen: F.one_hot(chosen, 4).sum((0, 1)).cumsum(0).diff(prepend=torch.tensor([0])).tolist(),
        count_one_by_one,
    ],
)
def test_tokens_sorted_by_expert_are_split_by_even_counts(count: Any):
    """As DeepSeek's own code does: the tokens of each expert are a slice, whose length the program asks for."""
    router, experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def mix(x: torch.Tensor) -> torch.Tensor:
        chosen = router(x).topk(2, dim=-1).indices
        parts = x[chosen.flatten().argsort() // 2].split(count(chosen))
        return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)])

    def rows(tokens: int) -> list[int]:
        graph = capture(mix, torch.randn(tokens, 16))
        assert any("spread evenly" in line for line in graph.assumptions)
        return [op.params["m"] for op in graph.kernels if op.name == "aten.addmm"][1:]

    assert rows(33) == [17, 17, 16, 16]
    assert rows(1) == [1, 1], "one token reaches two experts"


def test_what_a_model_keeps_of_integers_is_known():
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("stride", torch.tensor(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.pad(x, (0, int(self.stride - x.shape[-1] % self.stride)))

    assert capture(Padded(), torch.randn(2, 7)).ops[-1].outputs[0].shape == (2, 8)


def test_values_that_only_a_float_has():
    def fn(x):
        assert torch.allclose(x, x) and torch.equal(x, x)
        return x * sum(x.mean(0).tolist()) + torch.from_numpy(x.cpu().numpy()).sum()

    graph = capture(fn, torch.randn(4, 4))
    assert sum("taken to be" in line for line in graph.assumptions) >= 2


def test_distributions_check_their_arguments():
    def loss(x):
        q = torch.distributions.Normal(x, x.exp(), validate_args=True)  # others may have turned it off
        p = torch.distributions.Categorical(logits=x, validate_args=True)
        return q.log_prob(q.rsample()).sum() + p.log_prob(p.sample()).sum()

    graph = capture(loss, torch.randn(4, 8))
    assert any("_is_all_true() is taken to be True" in line for line in graph.assumptions)


# -- programs that hold their own tensors ------------------------------------------------------------------------

WEIGHT = torch.randn(8, 8, requires_grad=True)


def _loss(x: torch.Tensor) -> torch.Tensor:
    return (x @ WEIGHT).sum()


def _script(x: torch.Tensor) -> None:
    _loss(x).backward()


class _Step:
    def __init__(self) -> None:
        self.weight = torch.randn(8, 8, requires_grad=True)

    def __call__(self, x: torch.Tensor) -> None:
        (x @ self.weight).sum().backward()

    def run(self, x: torch.Tensor) -> None:
        self(x)


def test_leaves_are_found_wherever_a_program_keeps_them():
    weight = torch.randn(8, 8, requires_grad=True)
    in_dict, in_tuple, step = {"w": weight}, (weight,), _Step()
    programs = [
        _script,
        step,
        step.run,
        lambda x: (x @ in_dict["w"]).sum().backward(),
        lambda x: (x @ in_tuple[0]).sum().backward(),
        functools.partial(lambda w, x: (x @ w).sum().backward(), weight),
    ]
    for program in programs:
        assert capture(program, torch.randn(4, 8)).flops == 2 * 2 * 4 * 8 * 8
    assert WEIGHT.grad is None and weight.grad is None and step.weight.grad is None
    assert in_dict["w"] is weight and in_tuple[0] is weight and programs[-1].args == (weight,)
    assert WEIGHT.device.type == step.weight.device.type == "cpu", "everything is back in its place"


def test_a_list_that_the_program_shortens_is_whole_again():
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    before = list(weights)
    capture(lambda x: (x @ weights.pop()).sum().backward(), torch.randn(4, 8))
    assert len(weights) == 2 and all(a is b for a, b in zip(weights, before, strict=True))


def test_a_functional_training_step():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    parameters = dict(model.named_parameters())

    def loss(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    def step(x, y):
        gradients = torch.func.grad(loss)(parameters, x, y)
        return {name: p - 0.1 * gradients[name] for name, p in parameters.items()}

    graph = capture(step, (torch.randn(8, 16), torch.randint(0, 4, (8,))))
    forward = 2 * 8 * (16 * 32 + 32 * 4)
    assert graph.flops == forward + 2 * 8 * (16 * 32 + 2 * 32 * 4), "no gradient of the inputs"
    assert parameters["0.weight"] is model[0].weight


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss, weight, x: torch.func.grad(loss)(weight, x),
        lambda loss, weight, x: torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x),
        lambda loss, weight, x: torch.func.vjp(loss, weight, x)[1](torch.ones(())),
        lambda loss, weight, x: torch.func.jacrev(torch.func.jacrev(loss))(weight, x),
    ],
)
def test_transforms_reach_real_tensors_around_a_program(transform: Any):
    weight = torch.randn(16, 4)  # wants no gradient: torch.func asks for one all the same

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).pow(2).sum()

    graph = capture(lambda x: transform(loss, weight, x), torch.randn(8, 16))
    assert graph.flops >= 2 * 2 * 8 * 16 * 4
    assert weight.device.type == "cpu"


def test_a_model_that_cannot_be_trained_is_told_why():
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    with pytest.raises(CaptureError, match="no_grad") as caught:
        capture(Generator(), torch.randn(4, 8), mode="train")
    assert "mode='infer'" in str(caught.value)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_fused_optimizers_are_one_kernel_that_moves_the_model(make: Any):
    model = nn.Linear(64, 64)
    optimizer = make(model.parameters(), lr=0.1, fused=True)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    (update,) = [op for op in capture(step, torch.randn(8, 64)).kernels if "_fused_" in op.name]
    assert update.kind == "foreach" and "unmodelled" not in update.params
    assert sum(t.nbytes for t in update.outputs) >= 4 * sum(p.numel() for p in model.parameters())


def test_hooks_that_a_program_hangs_on_its_modules_are_taken_off():
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "watched"):
                self.watched = True
                self.inner.register_forward_hook(lambda _module, _args, out: out + 1)
            return self.inner(x)

    model = Watched()
    first, second = (names(capture(model, torch.randn(2, 4))) for _ in range(2))
    assert first == second == ["addmm", "add"]
    assert not model.inner._forward_hooks and not hasattr(model, "watched")


def test_a_capturable_optimizer():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    assert "aten._foreach_add_" in [
        op.name for op in capture(model, torch.randn(2, 8), mode="train", optimizer=optimizer).kernels
    ]
    with pytest.raises(AssertionError, match="capturable"):  # torch's own answer is its own again
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()


# -- operators ---------------------------------------------------------------------------------------------------


def test_distances_are_a_product():
    graph = capture(torch.cdist, (torch.randn(2, 64, 3), torch.randn(2, 48, 3)))
    (product,) = [op for op in graph.kernels if op.kind == "gemm"]
    assert product.flops == 2 * 2 * 64 * 48 * 5 and graph.ops[-1].outputs[0].shape == (2, 64, 48)


def test_distances_without_a_product_go_through_all_coordinates():
    near, far = (
        on("h200", lambda a, b: torch.cdist(a, b, p=1.0), (torch.empty(4096, d, device="meta"),) * 2) for d in (2, 256)
    )
    assert far.prediction.device_s > 20 * near.prediction.device_s
    assert any("_cdist_forward" in note for note in far.notes)


def test_a_bilinear_layer_is_two_products_for_each_output():
    layer = nn.Bilinear(16, 24, 5)
    graph = capture(layer, (torch.randn(32, 16), torch.randn(32, 24)))
    assert graph.flops == 5 * (2 * 32 * 16 * 24 + 2 * 32 * 24)
    assert graph.ops[-1].outputs[0].shape == (32, 5)
    trained = capture(layer, (torch.randn(32, 16), torch.randn(32, 24)), mode="train")
    assert trained.flops > 1.9 * graph.flops


def test_a_projected_lstm_counts_its_cell():
    plain, projected = (nn.LSTM(16, 64, 2, proj_size=p, batch_first=True) for p in (0, 8))
    graph = capture(projected, torch.randn(4, 10, 16))
    each = [4 * 64 * (inputs + 8) + 64 * 8 for inputs in (16, 8)]
    assert graph.flops == 2 * 4 * 10 * sum(each)
    assert next(op for op in graph.kernels if op.kind == "rnn").outputs[0].shape == (4, 10, 8)
    x = torch.empty(64, 100, 16, device="meta")
    longer, shorter = (on("h200", nn.LSTM(16, h, 2, proj_size=8, batch_first=True), x) for h in (1024, 64))
    assert longer.total_latency_s > shorter.total_latency_s
    assert capture(plain, torch.randn(4, 10, 16)).flops == 2 * 4 * 10 * 4 * 64 * (16 + 64 + 64 + 64)


def test_a_connectionist_loss_is_captured_and_said_not_to_be_modelled():
    def loss(scores, targets):
        lengths = torch.full((4,), 50), torch.full((4,), 10)
        return F.ctc_loss(scores.log_softmax(-1), targets, *lengths).backward()

    scores = torch.randn(50, 4, 20, requires_grad=True)
    graph = capture(loss, (scores, torch.randint(1, 20, (4, 10))))
    (forward,) = [op for op in graph.kernels if op.name == "aten._ctc_loss"]
    assert forward.outputs[1].shape == (4, 50, 21) and any("_ctc_loss_backward" in n for n in names(graph))
    assert any("_ctc_loss" in note for note in on("h200", graph, ()).notes)


def test_what_is_not_modelled_says_so_and_has_a_wide_interval():
    report = on("h200", lambda a: torch.linalg.svd(a)[1] + torch.matrix_exp(a)[..., 0], torch.randn(4, 64, 64))
    (note,) = [n for n in report.notes if n.startswith("not modelled")]
    assert "_linalg_svd" in note and "linalg_matrix_exp" in note
    unknown = [d for d in report.descriptors if "linalg" in d.subgraph_name]
    assert unknown and all(d.error_s >= 0.99 * UNMODELLED * d.device_s for d in unknown)
    plain = on("h200", lambda x: F.gelu(x).clamp_(0).masked_fill_(x > 0, 1.0).softmax(-1), torch.randn(64, 64))
    assert not any("not modelled" in note for note in plain.notes)


def test_an_operator_of_the_users_own_is_not_taken_for_a_model():
    library = torch.library.Library("unseen", "DEF")
    library.define("mix(Tensor x) -> Tensor")
    library.impl("mix", torch.empty_like, "Meta")
    report = on("h200", torch.ops.unseen.mix, torch.randn(64, 64))
    assert any("unseen.mix" in note for note in report.notes)
    library._destroy()


def test_a_transform_goes_through_its_data_once_for_each_dimension():
    x = torch.empty(64, 512, 512, device="meta")
    one, two = (on("h200", f, x).prediction for f in (torch.fft.rfft, torch.fft.rfft2))
    assert two.hbm_bytes == pytest.approx(2 * one.hbm_bytes, rel=0.02)
    long = on("h200", torch.fft.rfft, torch.empty(64, 1 << 20, device="meta"))
    assert long.prediction.hbm_bytes > 1.9 * 64 * (1 << 20) * 8
    assert long.prediction.error_s > 0.5 * long.total_latency_s


def test_the_product_of_two_vectors_runs_at_the_memorys_speed():
    report = on("h200", torch.dot, (torch.empty(1 << 26, device="meta"),) * 2)
    assert report.total_latency_s < 4 * 2 * (1 << 26) * 4 / 4.8e12


def test_values_wider_than_keys_take_longer():
    def attend(v_dim: int) -> float:
        q, v = (torch.empty(2, 8, 4096, d, dtype=torch.bfloat16, device="meta") for d in (64, v_dim))
        return on("h200", F.scaled_dot_product_attention, (q, q, v)).total_latency_s

    assert attend(256) > 1.8 * attend(64)


def test_large_heads_are_fused_but_where_heads_share_keys():
    q, k = (torch.empty(1, heads, 256, 512, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    assert names(capture(F.scaled_dot_product_attention, (q, q, q))) == ["sdpa"]
    apart = capture(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), (q, k))
    assert "sdpa" not in names(apart)
    report = on("h200", F.scaled_dot_product_attention, (q, q, q))
    assert report.descriptors[0].error_s >= 0.99 * UNMODELLED * report.descriptors[0].device_s


def test_padding_is_computed_on_where_torch_would_drop_it():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, padding = nn.TransformerEncoder(layer, 2), torch.tensor([[False] * 6 + [True] * 2] * 3)
    graph = capture(model, {"src": torch.randn(3, 8, 16), "src_key_padding_mask": padding})
    assert any("padding is computed on" in line for line in graph.assumptions)
    assert graph.flops >= 2 * 2 * 24 * (4 * 16 * 16 + 2 * 16 * 32)


def test_flexible_attention_over_the_blocks_of_its_mask():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.empty(2, 4, 512, 64, dtype=torch.bfloat16)
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cpu", BLOCK_SIZE=128)
    whole = capture(lambda q: flex.flex_attention(q, q, q), (q,))
    part = capture(lambda q: flex.flex_attention(q, q, q, block_mask=mask), (q,))
    assert names(whole) == names(part) == ["sdpa"]
    assert part.flops == whole.flops * 10 // 16, "ten of sixteen blocks"
    assert any("flex_attention" in line for line in part.assumptions)
    assert flex.flex_attention.__code__.co_filename == flex.__file__, "the real one is back"


def test_flexible_attention_of_another_thread_is_left_alone():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    found = queue.SimpleQueue()  # a list that the program holds would be put back
    x = torch.randn(1, 1, 128, 16)
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, before = True, flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG

    def attend():
        found.put(flex.flex_attention(x, x, x))

    def program(y):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
        return y * 2

    try:
        capture(program, torch.randn(4))
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
    assert torch.allclose(found.get_nowait(), F.scaled_dot_product_attention(x, x, x), atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_inputs_and_buffers_in_another_layout_are_refused_in_words():
    model = nn.Linear(4, 4)
    model.register_buffer("edges", torch.eye(4).to_sparse_csr())
    with pytest.raises(CaptureError, match="buffer is a sparse tensor"):
        capture(model, torch.randn(4, 4))
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with pytest.raises(CaptureError, match="input, parameter or buffer is a nested tensor"):
        capture(nn.Linear(4, 4), ragged)
    edges = torch.eye(4).to_sparse_csr()
    with pytest.raises(CaptureError, match="uses a sparse tensor"):
        capture(lambda x: edges @ x, torch.randn(4, 4))


def test_what_cannot_be_captured_says_what_and_where():
    with pytest.raises(CaptureError, match="sparse tensor") as caught:
        capture(nn.Sequential(nn.Embedding(64, 8, sparse=True)), torch.randint(0, 64, (4, 4)), mode="train")
    assert "sparse=False" in str(caught.value)
    with pytest.raises(CaptureError, match="nested tensor"):
        capture(torch.nested.nested_tensor_from_jagged, (torch.randn(8, 4), torch.tensor([0, 3, 8])))
    with pytest.raises(PredictionError, match="mm multiplies int64"):
        on("h200", lambda x: x @ x, torch.ones(4, 4, dtype=torch.int64))
    with pytest.raises(DataDependent) as told:
        tessera.predict(lambda x: x[x > 0], torch.randn(8), on="h200")
    assert "device='cpu'" in str(told.value)
    assert "test_predict_unusual_programs.py" in str(told.value) and "estimate/predict.py" not in str(told.value)


def test_a_program_that_runs_nothing_says_so():
    report = tessera.predict(nn.Identity(), torch.randn(4), on="h200")
    assert report.total_energy_j == 0 and any("nothing runs on the device" in note for note in report.notes)


# -- laws --------------------------------------------------------------------------------------------------------


def _scatter(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).index_add_(0, index, x)


LAWS = {
    "scatter": (_scatter, (torch.empty(100_000, 128, device="meta"), torch.randint(0, 1000, (100_000,)))),
    "scan": (lambda x: x.cumsum(-1), torch.empty(1024, 16384, device="meta")),
    "small fp32 product": (nn.Linear(512, 512), torch.empty(256, 512, device="meta")),
    "norm": (nn.LayerNorm(1024), torch.empty(8192, 1024, device="meta")),
    "fill": (torch.zeros_like, torch.empty(1 << 28, device="meta")),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q), torch.empty(4, 16, 1024, 64, device="meta")),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_chip_with_less_bandwidth_is_never_the_faster(name: str):
    graph = capture(*LAWS[name])
    h200, h100, a100 = (on(chip, graph, ()).prediction.device_s for chip in ("h200", "h100", "a100"))
    assert h200 <= 1.01 * h100, "the same SMs, more bandwidth"
    assert h100 <= a100


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("chip", ["h200", "h100", "a100", "mi300x"])
def test_no_kernel_is_faster_than_the_memory(name: str, chip: str):
    bandwidth = tessera.hardware.lookup(chip).memory.bandwidth_bytes_per_s.value
    for d in on(chip, *LAWS[name]).descriptors:
        assert d.device_s >= d.hbm_bytes / bandwidth * (1 - 1e-9)


def test_a_replay_is_no_slower_than_launching_one_by_one():
    for size in (64, 1024, 4096):
        graph = capture(nn.Linear(1024, 1024), torch.empty(size, 1024, device="meta"))
        eager, replayed = (
            tessera.predict(graph, on="h200", launch=how, calibration=None).total_latency_s
            for how in ("eager", "graph")
        )
        assert replayed <= 1.01 * eager, size
    tiny = capture(lambda x: x.clone(), torch.empty(65536, device="meta"))
    assert on("h200", tiny, ()).total_latency_s == pytest.approx(4.06e-6, rel=0.1), "as was measured"


def test_the_residual_is_carried_to_the_same_sms_and_to_the_same_kernels_only():
    """fp32 products are the same code on every chip since Ampere; other kernels differ between architectures."""
    h100, a100 = (kernel_time.chip(tessera.hardware.lookup(name)) for name in ("h100", "a100"))
    carried = kernel_time.find_correction(h100, lambda features: features[0], lambda _: np.zeros((1, 1)))
    assert carried is not None and "the same SMs" in carried.source
    assert kernel_time.find_correction(a100, lambda features: features[0], lambda _: np.zeros((1, 1))) is None
    graph = capture(*LAWS["small fp32 product"])
    for name in ("h100", "a100"):
        product = on(name, graph, ()).descriptors[0]
        assert "the same kernels" in product.provenance
        assert product.error_s > 0.2 * product.device_s, "nothing was measured there"
