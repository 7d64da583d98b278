"""op.fft, op.spectral_conv2d, op.moe and op.all_reduce on the CPU: against torch, dense sums, and two processes."""

from __future__ import annotations

import importlib
import math
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tessera
from tessera import op, stream
from tessera.errors import ArgumentError
from tessera.op.spectral import fast_size, spectral_wins

moe_module = importlib.import_module("tessera.op.moe")  # `op.moe` is the operator
CPU = stream.create(name="work", device="cpu")


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


# -- transforms --------------------------------------------------------------------------------------------------------


def test_fft_is_torchs_over_any_dimensions():
    x = torch.randn(3, 8, 5)
    assert torch.allclose(op.fft(x), torch.fft.fft(x), atol=1e-5)
    assert torch.allclose(op.fft(x, (0, 1), norm="ortho", stream=CPU), torch.fft.fftn(x, dim=(0, 1), norm="ortho"))
    assert relative(op.ifft(op.fft(x, (0, 1, 2)), (0, 1, 2)).real, x) < 1e-6
    half = op.fft(x.half())
    assert (
        half.dtype == torch.complex64
        and relative(torch.view_as_real(half), torch.view_as_real(torch.fft.fft(x))) < 1e-2
    )
    leaf = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: op.fft(t, (0, 1)), leaf)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: op.fft(x, 3), "dims=3"),
        (lambda x: op.fft(x, (0, -3)), "twice"),
        (lambda x: op.ifft(x, ()), r"dims=\(\)"),
        (lambda x: op.fft(x, norm="best"), "norm='best'"),
        (lambda x: op.fft(x.int()), "x is torch.int32"),
        (lambda x: op.fft(x, stream="s"), "stream='s'"),
    ],
)
def test_wrong_transforms_are_named(call, said):
    with pytest.raises(ArgumentError, match=said):
        call(torch.randn(3, 4, 5))


@given(st.integers(1, 5000))
def test_fast_sizes_are_the_next_smooth_ones(n):
    def smooth(m):
        for prime in (2, 3, 5, 7):
            while m % prime == 0:
                m //= prime
        return m == 1

    assert fast_size(n) == next(m for m in range(n, 2 * n + 1) if smooth(m))


# -- spectral convolution ----------------------------------------------------------------------------------------------

SIZES = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3), groups=st.integers(1, 3), each=st.integers(1, 3), out=st.integers(1, 3), h=SIZES, w=SIZES,
    kh=st.integers(1, 5), kw=st.integers(1, 5), dilation=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    padding=st.one_of(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.sampled_from(["same", "valid"])),
    bias=st.booleans(),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's word on its own speed
def test_spectral_conv2d_is_conv2d(n, groups, each, out, h, w, kh, kw, dilation, padding, bias):
    torch.manual_seed(0)
    x = torch.randn(n, groups * each, h, w, dtype=torch.double)
    weight = torch.randn(groups * out, each, kh, kw, dtype=torch.double)
    b = torch.randn(groups * out, dtype=torch.double) if bias else None
    pads = (0, 0) if padding == "valid" else padding
    room = [s + (d * (k - 1) if pads == "same" else 2 * pads[i]) for i, (s, d, k) in
            enumerate(zip((h, w), dilation, (kh, kw), strict=True))]  # fmt: skip
    if any(d * (k - 1) + 1 > r for d, k, r in zip(dilation, (kh, kw), room, strict=True)):
        with pytest.raises(ArgumentError, match="w reaches over"):
            op.spectral_conv2d(x, weight, b, padding=padding, dilation=dilation, groups=groups)
        return
    wanted = F.conv2d(x, weight, b, padding=padding, dilation=dilation, groups=groups)
    found = op.spectral_conv2d(x, weight, b, padding=padding, dilation=dilation, groups=groups, stream=CPU)
    assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-10)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.half, 2e-3), (torch.bfloat16, 1e-2)])
def test_spectral_conv2d_keeps_the_dtype(dtype, most):
    torch.manual_seed(1)
    x, w = torch.randn(2, 4, 20, 17).to(dtype), torch.randn(6, 4, 7, 7).to(dtype)
    found = op.spectral_conv2d(x, w, padding=3)
    assert found.dtype == dtype
    assert relative(found.double(), F.conv2d(x.double(), w.double(), padding=3)) < most
    assert torch.equal(op.spectral_conv2d(x[0], w, padding=3), op.spectral_conv2d(x[:1], w, padding=3)[0])


def test_spectral_conv2d_has_conv2ds_gradients():
    x = torch.randn(2, 4, 6, 5, dtype=torch.double, requires_grad=True)
    for groups in (1, 2, 4):
        w = torch.randn(4, 4 // groups, 3, 2, dtype=torch.double, requires_grad=True)
        b = torch.randn(4, dtype=torch.double, requires_grad=True)
        seed = torch.randn(2, 4, 4, 5, dtype=torch.double)
        options = {"padding": (0, 1), "groups": groups, "dilation": (1, 2)}
        mine = torch.autograd.grad(op.spectral_conv2d(x, w, b, **options), (x, w, b), seed)
        theirs = torch.autograd.grad(F.conv2d(x, w, b, **options), (x, w, b), seed)
        assert all(torch.allclose(m, t, atol=1e-10) for m, t in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": torch.randn(4, 3, 3, 3)}, "w is 4x3x3x3"),
        ({"groups": 3}, "groups=3"),
        ({"bias": torch.randn(3)}, "bias is 3"),
        ({"padding": -1}, "padding=-1"),
        ({"padding": "full"}, "padding='full'"),
        ({"dilation": 0}, "dilation=0"),
        ({"w": torch.randn(4, 2, 9, 9)}, "w reaches over 9"),
        ({"x": torch.randn(4)}, "x is 4"),
        ({"w": torch.randn(4, 2, 3, 3).half()}, "w is torch.float16"),
    ],
)
def test_wrong_convolutions_are_named(change, said):
    given = {"x": torch.randn(1, 2, 8, 8), "w": torch.randn(4, 2, 3, 3), **change}
    with pytest.raises(ArgumentError, match=said):
        op.spectral_conv2d(given.pop("x"), given.pop("w"), given.pop("bias", None), **given)


def test_the_cost_model_prefers_transforms_for_large_kernels_only():
    verdicts = [spectral_wins((8, 256, 64, 64), (256, 1, k, k), padding=k // 2, groups=256) for k in (3, 7, 15, 31)]
    assert not verdicts[0] and verdicts[-1]
    assert [bool(v) for v in verdicts] == sorted(bool(v) for v in verdicts)  # once it wins it goes on winning
    assert all(v.direct_s > 0 and v.spectral_j > 0 and "mJ" in v.reason for v in verdicts)
    # Products of half precision on tensor cores are hard to beat with a dense 3x3.
    assert not spectral_wins((32, 256, 56, 56), (256, 256, 3, 3), padding=1)
    assert not spectral_wins((32, 256, 56, 56), (256, 256, 3, 3), padding=1, on="a100", dtype="fp32")
    for wrong in ({"x_shape": (1, 2, 3)}, {"dtype": "int8"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            spectral_wins(**{"x_shape": (1, 2, 8, 8), "w_shape": (2, 2, 3, 3), **wrong})


# -- mixture of experts ------------------------------------------------------------------------------------------------

ACT = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def dense(x, logits, w1, w2, w3, top_k, activation, normalize):
    """Every expert on every token, most of them weighted by zero."""
    shares = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    top, experts = shares.topk(top_k, -1)
    if normalize:
        top = top / top.sum(-1, keepdim=True)
    weights = torch.zeros_like(shares).scatter(-1, experts, top).to(x.dtype)
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        inner = ACT[activation](x @ w1[e].T)
        inner = inner * (x @ w3[e].T) if w3 is not None else inner
        out = out + weights[..., e, None] * (inner @ w2[e].T)
    return out


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 20), experts=st.integers(1, 6), k=st.integers(1, 6), d=st.integers(1, 9), h=st.integers(1, 9),
    gated=st.booleans(), activation=st.sampled_from(sorted(ACT)), normalize=st.booleans(), gate=st.booleans(),
)  # fmt: skip
def test_moe_is_the_dense_sum(tokens, experts, k, d, h, gated, activation, normalize, gate):
    torch.manual_seed(tokens)
    k = min(k, experts)
    x = torch.randn(tokens, d, dtype=torch.double, requires_grad=True)
    w1, w3 = (torch.randn(experts, h, d, dtype=torch.double, requires_grad=True) for _ in range(2))
    w2 = torch.randn(experts, d, h, dtype=torch.double, requires_grad=True)
    w3 = w3 if gated else None
    gate = gate and (tokens, experts) != (experts, d)  # shaped as logits, it would be taken for them
    router = torch.randn(*((experts, d) if gate else (tokens, experts)), dtype=torch.double)
    logits = x @ router.T if gate else router
    options = {"top_k": k, "activation": activation, "normalize": normalize}
    found = op.moe(x, router, w1, w2, w3, **options)
    wanted = dense(x, logits, w1, w2, w3, **options)
    assert found.shape == x.shape and torch.allclose(found, wanted, atol=1e-10)
    leaves = [t for t in (x, w1, w2, w3) if t is not None]
    seed = torch.randn_like(found)
    for mine, theirs in zip(*(torch.autograd.grad(y, leaves, seed) for y in (found, wanted)), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)


def test_moe_with_experts_nobody_asks_for():
    x, w1, w2 = torch.randn(2, 3, 8), torch.randn(4, 16, 8, requires_grad=True), torch.randn(4, 8, 16)
    logits = torch.tensor([0.0, 9.0, -9.0, 8.0]).expand(2, 3, 4)
    found = op.moe(x, logits, w1, w2, stream=CPU)
    assert torch.allclose(found, dense(x, logits, w1, w2, None, 2, "silu", True), atol=1e-5)
    found.sum().backward()
    assert w1.grad[[0, 2]].abs().max() == 0 and w1.grad[[1, 3]].abs().min() > 0
    assert torch.equal(op.moe(x, logits, w1, w2), found)  # the same bits again


def test_the_router_learns():
    router = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    x, w1, w2 = (torch.randn(*s, dtype=torch.double) for s in ((5, 8), (4, 6, 8), (4, 8, 6)))
    mine = torch.autograd.grad(op.moe(x, router, w1, w2).square().sum(), router)[0]
    theirs = torch.autograd.grad(dense(x, x @ router.T, w1, w2, None, 2, "silu", True).square().sum(), router)[0]
    assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5) and theirs.abs().max() > 0


def test_the_grouped_product_is_the_loop(monkeypatch):
    """torch's grouped product has a CPU path: the one launch on a GPU gives what one launch per expert gives."""
    if moe_module._grouped_mm() is None:
        pytest.skip("this torch has no grouped product")
    x = torch.randn(40, 16).bfloat16()
    w1, w3 = (torch.randn(5, 24, 16).mul(0.2).bfloat16() for _ in range(2))
    w2, router = torch.randn(5, 16, 24).mul(0.2).bfloat16(), torch.randn(40, 5).mul(3)
    router[:, 2] = -50.0  # an expert without tokens
    looped = op.moe(x, router, w1, w2, w3)
    monkeypatch.setattr(moe_module, "can_group", lambda rows, w: True)
    grouped = op.moe(x, router, w1, w2, w3)
    assert relative(grouped.float(), looped.float()) < 1e-2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"router": torch.randn(3, 3)}, "router is 3x3"),
        ({"w1": torch.randn(4, 8, 6)}, "w1 is 4x8x6"),
        ({"w1": torch.randn(4, 6)}, "w1 is 4x6"),
        ({"w2": torch.randn(4, 6, 8)}, "w2 is 4x6x8"),
        ({"w3": torch.randn(3, 6, 8)}, "w3 is 3x6x8"),
        ({"top_k": 5}, "top_k=5"),
        ({"top_k": 0}, "top_k=0"),
        ({"activation": "swish"}, "activation='swish'"),
        ({"w2": torch.randn(4, 8, 6).half()}, "w2 is torch.float16"),
        ({"x": [1.0]}, "x is a list"),
    ],
)
def test_wrong_mixtures_are_named(change, said):
    shapes = {"x": (5, 8), "router": (5, 4), "w1": (4, 6, 8), "w2": (4, 8, 6)}
    given = {name: torch.randn(*shape) for name, shape in shapes.items()}
    with pytest.raises(ArgumentError, match=said):
        op.moe(**{**given, **change})


# -- all-reduce --------------------------------------------------------------------------------------------------------


def test_one_process_reduces_to_itself():
    x = torch.randn(4)
    for how in ("sum", "mean", "avg", "max", "min", "prod"):
        assert op.all_reduce(x, how, stream=CPU) is x
    assert op.all_reduce(x, async_op=True).wait() is x
    leaf = torch.ones(2, requires_grad=True)
    assert op.all_reduce(leaf * 2, op="mean").requires_grad


def test_on_the_meta_device_there_are_shapes_and_flops():
    x, w = torch.empty(2, 4, 9, 9, device="meta"), torch.empty(6, 2, 3, 3, device="meta")
    assert op.spectral_conv2d(x, w, padding=1, groups=2).shape == (2, 6, 9, 9)
    sizes = ((7, 32), (4, 32), (4, 16, 32), (4, 32, 16))
    tokens, gate, w1, w2 = (torch.empty(*s, device="meta", requires_grad=True) for s in sizes)
    out = op.moe(tokens, gate, w1, w2)
    out.sum().backward()
    assert out.shape == (7, 32) and w1.grad.shape == w1.shape
    report = tessera.predict(op.moe, (tokens.detach(), gate.detach(), w1.detach(), w2.detach()), on="h200")
    assert report.prediction.flops >= 2 * 2 * (7 * 2) * 32 * 16  # two products of every token with two experts


def test_they_compile_in_one_graph():
    x, w = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)

    def program(x, w):
        return op.all_reduce(op.spectral_conv2d(x, w, padding=1)).sum() + op.fft(x, (2, 3)).abs().sum()

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x, w), program(x, w), rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: op.all_reduce(torch.ones(2), "total"), "op='total'"),
        (lambda: op.all_reduce([1.0]), "x is a list"),
        (lambda: op.all_reduce(torch.ones(2, dtype=torch.int64), "mean"), "op='mean' of torch.int64"),
        (lambda: op.all_reduce(torch.ones(2, requires_grad=True), "max"), "requires gradients"),
        (lambda: op.all_reduce(torch.ones(2, requires_grad=True), async_op=True), "async_op"),
    ],
)
def test_wrong_reductions_are_named(call, said):
    with pytest.raises(ArgumentError, match=said):
        call()


def test_ranks_that_were_launched_and_not_connected_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ArgumentError, match="4 ranks were launched"):
        op.all_reduce(torch.ones(2))


RANK = """
import sys, torch, torch.distributed as dist
from tessera import op, stream
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
s = stream.create(name="reduce", device="cpu")
mine = torch.arange(6.0) + 10 * rank
wanted = {"sum": 2 * torch.arange(6.0) + 10, "mean": torch.arange(6.0) + 5, "max": torch.arange(6.0) + 10,
          "min": torch.arange(6.0), "prod": torch.arange(6.0) * (torch.arange(6.0) + 10)}
wanted["avg"] = wanted["mean"]
for how, result in wanted.items():
    x = mine.clone()
    assert op.all_reduce(x, how, stream=s) is x and torch.equal(x, result), (how, x)
    x = mine.clone()
    pending = op.all_reduce(x, how, async_op=True)
    assert pending.wait() is x and pending.wait() is x and torch.equal(x, result), (how, x)
x = mine.clone().reshape(2, 3).t()  # not dense: in place all the same
assert op.all_reduce(x) is x and torch.equal(x, wanted["sum"].reshape(2, 3).t())
assert torch.equal(op.all_reduce(torch.tensor([3 + rank]), "max"), torch.tensor([4]))
for how, factor in (("sum", 1.0), ("mean", 0.5)):
    leaf = mine.clone().requires_grad_()
    out = op.all_reduce(leaf, how)
    assert out is not leaf and torch.equal(leaf.detach(), mine) and torch.equal(out.detach(), wanted[how])
    (out * (rank + 1)).sum().backward()  # the ranks' losses weigh it by 1 and 2: summed 3
    assert torch.equal(leaf.grad, torch.full((6,), 3.0 * factor)), leaf.grad
alone = dist.new_group([0])
if rank == 1:
    try:
        op.all_reduce(torch.ones(1), group=alone)
    except ValueError as exc:
        assert "not in the group" in str(exc)
    else:
        raise AssertionError
else:
    assert op.all_reduce(torch.ones(1), group=alone).item() == 1
dist.destroy_process_group()
print("good", rank)
"""


def test_two_processes_reduce_over_gloo():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), str(rank), port], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [r.communicate(timeout=120)[0] for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    assert all(f"good {i}" in text for i, text in enumerate(said)), "\n".join(said)
    assert math.prod(r.returncode == 0 for r in ranks)
