"""`flex_attention` on meta tensors: one fused kernel over the blocks that its mask leaves, as torch.compile makes it.

Programs import the function by name, so that a name put into torch's module would not reach them: its code is replaced
for the length of a capture.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from .costing import attention_params
from .intercept import _Attention
from .record import Recorder

_MODULE = "torch.nn.attention.flex_attention"
_ANSWER = "_tessera_answer"


def _stand_in(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    return _tessera_answer(  # type: ignore[name-defined]  # noqa: F821
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )


@contextlib.contextmanager
def flexible(recorder: Recorder) -> Iterator[None]:
    """Answer `flex_attention` where a program has imported it; importing it here would make every capture slower."""
    module = sys.modules.get(_MODULE)
    function = getattr(module, "flex_attention", None)
    if module is None or not isinstance(function, FunctionType) or not _alike(function.__code__):
        yield
        return
    code, here = function.__code__, threading.get_ident()
    real = FunctionType(code, function.__globals__, function.__name__)

    def answer(*args: Any, return_aux: Any) -> Any:
        if threading.get_ident() != here:  # another thread's real model
            return real(*args, return_aux=return_aux)
        return _attend(recorder, args[:3], args[4], args[7], return_aux)

    setattr(module, _ANSWER, answer)
    function.__code__ = _stand_in.__code__
    try:
        yield
    finally:
        function.__code__ = code
        delattr(module, _ANSWER)


def _alike(code: CodeType) -> bool:
    """Whether torch's function takes what the stand-in does: another version's may not."""
    ours = _stand_in.__code__
    count = ours.co_argcount + ours.co_kwonlyargcount
    same = (code.co_argcount, code.co_kwonlyargcount) == (ours.co_argcount, ours.co_kwonlyargcount)
    return same and not code.co_freevars and code.co_varnames[:count] == ours.co_varnames[:count]


def _attend(recorder: Recorder, operands: Any, block_mask: Any, return_lse: bool, return_aux: Any) -> Any:
    q, k, v = (recorder.on_meta(t) for t in operands)
    recorder.assumptions["flex_attention runs as one fused kernel, at the rates of torch's own attention"] = None
    share = 1.0 if block_mask is None else _share(recorder, block_mask)
    params = attention_params(q, k, v, None, False)
    # Keys that no query of a block sees are never loaded: as if there were fewer.
    params |= {"kv_len": max(1, round(share * k.shape[-2])), "flexible": True}
    out = _Attention.apply(recorder, q, k, v, None, params)
    statistics = torch.empty(q.shape[:-1], dtype=torch.float32, device="meta")
    if return_aux is not None:
        wanted = {name: statistics if getattr(return_aux, name) else None for name in ("lse", "max_scores")}
        return out, sys.modules[_MODULE].AuxOutput(**wanted)
    return (out, statistics) if return_lse else out


def _share(recorder: Recorder, mask: Any) -> float:
    """The share of its blocks that a block mask computes; all of them where its values are not known."""
    columns = mask.kv_indices.shape[-1]
    computed = 0.0
    for blocks in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        if blocks is None:
            continue
        value = recorder.known.value(blocks)
        if value is None:
            recorder.assumptions["flex_attention computes every block: the values of its mask are not known"] = None
            return 1.0
        computed += float(value.sum()) / max(1, value.numel() * columns)
    return min(1.0, computed)
