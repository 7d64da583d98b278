"""Calls that leave the dispatcher out: who must not be left out, the same gradients, the same launches as Triton's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.op import attention_ops, eager, lowprec, row_ops


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
    assert eager.KNOWN and not eager.straight(torch.ones(2))


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("precision", lowprec.PRECISIONS)
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
    assert eager.straight(x, None, torch.nn.Parameter(x))
    with torch.inference_mode(), torch.autocast("cpu"):
        assert eager.straight(torch.ones(2), x)


def test_whoever_sees_or_changes_operators_gets_them(as_cuda):
    x, answers = torch.ones(2), {}

    def asked(name):
        def ask(t):
            answers[name] = eager.straight(t)
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
    assert not eager.straight(x, x.as_subclass(Own))
    assert not eager.straight(x, torch.ones(2, dtype=torch.complex64).conj().imag)
    assert eager.straight(x)


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
    monkeypatch.setattr(row_ops, "_normed_backward", by_operator(row_ops.norm_backward_op, 1, 2, run=run))
    x, w = torch.randn(shape), torch.randn(6)
    leaves = x, torch.randn(shape) if with_residual else None, w, w + 1 if centered else None
    straight = gradients(lambda *t: row_ops.norm(*t, 1e-5, centered), *leaves)
    assert run == [row_ops.norm_op, row_ops.norm_backward_op]
    monkeypatch.setattr(row_ops, "straight", lambda *_: False)
    for a, b in zip(straight, gradients(lambda *t: row_ops.norm(*t, 1e-5, centered), *leaves), strict=True):
        assert torch.equal(a, b)


def test_softmax_and_attention_have_the_operators_gradients(as_cuda, monkeypatch):
    for name in ("_softmax_cuda", "_softmax_backward_cuda"):
        monkeypatch.setattr(row_ops, name, by_operator(getattr(row_ops, name.removesuffix("_cuda")[1:] + "_op")))
    for name in ("_attention_cuda", "_attention_backward_cuda"):
        op = getattr(attention_ops, name.removesuffix("_cuda")[1:] + "_op")
        monkeypatch.setattr(attention_ops, name, by_operator(op))
    x, q, k = torch.randn(2, 3, 5), torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    more = (None, torch.tensor([77]), 0.25, 0.3, True, 64, 64, 2, 4, "ieee")
    calls = (
        (lambda t: [row_ops.softmax(t, torch.float32)], (x,)),
        (lambda *t: attention_ops.attention(*t, *more)[:1], (q, k, k + 1)),
    )
    straight = [gradients(call, *leaves) for call, leaves in calls]
    for module in (row_ops, attention_ops):
        monkeypatch.setattr(module, "straight", lambda *_: False)
    for first, (call, leaves) in zip(straight, calls, strict=True):
        for a, b in zip(first, gradients(call, *leaves), strict=True):
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


TWICE = """
from triton import knobs
from tessera.op.kernels import attention, direct, rows
from tessera.op.kernels.attention_backward import backward

def number(value):
    return value.data_ptr() if isinstance(value, torch.Tensor) else value

Driver.launcher_cls = lambda self, source, made: (
    lambda *args: seen.append([made.name, made.hash, *args[:4], *map(number, args[9:])]))
asked = []
jit_run = type(rows._norm_forward).run
def run(self, *args, **kwargs):
    asked.append(self.__name__)
    return jit_run(self, *args, **kwargs)
type(rows._norm_forward).run = run

def all_of_them():
    del seen[:]
    for shape, dtype in (((1, 16), torch.float32), ((64, 100), torch.bfloat16), ((4, 5, 48), torch.bfloat16)):
        x, w = rand(*shape, dtype=dtype), rand(shape[-1])
        rows.softmax_backward(x, rows.softmax_forward(x, torch.float32), dtype)
        for centered, residual, weight in ((True, x, w), (False, None, rand(shape[-1], dtype=torch.float32))):
            y, _, mean, rstd = rows.norm_forward(
                x, residual, weight, weight if centered else None, eps=1e-5, centered=centered)
            x2 = x.reshape(-1, shape[-1])
            rows.norm_backward(x2, None, x2, weight, mean=mean, rstd=rstd, weight_grad=True, bias_grad=centered)
    for heads, s, d, mask, p in ((2, 100, 16, None, 0.0), (4, 1, 20, rand(1, 1), 0.3)):
        q, k = rand(2, heads, s, d), rand(2, s, 2, d).transpose(1, 2)
        drop, launch = attention.Drop(p, rand(1, dtype=torch.int64) if p else None), attention.Launch(16, 16, 2, 4)
        out, lse = attention.forward(q, k, k, mask, 0.1, mask is None, launch, drop)
        backward(out, q, k, k, mask, out, lse, 0.1, mask is None, launch, drop)
    return list(seen)

first = all_of_them()
compiled = len(asked)
second = all_of_them()
straight = len(asked) - compiled
hook = lambda metadata: None
knobs.runtime.launch_enter_hook.add(hook)
hooked = all_of_them()
hook_asked = len(asked) - compiled - straight
knobs.runtime.launch_enter_hook.remove(hook)
x = torch.zeros(65, dtype=torch.float32)
seen.clear()
for start in (0, 1, 0, 1, 0):  # 4 bytes off: another kernel, the aligned one stays
    rows.softmax_forward(x[start:start + 64].view(4, 16), torch.float32)
offs = [launch[1] for launch in seen]
direct.MOST = 3
kept = direct.Kernel(rows._softmax_forward)
for n in range(2, 9):
    kept.launch(1, (rand(n, 16), rand(n, 16)), (n, 16), (), (1, 16), warps=4)
print(json.dumps([first, second, hooked, compiled, straight, hook_asked, offs, len(kept._known)]))
"""


def test_the_second_launch_is_the_first_without_tritons_binder():
    pytest.importorskip("triton")
    from op.test_launch import DRIVER

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TESSERA_DIRECT_LAUNCH": "1"}
    done = subprocess.run([sys.executable, "-c", DRIVER + TWICE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, hooked, compiled, straight, hook_asked, offs, kept = json.loads(done.stdout.splitlines()[-1])
    assert first == second == hooked and len(first) == hook_asked
    assert straight == 0 < compiled <= len(first)
    assert offs[0] == offs[2] == offs[4] != offs[1] == offs[3]
    assert kept <= 3
