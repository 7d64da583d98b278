"""op.moe: against dense sums, on the CPU and the meta device."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tessera
from tessera import op, stream
from tessera.errors import ArgumentError

moe_module = importlib.import_module("tessera.op.moe")  # `op.moe` is the operator
CPU = stream.create(name="work", device="cpu")


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


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
    tokens=st.integers(0, 20),
    experts=st.integers(1, 6),
    k=st.integers(1, 6),
    d=st.integers(1, 9),
    h=st.integers(1, 9),
    gated=st.booleans(),
    activation=st.sampled_from(sorted(ACT)),
    normalize=st.booleans(),
    gate=st.booleans(),
)
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
