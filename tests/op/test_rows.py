"""Softmax and the norms: against torch and float64; their kernels interpreted, and compiled for real chips."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tessera import op, stream
from tessera.errors import ArgumentError
from tessera.op import normalize, row_ops

from kernel_checks import check_interpreted, spilled_bytes

NORMS = [
    (centered, residual, affine) for centered in (True, False) for residual in (True, False) for affine in (True, False)
]
SHAPES = [(1, 3), (5, 7), (33, 100), (3, 128), (2, 2100), (70, 17)]


def relative(found, true) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-6))


# -- the kernels, interpreted ------------------------------------------------------------------------------------


def interpret_softmax(x, dy) -> dict[str, float]:
    from tessera.op.kernels import rows

    y = rows.softmax_forward(x, x.dtype)
    true = x.double().requires_grad_()
    ref = true.softmax(-1)
    (gradient,) = torch.autograd.grad(ref, true, dy.double())
    wide = rows.softmax_forward(x, torch.float32)
    return {
        "forward": relative(y, ref),
        "forward fp32": relative(wide, ref),
        "backward": relative(rows.softmax_backward(dy, y, x.dtype), gradient),
    }


def interpret_norm(x, dy, centered, residual, affine) -> dict[str, float]:
    from tessera.op.kernels import rows

    cols = x.shape[1]
    added = torch.randn_like(x) if residual else None
    weight = torch.randn(cols).to(x.dtype) if affine else None
    bias = torch.randn(cols).to(x.dtype) if affine and centered else None
    y, summed, mean, rstd = rows.norm_forward(x, added, weight, bias, eps=1e-5, centered=centered)
    seen = summed if residual else x
    errors = {"sum": relative(summed, x.double() + added)} if residual else {}
    leaves = [t.double().requires_grad_() for t in (seen, weight, bias) if t is not None]
    given_ = dict(zip((n for n, t in (("x", seen), ("w", weight), ("b", bias)) if t is not None), leaves, strict=True))
    if centered:
        ref = F.layer_norm(given_["x"], (cols,), given_.get("w"), given_.get("b"), 1e-5)
    else:
        ref = F.rms_norm(given_["x"], (cols,), given_.get("w"), 1e-5)
    true = list(torch.autograd.grad(ref, leaves, dy.double()))
    dsummed = torch.randn_like(x) if residual else None
    if residual:
        true[0] = true[0] + dsummed.double()
    found = rows.norm_backward(
        dy, dsummed, seen, weight, mean=mean, rstd=rstd, weight_grad=weight is not None, bias_grad=bias is not None
    )
    errors["forward"] = relative(y, ref)
    errors |= {
        f"d{n}": relative(a, b) for n, a, b in zip(given_, (f for f in found if f is not None), true, strict=True)
    }
    return errors


def interpret() -> None:
    """Run every kernel on CPU tensors; memory that nobody writes is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    torch.manual_seed(0)
    for (rows, cols), dtype in itertools.product(SHAPES, (torch.float32, torch.float16)):
        x, dy = torch.randn(rows, cols).to(dtype), torch.randn(rows, cols).to(dtype)
        where = f"{rows}x{cols} {dtype}"
        print(json.dumps({"case": f"softmax {where}", "dtype": str(dtype), "errors": interpret_softmax(x, dy)}))
        for kind in NORMS:
            print(
                json.dumps(
                    {"case": f"norm {kind} {where}", "dtype": str(dtype), "errors": interpret_norm(x, dy, *kind)}
                )
            )


def test_the_kernels_are_right_in_the_interpreter():
    check_interpreted(__file__, len(SHAPES) * 2 * (1 + len(NORMS)))


# -- the kernels, compiled ---------------------------------------------------------------------------------------


def build(kernel, cols: int, arch: int, dtype: str = "bf16", **flags):
    from triton.backends.compiler import GPUTarget

    from tessera.op.kernels import compile_for, rows

    cut = rows.row_block(cols)
    constants = {"ROWS": cut.rows, "COLS": cut.cols, **flags}
    if "STAGES" in kernel.arg_names:
        constants["STAGES"] = rows.count_stages(cut, 2)
    known = dict.fromkeys(("mean", "rstd", "dweight", "dbias"), "*fp32") | {"eps": "fp32"}
    known |= dict.fromkeys(("rows", "cols", "blocks"), "i32")
    types = {n: known.get(n, f"*{dtype}") for n in kernel.arg_names if n not in constants}
    return compile_for(
        kernel, types, constants, ("rows", "blocks"), stages=3, warps=cut.warps, target=GPUTarget("cuda", arch, 32)
    )


ALL = {"CENTERED": True, "RESIDUAL": True, "WEIGHT": True}


@pytest.mark.parametrize(("cols", "arch"), [(768, 90), (4096, 90), (4096, 80), (8192, 90), (2048, 100)])
def test_the_kernels_compile_for_real_chips_without_spills(cols, arch):
    from tessera.op import tile
    from tessera.op.kernels import rows

    kernels = {
        rows._softmax_forward: {},
        rows._softmax_backward: {},
        rows._norm_forward: {**ALL, "BIAS": True},
        rows._norm_backward: {**ALL, "DWEIGHT": True, "DBIAS": True},
    }
    for kernel, flags in kernels.items():
        found = build(kernel, cols, arch, **flags)
        assert found.metadata.shared < tile.limit_bytes(86)
        assert ".v4.b32" in found.asm["ptx"]  # 16 bytes a load
        assert not re.search(r"\b(atom|red)\.", found.asm["ptx"])  # one order of every sum
        if arch < 100:  # cuobjdump of this Triton reads no newer code
            assert spilled_bytes(found) == 0


# -- what a caller sees ------------------------------------------------------------------------------------------

small = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), small, st.floats(-50, 50), st.integers(0, 2**31))
def test_softmax_is_a_distribution_and_ignores_a_shift(rows, cols, shift, seed):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = op.softmax(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(rows, dtype=torch.float64))
    torch.testing.assert_close(op.softmax(x + shift), y)
    torch.testing.assert_close(row_ops.softmax(x, torch.float64), y)
    torch.testing.assert_close(op.softmax(x.mT, 0), y.mT)


@settings(max_examples=40, deadline=None)
@given(
    small,
    st.integers(2, 9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_norm_with_a_residual_is_the_sum_and_its_norm(rows, cols, centered, affine, ours, dtype):
    x, added = torch.randn(2, rows, cols).to(dtype), torch.randn(2, rows, cols).to(dtype)
    weight = torch.randn(cols).to(dtype) if affine else None
    bias = torch.randn(cols).to(dtype) if affine and centered else None
    name = "layer_norm" if centered else "rms_norm"
    if ours:
        y, summed = normalize.norm_rows(name, x, weight, bias, 1e-5, added, cols)
    elif centered:
        y, summed = op.layer_norm(x, None, weight, bias, residual=added)
    else:
        y, summed = op.rms_norm(x, weight, 1e-5, residual=added)
    assert torch.equal(summed, x + added)
    wide = [None if t is None else t.double() for t in (summed, weight, bias)]
    true = F.layer_norm(wide[0], (cols,), *wide[1:]) if centered else F.rms_norm(wide[0], (cols,), wide[1], 1e-5)
    assert y.dtype is dtype
    torch.testing.assert_close(
        y.double(), true, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-2 if dtype is torch.bfloat16 else 1e-4
    )


@settings(max_examples=20, deadline=None)
@given(small, st.integers(2, 9), st.floats(0.1, 100))
def test_rms_norm_ignores_a_scale(rows, cols, factor):
    x = torch.randn(rows, cols, dtype=torch.float64) + 0.1
    torch.testing.assert_close(op.rms_norm(x * factor, eps=0.0), op.rms_norm(x, eps=0.0))


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_of_the_registered_norm_are_exact(centered, residual, affine):
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    x, added = leaf(3, 5), leaf(3, 5) if residual else None
    weight, bias = (leaf(5) if affine else None), (leaf(5) if affine and centered else None)
    given_ = [t for t in (x, added, weight, bias) if t is not None]

    def call(*leaves):
        rest = iter(leaves)
        full = [None if t is None else next(rest) for t in (x, added, weight, bias)]
        return row_ops.norm(*full, 1e-5, centered)[: 2 if residual else 1]

    assert torch.autograd.gradcheck(call, given_)
    torch.library.opcheck(
        row_ops.norm_op,
        (x.float().detach(), None if added is None else added.float().detach(), weight, bias, 1e-5, centered),
    )


def test_gradients_of_the_registered_softmax_are_exact():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: row_ops.softmax(x, torch.float64), (x,))
    torch.library.opcheck(row_ops.softmax_op, (torch.randn(3, 5, requires_grad=True), torch.bfloat16))


def test_a_sum_or_a_norm_that_nobody_uses_costs_no_gradient():
    x, added = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, summed = normalize.norm_rows("rms_norm", x, None, None, 1e-5, added, 5)
    (only_norm,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (only_sum,) = torch.autograd.grad(summed.sum(), added)
    (true,) = torch.autograd.grad(F.rms_norm(x + added, (5,), eps=1e-5).sum(), x)
    torch.testing.assert_close(only_norm, true)
    assert torch.equal(only_sum, torch.ones_like(x))


def test_several_dimensions_and_the_weights_own_dtype():
    x, weight = torch.randn(2, 3, 4).to(torch.bfloat16), torch.randn(3, 4)
    y = op.rms_norm(x, weight)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), F.rms_norm(x.float(), (3, 4), weight), rtol=1e-2, atol=1e-2)
    z = op.layer_norm(x, (3, 4), weight, weight)
    torch.testing.assert_close(z.float(), F.layer_norm(x.float(), (3, 4), weight, weight), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(op.rms_norm(x), F.rms_norm(x, (4,)))
    tiny = torch.full((1, 4), 1e-3).to(torch.bfloat16)  # where eps matters: fp32's, as torch's since 2.8
    torch.testing.assert_close(op.rms_norm(tiny).double(), F.rms_norm(tiny.float(), (4,)).double(), rtol=1e-2, atol=0)


def test_no_rows_and_rows_of_minus_infinity_are_as_in_torch():
    assert op.softmax(torch.zeros(0, 4)).shape == (0, 4)
    y, summed = op.rms_norm(torch.zeros(0, 4), residual=torch.zeros(0, 4))
    assert y.shape == summed.shape == (0, 4)
    x = torch.full((2, 3), -float("inf"))
    assert op.softmax(x).isnan().all() and row_ops.softmax(x, torch.float32).isnan().all()


def test_the_rule_chooses(monkeypatch):
    """A rule sends rows to our operator (here its CPU side), and only the rows that it covers."""
    rule = normalize.RowRule(8, 16, torch.float32, training=False, least_rows=2)
    monkeypatch.setattr(normalize, "RULES", dict.fromkeys(normalize.RULES, (rule,)))
    monkeypatch.setattr(normalize, "can_run_kernel", lambda x, cols: True)
    covered, short, few = torch.randn(4, 8), torch.randn(4, 7), torch.randn(1, 8)

    def ours(call) -> bool:
        with torch.profiler.profile() as seen:
            call()
        return any(event.key.startswith("tessera::") for event in seen.key_averages())

    for call in (op.softmax, op.layer_norm, op.rms_norm):
        assert ours(lambda: call(covered))  # noqa: B023 - called at once
        assert not ours(lambda: call(short)) and not ours(lambda: call(few))  # noqa: B023
        assert not ours(lambda: call(covered.clone().requires_grad_()))  # noqa: B023
    assert not ours(lambda: op.softmax(covered, 0))
    assert not ours(lambda: op.softmax(covered, dtype=torch.float64))


def test_meta_tensors_and_torch_compile():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def step(x, weight):
        y, summed = op.rms_norm(op.softmax(op.layer_norm(x, weight=weight, bias=weight)), weight, residual=x)
        return y + summed

    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(x, weight), step(x, weight))
    assert step(x.to("meta"), weight.to("meta")).shape == x.shape
    y, summed = normalize.norm_rows("rms_norm", x.to("meta"), weight.to("meta"), None, 1e-5, x.to("meta"), 8)
    assert y.device.type == summed.device.type == "meta"


def test_a_stream_of_the_cpu_keeps_order():
    s, x = stream.create("rows", device="cpu"), torch.randn(2, 4)
    assert torch.equal(op.softmax(x, stream=s), x.softmax(-1))
    assert torch.equal(op.layer_norm(x, stream=s), F.layer_norm(x, (4,)))
    assert torch.equal(op.rms_norm(x, stream=s), F.rms_norm(x, (4,)))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: op.softmax([1.0]), "x is a list"),
        (lambda: op.softmax(torch.ones(2, dtype=torch.int64)), "x is torch.int64"),
        (lambda: op.softmax(torch.ones(2), 1), "dim=1"),
        (lambda: op.layer_norm(torch.ones(2, 3), 4), "normalized_shape is 4"),
        (lambda: op.layer_norm(torch.ones(2, 3), weight=torch.ones(2)), "weight is 2"),
        (lambda: op.layer_norm(torch.ones(2, 3), bias=torch.ones(2)), "bias is 2"),
        (lambda: op.rms_norm(torch.ones(2, 3), residual=torch.ones(3)), "residual is 3"),
        (lambda: op.rms_norm(torch.ones(2, 3), residual=torch.ones(2, 3).double()), "residual is 2x3 torch.float64"),
        (lambda: op.rms_norm(torch.ones(2, 3), torch.ones(3, device="meta")), "weight is on meta"),
        (lambda: op.rms_norm(torch.ones(()), None), "normalized_shape is a scalar"),
        (lambda: op.rms_norm(torch.ones(2, 3), (3,)), "normalized_shape=(3,)"),
        (lambda: op.rms_norm(torch.ones(2, 3), 3), "normalized_shape=3"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert named in str(caught.value) and caught.value.fix


if __name__ == "__main__":
    interpret()
