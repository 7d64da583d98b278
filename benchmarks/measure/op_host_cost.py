"""What an operator of ours costs the host beyond torch's call, on tensors so small that nothing else counts.

    python benchmarks/measure/op_host_cost.py [RESULTS.json]

Prints microseconds of CPU time a call of torch and of ours (the least of forty rounds taken in turn, one thread, CPU
tensors): the goal is 5 us over torch on aligned shapes. The launch of a GPU kernel would be the same on both sides.

Then calls by our own kernels with everything but the launch: a driver of Triton's that launches nothing, and CPU
tensors that say they are CUDA's. "straight" is a plain call, "operator" the same through torch's dispatcher, as every
call goes under a mode, a transform or a profiler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from tessera import op
from tessera.op import attention_ops, dispatch, normalize, row_ops

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

ROUNDS, CALLS = 40, 500


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    a, b, c = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
    ha, hb = a.to(torch.bfloat16), b.to(torch.bfloat16)
    stack, heads = torch.randn(4, 8, 8), torch.randn(1, 2, 8, 8)
    image, filters = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    return {
        "matmul fp32": (lambda: torch.matmul(a, b), lambda: op.matmul(a, b)),
        "matmul bf16": (lambda: torch.matmul(ha, hb), lambda: op.matmul(ha, hb)),
        "matmul batched": (lambda: torch.matmul(stack, stack), lambda: op.matmul(stack, stack)),
        "linear": (lambda: F.linear(a, b, c), lambda: op.linear(a, b, c)),
        "linear bf16": (lambda: F.linear(ha, hb), lambda: op.linear(ha, hb)),
        "softmax": (lambda: torch.softmax(a, -1), lambda: op.softmax(a)),
        "layer_norm": (lambda: F.layer_norm(a, (8,), c, c), lambda: op.layer_norm(a, None, c, c)),
        "rms_norm": (lambda: F.rms_norm(a, (8,), c, 1e-6), lambda: op.rms_norm(a, c, 1e-6)),
        "attention": (
            lambda: F.scaled_dot_product_attention(heads, heads, heads),
            lambda: op.flash_attention(heads, heads, heads),
        ),
        "gemm": (lambda: torch.addmm(c, a, b), lambda: op.gemm(a, b, c)),
        "conv2d": (lambda: F.conv2d(image, filters, padding=1), lambda: op.conv2d(image, filters, padding=1)),
    }


def microseconds(fn: Callable[[], Any]) -> float:
    begin = time.thread_time()  # not what other processes take
    for _ in range(CALLS):
        fn()
    return (time.thread_time() - begin) / CALLS * 1e6


def least(*ways: Callable[[], Any]) -> list[float]:
    for way in ways:
        way(), way()
    rounds = [[microseconds(way) for way in ways] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*rounds, strict=True)]


def without_a_gpu() -> None:
    """Let everything of a call of our kernels run here but the launch."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Utils:
        def load_binary(self, *_: Any) -> tuple[int, ...]:
            return 1, 2, 0, 0, 1024

        def get_device_properties(self, _: int) -> dict[str, int]:
            return {"max_shared_mem": 232448}

    class Driver:
        utils = Utils()
        get_current_device = staticmethod(lambda: -1)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        launcher_cls = staticmethod(lambda source, metadata: lambda *_: None)

    driver.set_active(Driver())
    torch.cuda.current_device = lambda: -1
    torch.Tensor.is_cuda = True
    for module, names in ((row_ops, ("softmax", "norm", "norm_backward")), (attention_ops, ("attention",))):
        for name in names:
            getattr(module, f"{name}_op").register_kernel("cpu")(getattr(module, f"_{name}_cuda"))
    kinds = [(dtype, training) for dtype in normalize.KERNEL_DTYPES for training in (False, True)]
    every = tuple(normalize.RowRule(1, normalize.MAX_COLS, *kind, least_rows=1) for kind in kinds)
    normalize.RULES.update(dict.fromkeys(normalize.RULES, every))


def kernel_calls() -> dict[str, Callable[[], Any]]:
    x, w, q = (torch.randn(shape).to(torch.bfloat16) for shape in ((64, 64), (64,), (1, 4, 16, 64)))
    trained = x.clone().requires_grad_()
    return {
        "softmax": lambda: op.softmax(x),
        "layer_norm": lambda: op.layer_norm(x, None, w, w),
        "rms_norm": lambda: op.rms_norm(x, w, 1e-6),
        "rms_norm, residual": lambda: op.rms_norm(x, w, 1e-6, residual=x),
        "rms_norm, training": lambda: op.rms_norm(trained, w, 1e-6),
        "attention, a tile": lambda: op.flash_attention(q, q, q, tile_shape=(64, 64)),
    }


def by_our_kernels() -> dict[str, dict[str, float]]:
    """{call: microseconds straight and by the operator}."""

    def operator(call: Callable[[], Any]) -> Callable[[], Any]:
        def through() -> None:
            dispatch.KNOWN = False
            call()
            dispatch.KNOWN = True

        return through

    found = {}
    print(f"\n{'us, launch faked':18s} {'straight':>8s} {'operator':>8s}")
    for name, call in kernel_calls().items():
        straight, through = least(call, operator(call))
        print(f"{name:18s} {straight:8.2f} {through:8.2f}")
        found[name] = {"straight_us": straight, "operator_us": through}
    return found


def main() -> None:
    torch.set_num_threads(1)
    calls, kernels = {}, {}
    print(f"{'us a call':18s} {'torch':>8s} {'ours':>8s} {'more':>8s}")
    for name, (theirs, ours) in cases().items():
        by_torch, by_us = least(theirs, ours)
        print(f"{name:18s} {by_torch:8.2f} {by_us:8.2f} {by_us - by_torch:8.2f}")
        calls[name] = {"torch_us": by_torch, "op_us": by_us, "more_us": by_us - by_torch}
    if normalize.has_triton():
        without_a_gpu()
        kernels = by_our_kernels()
    if len(sys.argv) > 1:
        found = {"calls": calls, "kernels": kernels, "torch": torch.__version__}
        write_result(Path(sys.argv[1]), found)


if __name__ == "__main__":
    main()
