"""Attention: against torch and float64, its kernels in Triton's interpreter and compiled for real chips."""

from __future__ import annotations

import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import op, stream
from tessera.errors import ArgumentError, TileError
from tessera.op import attention, attention_ops, hints, tile

from kernel_checks import check_interpreted, spilled_bytes

TILE = (64, 32)

# batch, heads, key heads, queries, keys, dim, causal: odd lengths, tiles cut by an edge
CASES = [
    (1, 2, 2, 32, 32, 16, True),
    (2, 4, 2, 37, 53, 32, False),
    (2, 4, 2, 37, 53, 32, True),
    (1, 2, 1, 70, 20, 24, True),
    (1, 1, 1, 1, 40, 64, False),
    (1, 4, 1, 33, 19, 40, False),
]


def truth(q, k, v, mask, scale, causal):
    """The definition, in the tensors' own precision; rows that see nothing give zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    blind = scores.isneginf().all(-1, keepdim=True)
    return torch.where(blind, 0.0, scores.masked_fill(blind, 0.0).softmax(-1)) @ v


def operands(batch, heads, kv_heads, queries, keys, dim, kind, dtype, seed=0):
    make = torch.Generator().manual_seed(seed)
    # (batch, sequence, heads, dim) in memory, as a projection leaves them
    q, k, v = (
        torch.randn(batch, length, n, dim, generator=make, dtype=torch.float64).to(dtype).transpose(1, 2)
        for length, n in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    mask = None
    if kind == "bool":
        mask = torch.rand(queries, keys, generator=make) > 0.4
        mask[0] = False
    elif kind == "add":
        mask = torch.randn(batch, 1, queries, keys, generator=make).to(dtype)
    return q, k, v, mask


def relative(found, true) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-6))


def interpret() -> None:
    """Run the kernels on CPU tensors; memory that nobody writes is NaN."""
    from tessera.op.kernels import attention as kernel

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    for i, (*sizes, causal) in enumerate(CASES):
        dtype = torch.float16 if i % 3 == 2 else torch.float32
        q, k, v, _ = operands(*sizes, None, dtype)
        scale = -0.3 if i == 1 else 0.3
        out, cut = torch.empty_like(q), {"tile": (16, 32), "stages": 2, "warps": 4, "precision": "ieee"}
        kernel.run_attention(q, k, v, out, scale=scale, causal=causal, **cut)
        ref = truth(*(t.double() for t in (q, k, v)), None, scale, causal)
        assert out.transpose(1, 2).is_contiguous()  # as the operands are
        errors = {"out": relative(out, ref)}
        print(json.dumps({"case": str((sizes, causal)), "dtype": str(dtype), "errors": errors}))


def test_the_kernels_are_right_in_the_interpreter():
    check_interpreted(__file__, len(CASES))


# -- the kernels, compiled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128])
def test_forward_uses_the_tensor_cores_of_hopper_without_spills_in_the_bytes_of_the_formula(dim):
    from triton.backends.compiler import GPUTarget

    from tessera.op.kernels import attention as kernel

    stages, warps = attention_ops.pipeline(128, 64, dim)
    found = kernel.compile_attention((128, 64, dim), "bf16", stages, warps, GPUTarget("cuda", 90, 32))
    assert "wgmma" in found.asm["ptx"] and "cp.async" in found.asm["ptx"]
    assert found.metadata.shared == attention_ops.forward_bytes(tile.Tile(128, 64, dim), "bf16", stages)
    assert spilled_bytes(found) == 0


# -- what a caller sees ------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_tile_changes_nothing_but_the_kernel(batch, heads, queries, keys, dim, causal, seed):
    q, k, v, _ = operands(batch, *heads, queries, keys, dim, None, torch.float64, seed)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = {"causal": causal, "enable_gqa": True}
    found = op.flash_attention(q, k, v, tile_shape=TILE, **options)
    true = truth(q, k, v, None, 1 / math.sqrt(dim), causal)
    torch.testing.assert_close(found, true)
    seed_ = torch.randn_like(true)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, seed_), torch.autograd.grad(true, leaves, seed_), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(op.flash_attention(q, k, v, **options), true)


def test_gradients_of_the_registered_operator_are_exact():
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for causal in (True, False):
        assert torch.autograd.gradcheck(
            lambda *x: attention_ops.attention(*x, 0.7, causal, *TILE, 0, 0, "ieee"),  # noqa: B023
            (q, k, v),
        )
    single = [t.detach().float().requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(attention_ops.attention_op, (*single, 0.7, True, *TILE, 0, 0, "ieee"))


@pytest.mark.parametrize(
    ("more", "why"),
    [({"attn_mask": torch.ones(3, 3)}, "masks"), ({"dropout_p": 0.5}, "dropout"), ({"causal": True}, "")],
)
def test_what_our_kernel_cannot_do_torchs_does_and_a_warning_says_so(more, why):
    q = torch.randn(1, 2, 3, 8)
    with Seen() as seen, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        found = op.flash_attention(q, q, q, tile_shape=TILE, **more)
    torch.manual_seed(1)
    torch.testing.assert_close(found, op.flash_attention(q, q, q, **more))
    assert bool(seen.calls) == (not why) and [why in str(w.message) for w in said] == [True] * bool(why)


def test_plain_calls_are_torchs_own():
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    assert torch.equal(op.flash_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(
        op.flash_attention(q, k, v, causal=True, scale=0.2),
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2),
    )
    torch.manual_seed(0)
    dropped = op.flash_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    s = stream.create("attention", device="cpu")
    assert torch.equal(op.flash_attention(q[0], k[0], v[0], stream=s), F.scaled_dot_product_attention(q[0], k[0], v[0]))


@pytest.mark.parametrize("cut", [None, TILE])
def test_no_queries_no_keys_and_rows_that_see_nothing(cut):
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 2, 0, 8, requires_grad=True)
    out = op.flash_attention(q, k, k, tile_shape=cut)
    assert torch.equal(out, torch.zeros_like(q))
    out.sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q)) and k.grad.shape == k.shape
    assert op.flash_attention(k, q, q, tile_shape=cut).shape == k.shape
    keys, mask = torch.randn(1, 2, 5, 8), torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    assert torch.equal(op.flash_attention(q, keys, keys, attn_mask=mask)[:, :, 1], torch.zeros(1, 2, 8))


def test_a_precision_casts_and_gives_back_the_dtype():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    full = op.flash_attention(q, k, v)
    for cut in (None, TILE):
        half = op.flash_attention(q, k, v, precision="bf16", tile_shape=cut)
        assert half.dtype is torch.float32 and 1e-5 < relative(half, full) < 1e-2
        assert relative(op.flash_attention(q, k, v, precision="tf32", tile_shape=cut), full) < 1e-5
        up = op.flash_attention(*(t.bfloat16() for t in (q, k, v)), precision="fp32", tile_shape=cut)
        assert up.dtype is torch.bfloat16


class Seen(TorchDispatchMode):
    """The arguments of tessera::attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.tessera.attention.default:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def test_a_schedules_hints_choose_tile_depth_and_warps():
    q = torch.randn(1, 1, 4, 16)
    with (
        Seen() as seen,
        hints.use(hints.Hints(tiles={"flash_attention": (64, 32)}, cp_async_depth=3, warp_mma_concurrency=2)),
    ):
        op.flash_attention(q, q, q)
        op.flash_attention(q, q, q, tile_shape=(64, 64))
    assert [call[5:9] for call in seen.calls] == [(64, 32, 3, 8), (64, 64, 3, 8)]
    with Seen() as seen:
        op.flash_attention(q, q, q)
    assert not seen.calls


def test_meta_tensors_and_torch_compile():
    q, k, v = (torch.randn(2, 2, 10, 16, requires_grad=True) for _ in range(3))

    def step(q, k, v):
        return op.flash_attention(q, k, v, causal=True, tile_shape=TILE) + op.flash_attention(q, k, v)

    true = step(q, k, v)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(found, true)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(true.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b)
    assert step(*(t.to("meta") for t in (q, k, v))).shape == q.shape


def test_a_tile_that_does_not_fit_says_what_does():
    q = torch.randn(1, 1, 4, 256, dtype=torch.bfloat16)
    with pytest.raises(TileError) as caught:
        op.flash_attention(q, q, q, tile_shape=(128, 128))
    assert "327,680 bytes" in str(caught.value) and "(128, 64)" in caught.value.fix
    assert op.flash_attention(q, q, q, tile_shape=(128, 64)).shape == q.shape
    with pytest.raises(TileError, match="power of two"):
        op.flash_attention(q, q, q, tile_shape=(100, 64))
    with pytest.raises(TileError):  # also where the call is traced: when it runs
        torch.compile(lambda q: op.flash_attention(q, q, q, tile_shape=(128, 128)), backend="eager")(q)
    with pytest.warns(UserWarning, match="BM=32 is not a multiple of 64"):
        op.flash_attention(q[..., :16], q[..., :16], q[..., :16], tile_shape=(32, 32))


@pytest.mark.parametrize("dims", [8, 24, 80, 96, 160])
@pytest.mark.parametrize("cut", [(100, 64), (256, 256), (8, 512)])
def test_the_nearest_tile_is_taken_as_it_is_written(dims, cut):
    q = torch.ones(1, 1, 4, dims)
    with pytest.raises(TileError) as caught:
        op.flash_attention(q, q, q, tile_shape=cut)
    assert f"tile_shape={cut} cannot work" in str(caught.value)
    nearest = tuple(map(int, re.search(r"tile_shape=\((\d+), (\d+)\)", caught.value.fix).groups()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a small tile is slow, and that is said
        assert op.flash_attention(q, q, q, tile_shape=nearest).shape == q.shape


x = torch.ones(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: op.flash_attention([], x, x), "q is a list"),
        (lambda: op.flash_attention(x, x.double(), x), "k is torch.float64"),
        (lambda: op.flash_attention(x, x, x.to("meta")), "v is on meta"),
        (lambda: op.flash_attention(x, torch.ones(1, 2, 3, 5), x), "k is 1x2x3x5"),
        (lambda: op.flash_attention(x, x, torch.ones(1, 2, 4, 4)), "v is 1x2x4x4"),
        (lambda: op.flash_attention(torch.ones(1, 4, 3, 4), x, x), "enable_gqa=True"),
        (lambda: op.flash_attention(torch.ones(1, 3, 3, 4), x, x, enable_gqa=True), "k is 1x2x3x4"),
        (lambda: op.flash_attention(torch.ones(4), x, x), "q is 4"),
        (lambda: op.flash_attention(x, x, x, dropout_p=1.5), "dropout_p=1.5"),
        (lambda: op.flash_attention(x, x, x, precision="fp8"), "precision='fp8'"),
        (lambda: op.flash_attention(x, x, x, precision="bf61"), "did you mean 'bf16'"),
        (lambda: op.flash_attention(x, x, x, tile_shape=64), "tile_shape=64"),
        (lambda: op.flash_attention(x, x, x, tile_shape=(64, 32, 8)), "tile_shape=(64, 32, 8)"),
        (lambda: op.flash_attention(x, x, x, tile_shape=TILE, attn_mask=torch.ones(7, 3)), "attn_mask is 7x3"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert named in str(caught.value) and caught.value.fix


def far_masked(dtype, causal):
    """Masks that are added: a query that sees no key by -1e9, one by the smallest number, keys that nobody sees."""
    mask = torch.zeros(2, 1, 6, 6, dtype=dtype)
    mask[0, :, 2] = -1e9
    mask[1, :, :, :3] = -1e9
    mask[1, :, 5] = torch.finfo(dtype).min
    seen = mask.double()
    if causal:
        seen = seen.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf)
    return mask, seen - seen.amax(-1, keepdim=True)


@pytest.mark.parametrize(("options", "causal"), [({}, False)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_a_query_without_keys_by_an_added_mask(options, causal, dtype, most):
    """Its weights are those without the mask; a sum's logarithm beside 1e9 is none (torch's own: 6 times too large)."""
    torch.manual_seed(3)
    qkv = [torch.randn(2, 3, 6, 8).to(dtype).requires_grad_() for _ in range(3)]
    g = torch.randn(2, 3, 6, 8).to(dtype)
    mask, level = far_masked(dtype, causal)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    true = torch.softmax(wide[0] @ wide[1].mT / math.sqrt(8) + level, -1) @ wide[2]
    found = op.flash_attention(*qkv, attn_mask=mask, causal=causal, **options)
    wanted = true, *torch.autograd.grad(true, wide, g.double())
    for mine, theirs in zip((found, *torch.autograd.grad(found, qkv, g)), wanted, strict=True):
        assert (mine.double() - theirs).abs().max() <= most


def test_without_a_gradient_such_a_query_has_torchs_answer():
    """Beside 1e9 an fp32 score is nothing: the query sees all values alike."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    mask = torch.zeros(6, 6)
    mask[2] = -1e9
    y = op.flash_attention(q, k, v, attn_mask=mask)
    assert torch.equal(y, F.scaled_dot_product_attention(q, k, v, mask))
    assert torch.allclose(y[..., 2, :], v.mean(-2), atol=1e-6)


def test_masks_near_zero_and_their_gradients_stay_as_they_are():
    torch.manual_seed(4)
    q, bias = torch.randn(1, 2, 5, 8, requires_grad=True), (50 * torch.randn(2, 5, 5)).requires_grad_()
    with torch.no_grad():
        bias[0, 1] = -math.inf
    runs = [run(q, q, q, attn_mask=bias) for run in (op.flash_attention, F.scaled_dot_product_attention)]
    assert torch.equal(*runs)
    found = [torch.autograd.grad(y.nan_to_num().square().sum(), (q, bias)) for y in runs]
    assert all(torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()) for a, b in zip(*found, strict=True))
    lifted = (bias.detach() + 5000).requires_grad_()
    y = op.flash_attention(q, q, q, attn_mask=lifted)
    assert torch.autograd.grad(y.nan_to_num().square().sum(), lifted)[0].shape == lifted.shape


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_mask_follows_the_precision(precision, dtype):
    q, mask = torch.randn(1, 2, 5, 8).to(dtype), torch.zeros(5, 5, dtype=dtype)
    mask[:, 3:] = torch.finfo(dtype).min
    found = op.flash_attention(q, q, q, attn_mask=mask, precision=precision)
    wanted = op.flash_attention(q, q[:, :, :3], q[:, :, :3], precision=precision)
    assert found.dtype is dtype and torch.allclose(found, wanted, atol=1e-2)


def test_layers_share_one_levelled_mask():
    q, mask = torch.randn(1, 2, 5, 8, requires_grad=True), torch.zeros(1, 1, 5, 6)
    seen = [attention.level_mask(mask[..., :5], q, q, q, causal=False) for _ in range(2)]
    assert seen[0] is seen[1] and torch.equal(seen[0], mask[..., :5])
    mask[..., 2, :] = -1e9  # counted by torch
    assert not attention.level_mask(mask[..., :5], q, q, q, causal=False).any()
    assert attention.level_mask(mask, q.detach(), q.detach(), q.detach(), causal=False) is mask


def test_a_levelled_mask_lives_as_long_as_layers_have_saved_it():
    q, values = torch.randn(1, 2, 5, 8, requires_grad=True), np.zeros((5, 5), dtype=np.float32)
    mask = torch.from_numpy(values)
    y = op.flash_attention(q, q, q, attn_mask=mask)
    assert attention.level_mask(mask, q, q, q, causal=False) is attention._level_masks[mask].mask()
    y.sum().backward()
    assert attention._level_masks[mask].mask() is None
    values[:, 3:] = -math.inf  # of which torch knows nothing
    y = op.flash_attention(q, q, q, attn_mask=mask)
    assert torch.allclose(y, F.scaled_dot_product_attention(q, q, q, mask), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_an_expanded_mask_is_levelled_as_small_as_it_is(causal):
    q, mask = torch.randn(2, 3, 5, 8, requires_grad=True), torch.zeros(1, 1, 5, 6)
    mask[..., 2, :] = -1e9
    whole = mask.expand(2, 3, 5, 6)
    found = attention.level_mask(whole, q, q.new_ones(2, 3, 6, 8), q, causal)
    assert found.shape == whole.shape and found.untyped_storage().nbytes() == mask.nbytes
    assert torch.equal(found, attention.level_mask(whole.contiguous(), q, q.new_ones(2, 3, 6, 8), q, causal))


def test_a_mask_of_fixed_shape_beside_queries_of_any():
    q, mask = torch.randn(1, 2, 5, 8), torch.zeros(1, 2, 5, 5)
    torch._dynamo.maybe_mark_dynamic(q, 2)
    run = torch.compile(
        lambda q: op.flash_attention(q, q, q, attn_mask=mask, tile_shape=TILE), fullgraph=True, backend="aot_eager"
    )
    assert torch.allclose(run(q), F.scaled_dot_product_attention(q, q, q), atol=1e-5)


if __name__ == "__main__":
    interpret()
