"""A function mode that answers the calls for which meta tensors would take another path than a GPU.

Attention on meta tensors falls apart into products and a softmax, a GPU runs one fused kernel; the same holds for
recurrent layers (cuDNN), dropout and RMS norm. Requests for a CUDA device are given the meta device, so that a program
written for a GPU can be captured on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from ..errors import DataDependent
from .autocast import Autocast
from .flops import attention_params
from .recorder import Recorder, user_line
from .tracking import MAX_KNOWN_INTS, AssumedFloat

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Recurrent functions of torch by the products of one step."""
FUSED_CELLS = {"lstm": 4, "gru": 5}
"""Cells whose step a GPU runs as one kernel after its two products, by what it keeps of each unit for the gradient."""

_PRODUCTS = (torch.sparse.mm, torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)

_SDPA = F.scaled_dot_product_attention


def _new_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t, device="meta")  # a slice of something larger gets memory of its own, in its order


def _attention_call(q: Any, k: Any, v: Any, mask: Any, params: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The operator a GPU dispatches for a fused attention, with its arguments: flash, or the one that takes masks."""
    if mask is None and q.dtype != torch.float32 and q.shape[-1] <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash, (q, k, v, params["dropout"], params["causal"])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return efficient, (q, k, v, mask, True, params["dropout"], params["causal"])


class FusedAttention(torch.autograd.Function):
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
        dq, dk, dv = _new_like(q), _new_like(k), _new_like(v)
        dmask = _new_like(mask[0]) if ctx.mask_grad else None
        reads, params = [grads[0], q, k, v, out, lse, *mask], {**ctx.params, "backward": True}
        ctx.recorder.emit("tessera.sdpa_backward", "attention", reads, [dq, dk, dv], params)
        return None, dq, dk, dv, dmask, None


def _can_fuse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, gqa: bool
) -> bool:
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
    query, key, value = (recorder.on_meta(t) for t in (query, key, value))
    if not _can_fuse(query, key, value, attn_mask, enable_gqa):
        return _SDPA(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    params = attention_params(query, key, value, attn_mask, is_causal, dropout=dropout_p)
    attn_mask = recorder.on_meta(attn_mask)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the fused kernels add a mask: zeros and infinities
        with torch.no_grad():
            zero, never = (torch.scalar_tensor(x, dtype=query.dtype, device="meta") for x in (0.0, -math.inf))
            attn_mask = torch.where(attn_mask, zero, never)
    out: torch.Tensor = FusedAttention.apply(recorder, query, key, value, attn_mask, params)
    return out


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """What `torch.nn.functional.dropout` runs on a GPU: one kernel in training, none otherwise."""
    if not training or p == 0.0:
        return input
    out: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return out


class _RmsNorm(torch.autograd.Function):
    """One kernel forward, one backward."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x: torch.Tensor, weight: Any) -> torch.Tensor:
        out = torch.empty_like(x)
        weights = [weight] if weight is not None else []
        recorder.emit("tessera.rms_norm", "norm", [x, *weights], [out], {})
        ctx.recorder = recorder
        ctx.save_for_backward(x, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weight = ctx.saved_tensors
        outs = [_new_like(x), *(_new_like(w) for w in weight)]
        ctx.recorder.emit("tessera.rms_norm_backward", "norm", [grads[0], x, *weight], outs, {})
        return None, outs[0], outs[1] if weight else None


class _GroupedProduct(torch.autograd.Function):
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
        da, db = _new_like(a), _new_like(b)
        for wanted, out, reads in ((ctx.needs_input_grad[1], da, b), (ctx.needs_input_grad[2], db, a)):
            if wanted:
                # Each gradient is a product with the FLOPs of the forward one: emitted with its sizes.
                ctx.recorder.emit("aten._grouped_mm", "gemm", [a, b], [out], {"gradient": True, "reads": reads.shape})
        return None, da, db, None


class _Recurrent(torch.autograd.Function):
    """A whole recurrent layer, as cuDNN runs it."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, params: dict[str, Any], out_shape: Any, *tensors: torch.Tensor) -> Any:
        x = tensors[0]
        states = [torch.empty_like(t) for t in tensors[1 : 1 + params["states"]]]
        out = torch.empty(out_shape, dtype=x.dtype, device="meta")
        recorder.emit("tessera.rnn", "rnn", list(tensors), [out, *states], params)
        ctx.recorder, ctx.params = recorder, params
        ctx.save_for_backward(*tensors, out)
        return (out, *states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, out = ctx.saved_tensors
        outs = [torch.empty_like(t, device="meta") for t in tensors]
        reads, params = [*(g for g in grads if g is not None), *tensors, out], {**ctx.params, "backward": True}
        ctx.recorder.emit("tessera.rnn_backward", "rnn", reads, outs, params)
        return None, None, None, *outs


class _FusedCell(torch.autograd.Function):
    """A step of an LSTM or GRU cell after its products: one kernel, and one for the gradient."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, cell: str, *tensors: torch.Tensor) -> Any:
        state = tensors[2]
        outs = [_new_like(state) for _ in range(2 if cell == "lstm" else 1)]
        kept = torch.empty((*state.shape[:-1], FUSED_CELLS[cell] * state.shape[-1]), dtype=state.dtype, device="meta")
        recorder.emit(f"aten._thnn_fused_{cell}_cell", "elementwise", list(tensors), [*outs, kept], {})
        ctx.recorder, ctx.cell, ctx.has_bias = recorder, cell, len(tensors) > 3
        ctx.save_for_backward(state, tensors[0], kept, *outs)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        state, gates, kept, *outs = ctx.saved_tensors
        is_lstm = ctx.cell == "lstm"
        of_gates = [_new_like(gates) for _ in range(1 if is_lstm else 2)]
        of_state = _new_like(state)
        reads = [*(g for g in grads if g is not None), state, *outs[1:], kept]
        name = f"aten._thnn_fused_{ctx.cell}_cell_backward" + ("_impl" if is_lstm else "")
        ctx.recorder.emit(name, "elementwise", reads, [*of_gates, of_state], {})
        of_biases = [g.sum(0) for g in of_gates] if ctx.has_bias else []
        both = (lambda found: [*found, *found]) if is_lstm else list  # an LSTM's products have one gradient
        return None, None, *both(of_gates), of_state, *both(of_biases)


def _product(recorder: Recorder, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A product; a sparse matrix looks up rows of the other factor, scales them and adds them to the rows it names."""
    factors: tuple[Any, Any] = (args[0], args[1]) if len(args) == 2 else (None, None)
    a, b = factors
    count = a._nnz() if getattr(a, "layout", None) is torch.sparse_coo else getattr(a, "sparse_nnz", None)
    if count is None or not isinstance(b, torch.Tensor) or b.layout is not torch.strided or b.dim() != 2:
        return function(*args, **kwargs)
    recorder.assume("a product of a sparse matrix is predicted as a look-up, a product and a sum of rows")
    columns, rows = (torch.empty(count, dtype=torch.int64, device="meta") for _ in range(2))
    values = torch.empty((count, 1), dtype=a.dtype, device="meta")
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=b.dtype, device="meta")
    return out.index_add(0, rows, recorder.on_meta(b).index_select(0, columns) * values)


def _cell(
    recorder: Recorder, cell: str, x: Any, state: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """`torch.lstm_cell`, `torch.gru_cell`: two products without bias, and the rest as one kernel."""
    hidden, *cells = state if cell == "lstm" else [state]
    gates = F.linear(x, w_ih), F.linear(hidden, w_hh)
    biases = [b for b in (b_ih, b_hh) if b is not None]
    out = _FusedCell.apply(recorder, cell, *gates, *(cells or [hidden]), *biases)
    return out if cell == "lstm" else out[0]


def _recurrent(recorder: Recorder, cell: str, *args: Any) -> Any:
    """`torch.lstm`, `torch.gru`, `torch.rnn_tanh`: padded input, or packed (data, batch sizes)."""
    packed = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64
    x, rest = args[0], args[2:] if packed else args[1:]
    states = list(rest[0]) if cell == "lstm" else [rest[0]]
    weights, _bias, layers, _dropout, _train, bidirectional = rest[1:7]
    batch_first = bool(rest[7]) if len(rest) > 7 else False
    directions = 2 if bidirectional else 1
    hidden = states[-1].shape[-1]  # the cell state of an LSTM: its output may be projected to fewer
    width = states[0].shape[-1] * directions
    if packed:
        steps, batch = len(args[1]), max(1, x.shape[0] // max(1, len(args[1])))
        out_shape: list[int] = [x.shape[0], width]
    else:
        batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
        out_shape = [*x.shape[:2], width]
    params = {
        "gates": GATES[cell],
        "cell": cell,
        "hidden": hidden,
        "input": x.shape[-1],
        "layers": int(layers),
        "directions": directions,
        "steps": steps,
        "batch": batch,
        "states": len(states),
        "out": states[0].shape[-1],
    }
    tensors = [recorder.on_meta(t) for t in (x, *states, *weights)]
    return _Recurrent.apply(recorder, params, out_shape, *tensors)


class Interceptor(TorchFunctionMode):
    """Sees every torch function before it falls apart, counts them for the host, and answers the special ones."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.autocast = Autocast()
        vf = torch._C._VariableFunctions
        self._answers: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: partial(attention, recorder),
            F.dropout: dropout,
            torch.dropout: dropout,
            F.rms_norm: self._rms_norm,
            torch.rms_norm: self._rms_norm,
            torch.Tensor.backward: self._backward,
            torch.tensor: partial(self._literal, torch.tensor),
            torch.as_tensor: partial(self._literal, torch.as_tensor),
            F.one_hot: self._one_hot,
            torch._grouped_mm: self._grouped_product,
            torch.nn.functional.grouped_mm: self._grouped_product,
            torch.Tensor.__setitem__: self._set_item,
            torch.Tensor.cuda: lambda x, *a, **k: x.to("meta"),
            torch.Tensor.cpu: lambda x, *a, **k: self._to_host(x),
            torch.Tensor.numpy: lambda x, *a, **k: self._values(x).numpy(),
            torch.Tensor.tolist: lambda x: self._values(x).tolist(),
            torch.Tensor.item: self._item,
            torch.Tensor.pin_memory: lambda x, *a: x,
        }
        for cell in GATES:
            self._answers[getattr(vf, cell)] = partial(_recurrent, recorder, cell)
        for product in _PRODUCTS:
            self._answers[product] = partial(_product, recorder, product)
        for cell in FUSED_CELLS:
            self._answers[getattr(vf, f"{cell}_cell")] = partial(_cell, recorder, cell)
        for module, name in (
            (F, "multi_head_attention_forward"),
            (torch.autograd, "grad"),
            (torch.autograd, "backward"),
        ):
            function = getattr(module, name)
            self._answers[function] = partial(self._run_inside, module, function)

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

    def _run_inside(self, module: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function of torch that runs Python of its own: what it calls is answered and cast like everything else."""
        ask = module.has_torch_function
        module.has_torch_function = lambda *_: False  # it would hand itself to this mode again
        try:
            with self:
                return function(*args, **kwargs)
        finally:
            module.has_torch_function = ask

    def _backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward runs Python too: checkpoints recompute, custom functions differentiate."""
        names = ("gradient", "retain_graph", "create_graph", "inputs")
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        options["grad_tensors"] = options.pop("gradient", None)
        self._run_inside(torch.autograd, torch.autograd.backward, tensor, **options)

    def _one_hot(self, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        out: torch.Tensor = F.one_hot(tensor, num_classes)
        if out.device.type == "meta":
            self._recorder.masks.note_one_hot(out, int(out.shape[-1]))
        return out

    def _literal(self, make: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor made of numbers in the program: its values are known wherever it lives."""
        if isinstance(data, torch.Tensor) or torch.device(kwargs.get("device") or "cpu").type != "meta":
            return make(data, *args, **kwargs)
        value = make(data, *args, **{**kwargs, "device": "cpu"})
        meta = make(data, *args, **kwargs)
        self._recorder.known.note(meta, value)
        return meta

    @staticmethod
    def _set_item(x: torch.Tensor, index: Any, value: Any) -> None:
        """`x[a:b] = number` and `x[mask] = number` fill on a GPU; on the meta device the number becomes a tensor."""
        items = index if isinstance(index, tuple) else (index,)
        plain = all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in items)
        if plain and isinstance(value, (int, float)):
            x[index].fill_(value)
        elif isinstance(value, (int, float)) and isinstance(index, torch.Tensor) and index.dtype == torch.bool:
            x.masked_fill_(index.reshape(*index.shape, *([1] * (x.dim() - index.dim()))), value)
        else:
            x.__setitem__(index, value)

    def _grouped_product(
        self, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None, **_: Any
    ) -> Any:
        return _GroupedProduct.apply(self._recorder, a, b, out_dtype)

    def _rms_norm(self, input: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if weight is None or weight.dtype == input.dtype:
            return _RmsNorm.apply(self._recorder, input, weight)
        # torch's kernel wants one format (fp32 weights under autocast have another): else it computes step by step.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        mean = x.pow(2).mean([-1 - i for i in range(len(shape))], keepdim=True)
        return x.mul(mean.add_(eps or 0.0).rsqrt()).mul(weight).type_as(input)

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        self._recorder.wait()
        value = self._recorder.known.value(x)
        return value if value is not None else x

    def _item(self, x: torch.Tensor) -> Any:
        """A value; one that nobody knows says so where the program compares it."""
        known = self._recorder.known.value(x) is not None or not x.is_floating_point()
        return x.item() if known else AssumedFloat(x.item(), self._recorder.assume)

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        self._recorder.wait()
        value = self._recorder.known.value(x)
        if value is None and x.is_floating_point() and x.numel() <= MAX_KNOWN_INTS:
            self._recorder.assume("the values of floats are taken to be 1.0")
            return torch.ones(x.shape, dtype=x.dtype, device="cpu")
        if value is None:
            raise DataDependent(
                f"the program asks for the values of a tensor at {user_line()}",
                why="capture computes nothing, so they do not exist",
                fix="leave that part out of what is predicted, or measure the model instead: tessera measure",
            )
        return value


class StayOnMeta(TorchFunctionMode):
    """While a model is built: a request for a GPU gets the meta device, and a meta tensor that is moved stays there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Change the device that is asked for."""
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or (func is torch.Tensor.cpu and args[0].is_meta):
            return args[0].to("meta")
        moves_meta = func is torch.Tensor.to and args[0].is_meta

        def change(value: Any) -> Any:
            moved = _is_cuda(value) or (moves_meta and isinstance(value, (str, torch.device)))
            return torch.device("meta") if moved else value

        if func is torch.Tensor.to:
            args = tuple(map(change, args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": change(kwargs["device"])}
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.startswith("cuda")
