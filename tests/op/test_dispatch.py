"""Calls that skip the dispatcher: who must see them, the same gradients; torch's switches for products."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.op import casting, dispatch, lowprec, row_ops
from tessera.op.dispatch import force_fp32_sums, is_tf32_allowed, set_tf32


class Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


@pytest.fixture
def as_cuda(monkeypatch):
    """CPU tensors that say they are CUDA's, so that only what is asked besides decides."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)


def test_a_tensor_of_no_gpu_goes_by_the_dispatcher():
    assert dispatch.KNOWN and not dispatch.may_skip_dispatcher(torch.ones(2))


def test_a_product_of_a_precision_imports_no_compiler():
    """An operator's first call does, for seconds; where nobody would see the operator its function runs."""
    code = """
import sys, torch
from tessera import op
a = torch.randn(32, 32)
op.matmul(a, a, error_tolerance=1e-2)
op.matmul(a, a, precision="bf16")
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("precision", casting.PRECISIONS)
def test_a_product_is_the_operators_and_who_looks_sees_the_operator(precision):
    a, b = torch.randn(3, 24, 40), torch.randn(3, 40, 16)
    with Kernels() as kernels:
        seen = lowprec.mm(a, b, precision)
    assert "tessera.lowprec_mm.default" in kernels.seen
    assert torch.equal(lowprec.mm(a, b, precision), seen)
    grown = lowprec.mm(a.requires_grad_(), b, precision)
    assert grown.requires_grad and torch.equal(grown.detach(), seen)


def test_plain_tensors_go_straight(as_cuda):
    x = torch.ones(2)
    assert dispatch.may_skip_dispatcher(x, None, torch.nn.Parameter(x))
    with torch.inference_mode(), torch.autocast("cpu"):
        assert dispatch.may_skip_dispatcher(torch.ones(2), x)


def test_whoever_sees_or_changes_operators_gets_them(as_cuda):
    x, answers = torch.ones(2), {}

    def asked(name):
        def ask(t):
            answers[name] = dispatch.may_skip_dispatcher(t)
            return t * 1

        return ask

    with Calls():
        asked("function mode")(x)
    with Kernels():
        asked("dispatch mode")(x)
    with torch.profiler.profile():
        asked("profiler")(x)
    torch.func.vmap(asked("vmap"))(x)
    torch.func.grad(lambda t: asked("grad")(t).sum())(x)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        torch.jit.trace(asked("trace"), x, check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(asked("make_fx"))(x)
    asked("subclass")(x.as_subclass(Own))
    asked("negated")(torch.ones(2, dtype=torch.complex64).conj().imag)
    assert set(answers.values()) == {False} and len(answers) == 9
    assert not dispatch.may_skip_dispatcher(x, x.as_subclass(Own))
    assert not dispatch.may_skip_dispatcher(x, torch.ones(2, dtype=torch.complex64).conj().imag)
    assert dispatch.may_skip_dispatcher(x)


def test_a_compiled_graph_holds_the_operator(as_cuda):
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    torch.compile(lambda x: row_ops.softmax(x, torch.float32), backend=backend, fullgraph=True)(torch.randn(2, 3))
    assert "tessera.softmax" in graphs[0]


def test_the_profiler_names_the_operator_and_nobody_else_runs_it(as_cuda, monkeypatch):
    straight = []
    monkeypatch.setattr(row_ops, "_softmax_cuda", lambda x, dtype: straight.append(dtype) or x)
    x = torch.randn(2, 3)
    row_ops.softmax(x, torch.float32)
    with torch.profiler.profile() as found:
        row_ops.softmax(x, torch.float32)
    assert straight == [torch.float32] and "tessera::softmax" in {event.name for event in found.events()}


def by_operator(op, *none, run=None):
    """What a kernel would give, by the operator's own CPU code: `none` are the results it has None for if empty."""

    def by(*args):
        if run is not None:
            run.append(op)
        with torch.no_grad():
            out = op(*args)
        if not none:
            return out
        return tuple(None if i in none and not t.numel() else t for i, t in enumerate(out))

    return by


def gradients(call, *leaves):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
    outs = [out for out in call(*leaves) if out is not None and out.requires_grad]
    torch.manual_seed(1)
    loss = sum((out * torch.randn_like(out)).sum() for out in outs)
    return [*outs, *torch.autograd.grad(loss, [t for t in leaves if t is not None])]


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (6,)])
def test_a_norm_has_the_operators_gradients(as_cuda, monkeypatch, centered, with_residual, shape):
    run = []
    monkeypatch.setattr(row_ops, "_norm_cuda", by_operator(row_ops.norm_op, run=run))
    monkeypatch.setattr(row_ops, "_run_norm_backward", by_operator(row_ops.norm_backward_op, 1, 2, run=run))
    x, w = torch.randn(shape), torch.randn(6)
    leaves = x, torch.randn(shape) if with_residual else None, w, w + 1 if centered else None
    straight = gradients(lambda *t: row_ops.norm(*t, 1e-5, centered), *leaves)
    assert run == [row_ops.norm_op, row_ops.norm_backward_op]
    monkeypatch.setattr(row_ops, "may_skip_dispatcher", lambda *_: False)
    for a, b in zip(straight, gradients(lambda *t: row_ops.norm(*t, 1e-5, centered), *leaves), strict=True):
        assert torch.equal(a, b)


def test_softmax_has_the_operators_gradients(as_cuda, monkeypatch):
    for name in ("_softmax_cuda", "_softmax_backward_cuda"):
        monkeypatch.setattr(row_ops, name, by_operator(getattr(row_ops, name.removesuffix("_cuda")[1:] + "_op")))
    x = torch.randn(2, 3, 5)
    direct = gradients(lambda t: [row_ops.softmax(t, torch.float32)], x)
    monkeypatch.setattr(row_ops, "may_skip_dispatcher", lambda *_: False)
    for a, b in zip(direct, gradients(lambda t: [row_ops.softmax(t, torch.float32)], x), strict=True):
        assert torch.equal(a, b)


def test_a_gradient_of_a_gradient_is_the_operators_own(as_cuda, monkeypatch):
    monkeypatch.setattr(row_ops, "_softmax_cuda", by_operator(row_ops.softmax_op))
    monkeypatch.setattr(row_ops, "_softmax_backward_cuda", by_operator(row_ops.softmax_backward_op))
    x = torch.randn(2, 3, requires_grad=True)
    found = [
        torch.autograd.grad(dx.square().sum(), x)[0]
        for y in (row_ops.softmax(x, torch.float32), torch.softmax(x, -1))
        for dx in torch.autograd.grad(y.square().sum(), x, create_graph=True)
    ]
    assert torch.allclose(*found, atol=1e-6)


# -- torch's switches ----------------------------------------------------------------------------------------------


def states():
    matmul = torch.backends.cuda.matmul
    return torch.get_float32_matmul_precision(), matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("tf32", [True, False])
def test_the_tf32_switch_comes_back(before, tf32):
    default = states()
    torch.set_float32_matmul_precision(before)
    kept = states()
    try:
        with pytest.raises(KeyError), set_tf32(tf32):
            assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == tf32 or kept[1] == "none"
            raise KeyError
        assert states() == kept
    finally:
        torch.set_float32_matmul_precision(default[0])
        torch.backends.cuda.matmul.fp32_precision = default[1]
        torch.backends.mkldnn.matmul.fp32_precision = default[2]
    assert states() == default


def test_a_program_that_uses_the_newer_switches_keeps_them():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"  # from here the older switch cannot even be read
    try:
        with set_tf32(False):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_what_counts_is_the_switch_that_kernels_read():
    default = states()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # said later, and finer
        assert not is_tf32_allowed()
        with set_tf32(True):
            assert is_tf32_allowed()
        assert not is_tf32_allowed()
    finally:
        torch.set_float32_matmul_precision(default[0])
        torch.backends.cuda.matmul.fp32_precision = default[1]
        torch.backends.mkldnn.matmul.fp32_precision = default[2]


def test_sums_stay_wide_and_the_switch_comes_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with force_fp32_sums("bf16"):
        assert not matmul.allow_bf16_reduced_precision_reduction
    assert matmul.allow_bf16_reduced_precision_reduction == before


def test_threads_do_not_leave_the_switch_behind():
    default = states()

    def flip(tf32: bool) -> None:
        for _ in range(50):
            with set_tf32(tf32):
                pass

    threads = [threading.Thread(target=flip, args=(i % 2 == 0,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert states() == default
