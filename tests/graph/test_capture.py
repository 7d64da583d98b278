"""Capture: what runs is seen, nothing is computed, everything is put back, and what cannot be done says where."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tessera.errors import ArgumentError, CaptureError, DataDependent
from tessera.graph.capture import capture
from tessera.graph.op_kinds import kind_of
from tessera.graph.surroundings import find_models


def names(graph):
    return [op.name.rpartition(".")[2] for op in graph.kernels]


def kinds(graph):
    return [op.kind for op in graph.kernels]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


def test_inference_is_what_dispatches():
    graph = capture(Net(), torch.randn(4, 3, 16, 16))
    assert names(graph) == ["convolution", "native_batch_norm", "relu", "mean", "addmm"]
    assert [op.scope for op in graph.kernels] == ["conv", "norm", "", "", "head"]
    assert graph.samples == 4
    assert graph.flops == 2 * 4 * 8 * 16 * 16 * 27 + 2 * 4 * 8 * 10
    assert graph.parameters == sum(p.numel() for p in Net().parameters())


def test_views_launch_nothing():
    def fn(x):
        return x.view(4, -1).t().unsqueeze(0).expand(3, -1, -1)

    graph = capture(fn, torch.randn(4, 3, 5))
    assert graph.kernels == ()
    assert {op.kind for op in graph.ops} == {"view"}


def test_a_permuted_tensor_is_copied_once():
    graph = capture(lambda x: x.transpose(1, 2).contiguous().view(-1), torch.randn(2, 3, 4))
    assert kinds(graph) == ["copy"]


def test_training_has_backward_and_optimizer():
    graph = capture(Net(), torch.randn(4, 3, 16, 16), mode="train", optimizer="adamw")
    phases = [op.phase for op in graph.kernels]
    assert phases.index("backward") > phases.index("forward")
    assert phases[-1] == "optimizer"
    assert any(op.kind == "foreach" for op in graph.kernels)
    backward = [op for op in graph.kernels if op.name.endswith("convolution_backward")]
    assert len(backward) == 1
    assert backward[0].scope == "conv"  # a gradient belongs to the module that made it necessary
    categories = {s.category for s in graph.storages.values()}
    assert categories >= {"weights", "gradients", "optimizer", "activations", "inputs"}


def test_sgd_moves_fewer_bytes_than_adamw():
    sgd, adamw = (capture(Net(), torch.randn(2, 3, 8, 8), mode="train", optimizer=o) for o in ("sgd", "adamw"))
    moved = [sum(op.bytes_in + op.bytes_out for op in g.kernels if op.phase == "optimizer") for g in (sgd, adamw)]
    assert 0 < moved[0] < moved[1]


def test_the_gradient_of_indexing_adds_and_an_assignment_does_not():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 4))

        def forward(self, ids):
            return torch.zeros(10, 4).index_put((ids,), self.weight[ids])

    graph = capture(Rows(), torch.tensor([1, 3, 3]), mode="train")
    puts = {op.phase: op.params["accumulate"] for op in graph.kernels if "index_put" in op.name}
    assert puts == {"forward": False, "backward": True}


def test_what_is_made_like_a_tensor_does_not_read_it():
    graph = capture(lambda x: (torch.zeros_like(x), x.new_ones(3), torch.rand_like(x)), torch.randn(1000))
    assert [(op.bytes_in, op.bytes_out) for op in graph.kernels] == [(0, 4000), (0, 12), (0, 4000)]


def test_an_rms_norm_in_two_formats_falls_apart():
    x, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.ones(8)
    graph = capture(lambda x: F.rms_norm(x, (8,), weight), x)
    assert names(graph) == ["_to_copy", "pow", "mean", "add_", "rsqrt", "mul", "mul", "_to_copy"]
    assert graph.kernels[-1].outputs[0].dtype == "bf16"
    assert names(capture(lambda x: F.rms_norm(x, (8,), weight.bfloat16()), x)) == ["rms_norm"]


def test_the_dimension_of_a_norm_stands_behind_its_order():
    graph = capture(lambda x: (x.norm(2, 1), x.prod(-1), x.sum(0)), torch.randn(4, 5, 6))
    assert [op.params["dim"] for op in graph.kernels] == [[1], -1, [0]]


def test_how_often_the_gradient_of_indexing_adds_to_one_row_is_known():
    weight, ids = nn.Parameter(torch.randn(10, 4)), torch.arange(6).clamp(max=2).view(2, 3)

    def step(ids):
        weight[ids].sum().backward()

    (put,) = (op for op in capture(step, ids).kernels if "index_put" in op.name)
    assert put.params["longest_run"] == 4
    (put,) = (op for op in capture(step, ids.to("meta")).kernels if "index_put" in op.name)
    assert put.params["longest_run"] is None


def test_nothing_is_allocated_or_changed():
    model = Net()
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = dict(model._forward_hooks)
    capture(model, torch.randn(2, 3, 8, 8), mode="train")
    capture(model, torch.randn(2, 3, 8, 8), precision="bf16")
    assert model.training and model.conv.training
    assert dict(model._forward_hooks) == hooks
    for k, v in model.state_dict().items():
        assert v.device.type == "cpu" and v.dtype == before[k].dtype and torch.equal(v, before[k])
    assert all(p.grad is None for p in model.parameters())


def test_everything_is_put_back_when_the_model_fails():
    class Broken(Net):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("on purpose")

    model = Broken()
    with pytest.raises(CaptureError, match="on purpose") as caught:
        capture(model, torch.randn(2, 3, 8, 8))
    assert "test_capture.py" in str(caught.value)
    assert model.conv.weight.device.type == "cpu"
    assert not F.scaled_dot_product_attention.__module__.startswith("tessera")


def test_a_large_model_costs_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(40)))  # 43 GB in fp32
    graph = capture(model, torch.empty(8, 16384, device="meta"))
    assert graph.parameters > 10e9
    assert graph.flops == 40 * 2 * 8 * 16384**2


@pytest.mark.parametrize(("causal", "gqa"), [(False, False), (True, False), (True, True)])
def test_attention_is_one_kernel(causal, gqa):
    q = torch.empty(2, 8, 64, 32, dtype=torch.bfloat16)
    k = torch.empty(2, 2 if gqa else 8, 64, 32, dtype=torch.bfloat16)
    graph = capture(lambda: F.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=gqa))
    assert names(graph) == ["sdpa"]
    op = graph.kernels[0]
    assert op.params["causal"] is causal and op.params["kv_heads"] == k.shape[1]
    pairs = 64 * 65 // 2 if causal else 64 * 64
    assert op.flops == 4 * 2 * 8 * pairs * 32


def test_attention_that_no_fused_kernel_takes_falls_apart():
    q = torch.empty(2, 4, 16, 8)
    bias = torch.empty(16, 16, 4).permute(2, 0, 1).unsqueeze(0)  # its last dimension does not run fastest
    graph = capture(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=bias))
    assert "sdpa" not in names(graph)
    assert kinds(graph).count("gemm") == 2
    assert "_softmax" in names(graph)


def test_keys_that_must_be_broadcast_are_not_fused():
    q, k = torch.empty(2, 8, 16, 32, dtype=torch.bfloat16), torch.empty(2, 1, 16, 32, dtype=torch.bfloat16)
    assert "sdpa" not in names(capture(lambda: F.scaled_dot_product_attention(q, k, k)))
    assert names(capture(lambda: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))) == ["sdpa"]


def test_attention_backward_is_recorded():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 32)

    graph = capture(Attend(), torch.randn(2, 16, 32), mode="train")
    forward, backward = (op for op in graph.kernels if op.kind == "attention")
    assert backward.flops == forward.flops * 5 // 2
    assert backward.phase == "backward"


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_is_one_operator(cell):
    layer = getattr(nn, cell)(16, 32, num_layers=2, batch_first=True)
    graph = capture(layer, torch.randn(3, 5, 16))
    assert kinds(graph).count("rnn") == 1
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[cell]
    assert graph.flops == 2 * 3 * 5 * gates * 32 * ((16 + 32) + (32 + 32))
    trained = capture(layer, torch.randn(3, 5, 16), mode="train")
    assert kinds(trained).count("rnn") == 2


@pytest.mark.parametrize(("cell", "gradient", "sums"), [("LSTM", "_backward_impl", 1), ("GRU", "_backward", 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_recurrent_cell_is_two_products_and_one_kernel(cell, gradient, sums, bias):
    """As traced on an H200 (h200_heldout7_traces: lstm_cells); a meta tensor's cell falls apart into 18 operators."""

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = getattr(nn, f"{cell}Cell")(16, 32, bias=bias)

        def forward(self, x):
            state = None
            for t in range(3):
                state = self.cell(x[:, t], state)
            return state[0] if cell == "LSTM" else state

    fused = f"_thnn_fused_{cell.lower()}_cell"
    assert sorted(names(capture(Steps(), torch.randn(4, 3, 16)))) == [fused] * 3 + ["mm"] * 6 + ["zeros"]
    trained = [op for op in capture(Steps(), torch.randn(4, 3, 16), mode="train").kernels if op.phase == "backward"]
    backward = [op.name.removeprefix("aten.") for op in trained]
    assert backward.count(fused + gradient) == 3
    assert sum("sum" in name for name in backward) == 3 * sums * bias


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("multiply", [torch.sparse.mm, torch.matmul, lambda a, x: a @ x])
def test_a_sparse_product_is_of_its_nonzeros(multiply):
    """It was costed as a dense one of 100 million elements."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            at = torch.arange(50).repeat(2, 1)
            self.register_buffer("edges", torch.sparse_coo_tensor(at, torch.ones(50), (10_000, 10_000)))
            self.narrow = nn.Linear(8, 8)

        def forward(self, x):
            return multiply(self.edges, self.narrow(x))

    graph = capture(Graph(), torch.empty(10_000, 8), mode="train")
    assert "index_select" in names(graph) and "index_add" in names(graph)
    assert max(spec.numel for op in graph.ops for spec in (*op.inputs, *op.outputs)) == 80_000


def test_products_are_called_as_torch_lets_them_be_called():
    def run(x):
        return torch.matmul(input=x, other=x) + torch.mm(x, mat2=x) + x.matmul(other=x)

    assert names(capture(run, torch.empty(8, 8))).count("mm") == 3


def test_cells_of_autocast_multiply_in_its_format():
    def run(x):
        with torch.autocast("cuda", torch.bfloat16):
            return cell(x)

    cell = nn.GRUCell(16, 32)
    products = [op for op in capture(run, torch.randn(4, 16)).kernels if op.kind == "gemm"]
    assert [op.precision for op in products] == ["bf16"] * 2


def test_the_encoder_takes_its_fast_path_only_without_gradients():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    fast = capture(layer, torch.randn(2, 16, 32))
    assert kinds(fast).count("gemm") == 4 and kinds(fast).count("attention") == 1
    assert kinds(fast).count("norm") == 2
    slow = capture(layer, torch.randn(2, 16, 32), mode="train")
    assert len(slow.kernels) > 2 * len(fast.kernels)


def test_dropout_is_one_kernel_in_training_and_none_in_eval():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    assert names(capture(model, torch.randn(4, 8))) == ["addmm"]
    assert "native_dropout" in names(capture(model, torch.randn(4, 8), mode="train"))


def test_custom_autograd_functions_are_seen():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return Square.apply(self.fc(x))

    graph = capture(Model(), torch.randn(4, 8), mode="train")
    assert sum(op.name == "aten.mul" and op.phase == "backward" for op in graph.kernels) >= 2


def test_a_callable_that_steps_itself_is_taken_as_it_is():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device: a value nobody needs to know

    graph = capture(step, (torch.randn(8, 16), torch.randint(0, 4, (8,))))
    assert graph.mode == "step"
    assert any(op.kind == "foreach" for op in graph.kernels)
    assert graph.assumptions
    assert model.weight.device.type == "cpu" and not optimizer.state


def test_autocast_for_a_gpu_is_honoured_without_one():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    graph = capture(step, (torch.randn(8, 16), torch.randint(0, 4, (8,))))
    products = [op for op in graph.kernels if op.kind == "gemm"]
    assert {op.precision for op in products} == {"bf16"} and len(products) >= 5
    norm = next(op for op in graph.kernels if op.name == "aten.native_layer_norm")
    assert norm.inputs[0].dtype == "fp32"
    casts = [op for op in graph.kernels if op.name == "aten._to_copy" and op.phase == "forward"]
    assert len(casts) >= 5  # input, two weights, two biases, and back to fp32 for the norm and the loss
    assert torch.autocast("cpu").__enter__ is not None  # the class is as it was


def test_autocast_switched_off_inside_is_off():
    weight = torch.randn(8, 8)

    def fn(x):
        with torch.autocast(device_type=x.device.type, dtype=torch.float16):
            y = x @ weight
            with torch.autocast("cuda", enabled=False):
                return y, x @ weight

    precisions = [op.precision for op in capture(fn, torch.randn(4, 8)).kernels if op.kind == "gemm"]
    assert precisions == ["fp16", "fp32"]


def test_closures_with_real_tensors():
    weight = torch.randn(16, 16)
    graph = capture(lambda x: x @ weight, torch.randn(4, 16))
    assert graph.flops == 2 * 4 * 16 * 16


def test_a_program_written_for_cuda_is_captured_without_one():
    def fn(x):
        mask = torch.ones(4, 4, device="cuda").tril()
        return (x.cuda() @ mask.to("cuda:0")).cpu()

    graph = capture(fn, torch.randn(4, 4))
    assert "mm" in names(graph)


def test_known_integers_decide_branches():
    def fn(ids, mask):
        if mask.all():
            return ids * 2
        return ids[:, : int(mask.sum(1).max())] * 3

    full = capture(fn, (torch.randint(0, 9, (2, 8)), torch.ones(2, 8, dtype=torch.bool)))
    assert full.ops[-1].outputs[0].shape == (2, 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, 5:] = False
    part = capture(fn, (torch.randint(0, 9, (2, 8)), mask))
    assert part.ops[-1].outputs[0].shape == (2, 5)


def test_data_dependent_control_flow_names_the_line():
    def fn(x):
        count = (x > 0).sum()
        if count > 3:  # the line
            return x * 2
        return x

    with pytest.raises(DataDependent) as caught:
        capture(fn, torch.randn(8))
    assert "test_capture.py" in str(caught.value) and "fix" in str(caught.value)


def test_sizes_that_depend_on_values_name_the_operator():
    with pytest.raises(DataDependent, match="nonzero"):
        capture(lambda x: x[x > 0].sum(), torch.randn(8))


def test_a_known_mask_that_is_broadcast_still_selects():
    mask = torch.arange(40) % 3 == 0
    graph = capture(lambda x, m: torch.masked_select(x, m.unsqueeze(1)), (torch.randn(40, 8), mask))
    assert graph.ops[-1].outputs[0].shape == (14 * 8,)


def test_setting_a_slice_to_a_number_is_a_fill():
    def fn(x):
        y = x.clone()
        y[:2] = 1.0
        return y

    assert names(capture(fn, torch.randn(4, 4))) == ["clone", "fill_"]


def test_channels_last_is_kept_through_convolutions():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    graph = capture(model, torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last))
    assert [op.outputs[0].channels_last for op in graph.kernels] == [True] * 3


def test_planes_of_one_point_lose_channels_last_in_an_elementwise_kernel():
    pooled = torch.empty_strided((2, 32, 1, 1), (32, 1, 32, 32))
    graph = capture(lambda x: F.interpolate(F.relu(x), size=(4, 4), mode="bilinear"), pooled)
    assert [op.outputs[0].stride for op in graph.kernels] == [(32, 1, 1, 1), (512, 16, 4, 1)]  # as on a GPU


def test_precision_casts_parameters_and_floats_only():
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.fc = nn.Linear(8, 8)

        def forward(self, ids, scale):
            return self.fc(self.table(ids) * scale)

    graph = capture(Embed(), {"ids": torch.zeros(2, 3, dtype=torch.int64), "scale": torch.ones(1)}, precision="fp16")
    assert graph.kernels[-1].precision == "fp16"
    assert graph.kernels[0].inputs[1].dtype == "int64"


def test_batch_rescales_every_input():
    model = nn.Bilinear(4, 5, 6)
    graph = capture(model, (torch.randn(2, 4), torch.randn(2, 5)), batch=32)
    assert graph.samples == 32


def test_tf32_switches_are_read_when_each_operator_runs():
    class Switching(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(4, 4, 1), nn.Linear(16, 16)

        def forward(self, x):
            matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
            x = self.fc(self.conv(x).flatten(1))
            try:
                torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
                x = self.fc(x)
                x = self.conv(x.view(-1, 4, 2, 2))
            finally:
                torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
            return self.fc(x.flatten(1))

    graph = capture(Switching(), torch.randn(2, 4, 2, 2))
    assert [op.precision for op in graph.kernels] == ["tf32", "fp32", "tf32", "fp32", "fp32"]
    whatif = capture(Switching(), torch.randn(2, 4, 2, 2), precision="tf32")
    assert {op.precision for op in whatif.kernels} == {"tf32"}


def test_fp32_products_and_convolutions_follow_torchs_switches():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 4))
    graph = capture(model, torch.randn(2, 4, 2, 2))
    assert [op.precision for op in graph.kernels] == ["tf32", "fp32"]  # torch's own defaults
    assert [op.precision for op in capture(model, torch.randn(2, 4, 2, 2), precision="tf32").kernels] == [
        "tf32",
        "tf32",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "trian"}, "did you mean 'train'"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"batch": 0}, "batch of 0"),
    ],
)
def test_wrong_arguments_say_what_is_right(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        capture(nn.Linear(2, 2), torch.randn(1, 2), **arguments)


def test_training_a_plain_callable_is_refused():
    with pytest.raises(ArgumentError, match="needs a model"):
        capture(lambda x: x, torch.randn(2), mode="train")


def test_a_lazy_layer_is_refused_with_the_fix():
    with pytest.raises(CaptureError, match="lazy"):
        capture(nn.LazyLinear(4), torch.randn(2, 3))


def test_storages_have_lives():
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8))
    made = [s for s in graph.storages.values() if s.birth >= 0 and s.category == "activations"]
    assert made and any(s.death is not None and s.death > s.birth for s in made)


def test_kinds_of_unknown_operators():
    assert kind_of("aten.addmm") == "gemm"
    assert kind_of("aten._foreach_add_") == "foreach"
    assert kind_of("mylib.special") == "elementwise"
    assert kind_of("aten.squeeze_") == "view"


def test_a_users_own_optimizer_is_left_alone():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    graph = capture(model, torch.randn(2, 3, 8, 8), mode="train", optimizer=optimizer)
    assert any(op.kind == "foreach" for op in graph.kernels)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


def test_two_threads_capture_without_disturbing_each_other():
    from concurrent.futures import ThreadPoolExecutor

    original = F.scaled_dot_product_attention
    with ThreadPoolExecutor(4) as pool:
        graphs = list(pool.map(lambda _: capture(Net(), torch.randn(2, 3, 8, 8), mode="train"), range(8)))
    assert len({len(g.ops) for g in graphs}) == 1
    assert F.scaled_dot_product_attention is original


def test_hooks_do_not_pile_up_on_a_meta_model():
    with torch.device("meta"):
        model = Net()
    for _ in range(3):
        capture(model, torch.empty(2, 3, 8, 8, device="meta"), mode="train")
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_a_forward_keeps_is_given_back():
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.seen = {}, []
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            self.kept["y"] = y
            self.seen.append(y)
            return y

    model = Caches()
    capture(model, torch.randn(2, 4))
    assert model.kept == {} and model.seen == []


def test_real_tensors_of_the_program_are_not_written():
    counter = torch.zeros(3)

    def fn(x):
        counter.add_(1)
        return x * 2

    capture(fn, torch.randn(3))
    assert counter.tolist() == [0, 0, 0]


def test_any_failure_of_the_model_is_told_as_one():
    def fn(x):
        assert x.shape[0] == 3, "three, please"
        return x

    with pytest.raises(CaptureError, match="three, please"):
        capture(fn, torch.randn(2))


def test_autocast_reaches_into_torchs_own_attention():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def fn(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer(x)

    precisions = {
        op.precision for op in capture(fn, torch.randn(2, 16, 32)).kernels if op.kind in ("gemm", "attention")
    }
    assert precisions == {"bf16"}
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_in_the_same_region(reentrant):
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=reentrant).sum()
        y.backward()

    graph = capture(step, torch.randn(4, 16, requires_grad=True))
    products = [op for op in graph.kernels if op.kind == "gemm"]
    assert len(products) >= 7 and {op.precision for op in products} == {"bf16"}


def test_packed_sequences():
    from torch.nn.utils.rnn import pack_padded_sequence

    lstm = nn.LSTM(8, 16, batch_first=True)

    def fn(x):
        return lstm(pack_padded_sequence(x, [5, 3, 2], batch_first=True, enforce_sorted=False))[0].data

    graph = capture(fn, torch.randn(3, 5, 8))
    assert kinds(graph).count("rnn") == 1
    assert any(t.shape == (10, 16) for op in graph.ops if op.kind == "rnn" for t in op.outputs)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}, {"capturable": True}])
def test_optimizers_as_they_are_used_on_gpus(options):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), **({} if "capturable" in options else options))
    graph = capture(model, torch.randn(2, 8), mode="train", optimizer=optimizer)
    assert any(op.phase == "optimizer" for op in graph.kernels)


def test_literals_are_known_wherever_they_live():
    def fn(x):
        return x[: int(torch.tensor([3, 4], device=x.device)[1].item())]

    assert capture(fn, torch.randn(8)).ops[-1].outputs[0].shape == (4,)


def test_random_numbers_of_the_program_are_left_alone():
    before = torch.get_rng_state()
    capture(lambda x: x + torch.randn(4), torch.randn(4).clone())
    capture(nn.Dropout(0.5), torch.ones(4), mode="infer")
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randn(4)
    assert torch.equal(after, torch.get_rng_state())


def test_few_rows_touch_few_experts():
    from tessera.graph.flops import touched_groups

    assert touched_groups(8, 1) == pytest.approx(1)
    assert 1.8 < touched_groups(8, 2) < 2
    assert touched_groups(8, 1000) == pytest.approx(8)


def test_a_real_model_in_another_thread_is_not_disturbed():
    import threading

    q = torch.randn(1, 2, 8, 4)
    seen: list[str] = []

    class Waits(nn.Module):
        def forward(self, x):
            worker = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention(q, q, q).device.type))
            worker.start()
            worker.join()
            return x + 1

    capture(Waits(), torch.randn(2))
    assert seen == ["cpu"]


def test_nested_caches_and_counters_are_put_back():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(4, 2)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
            self.steps, self.losses, self.caches = 0, [], {"x": {}}

        def step(self, x):
            loss = self.model(x).sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.steps += 1
            self.losses.append(loss)
            self.caches["x"]["last"] = loss

    trainer = Trainer()
    capture(trainer.step, torch.randn(3, 4))
    assert trainer.steps == 0 and trainer.losses == [] and trainer.caches == {"x": {}}
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 and trainer.schedule.last_epoch == 0


def test_leaf_tensors_of_a_closure_train():
    weight = torch.randn(8, 8, requires_grad=True)
    graph = capture(lambda x: (x @ weight).sum().backward(), torch.randn(4, 8))
    assert sum(op.kind == "gemm" for op in graph.kernels) == 2
    assert weight.grad is None


def test_exported_and_scripted_programs():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    assert names(capture(torch.export.export(model, (x,)), x)) == ["addmm", "relu"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still around
        scripted = torch.jit.trace(model, x)
    with pytest.raises(CaptureError, match="scripted"):
        capture(scripted, x)


def test_a_loop_over_experts_spreads_its_tokens():
    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    router = nn.Linear(16, 4)

    def fn(x):
        chosen = router(x).topk(2, dim=-1).indices
        mask = F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for i in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            _, rows = torch.where(mask[i[0]])
            out.index_add_(0, rows, experts[0](x[rows]))
        return out

    graph = capture(fn, torch.randn(32, 16))
    products = [op for op in graph.kernels if op.kind == "gemm"]
    assert len(products) == 5 and {op.params["m"] for op in products[1:]} == {16}
    assert any("evenly" in a for a in graph.assumptions)


def test_autocast_reaches_attention_called_by_name():
    class Rotary(nn.Module):
        """Queries and keys come out of fp32 arithmetic, values out of a narrow product."""

        def forward(self, q, v):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return nn.functional.scaled_dot_product_attention(q * 1.5, q * 0.5, v)

    q = torch.randn(2, 4, 16, 8)
    graph = capture(Rotary(), (q, q))
    (attention,) = [op for op in graph.kernels if op.kind == "attention"]
    assert {t.dtype for t in attention.inputs} == {"bf16"}


def test_attention_over_columns_is_not_fused():
    x = torch.randn(2, 1, 8, 16, dtype=torch.float16)

    def attend(t):
        return nn.functional.scaled_dot_product_attention(t, t, t)

    assert any(op.kind == "attention" for op in capture(attend, (x,)).kernels)
    columns = capture(lambda t: attend(t.transpose(2, 3)), (x,)).kernels
    assert not any(op.kind == "attention" for op in columns)
    assert sum(op.kind == "gemm" for op in columns) == 2


def test_a_boolean_mask_is_made_additive_for_fused_attention():
    x, mask = torch.randn(1, 2, 8, 16, dtype=torch.float16), torch.ones(8, 8, dtype=torch.bool)
    graph = capture(lambda t, m: nn.functional.scaled_dot_product_attention(t, t, t, attn_mask=m), (x, mask))
    names = [op.name for op in graph.kernels]
    assert names.index("aten.where") < names.index("tessera.sdpa")


def test_a_program_that_imports_the_compiler_leaves_it_whole() -> None:
    """Dynamo keeps torch's functions by identity from its first import on; in a process of its own, since it stays."""
    code = """
import sys, torch, tessera
def program(x):
    import torch._dynamo
    return torch.nn.functional.dropout(x @ x, 0.1)
assert "torch._dynamo" not in sys.modules
tessera.predict(program, (torch.empty(8, 8),))
step = torch.compile(lambda x: x + 1 if torch.is_autocast_enabled("cpu") else x + 2, backend="eager", fullgraph=True)
print(step(torch.ones(1)).item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3.0", done.stderr[-800:]


class Hostile:
    """Raises whatever it is asked for."""

    def __getattr__(self, name):
        raise RuntimeError(f"nobody may ask for {name}")


class Disguised(Hostile):
    """Has no class to show and no attributes."""

    __slots__ = ()

    @property
    def __class__(self):
        raise RuntimeError("nobody may ask for the class")

    @property
    def __dict__(self):
        raise RuntimeError("nobody may ask for the attributes")


class Growing(dict):
    """Written to by another while somebody looks at its values."""

    def values(self):
        for value in super().values():
            self[len(self)] = None
            yield value


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.ops,
        lambda: torch.classes,
        lambda: sys.modules,
        Hostile,
        Disguised,
        lambda: Growing(a=1, b=2),
    ],
    ids=["ops", "classes", "modules", "hostile", "disguised", "growing"],
)
def test_strangers_around_a_program_are_left_alone(made, monkeypatch):
    model, stranger = nn.Linear(4, 4), made()
    monkeypatch.setitem(globals(), "STRANGER", [stranger])

    def step(x, default=stranger):
        return model(x), stranger, default, STRANGER  # noqa: F821 - set above

    before = len(sys.modules)
    found, _ = find_models(step)
    assert found == [model]
    assert len(sys.modules) == before


def test_models_of_several_partials_are_all_found():
    """What is made for the look alone must not be taken for something seen: addresses are used again."""
    models = [nn.Linear(1, 1) for _ in range(8)]
    found, _ = find_models(*(functools.partial(print, model) for model in models))
    assert found == models
