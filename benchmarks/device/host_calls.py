"""What a call costs the host: microseconds to issue an operator, alone and in a chain, and how fast the host is."""

from __future__ import annotations

import statistics as st
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import kernel_case
from kernel_case import Row, Step, rand
from record_models import JsonLines


class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def host_calls(grad: bool) -> dict[str, Step]:
    """Calls on tensors so small that the device always waits for the host."""
    with torch.device(kernel_case.device):
        return {**_computing(grad), **_moving(grad), **_others(grad)}


def _leaves(grad: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices, a row and an image."""
    shapes = ((64, 64), (64, 64), (64,), (2, 8, 8, 8))
    a, b, row, image = (torch.randn(shape, requires_grad=grad) for shape in shapes)
    return a, b, row, image


def _computing(grad: bool) -> dict[str, Step]:
    a, b, row, image = _leaves(grad)
    lin, bare, ln, empty = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.LayerNorm(64), Empty()
    stack = nn.Sequential(Empty(), Empty(), Empty(), Empty())
    conv, bn, frozen = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.BatchNorm2d(8).eval()
    q = torch.randn(1, 4, 16, 16, dtype=torch.bfloat16, requires_grad=grad)
    mask = torch.randn(1, 1, 16, 16, dtype=torch.bfloat16)
    return {
        "add": lambda: a + b,
        "add_inplace": lambda: b.detach().add_(1.0),
        "mul_scalar": lambda: a * 0.5,
        "matmul": lambda: a @ b,
        "linear": lambda: F.linear(a, lin.weight, lin.bias),
        "linear_module": lambda: lin(a),
        "linear_module_no_bias": lambda: bare(a),
        "empty_module": lambda: empty(a),
        "sequential_of_4_empty": lambda: stack(a),
        "layer_norm": lambda: F.layer_norm(a, (64,), ln.weight, ln.bias),
        "layer_norm_module": lambda: ln(a),
        "rms_norm": lambda: F.rms_norm(a, (64,), row),
        "softmax": lambda: a.softmax(-1),
        "gelu": lambda: F.gelu(a),
        "silu": lambda: F.silu(a),
        "conv2d": lambda: F.conv2d(image, conv.weight, conv.bias, padding=1),
        "conv2d_module": lambda: conv(image),
        "batch_norm_eval": lambda: frozen(image),
        "batch_norm_train": lambda: bn(image),
        "sdpa": lambda: F.scaled_dot_product_attention(q, q, q),
        "sdpa_mask": lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
    }


def _moving(grad: bool) -> dict[str, Step]:
    a, b, row, image = _leaves(grad)
    table, i = nn.Embedding(100, 64), torch.randint(0, 100, (64,))
    return {
        "view": lambda: a.view(32, 128),
        "transpose": lambda: a.transpose(0, 1),
        "permute": lambda: image.permute(0, 2, 3, 1),
        "unsqueeze": lambda: a.unsqueeze(0),
        "expand": lambda: row.expand(64, 64),
        "slice": lambda: a[:, :32],
        "split": lambda: a.split(32, 1),
        "chunk3": lambda: row[:63].chunk(3),
        "index": lambda: a[0],
        "index_tensor": lambda: table.weight[i],
        "transpose_contiguous": lambda: a.t().contiguous(),
        "to_dtype": lambda: a.to(torch.bfloat16),
        "to_same": lambda: a.to(torch.float32),
        "cat": lambda: torch.cat([a, b]),
        "stack": lambda: torch.stack([a, b]),
        "embedding": lambda: F.embedding(i, table.weight),
    }


def _others(grad: bool) -> dict[str, Step]:
    a, b, _, image = _leaves(grad)
    drop, act, target = nn.Dropout(0.1), nn.ReLU(inplace=True), torch.randint(0, 64, (64,))
    device = kernel_case.device
    return {
        "max_pool2d": lambda: F.max_pool2d(image, 2),
        "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(image, 1),
        "relu_": lambda: F.relu(a.clone(), inplace=True),
        "relu_module": lambda: act(a + 0.0),
        "dropout_train": lambda: drop(a),
        "sum": a.sum,
        "mean_last": lambda: a.mean(-1, keepdim=True),
        "pow": lambda: a.pow(2),
        "rsqrt": lambda: torch.rsqrt(a),
        "where": lambda: torch.where(a > 0, a, b),
        "arange": lambda: torch.arange(64, device=device),
        "zeros": lambda: torch.zeros(64, 64, device=device),
        "empty": lambda: torch.empty(64, 64, device=device),
        "cross_entropy": lambda: F.cross_entropy(a, target),
    }


def time_calls(fn: Step, n: int = 400) -> tuple[float, float]:
    """(host, host and device) microseconds a call: the median of five loops."""
    host, whole = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        for _ in range(n):
            fn()
        t1 = time.perf_counter()
        torch.cuda.synchronize()
        host.append((t1 - t0) / n * 1e6)
        whole.append((time.perf_counter() - t0) / n * 1e6)
    return st.median(host), st.median(whole)


def record_host_calls(out: JsonLines) -> None:
    for grad in (False, True):
        for name, fn in host_calls(grad).items():
            with torch.set_grad_enabled(grad):
                host, whole = time_calls(fn)
            out.write({"case": "host_call", "op": name, "grad": grad, "host_us": host, "with_gpu_us": whole})


def chains() -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]]:
    """Operators that can follow themselves, and the shape they keep."""
    with torch.device(kernel_case.device):
        lin, ln, conv, bn = nn.Linear(64, 64), nn.LayerNorm(64), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        b = torch.randn(64, 64, requires_grad=True)
        drop = nn.Dropout(0.1)
    image = (2, 8, 8, 8)
    return {
        "add": (lambda x: x + b, (64, 64)),
        "add_residual": (lambda x: x + x, (64, 64)),
        "mul": (lambda x: x * b, (64, 64)),
        "mul_scalar": (lambda x: x * 0.5, (64, 64)),
        "matmul": (lambda x: x @ b, (64, 64)),
        "linear_module": (lin, (64, 64)),
        "layer_norm_module": (ln, (64, 64)),
        "gelu": (F.gelu, (64, 64)),
        "relu": (torch.relu, (64, 64)),
        "softmax": (lambda x: x.softmax(-1), (64, 64)),
        "dropout": (drop, (64, 64)),
        "conv2d_module": (conv, image),
        "batch_norm_train_module": (bn, image),
        "sdpa_bf16": (lambda x: F.scaled_dot_product_attention(x, x, x), (1, 4, 16, 16)),
        "transpose": (lambda x: x.transpose(0, 1), (64, 64)),
        "view": (lambda x: x.view(64, 64), (64, 64)),
        "contiguous_transpose": (lambda x: x.t().contiguous(), (64, 64)),
        "rms_norm": (lambda x: F.rms_norm(x, (64,), b[0]), (64, 64)),
    }


def record_chains(out: JsonLines, length: int = 100) -> None:
    """Host microseconds per operator, forward and backward, of a chain of the same operator."""
    for name, (fn, shape) in chains().items():
        x = rand(*shape, dtype="bf16" if name.endswith("bf16") else "fp32", grad=True)
        seed, forward, backward = torch.randn_like(x), [], []
        for _ in range(9):
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            y = x
            for _ in range(length):
                y = fn(y)
            t1 = time.perf_counter()
            torch.cuda.synchronize()
            t2 = time.perf_counter()
            y.backward(seed)
            t3 = time.perf_counter()
            forward.append((t1 - t0) / length * 1e6)
            backward.append((t3 - t2) / length * 1e6)
        figures_ = {"forward_us": st.median(forward), "backward_us": st.median(backward)}
        out.write({"case": "host_chain", "op": name, "length": length, **figures_})


def host_speed() -> Row:
    """How fast this host runs Python, and launches: for comparing machines and times."""

    def loop() -> None:
        for _ in range(1_000_000):
            pass

    took = []
    for _ in range(5):
        t0 = time.perf_counter()
        loop()
        took.append(time.perf_counter() - t0)
    a = torch.zeros(64, device=kernel_case.device)
    return {"case": "host_speed", "empty_loop_ns": st.median(took) * 1e3, "add_us": time_calls(lambda: a.add_(1.0))[0]}
