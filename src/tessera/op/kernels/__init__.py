"""Triton kernels and the functions that launch them; importing one needs Triton."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...errors import needs_extra

TRITON_TYPE = {"fp64": "fp64", "fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv"}
"""Triton's names of our number formats."""


def pad_head(dims: int) -> int:
    """Return the width that the attention kernel works with: a power of two that holds the head."""
    return max(16, 1 << (dims - 1).bit_length())


def compile_for(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], unaligned: Collection[str] = (), *,
    stages: int, warps: int, target: Any,
) -> Any:
    """Compile a kernel for a target without a GPU; the result has `.metadata.shared` and `.asm`.

    `types` are those of the runtime arguments ("*bf16", "i32"), `constants` are the constexpr ones. Pointers and
    integers count as divisible by 16, as they are for aligned tensors, except those in `unaligned`.
    """
    with needs_extra("triton", "triton", "compiling a kernel"):
        import triton
        from triton.compiler import ASTSource
    names = list(kernel.arg_names)
    signature = {name: types.get(name, "constexpr") for name in names}
    even = [i for i, name in enumerate(names) if name in types and types[name] != "fp32" and name not in unaligned]
    source = ASTSource(kernel, signature, dict(constants), {(i,): [["tt.divisibility", 16]] for i in even})
    return triton.compile(source, target=target, options={"num_stages": stages, "num_warps": warps})
