"""`conv2d`: cuDNN's (torch's) convolution, or with a tile our implicit matrix product, `tessera::tiled_conv2d`.

The kernel wants channels innermost; images that lie otherwise are copied, and the result lies as the image did. Its
gradients are torch's (`aten::convolution_backward`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..stream import Stream
from . import arguments, hints, tile
from .eager import composed
from .switches import tf32_allowed
from .tile import Tile
from .tiled import check_dtype, runs_in

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, "
    "int[] tile_shape, int stages, int warps) -> Tensor"
)


def _compile(shape: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    from .kernels.conv import compile_conv

    return compile_conv(shape, dtype, stages, warps, target).metadata


tile.register("conv2d", _compile)


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    tile_shape: tuple[int, int, int] | None = None,
    stream: Stream | None = None,
) -> Any:
    """The convolution of images (n, channels, height, width) with filters (out, channels / groups, height, width).

    `padding` may be "same" or "valid". `tile_shape=(BM, BN, BK)` runs our kernel: BM output pixels by BN filters at a
    time, BK deep; one that cannot work is a `TileError` with the nearest that does.
    """
    _check(x, weight, bias, groups)
    steps = arguments.pair("conv2d", "stride", stride, 1), arguments.pair("conv2d", "dilation", dilation, 1)
    if isinstance(padding, str):
        arguments.one_of("conv2d", "padding", padding, ("same", "valid"))
    else:
        padding = arguments.pair("conv2d", "padding", padding, 0)
    with arguments.on(stream, x, weight, bias):
        if tile_shape is None and not torch.compiler.is_compiling():
            tile_shape = hints.current().tiles.get("conv2d")  # type: ignore[assignment]  # a tile of three
        if tile_shape is None:
            try:
                return torch.nn.functional.conv2d(x, weight, bias, steps[0], padding, steps[1], groups)
            except NotImplementedError as e:
                arguments.explain_dtype("conv2d", "x", x, e)
                raise
            except RuntimeError as e:
                _explain(e, x, weight, steps[0], padding, steps[1])
                raise
        x, weight, bias = arguments.autocast(x, weight, bias)
        check_dtype("conv2d", "x", x)
        return _tiled(x, weight, bias, steps[0], padding, steps[1], groups, Tile.of("conv2d", tile_shape))


def _check(x: Any, weight: Any, bias: Any, groups: Any) -> None:
    arguments.tensors("conv2d", one_dtype=not arguments.autocasts(x), x=x, weight=weight, bias=bias)
    if x.ndim not in (3, 4):
        raise _misshapen("x", x, "images are (n, channels, height, width)", "x.unsqueeze or x.reshape")
    if weight.ndim != 4:
        raise _misshapen("weight", weight, "filters are (out, channels / groups, height, width)", "weight.reshape")
    if not arguments.whole(groups) or groups < 1 or weight.shape[0] % groups:
        raise ArgumentError(f"op.conv2d: groups={groups!r}", fix=f"groups divides the {weight.shape[0]} filters")
    if x.shape[-3] != weight.shape[1] * groups:
        why = f"weight takes {weight.shape[1]} channels in each of {groups} groups"
        raise _misshapen("x", x, why, f"x has {weight.shape[1] * groups} channels, or other groups")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _misshapen("bias", bias, f"there are {weight.shape[0]} filters", "one value a filter")


def _misshapen(name: str, value: Any, why: str, fix: str) -> ArgumentError:
    return ArgumentError(f"op.conv2d: {name} is {arguments.shape(value)}", why=why, fix=fix)


def _tiled(
    x: Any, weight: Any, bias: Any, stride: tuple[int, int], padding: Any, dilation: tuple[int, int], groups: int,
    shape: Tile,
) -> Any:  # fmt: skip
    stages = warps = 0
    if not torch.compiler.is_compiling():
        stages, warps = tile.pipeline(shape)
        arch = tile.arch_of(x.device)
        tile.check("conv2d", shape, runs_in(x.dtype), stages, warps, arch)
        tile.advise("conv2d", shape, x.dtype, arch)
    images = x.unsqueeze(0) if x.ndim == 3 else x
    if isinstance(padding, str):
        images, padding = _resolved(images, weight, stride, padding, dilation)
    _check_size(x, _size(images, weight, stride, padding, dilation))
    out = _convolution(images, weight, bias, stride, padding, dilation, groups, list(shape.sides), stages, warps)
    return out.squeeze(0) if x.ndim == 3 else out


def _explain(refused: RuntimeError, x: Any, weight: Any, stride: Any, padding: Any, dilation: Any) -> None:
    """Raise the error that names what torch refused; return where it is something else."""
    images = x.unsqueeze(0) if x.ndim == 3 else x
    try:
        if isinstance(padding, str):
            images, padding = _resolved(images, weight, stride, padding, dilation)
        _check_size(x, _size(images, weight, stride, padding, dilation))
    except ArgumentError as e:
        raise e from refused


def _check_size(x: Any, size: tuple[int, int]) -> None:
    if min(size) < 1:
        why = f"the result would be {max(0, size[0])}x{max(0, size[1])} pixels"
        raise _misshapen("x", x, why, "a larger image, more padding, or a smaller filter")


def _resolved(
    x: Any, weight: Any, stride: tuple[int, int], padding: str, dilation: tuple[int, int]
) -> tuple[Any, tuple[int, int]]:
    """Padding in pixels for "same" and "valid"; an odd pixel of "same" is added at the image's end, as torch does."""
    if padding == "valid":
        return x, (0, 0)
    if stride != (1, 1):
        raise ArgumentError(f"op.conv2d: padding='same' with stride={stride}", fix="stride=1, or padding in pixels")
    whole = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(pixels % 2 for pixels in whole):
        x = torch.nn.functional.pad(x, (0, whole[1] % 2, 0, whole[0] % 2))
    return x, (whole[0] // 2, whole[1] // 2)


def _size(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any) -> tuple[int, int]:
    def along(i: int) -> int:
        return int((x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1)

    return along(0), along(1)


@torch.library.custom_op("tessera::tiled_conv2d", mutates_args=(), schema=_SCHEMA)
def tiled_conv2d(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, tile_shape: Any,
    stages: int, warps: int,
) -> Any:  # fmt: skip
    """The convolution as torch sees it; the result lies as the image does."""
    if not x.is_cuda:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        parts = (None if part is None else part.to(wide) for part in (x, weight, bias))
        with arguments.uncast(x):
            found = torch.nn.functional.conv2d(*parts, stride, padding, dilation, groups)
        return found.to(x.dtype).contiguous(memory_format=_lies(x))
    from .kernels.conv import launch

    shape = Tile(*tile_shape)
    if not stages:
        stages, warps = tile.pipeline(shape)
    out = x.new_empty((x.shape[0], *_size(x, weight, stride, padding, dilation), weight.shape[0]))
    with torch.cuda.device(x.device):  # Triton launches on the current device, whatever the tensors' is
        launch(
            x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1),
            weight.permute(0, 2, 3, 1).contiguous(), None if bias is None else bias.contiguous(), out,
            stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation), groups=groups, tile=shape,
            stages=stages, warps=warps, dot="tf32" if tf32_allowed() else "ieee",
        )  # fmt: skip
    return out.permute(0, 3, 1, 2).contiguous(memory_format=_lies(x))


def _lies(x: Any) -> Any:
    """Channels innermost, or outermost."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


@tiled_conv2d.register_fake
def _(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, tile_shape: Any,
    stages: int, warps: int,
) -> Any:  # fmt: skip
    if not stages:
        shape = Tile(*tile_shape)
        tile.check("conv2d", shape, runs_in(x.dtype), *tile.pipeline(shape), tile.arch_of(x.device))
    size = (x.shape[0], weight.shape[0], *_size(x, weight, stride, padding, dilation))
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_lies(x))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs[:7]
    ctx.save_for_backward(x, weight)
    ctx.bias_sizes = None if bias is None else list(bias.shape)


def _gradients(ctx: Any, g: Any) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    found = torch.ops.aten.convolution_backward(
        g, x, weight, ctx.bias_sizes, list(ctx.stride), list(ctx.padding), list(ctx.dilation), False, [0, 0],
        ctx.groups, list(ctx.needs_input_grad[:3]),
    )  # fmt: skip
    return (*found, None, None, None, None, None, None, None)


tiled_conv2d.register_autograd(_gradients, setup_context=_save)
_convolution = composed(tiled_conv2d, _save, _gradients, "conv2d", "tile_shape")
