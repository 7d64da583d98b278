"""The parts of torch that are replaced while a program is captured, so that meta tensors take the path of a GPU.

Replaced are functions that torch's own Python calls (a function mode does not see those), `torch.autocast`, the fused
inference paths of torch's transformer layers, and `flex_attention`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from .autocast import Autocast
from .flops import attention_params
from .intercept import FusedAttention, attention, dropout
from .recorder import Recorder

_COMPILER = "torch._dynamo"
_FLEX_MODULE = "torch.nn.attention.flex_attention"


class TorchPatches(contextlib.ExitStack):
    """Replaces attributes of torch and puts them back on exit.

    Torch's compiler keeps some functions by identity in tables that it fills when it is first imported. If a captured
    program imports it, those tables hold our stand-ins; they are corrected on exit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._compiler_loaded = _COMPILER in sys.modules
        self._originals: dict[int, Any] = {}  # by the identity of what replaces them
        self._replacements: list[Any] = []  # keeps those identities unique
        self.callback(self._correct_compiler)

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute until exit; returns the original."""
        original = getattr(owner, name)
        self._originals[id(value)] = original
        self._replacements.append(value)
        setattr(owner, name, value)
        self.callback(setattr, owner, name, original)
        return original

    def in_capture(self) -> bool:
        """Whether this thread is the one that captures: other threads run real models meanwhile."""
        return threading.get_ident() == self._thread

    def _correct_compiler(self) -> None:
        if not self._compiler_loaded and _COMPILER in sys.modules:
            for name, module in list(sys.modules.items()):
                if name.startswith(_COMPILER) and isinstance(module, ModuleType):
                    self._correct_module(module)

    def _correct_module(self, module: ModuleType) -> None:
        originals = self._originals
        for key, value in list(vars(module).items()):
            if isinstance(value, (list, set, frozenset)) and any(id(v) in originals for v in value):
                setattr(module, key, type(value)(originals.get(id(v), v) for v in value))
            elif isinstance(value, dict) and any(id(k) in originals for k in value):
                setattr(module, key, {originals.get(id(k), k): v for k, v in value.items()})
            elif id(value) in originals:
                setattr(module, key, originals[id(value)])


def patch_torch(patches: TorchPatches, recorder: Recorder, autocast: Autocast, launch: str) -> None:
    """Replace everything. Programs that ask whether a CUDA graph is captured or they are compiled learn of `launch`."""
    _patch_autocast(patches, autocast, recorder.assumptions)
    _patch_functions(patches, recorder, autocast)
    if launch == "graph":
        _patch_graph_question(patches, recorder)
    if launch == "compile":
        _patch_compile_question(patches, recorder)
    _patch_optimizers(patches)
    _patch_transforms(patches, recorder)
    _patch_transformer_layers(patches, recorder, autocast)
    _patch_flex_attention(patches, recorder)


def _patch_functions(patches: TorchPatches, recorder: Recorder, autocast: Autocast) -> None:
    real_sdpa, real_dropout = F.scaled_dot_product_attention, F.dropout

    def sdpa(*args: Any, **kwargs: Any) -> Any:
        if not patches.in_capture():
            return real_sdpa(*args, **kwargs)
        args, kwargs = autocast.apply(real_sdpa, args, kwargs)
        return attention(recorder, *args, **kwargs)

    def drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return (dropout if patches.in_capture() else real_dropout)(input, p, training, inplace)

    patches.replace(F, "scaled_dot_product_attention", sdpa)
    patches.replace(F, "dropout", drop)
    patches.replace(torch.cuda, "synchronize", lambda *_: recorder.wait())


def _patch_graph_question(patches: TorchPatches, recorder: Recorder) -> None:
    """`torch.cuda.is_current_stream_capturing` says yes: transformers then builds its masks."""

    def is_capturing() -> bool:
        note = "the program asks whether a CUDA graph is being captured; the answer is yes (masks are built)"
        recorder.assumptions[note] = None
        return True

    patches.replace(torch.cuda, "is_current_stream_capturing", is_capturing)


def _patch_compile_question(patches: TorchPatches, recorder: Recorder) -> None:
    """`torch.compiler.is_compiling` says yes to the program, as it does while Dynamo traces it.

    Transformers then builds its masks, and attention with a mask runs on other kernels. Torch's own code is answered
    as ever: its optimizers, which stay outside of a compiled model, would take paths that only Dynamo can follow.
    """
    real = torch.compiler.is_compiling

    def is_compiling() -> bool:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if asker.partition(".")[0] == "torch" or not patches.in_capture():
            return bool(real())
        note = "the program asks whether it is being compiled; the answer is yes (transformers then builds its masks)"
        recorder.assumptions[note] = None
        return True

    patches.replace(torch.compiler, "is_compiling", is_compiling)


def _patch_optimizers(patches: TorchPatches) -> None:
    """Optimizers choose their multi-tensor kernels by device: add the meta device to their lists."""
    # The modules of optimizers have imported these functions by name.
    places = [m for path, m in list(sys.modules.items()) if path.startswith("torch.optim.")]
    for which in ("foreach_kernels", "fused_kernels", "capturable"):
        name = f"_get_{which}_supported_devices"
        for module in places:
            if hasattr(module, name):
                ask = getattr(module, name)
                patches.replace(module, name, lambda *a, ask=ask, **k: [*ask(*a, **k), "meta"])


def _patch_transforms(patches: TorchPatches, recorder: Recorder) -> None:
    """`torch.func`'s transforms wrap the meta twins of real tensors: a meta gradient cannot reach a real one."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value  # whole numbers (places, lengths) may stay the host's
        if is_wrapped(value) or not patches.in_capture():
            return value
        with temporarily_clear_interpreter_stack():
            return recorder.on_meta(value)

    for module, name in (
        (torch._functorch.eager_transforms, "_wrap_for_grad"),
        (torch._functorch.eager_transforms, "_jvp_with_argnums"),
        (torch._functorch.vmap, "_add_batch_dim"),
    ):
        wrap = getattr(module, name)
        patches.replace(module, name, lambda *args, wrap=wrap, **kw: wrap(*pytree.tree_map(move, args), **kw))


# -- autocast ---------------------------------------------------------------------------------------------------


def _patch_autocast(patches: TorchPatches, regions: Autocast, assumptions: dict[str, None]) -> None:
    """`torch.autocast` for a GPU (or a meta tensor's device) notifies `regions` instead of switching itself off."""
    cls = torch.amp.autocast_mode.autocast
    real_init, real_enter, real_exit = cls.__init__, cls.__enter__, cls.__exit__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        device = "cuda" if device_type == "meta" else device_type
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no CUDA here
            real_init(self, device, dtype, enabled, cache_enabled)
        self.tessera_region = (self.fast_dtype if enabled else None,) if device == "cuda" else ()

    def enter(self: Any) -> Any:
        if not hasattr(self, "tessera_region"):  # made before the capture: without CUDA it has switched itself off
            self.tessera_region = (self.fast_dtype,) if self.device == "cuda" else ()
            if self.tessera_region:
                assumptions["an autocast region made before the capture is taken to be enabled"] = None
        if not self.tessera_region:
            return real_enter(self)
        regions.enter(self.tessera_region[0])  # torch's own switch is left alone
        return self

    def leave(self: Any, *exc: Any) -> Any:
        if not getattr(self, "tessera_region", ()):
            return real_exit(self, *exc)
        regions.leave()
        return False

    def on_gpu(device: Any) -> bool:
        return str(device).partition(":")[0] in ("meta", "cuda")

    # Activation checkpointing asks which region it is in, to enter it again when it recomputes.
    is_available, is_enabled = torch.amp.is_autocast_available, torch.is_autocast_enabled
    get_dtype = torch.get_autocast_dtype
    patches.replace(torch.amp, "is_autocast_available", lambda device: on_gpu(device) or is_available(device))
    patches.replace(
        torch, "is_autocast_enabled", lambda *a: regions.dtype is not None if not a or on_gpu(a[0]) else is_enabled(*a)
    )
    patches.replace(
        torch, "get_autocast_dtype", lambda d: (regions.dtype or torch.float16) if on_gpu(d) else get_dtype(d)
    )
    for name, method in (("__init__", init), ("__enter__", enter), ("__exit__", leave)):
        patches.replace(cls, name, method)
    if is_enabled("cuda"):
        regions.enter(get_dtype("cuda"))  # the capture itself is inside a region


# -- transformer layers -----------------------------------------------------------------------------------------


def _patch_transformer_layers(patches: TorchPatches, recorder: Recorder, autocast: Autocast) -> None:
    """The fused inference paths of torch's transformer layers, which real tensors take and meta tensors do not.

    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in eval mode without gradients run one C++ function that
    packs the three projections into one product. Here they run the operators that function launches.
    """
    attention, encoder = nn.MultiheadAttention.forward, nn.TransformerEncoderLayer.forward

    def mha_forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if patches.in_capture():
            weights = args[1] if len(args) > 1 else kwargs.get("need_weights", True)
            masks = kwargs.get("attn_mask") is None and kwargs.get("key_padding_mask") is None and not args
            if query is key and key is value and not weights and masks and _is_packed(self, query, autocast):
                return _attend(self, query), None
        return attention(self, query, key, value, *args, **kwargs)

    def encoder_forward(self: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        fast = (
            patches.in_capture()
            and not any(a is not None and a is not False for a in (*args, *kwargs.values()))
            and _is_packed(self.self_attn, src, autocast)
            and self.activation_relu_or_gelu
            and self.norm1.eps == self.norm2.eps
        )
        if not fast:
            return encoder(self, src, *args, **kwargs)
        recorder.functions += 1
        if self.norm_first:
            x = _attend(self.self_attn, self.norm1(src)).add_(src)
            return _feed_forward(recorder, self, self.norm2(x)).add_(x)
        x = self.norm1(_attend(self.self_attn, src).add_(src))
        return self.norm2(_feed_forward(recorder, self, x).add_(x))

    patches.replace(nn.MultiheadAttention, "forward", mha_forward)
    patches.replace(nn.TransformerEncoderLayer, "forward", encoder_forward)


def _is_packed(mha: nn.MultiheadAttention, x: torch.Tensor, autocast: Autocast) -> bool:
    """Whether self-attention of x takes the fast path (the conditions of `nn.MultiheadAttention.forward`)."""
    return bool(
        not mha.training
        and x.dim() == 3
        and mha.batch_first
        and mha._qkv_same_embed_dim
        and mha.in_proj_bias is not None
        and mha.in_proj_weight.dtype == x.dtype
        and mha.num_heads % 2 == 0
        and mha.bias_k is None
        and mha.bias_v is None
        and not mha.add_zero_attn
        and not torch.is_grad_enabled()
        and autocast.dtype is None
    )


def _attend(mha: nn.MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.shape
    qkv = F.linear(x, mha.in_proj_weight, mha.in_proj_bias)
    q, k, v = (
        t.view(batch, length, mha.num_heads, width // mha.num_heads).transpose(1, 2) for t in qkv.chunk(3, dim=-1)
    )
    out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(out.transpose(1, 2).reshape(batch, length, width), mha.out_proj.weight, mha.out_proj.bias)


def _feed_forward(recorder: Recorder, layer: nn.TransformerEncoderLayer, x: torch.Tensor) -> torch.Tensor:
    """Two products; the activation is part of the first one's kernel."""
    first, second = layer.linear1, layer.linear2
    flat = x.reshape(-1, x.shape[-1])
    hidden = torch.empty((flat.shape[0], first.out_features), dtype=x.dtype, device="meta")
    reads = [first.bias, flat, first.weight.t()] if first.bias is not None else [flat, first.weight.t()]
    name = "aten._addmm_activation" if first.bias is not None else "aten.mm"
    recorder.emit(name, "gemm", reads, [hidden], {})
    return F.linear(hidden, second.weight, second.bias).view(x.shape)


# -- flex_attention ---------------------------------------------------------------------------------------------


# The arguments of torch's function, in its order.
def _flex_stand_in(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    arguments = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    return _tessera_answer(*arguments, return_aux=return_aux)  # type: ignore[name-defined]  # noqa: F821


def _patch_flex_attention(patches: TorchPatches, recorder: Recorder) -> None:
    """One fused kernel over the blocks that its mask leaves, as torch.compile makes it.

    Programs import the function by name, so replacing the name would not reach them: its code is replaced. It is not
    imported here, which would make every capture slower.
    """
    module = sys.modules.get(_FLEX_MODULE)
    function = getattr(module, "flex_attention", None)
    if module is None or not isinstance(function, FunctionType) or not _has_same_arguments(function.__code__):
        return
    real = FunctionType(function.__code__, function.__globals__, function.__name__)

    def answer(*args: Any, return_aux: Any) -> Any:
        if not patches.in_capture():
            return real(*args, return_aux=return_aux)
        return _flex_attention(recorder, args[:3], args[4], args[7], return_aux)

    module._tessera_answer = answer  # type: ignore[attr-defined]
    patches.callback(delattr, module, "_tessera_answer")
    patches.replace(function, "__code__", _flex_stand_in.__code__)


def _has_same_arguments(code: CodeType) -> bool:
    """Whether torch's function takes what the stand-in does: another version's may not."""
    ours = _flex_stand_in.__code__
    count = ours.co_argcount + ours.co_kwonlyargcount
    same = (code.co_argcount, code.co_kwonlyargcount) == (ours.co_argcount, ours.co_kwonlyargcount)
    return same and not code.co_freevars and code.co_varnames[:count] == ours.co_varnames[:count]


def _flex_attention(recorder: Recorder, operands: Any, block_mask: Any, return_lse: bool, return_aux: Any) -> Any:
    q, k, v = (recorder.on_meta(t) for t in operands)
    recorder.assumptions["flex_attention runs as one fused kernel, at the rates of torch's own attention"] = None
    share = 1.0 if block_mask is None else _computed_share(recorder, block_mask)
    params = attention_params(q, k, v, None, False)
    # Keys that no query of a block sees are never loaded: as if there were fewer.
    params |= {"kv_len": max(1, round(share * k.shape[-2])), "flexible": True}
    out = FusedAttention.apply(recorder, q, k, v, None, params)
    statistics = torch.empty(q.shape[:-1], dtype=torch.float32, device="meta")
    if return_aux is not None:
        wanted = {name: statistics if getattr(return_aux, name) else None for name in ("lse", "max_scores")}
        return out, sys.modules[_FLEX_MODULE].AuxOutput(**wanted)
    return (out, statistics) if return_lse else out


def _computed_share(recorder: Recorder, mask: Any) -> float:
    """The share of its blocks that a block mask computes; all of them if its values are not known."""
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
