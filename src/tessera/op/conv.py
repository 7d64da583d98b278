"""`conv2d`: torch's (cuDNN's) convolution, or with a tile our implicit matrix product, `tessera::tiled_conv2d`.

The kernel needs channels innermost, so images in another format are copied; the result has the image's memory format.
Its gradients are torch's (`aten::convolution_backward`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, check_choice
from ..stream import Stream
from . import arguments, hints, tile
from .dispatch import is_tf32_allowed, make_differentiable
from .tile import Tile
from .tiled_matmul import check_dtype, dtype_to_check

_SCHEMA = (
    "(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, "
    "int[] tile_shape, int stages, int warps) -> Tensor"
)


def _compile(shape: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    from .kernels.matmul import compile_conv

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
    """Return the convolution of images (n, channels, height, width) with `weight`.

    The weight is (out, channels / groups, height, width). `padding` may be "same" or "valid". `tile_shape=(BM, BN, BK)`
    runs our kernel: BM output pixels by BN filters at a time, BK deep. A tile that cannot work raises `TileError`,
    which names the nearest tile that does.
    """
    arguments.check_convolution("conv2d", x, weight, bias, groups)
    steps = arguments.to_pair("conv2d", "stride", stride, 1), arguments.to_pair("conv2d", "dilation", dilation, 1)
    if isinstance(padding, str):
        check_choice("op.conv2d: padding", padding, ("same", "valid"))
    else:
        padding = arguments.to_pair("conv2d", "padding", padding, 0)
    with arguments.use_stream(stream, x, weight, bias):
        if tile_shape is None and not torch.compiler.is_compiling():
            tile_shape = hints.current().tiles.get("conv2d")  # type: ignore[assignment]  # a tile of three
        if tile_shape is None:
            try:
                return torch.nn.functional.conv2d(x, weight, bias, steps[0], padding, steps[1], groups)
            except RuntimeError:
                _pad_images(x, weight, steps[0], padding, steps[1])  # raises our error if the result has no pixel
                raise
        x, weight, bias = arguments.cast_like_autocast(x, weight, bias)
        check_dtype("conv2d", "x", x)
        shape, (stride, dilation) = Tile.of("conv2d", tile_shape), steps
        stages = warps = 0  # under torch.compile, the fake operator checks and the launch decides
        if not torch.compiler.is_compiling():
            stages, warps = tile.plan_launch("conv2d", shape, dtype_to_check(x.dtype), x.device)
        images, padding = _pad_images(x, weight, stride, padding, dilation)
        out = _convolution(images, weight, stride, padding, dilation, groups, list(shape.sides), stages, warps)
        out = out if bias is None else out + bias[:, None, None]
        return out.squeeze(0) if x.ndim == 3 else out


def _pad_images(
    x: Any, weight: Any, stride: tuple[int, int], padding: Any, dilation: tuple[int, int]
) -> tuple[Any, tuple[int, int]]:
    """Return images (n, channels, height, width) and their padding in pixels.

    Raises ArgumentError if the result has no pixel. An odd pixel of "same" is added at the image's end, as in torch.
    """
    images = x.unsqueeze(0) if x.ndim == 3 else x
    if padding == "same" and stride != (1, 1):  # as torch says it
        raise ArgumentError(f"op.conv2d: padding='same' with stride={stride}", fix="stride=1, or padding in pixels")
    before, after = arguments.find_padding("conv2d", weight, padding, dilation)
    if before != after:
        images = torch.nn.functional.pad(images, (0, after[1] - before[1], 0, after[0] - before[0]))
    size = _size(images, weight, stride, before, dilation)
    if min(size) < 1:
        why = f"the result would be {max(0, size[0])}x{max(0, size[1])} pixels"
        raise arguments.shape_error("conv2d", "x", x, why, "a larger image, more padding, or a smaller filter")
    return images, before


def _size(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any) -> tuple[int, int]:
    def along(i: int) -> int:
        return int((x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1)

    return along(0), along(1)


@torch.library.custom_op("tessera::tiled_conv2d", mutates_args=(), schema=_SCHEMA)
def tiled_conv2d(x: Any, weight: Any, *options: Any) -> Any:
    """Run the convolution as torch's operator; the result has the image's memory format."""
    stride, padding, dilation, groups, tile_shape, stages, warps = options
    if not x.is_cuda:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        with arguments.without_autocast(x):
            out = torch.nn.functional.conv2d(x.to(wide), weight.to(wide), None, stride, padding, dilation, groups)
        return out.to(x.dtype).contiguous(memory_format=_memory_format(x))
    from .kernels.matmul import launch_conv

    shape = Tile(*tile_shape)
    if not stages:
        stages, warps = tile.pipeline(shape)
    out = x.new_empty((x.shape[0], *_size(x, weight, stride, padding, dilation), weight.shape[0]))
    with torch.cuda.device(x.device):  # Triton launches on the current device, whatever the tensors' is
        launch_conv(
            x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1),
            weight.permute(0, 2, 3, 1).contiguous(),
            out,
            stride=tuple(stride),
            padding=tuple(padding),
            dilation=tuple(dilation),
            groups=groups,
            tile=shape,
            stages=stages,
            warps=warps,
            dot="tf32" if is_tf32_allowed() else "ieee",
        )
    return out.permute(0, 3, 1, 2).contiguous(memory_format=_memory_format(x))


def _memory_format(x: Any) -> Any:
    """Return channels_last if channels are innermost, else contiguous."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


@tiled_conv2d.register_fake
def _(x: Any, weight: Any, *options: Any) -> Any:
    stride, padding, dilation, _groups, tile_shape, stages, _warps = options
    if not stages:
        tile.plan_launch("conv2d", Tile(*tile_shape), dtype_to_check(x.dtype), x.device, warn=False)
    size = (x.shape[0], weight.shape[0], *_size(x, weight, stride, padding, dilation))
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_memory_format(x))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs[:6]
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, g: Any) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    steps = (list(ctx.stride), list(ctx.padding), list(ctx.dilation))
    wanted = [*ctx.needs_input_grad[:2], False]
    gradients = torch.ops.aten.convolution_backward(g, x, weight, None, *steps, False, [0, 0], ctx.groups, wanted)
    return (*gradients[:2], *(None,) * 7)


_convolution = make_differentiable(tiled_conv2d, _save, _backward, "conv2d", "tile_shape")
