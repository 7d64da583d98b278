"""Where the meta device would take another path than a GPU: those calls are answered here, and emitted as what runs.

Attention on meta tensors falls apart into products and a softmax, a GPU runs one fused kernel; the same holds for
recurrent layers (cuDNN), dropout and RMS norm. Requests for a CUDA device are given the meta device, so that a program
written for a GPU captures on a laptop.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch.overrides import TorchFunctionMode

from ..errors import DataDependent
from .autocast import Autocast
from .costing import attention_params
from .known import MAX_KNOWN_INTS
from .record import Recorder, _user_line
from .recurrent import GATES, recurrent

_SDPA = F.scaled_dot_product_attention


def _like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t, device="meta")  # a slice of something larger gets memory of its own, in its order


def _attention_call(q: Any, k: Any, v: Any, mask: Any, params: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The operator a GPU dispatches for a fused attention, with its arguments: flash, or the one that takes masks."""
    if mask is None and q.dtype != torch.float32 and q.shape[-1] <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash, (q, k, v, params["dropout"], params["causal"])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return efficient, (q, k, v, mask, True, params["dropout"], params["causal"])


class _Attention(torch.autograd.Function):
    """Scaled dot-product attention as one kernel forward and one family of kernels backward."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, q: Any, k: Any, v: Any, mask: Any, params: dict[str, Any]) -> Any:
        def run() -> tuple[torch.Tensor, torch.Tensor]:
            *lead, length, _ = q.shape
            # Fused kernels write (batch, sequence, head, dim): the transpose that follows them is then free.
            shape = [*lead[:-1], length, lead[-1], v.shape[-1]] if lead else [length, v.shape[-1]]
            out = torch.empty(shape, dtype=q.dtype, device="meta")
            out = out.transpose(-2, -3) if lead else out
            lse = torch.empty([*lead, length], dtype=torch.float32, device="meta")
            reads = [q, k, v] + ([mask] if mask is not None else [])
            recorder.emit("tessera.sdpa", "attention", reads, [out, lse], params)
            return out, lse

        out, lse = recorder.as_operator(lambda: _attention_call(q, k, v, mask, params), run)
        ctx.recorder, ctx.params, ctx.mask_grad = recorder, params, mask is not None and mask.requires_grad
        ctx.save_for_backward(q, k, v, out, lse, *([mask] if mask is not None else []))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, *mask = ctx.saved_tensors
        dq, dk, dv = _like(q), _like(k), _like(v)
        outs = [dq, dk, dv]
        dmask = _like(mask[0]) if ctx.mask_grad else None
        ctx.recorder.emit(
            "tessera.sdpa_backward",
            "attention",
            [grads[0], q, k, v, out, lse, *mask],
            outs,
            {**ctx.params, "backward": True},
        )
        return None, dq, dk, dv, dmask, None


def _fusible(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, gqa: bool) -> bool:
    """Whether a fused kernel takes these operands; otherwise torch runs products and a softmax (seen on an H200)."""
    cuda = torch.backends.cuda
    if not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()):
        return False  # the program has switched the fused kernels off
    if mask is not None and mask.shape[-1] > 1 and mask.stride(-1) != 1:
        return False
    if query.dim() == key.dim() == 4 and (
        query.shape[0] != key.shape[0] or (not gqa and query.shape[1] != key.shape[1])
    ):
        return False  # keys and values that must be broadcast (multi-query without enable_gqa)
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32) or query.dim() != 4:
        return False
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (query, key, value)):
        return False  # a head's numbers must lie together
    if query.dtype == torch.float32 or query.shape[-1] > 256:
        # The memory-efficient kernels: any size of a head, and no heads that share keys.
        return not (gqa and query.shape[-3] != key.shape[-3])
    return True


def attention(
    recorder: Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` runs on a GPU."""
    query, key, value = (t if t.device.type == "meta" else recorder.twin(t) for t in (query, key, value))
    if not _fusible(query, key, value, attn_mask, enable_gqa):
        return _SDPA(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    params = attention_params(query, key, value, attn_mask, is_causal, dropout=dropout_p)
    if attn_mask is not None and attn_mask.device.type != "meta":
        attn_mask = recorder.twin(attn_mask)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the fused kernels add a mask: zeros and infinities
        with torch.no_grad():
            zero, never = (torch.scalar_tensor(x, dtype=query.dtype, device="meta") for x in (0.0, -math.inf))
            attn_mask = torch.where(attn_mask, zero, never)
    out: torch.Tensor = _Attention.apply(recorder, query, key, value, attn_mask, params)
    return out


class _Fused(torch.autograd.Function):
    """One kernel forward, one backward: y = f(x, weight)."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, name: str, x: torch.Tensor, weight: Any) -> torch.Tensor:
        out = torch.empty_like(x)
        recorder.emit(f"tessera.{name}", "norm", [x] + ([weight] if weight is not None else []), [out], {})
        ctx.recorder, ctx.name = recorder, name
        ctx.save_for_backward(x, *([weight] if weight is not None else []))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weight = ctx.saved_tensors
        outs = [_like(x), *(_like(w) for w in weight)]
        ctx.recorder.emit(f"tessera.{ctx.name}_backward", "norm", [grads[0], x, *weight], outs, {})
        return None, None, outs[0], outs[1] if weight else None


class _Grouped(torch.autograd.Function):
    """A grouped matrix product (the experts of a mixture): one product of all rows forward, two backward."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, a: torch.Tensor, b: torch.Tensor, dtype: Any) -> torch.Tensor:
        lead = a.shape[:-1] if a.dim() == 2 or b.dim() == 3 else (b.shape[0], a.shape[0])
        out = torch.empty((*lead, b.shape[-1]), dtype=dtype or a.dtype, device="meta")
        recorder.emit("aten._grouped_mm", "gemm", [a, b], [out], {})
        recorder.assumptions["tokens are spread evenly over the experts"] = None
        ctx.recorder = recorder
        ctx.save_for_backward(a, b)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        da, db = _like(a), _like(b)
        for wanted, out, reads in ((ctx.needs_input_grad[1], da, b), (ctx.needs_input_grad[2], db, a)):
            if wanted:
                # Each gradient is a product with the FLOPs of the forward one: emitted with its sizes.
                ctx.recorder.emit("aten._grouped_mm", "gemm", [a, b], [out], {"gradient": True, "reads": reads.shape})
        return None, da, db, None


class Interceptor(TorchFunctionMode):
    """Sees every torch function before it falls apart, counts them for the host, and answers the special ones."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.autocast = Autocast()
        vf = torch._C._VariableFunctions
        self._answers: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            F.dropout: self._dropout,
            torch.dropout: self._dropout,
            F.rms_norm: self._rms_norm,
            torch.rms_norm: self._rms_norm,
            F.multi_head_attention_forward: lambda *a, **k: self._inside(
                F, lambda: F.multi_head_attention_forward(*a, **k)
            ),
            torch.autograd.grad: lambda *a, **k: self._inside(torch.autograd, lambda: torch.autograd.grad(*a, **k)),
            torch.autograd.backward: lambda *a, **k: self._inside(
                torch.autograd, lambda: torch.autograd.backward(*a, **k)
            ),
            torch.Tensor.backward: self._backward,
            torch.tensor: lambda *a, **k: self._literal(torch.tensor, *a, **k),
            torch.as_tensor: lambda *a, **k: self._literal(torch.as_tensor, *a, **k),
            F.one_hot: self._one_hot,
            torch._grouped_mm: self._grouped,
            torch.nn.functional.grouped_mm: self._grouped,
            torch.Tensor.__setitem__: self._set,
            torch.Tensor.cuda: lambda x, *a, **k: x.to("meta"),
            torch.Tensor.cpu: lambda x, *a, **k: self._to_host(x),
            torch.Tensor.numpy: lambda x, *a, **k: self._values(x).numpy(),
            torch.Tensor.tolist: lambda x: self._values(x).tolist(),
            torch.Tensor.pin_memory: lambda x, *a: x,
        }
        for cell in GATES:
            self._answers[getattr(vf, cell)] = lambda *a, cell=cell: recurrent(self._recorder, cell, *a)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, redirect to the meta device, answer or pass on."""
        kwargs = kwargs or {}
        self._recorder.functions += 1
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if func is torch.Tensor.to and any(_is_cuda(a) for a in args[1:]):
            args = tuple(torch.device("meta") if _is_cuda(a) else a for a in args)
        args, kwargs = self.autocast.apply(func, args, kwargs)
        answer = self._answers.get(func)
        return answer(*args, **kwargs) if answer is not None else func(*args, **kwargs)

    def _inside(self, module: Any, call: Callable[[], Any]) -> Any:
        """A function of torch that runs Python of its own: what it calls is answered and cast like everything else."""
        ask = module.has_torch_function
        module.has_torch_function = lambda *_: False  # it would hand itself to this mode again
        try:
            with self:
                return call()
        finally:
            module.has_torch_function = ask

    def _backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward runs Python too: checkpoints recompute, custom functions differentiate."""
        names = ("gradient", "retain_graph", "create_graph", "inputs")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given["grad_tensors"] = given.pop("gradient", None)
        self._inside(torch.autograd, lambda: torch.autograd.backward(tensor, **given))

    def _one_hot(self, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        out: torch.Tensor = F.one_hot(tensor, num_classes)
        if out.device.type == "meta":
            self._recorder.routes.one_hot(out, int(out.shape[-1]))
        return out

    def _literal(self, make: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor made of numbers in the program: its values are known wherever it lives."""
        if isinstance(data, torch.Tensor) or torch.device(kwargs.get("device") or "cpu").type != "meta":
            return make(data, *args, **kwargs)
        value = make(data, *args, **{**kwargs, "device": "cpu"})
        meta = make(data, *args, **kwargs)
        self._recorder.known.note(meta, value)
        return meta

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        return attention(self._recorder, *args, **kwargs)

    @staticmethod
    def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0.0:
            return input
        return torch.native_dropout(input, p, True)[0]

    @staticmethod
    def _set(x: torch.Tensor, index: Any, value: Any) -> None:
        """`x[a:b] = number` and `x[mask] = number` fill on a GPU; on the meta device the number becomes a tensor."""
        items = index if isinstance(index, tuple) else (index,)
        plain = all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in items)
        if plain and isinstance(value, (int, float)):
            x[index].fill_(value)
        elif isinstance(value, (int, float)) and isinstance(index, torch.Tensor) and index.dtype == torch.bool:
            x.masked_fill_(index.reshape(*index.shape, *([1] * (x.dim() - index.dim()))), value)
        else:
            x.__setitem__(index, value)

    def _grouped(self, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None, **_: Any) -> Any:
        return _Grouped.apply(self._recorder, a, b, out_dtype)

    def _rms_norm(self, input: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        return _Fused.apply(self._recorder, "rms_norm", input, weight)

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        self._recorder.wait()
        value = self._recorder.known.value(x)
        return value if value is not None else x

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        self._recorder.wait()
        value = self._recorder.known.value(x)
        if value is None and x.is_floating_point() and x.numel() <= MAX_KNOWN_INTS:
            self._recorder.assume("the values of floats are taken to be 1.0")
            return torch.ones(x.shape, dtype=x.dtype, device="cpu")
        if value is None:
            raise DataDependent(
                f"the program asks for the values of a tensor at {_user_line()}",
                why="capture computes nothing, so they do not exist",
                fix="leave that part out of what is predicted, or measure the model instead: tessera measure",
            )
        return value


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.startswith("cuda")


@contextlib.contextmanager
def patched(recorder: Recorder, replay: bool, autocast: Autocast) -> Iterator[None]:
    """Names that functions of torch itself call, where the function mode does not see them, and the foreach optimizers.

    Optimizers choose their multi-tensor kernels by device; the meta device is not on their list, a GPU is. `replay`:
    programs that ask whether a CUDA graph is being captured are told so (transformers then builds its masks).
    """
    import torch.optim.optimizer as optim

    capturing = torch.cuda.is_current_stream_capturing
    if replay:

        def yes() -> bool:
            recorder.assumptions[
                "the program asks whether a CUDA graph is captured, and is told so (masks are built)"
            ] = None
            return True

        torch.cuda.is_current_stream_capturing = yes

    names = ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices",
             "_get_capturable_supported_devices")  # fmt: skip
    # The modules of optimizers have imported them by name.
    places = [m for path, m in list(sys.modules.items()) if path.startswith("torch.optim.")]
    supported = [(m, name, getattr(m, name)) for m in (optim, *places) for name in names if hasattr(m, name)]
    for module, name, ask in supported:
        setattr(module, name, lambda *a, ask=ask, **k: [*ask(*a, **k), "meta"])
    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *_: recorder.wait()
    before_sdpa = F.scaled_dot_product_attention
    before_dropout = F.dropout

    here = threading.get_ident()

    def sdpa(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:  # another thread's real model
            return before_sdpa(*args, **kwargs)
        args, kwargs = autocast.apply(before_sdpa, args, kwargs)
        return attention(recorder, *args, **kwargs)

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if threading.get_ident() != here:
            return before_dropout(input, p, training, inplace)
        return Interceptor._dropout(input, p, training, inplace)

    F.scaled_dot_product_attention, F.dropout = sdpa, dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = before_sdpa, before_dropout
        torch.cuda.is_current_stream_capturing, torch.cuda.synchronize = capturing, synchronize
        for module, name, ask in reversed(supported):
            setattr(module, name, ask)
