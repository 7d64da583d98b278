"""torch's global switches for products on CUDA, set for the length of one launch and put back.

They belong to the process, not to a thread. A lock keeps our own launches apart; a product that another thread launches
in that moment by other ways sees the switch as we set it: in tf32 instead of fp32 at worst, or the reverse.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.RLock()


def tf32_allowed() -> bool:
    """Whether the program lets fp32 products on CUDA run in tf32."""
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9 each backend has a switch of its own, which kernels read; the older one may be unreadable then.
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(torch.get_float32_matmul_precision() != "highest")


@contextlib.contextmanager
def fp32_products(*, tf32: bool) -> Iterator[None]:
    """Let fp32 products run in tf32, or not, in the body; the state before it comes back."""
    with _lock:
        if tf32_allowed() == tf32:
            yield
            return
        # The older switch sets those of all backends.
        backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
        own = [(b, b.fp32_precision) for b in backends if hasattr(b, "fp32_precision")]
        try:
            older = torch.get_float32_matmul_precision()
        except RuntimeError:  # the program uses the newer switches, and reading the older one is then an error
            older = None
        try:
            if older is None:
                torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
            else:
                torch.set_float32_matmul_precision("high" if tf32 else "highest")
            yield
        finally:
            if older is not None:
                torch.set_float32_matmul_precision(older)
            for backend, before in own:
                backend.fp32_precision = before


@contextlib.contextmanager
def fp32_sums(precision: str, *, wanted: bool) -> Iterator[None]:
    """Keep split sums of bf16 or fp16 products in fp32, where torch by default may not; the state before comes back."""
    name = f"allow_{precision}_reduced_precision_reduction"
    matmul = torch.backends.cuda.matmul
    with _lock:
        before = getattr(matmul, name)
        if not (wanted and before):
            yield
            return
        split = getattr(matmul, f"{name}_split_k", None)  # a second switch under the same name, since torch 2.10
        try:
            setattr(matmul, name, False)
            yield
        finally:
            setattr(matmul, name, before if split is None else (before, split))
