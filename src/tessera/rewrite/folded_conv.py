"""One convolution with its batch norm folded into the weights, and with the addition and ReLU after it.

On CUDA one cuDNN call does all of it; elsewhere, and where cuDNN cannot, torch's conv2d, add_ and relu_ do.

What is relied on, read in PyTorch's aten/src/ATen/native/cudnn (ConvShared.cpp at 02f0955, Conv_v8.cpp at 06ca69c):

* ConvShared.cpp: `cudnn_convolution_relu` and `_add_relu` make input, weight and `z` contiguous in channels_last where
  input or weight is, so both layouts work; they ask `torch.backends.cudnn.benchmark` whether to measure cuDNN's engines
  or take its heuristics, `allow_tf32` for fp32, and are never deterministic. They compare neither dtypes nor shapes.
* Conv_v8.cpp, build_opgraph_fused: relu(conv(x) + alpha * z + bias) in fp32 for any input, rounded once; fp64 therefore
  has no such path. Groups follow from the shape of the weight. The cache of plans knows neither the shape nor the
  strides of `z`: it must be of the result's shape.
* ConvShared.cpp: `cudnn_convolution_relu` passes its uninitialised result as `z`, with alpha = 0. Zero times NaN is
  NaN, if an engine multiplies. Hence the comparison on the first call, after NaNs were left in that memory.
* pytorch/pytorch issue 62926: wrong results where input and `z` share memory, fixed in cuDNN 8.3.
* Neither operator has a backward ("derivative ... is not implemented", torch 2.13), nor a Meta kernel for fake tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ..errors import RewriteError
from .compare import TOLERANCE

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_MIN_CUDNN = 8300
_MAX_ELEMENTS = 2**31  # ConvShared.cpp, setConvolutionParams: sizes are ints


class ConvNormPair:
    """A convolution and the batch norm after it, if any."""

    def __init__(self, conv: nn.Conv2d, bn: Any = None) -> None:
        self.conv, self.bn = conv, bn

    def sources(self) -> list[torch.Tensor | None]:
        """Return the tensors the folded weights come from, as the modules hold them now."""
        own, bn = self.conv._parameters, self.bn
        sources = [own["weight"], own["bias"]]
        if bn is not None:
            kept = bn._buffers
            sources += [kept["running_mean"], kept["running_var"], bn._parameters["weight"], bn._parameters["bias"]]
        return sources

    def fold(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias with the batch norm folded in, in fp64 (fp32 if the device has no fp64)."""
        wide = torch.float32 if self.conv.weight.device.type == "mps" else torch.float64
        given: list[Any] = [None if t is None else t.detach().to(wide) for t in self.sources()]
        weight, bias = given[:2]
        if self.bn is None:
            return weight, bias
        mean, var, gamma, beta = given[2:]
        weight, bias = fuse_conv_bn_weights(weight, bias, mean, var, self.bn.eps, gamma, beta)
        return weight.detach(), bias.detach()


class FoldedConvolution(nn.Module):
    """relu(conv(x) + z), or a part of it, with folded weights, which are folded again when the originals change.

    `others` are convolutions whose results come in as `z`. Their biases are added here, so they need none of their own.
    """

    def __init__(
        self, pair: ConvNormPair, *, name: str, adds: bool, in_place: bool, relu: bool, biased: bool = True
    ) -> None:
        super().__init__()
        conv = pair.conv
        self.name, self.adds, self.in_place, self.relu, self.biased = name, adds, in_place, relu, biased
        self.others: list[ConvNormPair] = []
        self._pair = pair
        self._how = (conv.stride, conv.padding, conv.dilation, conv.groups)
        # For depthwise convolutions, torch chooses between its own kernel and cuDNN (Convolution.cpp,
        # use_cudnn_depthwise); the fused operators would take that choice away.
        self._depthwise = conv.groups > 1 and conv.groups == conv.in_channels
        self._folded_from: list[tuple[int, int, int] | None] = []
        self._held: list[torch.Tensor | None] = []  # keeps them alive, so that no other tensor gets their ids
        self._weight: torch.Tensor
        self._bias: torch.Tensor | None = None
        self._fits: dict[Any, bool] = {}

    def sources(self) -> list[torch.Tensor | None]:
        """Return every tensor the folded weights come from, as the modules hold it now."""
        return [source for pair in (self._pair, *self.others) for source in pair.sources()]

    def refresh(self) -> bool:
        """Fold again if a source is another tensor, moved or was written to; into the same memory if possible.

        Returns whether anything was folded. A write through `parameter.data` leaves no trace and is not seen.
        """
        sources = self.sources()
        stamps = [None if t is None else (id(t), t._version, t.data_ptr()) for t in sources]
        if stamps == self._folded_from:
            return False
        # weights that were folded under inference_mode could never be folded again
        with torch.inference_mode(False), torch.no_grad():
            self._fold()
        self._folded_from, self._held = stamps, sources
        return True

    def _fold(self) -> None:
        weight, bias = self._pair.fold()
        for other in self.others:
            more = other.fold()[1]
            bias = more if bias is None else bias if more is None else bias + more
        old = self._pair.conv.weight
        folded = torch.empty_like(old, requires_grad=False).copy_(weight)
        offset = None if bias is None or not self.biased else bias.to(old.dtype)
        if not all(t is None or t.is_meta or bool(torch.isfinite(t).all()) for t in (folded, offset)):
            raise RewriteError(
                f"the folded weights of {self.name} are not finite in {str(old.dtype).removeprefix('torch.')}",
                why="scaling by the batch norm leaves the range of that format, or a weight was not finite before",
                fix="keep this model as it is, or convert it to bfloat16 or float32",
            )
        kept = getattr(self, "_weight", None)
        if kept is not None and (_get_form(kept), kept.stride()) == (_get_form(folded), folded.stride()):
            kept.copy_(folded)  # a captured CUDA graph reads this memory
            if offset is not None and self._bias is not None:
                self._bias.copy_(offset)
                return
        else:
            self._weight = folded
            self._fits.clear()
        self._bias = offset

    def forward(self, x: Any, z: Any = None) -> Any:
        if self.relu and not self._depthwise and type(x) is torch.Tensor and _is_cudnn_allowed(x):
            key = (x.shape, x.stride(), x.dtype, *((z.shape, z.stride(), z.dtype) if type(z) is torch.Tensor else ()))
            fits = self._fits.get(key)
            if fits is None:
                fits = self._compare(x, z)
                if not _is_capturing(x):
                    self._fits[key] = fits
            if fits:
                operator, args = self.cudnn_call(x, z)
                return operator(*args)
        return self._by_torch(x, z)

    @property
    def falls_back(self) -> bool:
        """Return whether there was a shape for which cuDNN has no engine or gives another result."""
        return not all(self._fits.values())

    @property
    def operator(self) -> str:
        """Return the operator that this becomes on CUDA."""
        if not self.relu or self._depthwise:
            return "conv2d + relu_" if self.relu else "conv2d"
        return "cudnn_convolution_add_relu" if self.adds else "cudnn_convolution_relu"

    def cudnn_call(self, x: torch.Tensor, z: torch.Tensor | None) -> tuple[Any, tuple[Any, ...]]:
        """Return cuDNN's operator and its arguments."""
        aten = torch.ops.aten
        if z is None:
            return aten.cudnn_convolution_relu.default, (x, self._weight, self._bias, *self._how)
        return aten.cudnn_convolution_add_relu.default, (x, self._weight, z, 1.0, self._bias, *self._how)

    def _by_torch(self, x: Any, z: Any) -> Any:
        out = F.conv2d(x, self._weight, self._bias, *self._how)
        if self.adds:
            same = type(z) is torch.Tensor and (z.shape, z.dtype) == (out.shape, out.dtype)
            out = out.add_(z) if self.in_place or same else out + z
        return out.relu_() if self.relu else out

    def _compare(self, x: torch.Tensor, z: Any) -> bool:
        """Tell whether cuDNN takes this call and gives torch's result; asked once a shape, outside of captures."""
        weight = self._weight
        if _is_capturing(x) or x.dim() != 4 or x.dtype not in _DTYPES:
            return False
        if (x.dtype, x.device) != (weight.dtype, weight.device) or not 0 < x.numel() < _MAX_ELEMENTS:
            return False
        expected = F.conv2d(x, weight, self._bias, *self._how)
        if self.adds and (type(z) is not torch.Tensor or _get_form(z) != _get_form(expected)):
            return False
        if not 0 < expected.numel() < _MAX_ELEMENTS:
            return False
        expected = (expected.add_(z) if self.adds else expected).relu_()
        try:
            nans = [torch.full_like(expected, float("nan")) for _ in range(2)]
            del nans  # the next call's result most likely gets this memory
            operator, args = self.cudnn_call(x, z)
            return is_close(operator(*args), expected)
        except RuntimeError:  # "unable to find an engine to execute this computation", or no memory to compare in
            return False


def _get_form(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device


def is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two results are the same within the rounding of their format; a NaN is never the same."""
    if _get_form(result) != _get_form(expected):
        return False
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    return bool(norm(result - expected) <= TOLERANCE[expected.dtype] * norm(expected))


def _is_capturing(x: torch.Tensor) -> bool:
    """Tell whether a CUDA graph is being captured, in which nothing can be compared."""
    return bool(x.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_cudnn_allowed(x: torch.Tensor) -> bool:
    """Tell whether the device has the fused operators and the caller's settings allow them."""
    return bool(
        x.is_cuda
        and _has_fused_operators()
        and torch.backends.cudnn.enabled
        and not torch.backends.cudnn.deterministic
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.is_autocast_enabled("cuda")  # autocast does not know the fused operators, and would not cast
    )


@functools.cache
def _has_fused_operators() -> bool:
    version = torch.backends.cudnn.version() if torch.version.cuda is not None else None
    return version is not None and int(version) >= _MIN_CUDNN


def needs_gradients(calls: Sequence[FoldedConvolution], args: Sequence[Any]) -> bool:
    """Tell whether anything that goes into these calls needs a gradient: the fused operators have no backward."""
    if not torch.is_grad_enabled():
        return False
    sources = (t for call in calls for t in call.sources())
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in (*args, *sources))
