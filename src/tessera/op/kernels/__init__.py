"""Triton kernels and the functions that launch them, nothing else; importing one needs Triton."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ...errors import MissingExtra

TRITON_TYPE = {"fp64": "fp64", "fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv"}
"""What Triton calls our number formats."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], plain: Collection[str], *,
    stages: int, warps: int, target: Any,
) -> Any:  # fmt: skip
    """Compile a kernel for a target without a GPU; what the compiler knows of it (`.metadata.shared`, `.asm`).

    `types` are the runtime arguments' ("*bf16", "i32"), `constants` the constexpr ones. Pointers and integers count as
    divisible by 16, as they are for aligned tensors, but for those in `plain`.
    """
    try:
        import triton
        from triton.compiler import ASTSource
    except ImportError as e:
        raise MissingExtra("triton", "triton", "compiling a kernel") from e
    names = list(kernel.arg_names)
    signature = {name: types.get(name, "constexpr") for name in names}
    even = [i for i, name in enumerate(names) if name in types and types[name] != "fp32" and name not in plain]
    source = ASTSource(kernel, signature, dict(constants), {(i,): [["tt.divisibility", 16]] for i in even})
    return triton.compile(source, target=target, options={"num_stages": stages, "num_warps": warps})
