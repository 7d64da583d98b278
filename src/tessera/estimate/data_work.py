"""What an operator that moves data has to do: its family, elements and bytes, and the pieces it can be cut into.

Kernels of one family run at the same rates (data_movement.py). What differs within a family is told by how torch's
kernels divide the work: rows that share a warp, columns that one block sums, an index that is sorted first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, expm1, log2, prod
from typing import Any

from ..graph.ir import DTYPE_BYTES, Op, TensorSpec
from .data_movement import DataMovement

CHUNK = 65536  # elements of a block of torch's multi-tensor kernels (MultiTensorApply.cuh: kChunkSize)
CHUNKS_PER_LAUNCH = 320  # ... and of blocks in a launch
# Points of a Fourier transform that one block holds: 4096 complex numbers of 8 bytes are 32 KiB of shared memory.
_POINTS = 4096


def movement_of(op: Op, hbm_bytes: float) -> DataMovement:
    """An operator as a data-moving kernel: family, elements, bytes, and the pieces it can be cut into."""
    family, elements, blocks = _find_family(op, _rate_name(op))
    passes = _count_passes(op)
    elements, touched = max(1.0, passes * elements), passes * _touched_bytes(op)
    crossing = min(passes * hbm_bytes, 2.0 * touched)
    first = next(iter((*op.outputs, *op.inputs)), None)
    size = float(DTYPE_BYTES.get(first.dtype, 4)) if first else 4.0
    return DataMovement(
        family,
        elements,
        max(1.0, touched),
        crossing,
        max(1.0, blocks),
        count_launches(op),
        _run_length(op),
        size,
        _alone_s(op, family),
    )


# What torch computes by several kernels, each over all elements: how often these go over the operands.
_PASSES = {
    "logsumexp": 6.0, "binary_cross_entropy_with_logits": 5.5,
    "smooth_l1_loss": 2.0, "mse_loss": 2.0, "huber_loss": 2.0,
}  # fmt: skip


def _count_passes(op: Op) -> float:
    """How often an operator reads its data; a Fourier transform once for each dimension, a long one several times."""
    if op.kind != "fft" or not op.inputs or not op.outputs:
        return _PASSES.get(_rate_name(op), 1.0)
    shape = max(op.inputs[0].shape, op.outputs[0].shape, key=prod)  # of a real transform one side is half as long
    dims = [d for d in op.params.get("dims", (-1,)) if shape]
    return sum(max(1, ceil(log2(max(2, shape[d])) / log2(_POINTS))) for d in dims) or 1


# Operators of ours by the name of torch's that moves the same bytes in the same way. Not fitted to ours, which took
# half the joules on an H200 (results/ops_rows.json): their predictions are too high.
_TWINS = {
    "tessera.softmax_backward": "_softmax_backward_data",
    "tessera.norm": "native_layer_norm",
    "tessera.norm_backward": "native_layer_norm_backward",
}


def _rate_name(op: Op) -> str:
    """The operator's name under which its rates are looked up."""
    twin = _TWINS.get(op.name)
    if twin is None:
        return op.name.rpartition(".")[2].rstrip("_")
    return twin if op.params.get("centered", True) else twin.replace("native_layer_norm", "rms_norm")


def power_family(op: Op) -> str:
    """The dotted name under which the power of an operator's busy SMs is looked up."""
    if op.kind == "conv":
        groups, channels = max(1, int(op.params.get("groups", 1))), op.params["x"][1]
        shape = "plain" if groups == 1 else "depthwise" if groups == channels else "grouped"
        size = "wide" if op.precision in ("fp32", "tf32") else "narrow"
        return f"conv.{shape}.{size}.{'stem' if channels // groups < 8 and groups == 1 else 'inner'}"
    if op.kind in ("gemm", "attention", "rnn"):
        return op.kind
    return _find_family(op, _rate_name(op))[0]


def _run_length(op: Op) -> float:
    """Elements of one run: a row of a norm or sum, a channel's plane, neighbours in a copy, hits of one place."""
    x = max(op.inputs, key=lambda t: t.numel, default=None)
    if op.kind == "scatter" and op.outputs:
        return max(1.0, float(max(t.numel for t in op.inputs)) / max(1, op.outputs[0].numel))
    if x is None or not x.shape:
        return 1.0
    if op.kind == "norm" and "normalized" in op.params:
        return float(prod(op.params["normalized"]))
    if op.kind == "batch_norm":
        return float(x.shape[1] if _channels_run(x) else x.shape[0] * prod(x.shape[2:]))
    if op.kind in ("reduce", "softmax"):
        sums = op.kind == "reduce" and op.outputs
        dim = op.params.get("dim")
        out = op.outputs[0].numel if sums else x.numel // max(1, x.shape[-1 if dim is None else dim])
        return x.numel / max(1, out)
    if op.kind in ("copy", "elementwise", "gather", "scatter"):
        return _contiguous_run(x if op.kind != "gather" else op.outputs[0])
    if op.kind == "pool":
        return float(prod(op.params.get("window", (1,))))
    return float(x.shape[-1])


def _contiguous_run(t: TensorSpec) -> float:
    """Elements that lie together: the inner dimensions that are contiguous, and not broadcast."""
    length, expected = 1.0, 1
    for size, step in zip(reversed(t.shape), reversed(t.stride), strict=True):
        if size != 1:
            if step != expected:
                break
            length *= size
        expected *= size
    return length


def _touched_bytes(op: Op) -> float:
    """Bytes an operator really reads and writes: a look-up reads the rows it returns, a loss one number per row."""
    if op.kind == "gather" and op.outputs:
        return float(sum(t.nbytes for t in op.inputs[1:]) + op.looked_up_bytes + op.bytes_out)
    if "nll_loss" in op.name:
        return float(op.bytes_out + sum(t.nbytes for t in op.inputs if t.dtype == "int64"))
    if op.kind == "scatter" and "embedding" not in op.name and len(op.inputs) > 1:
        return 2.0 * float(sum(t.nbytes for t in op.inputs[1:]))
    return float(op.bytes_in + op.bytes_out)


# Of the 132 SMs of an H200: threads at once, and the shares of a column from which Reduce.cuh divides it among blocks.
_THREADS, _SHARE, _LEAST_SHARE = 132 * 2048, 256, 16
# The last block of a sum of columns adds what all blocks found, 0.25 us a step: 128 columns of 30,000 to 180,000 rows
# take 36 to 166 us, 512 columns of 200,000 rows 142 us (h200_heldout5_traces).
_MERGE_STEP_S = 0.25e-6
# A warp adds the values of one row one after the other: 2,401 of which 49 have one row take 8.6 us, 160,000 of which
# 80,200 have one 14.1 ms (h200_dev and heldout5 traces). So it does for every 512 elements of a row: 8,192 rows of
# 2,048 that are all added to one take 5.5 ms (h200_operator_traces).
_SAME_ROW_S, _SAME_ROW = 0.176e-6, 512
# A thread adds up a column one element after the other: 48,235 take 8.97 ms, 189 take 34 us; for a softmax, which goes
# through it three times (its gradient twice), 2,220 take 1.34 ms (h200_operator_traces).
_SCANNED_S, _SPATIAL_S = 0.186e-6, 0.2e-6
# Where source and result do not fit into the H200's cache: 462,375 of 64 columns take 161 ms.
_SCANNED_FAR_S, _CACHED = 0.34e-6, 50e6
_SPATIAL_ALONE = 64  # columns up to which the threads of a block share the elements of each (PersistentSoftmax.cuh)


def _alone_s(op: Op, family: str) -> float:
    """Seconds in which one block, warp or thread works alone."""
    if family.startswith("reduce.outer"):
        columns = op.outputs[0].numel
        return _MERGE_STEP_S * _count_merge_steps(columns, max(t.numel for t in op.inputs) // max(1, columns))
    if _adds_sorted(op):
        added = float(op.params.get("longest_run") or _run_length(op))
        return _SAME_ROW_S * added * ceil(float(op.params.get("row") or 1) / _SAME_ROW)
    if family.startswith("sort.columns"):
        return (_SCANNED_S if op.bytes_in + op.bytes_out < _CACHED else _SCANNED_FAR_S) * _columns(op)[0]
    if family.startswith("softmax.spatial"):
        length, columns = _columns(op)
        passes = 2 if "backward" in family else 3
        return passes * _SPATIAL_S * length if columns > _SPATIAL_ALONE else 0.0
    return 0.0


def _columns(op: Op) -> tuple[int, int]:
    """Elements along the dimension that an operator works on, and the columns side by side: 1 for the last one."""
    x, dim = max(op.inputs, key=lambda t: t.numel), op.params.get("dim", -1)
    if not x.shape or not isinstance(dim, int):
        return 1, 1
    dim %= len(x.shape)
    return x.shape[dim], prod(x.shape[dim + 1 :])


def _count_merge_steps(columns: int, rows: int) -> float:
    """Steps in which the last block of torch's sum of columns adds what the others found (Reduce.cuh)."""
    vector = 4 if columns % 4 == 0 else 1
    threads = 512 // vector
    across = min(32, 1 << int(log2(max(1, columns // vector))))
    down = min(1 << int(log2(max(1, rows))), threads // across)
    share = rows / down
    if share < _SHARE:
        return 0.0
    blocks = ceil(columns / vector / across)
    parts = max(min(ceil(_THREADS / threads / blocks), ceil(share / _LEAST_SHARE)), ceil(share / _SHARE))
    return parts / down


def count_launches(op: Op) -> int:
    """Kernels that an operator of a data-moving kind launches (counted in traces of an H200)."""
    if op.kind == "foreach":
        return max(1, -(-sum(-(-t.numel // CHUNK) for t in op.outputs) // CHUNKS_PER_LAUNCH))
    if op.kind == "sort":
        return 2
    if _rate_name(op) in _BY_SAMPLE:
        return max(1, op.inputs[0].shape[0])
    if op.kind == "scatter" and "embedding" in op.name:
        return 29 if _index_length(op) > _UNSORTED else 1
    return 9 if _adds_sorted(op) else 1


_BY_SAMPLE = ("im2col", "col2im")
"""Operators that launch a kernel for every sample."""


def _adds_sorted(op: Op) -> bool:
    """Whether rows are added where an index says after the index was sorted: backward of `x[index]`."""
    return op.kind == "scatter" and bool(op.params.get("accumulate"))


def _index_length(op: Op) -> int:
    """Rows that an index names."""
    return max((t.numel for t in op.inputs if t.dtype in ("int64", "int32")), default=1)


def _find_family(op: Op, short: str) -> tuple[str, float, float]:
    """(family, elements, blocks) of an operator."""
    biggest = max((*op.outputs, *op.inputs), key=lambda t: t.numel, default=None)
    n = float(biggest.numel) if biggest else 1.0
    if "generated" in op.params:
        return "elementwise.dense.generated", n, n / 1024
    by_kind = _BY_KIND.get(op.kind)
    if by_kind is not None:
        return by_kind(op, short, n)
    if op.kind == "foreach":
        chunks = float(sum(-(-t.numel // CHUNK) for t in op.outputs))
        return f"foreach.{short.removeprefix('_foreach_')}", float(sum(t.numel for t in op.outputs)), chunks
    if op.kind in ("gather", "scatter"):
        return _gather_or_scatter(op, short)
    if short == "upsample_bilinear2d" and op.outputs and not op.outputs[0].channels_last:
        # One thread for every point of the picture, which goes through all channels of all samples.
        return f"resample.planes.{short}", n, max(1.0, prod(op.outputs[0].shape[2:]) / 512)
    if short == "upsample_bilinear2d_backward" and not op.inputs[0].channels_last:
        return f"resample.planes.{short}", n, n / 1024  # which adds to planes by atomics
    if short in ("sort", "argsort") and op.inputs and max(op.inputs[0].shape, default=1) > _SORTED_BY_BLOCK:
        return f"sort.radix.{short}", n, n / 1024
    if short in _SCANS and op.inputs:
        length, columns = _columns(op)
        if columns > 1:
            return f"sort.columns.{short}", n, n / length / 512
        return f"sort.scan.{short}", n, max(1.0, n / length)
    # A distance goes through all coordinates of its two points.
    return f"{op.kind}.{_operand_layout(op)}.{short}", n * float(op.params.get("coordinates", 1)), n / 1024


# Rows of an embedding's gradient up to which torch does not sort the index (embedding_dense_backward_cuda), and the
# operators that write where an index says without adding.
_UNSORTED = 3072
_SORTED_BY_BLOCK = 4096  # elements that one block sorts; longer rows are sorted by 21 kernels
_SCANS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
_WRITTEN = ("index_copy", "index_fill", "scatter", "index_put", "index_put_impl", "unsafe_index_put")


def _gather_or_scatter(op: Op, short: str) -> tuple[str, float, float]:
    """Rows read or written where an index says."""
    written = op.inputs[1:] if len(op.inputs) > 1 and "backward" not in short else op.inputs
    moved = float(max((t.numel for t in (op.outputs if op.kind == "gather" else written)), default=1))
    rows = float(_index_length(op))
    table = op.inputs[0]
    named = len(table.shape) < 2 and short == "index"  # numbers one by one, not rows
    aligned = len(table.shape) < 2 or table.shape[-1] * DTYPE_BYTES.get(table.dtype, 4) % 16 == 0
    if op.kind == "gather" and aligned and not named and (lookup := _row_lookup(op, short)):
        rows = moved / max(1.0, prod(table.shape[1:]))
        if rows <= 16:  # a kernel that walks through the indices: 0.7 us each
            return f"gather.few.{lookup}", 1400.0 * rows, 1.0
        # A block for every row: 1,650 rows in a microsecond, however short they are.
        return f"gather.{lookup}", moved + 2000.0 * rows, rows
    if "embedding" in short and "backward" in short:
        if rows <= _UNSORTED and "bag" not in short:  # blocks that walk through the indices, 30 ns each
            return "scatter.few.embedding_dense_backward", 60.0 * rows, 1.0
        # The indices are sorted, and each row of the table that is hit, or ten hits of one, costs as much as 55
        # elements (rows of 1 to 1024 elements on an H200).
        moved = max(moved, rows * op.inputs[0].shape[-1])  # of a bag's gradient every row has a copy
        table_rows = float(op.outputs[0].shape[0]) if op.outputs else rows
        hit = table_rows * -expm1(-rows / table_rows)  # where indices are spread evenly
        return "scatter.embedding_dense_backward", moved + 55.0 * max(hit, rows / 10.0), moved / 1024
    if _adds_sorted(op):
        # A warp adds a row 128 elements at a time, and takes as long for a short one as for 75; sorting costs as much
        # as 13 of a row (rows of 1 to 256 elements, 8,832 to 900,000 of them: h200_heldout4_traces).
        width = float(op.params.get("row") or moved / rows)
        rows = moved / width
        added = 75.0 if width <= 32 else 128.0 * ceil(width / 128.0)
        return f"scatter.index_put{'.columns' if width == 1 else ''}", rows * (13.0 + added), rows / 4
    # Writing rows where an index says is one kernel, as reading them is; index_add and scatter_add add atomically.
    plain = op.kind == "scatter" and short.strip("_") in _WRITTEN
    return f"{'gather' if plain else op.kind}.{short}", moved, moved / 1024


def _row_lookup(op: Op, short: str) -> str | None:
    """The look-up that reads whole rows with the same kernel as this operator; None where there is none."""
    if short in ("embedding", "index_select"):
        return short
    indices = [t for t in op.inputs[1:] if t.dtype in ("int64", "int32")]
    if len(indices) != 1 or not op.outputs:
        return None
    table, index, out = op.inputs[0], indices[0], op.outputs[0]
    alike = short == "index" and out.shape == (*index.shape, *table.shape[1:])
    if short == "gather":  # by an index that was expanded along the rows
        alike = len(index.shape) > 1 and not any(index.stride[1:]) and out.shape[1:] == table.shape[1:]
    return "index_select" if alike else None


def _pool(op: Op, short: str, n: float) -> tuple[str, float, float]:
    out = float(op.outputs[0].numel) if op.outputs else n
    last = any(t.channels_last for t in op.inputs[:2])
    # Every result reads its window.
    elements = max(n, out * prod(op.params["window"])) if "window" in op.params else n
    return f"pool.{'last' if last else 'first'}.{short}", elements, max(out, n) / 1024


def _operand_layout(op: Op) -> str:
    """How an elementwise kernel can go through its operands.

    "dense": all alike, loads are vectorised. "crossed": operands that run fastest along different dimensions, so that
    neighbouring threads read far apart. "cast": several number formats, converted one by one. "strided": the rest.
    """
    if not op.outputs:
        return "dense"
    out = op.outputs[0]
    full = [t for t in op.inputs if t.numel > 1 and t.shape == out.shape and 0 not in t.stride]
    if len(out.shape) > 1 and len({_inner(t) for t in (*full, out)}) > 1:
        return "crossed"
    if len({t.dtype for t in op.inputs if t.numel > 1 and t.dtype.startswith(("fp", "bf"))}) > 1:
        return "cast"
    return "dense" if _is_dense(op) else "strided"


def _is_dense(op: Op) -> bool:
    """Whether all operands lie in memory like the result: no broadcast, no transposed view (torch then vectorises)."""
    if not op.outputs:
        return True
    out = op.outputs[0]
    for t in op.inputs:
        if t.numel <= 1:
            continue
        if t.shape != out.shape or (t.stride != out.stride and not (t.contiguous and out.contiguous)):
            return False
    return all(t.dtype == out.dtype for t in op.inputs if t.numel > 1) or len(op.inputs) > 1 or op.kind != "elementwise"


def _copy(op: Op, short: str, n: float) -> tuple[str, float, float]:
    if not op.inputs or not op.outputs:
        return f"copy.same.{short}", n, n / 1024
    source, target = max(op.inputs, key=lambda t: t.numel), op.outputs[0]
    if short in ("cat", "stack"):
        plain = all(t.contiguous for t in op.inputs)
        return f"copy.cat.{'dense' if plain else 'strided'}", float(target.numel), target.numel / 1024
    cast = "same"
    if source.dtype != target.dtype:  # to a wider format torch's kernel does not vectorise its loads
        cast = "up" if DTYPE_BYTES.get(target.dtype, 4) > DTYPE_BYTES.get(source.dtype, 4) else "down"
    if short not in ("clone", "copy", "_to_copy", "contiguous"):
        launches = op.inputs[0].shape[0] if short in _BY_SAMPLE else 1
        return f"copy.{short}", float(target.numel), target.numel / 1024 / max(1, launches)
    if source.shape != target.shape or 0 in source.stride:
        return f"copy.broadcast.{cast}", n, n / 1024
    if source.stride == target.stride or (source.contiguous and target.contiguous):
        return f"copy.{cast}", n, n / 1024
    a, b = _inner(source), _inner(target)
    if a == b and source.stride[a] == 1:
        return "copy.rows", n, n / 1024
    return ("copy.layout" if target.channels_last or source.channels_last else "copy.transpose"), n, n / 1024


def _inner(t: TensorSpec) -> int:
    """The dimension that runs fastest in memory."""
    steps = [(step, i) for i, (step, size) in enumerate(zip(t.stride, t.shape, strict=True)) if size > 1 and step > 0]
    return min(steps)[1] if steps else max(0, len(t.shape) - 1)


def _softmax(op: Op, short: str, n: float) -> tuple[str, float, float]:
    x, dim = max(op.inputs, key=lambda t: t.numel), op.params.get("dim", -1)
    width = float(x.shape[dim]) if x.shape and isinstance(dim, int) else 1.0
    size = "warp" if width <= 1024 else "block" if width <= 16384 else "vast"
    rows = max(1.0, n / max(width, 1.0))
    if isinstance(dim, int) and x.shape and prod(x.shape[dim % len(x.shape) + 1 :]) > 1:
        # Along a dimension that is not the last: a thread goes through all of it, several times.
        return f"{op.kind}.spatial.{short.lstrip('_')}", n, rows / 128.0
    return f"{op.kind}.{size}.{short.lstrip('_')}", n, rows / 4.0 if size == "warp" else rows


# Rows from which the gradient of a layer norm's weights is summed by a kernel of its own, and above which its blocks
# divide the rows of few columns among them (layer_norm_kernel.cu: LaunchGammaBetaBackwardCUDAKernel).
_MANY_ROWS = (128, 65536)


def _norm(op: Op, short: str, n: float) -> tuple[str, float, float]:
    x = max(op.inputs, key=lambda t: t.numel)
    if "group_norm" in short:  # one block sums a group
        return f"norm.{short}", n, max(1.0, float(x.shape[0] * op.params.get("groups", 32)))
    width = float(prod(op.params["normalized"])) if "normalized" in op.params else float(x.shape[-1])
    rows = max(1.0, n / max(width, 1.0))
    # A row costs as much as 750 elements: its block reduces and waits (fitted on rows of 96 to 1536 elements).
    # A row that does not lie together is copied first, by the same operator; "crossed": rows are columns in memory.
    sources = [t for t in op.inputs[: 2 if "backward" in short else 1] if t.numel == x.numel]
    odd = [t for t in sources if not t.contiguous]
    layout = "" if not odd else ".strided" if all(_inner(t) == len(t.shape) - 1 for t in odd) else ".crossed"
    if "norm_backward" not in short and width % 4 and not layout:
        # Rows that are not of whole vectors go through two kernels, the first of which walks.
        return f"norm.{short}.odd", n + 750.0 * rows, rows
    columns = width / 32.0
    if "layer_norm_backward" in short and len(op.outputs) > 1 and _MANY_ROWS[0] < rows <= _MANY_ROWS[1]:
        # The gradient of the weights is summed by a block for 32 columns, the whole way down.
        return f"norm.{short}.columns{layout}", n, columns
    return f"norm.{short}{layout}", n + 750.0 * rows, rows


def _batch_norm(op: Op, short: str, n: float) -> tuple[str, float, float]:
    x = op.inputs[1] if "backward" in short and len(op.inputs) > 1 else op.inputs[0]
    channels = float(x.shape[1]) if len(x.shape) > 1 else 1.0
    phase = "backward" if "backward" in short else "train" if op.params.get("training") else "eval"
    layout = "last" if _channels_run(x) else "first"
    # cuDNN's kernels take fp32 weights and no bf16, torch's own anything.
    narrow = x.dtype == "bf16" or (x.dtype != "fp32" and all(t.dtype != "fp32" for t in op.inputs[1:3]))
    name = f"batch_norm.{phase}.{layout}{'.narrow' if narrow else ''}"
    if layout == "last":
        return name, n, n / 1024
    if phase != "eval":
        # A block for every channel; writing its statistics costs as much as 2000 elements.
        return name, n + (2000.0 * channels if phase == "train" else 0.0), channels
    # A block for every channel of a sample: 16 planes of 256 x 256 keep 16 SMs busy, a plane of 10 x 10 none for long.
    planes = x.shape[0] * channels
    return name, n + (270.0 if narrow else 130.0) * planes, planes


def _channels_run(x: TensorSpec) -> bool:
    """Whether channels lie together, which batch norms have kernels for: also those of samples without a plane."""
    return x.channels_last or (x.contiguous and len(x.shape) > 1 and prod(x.shape[2:]) == 1)


def _reduction(op: Op, short: str, n: float) -> tuple[str, float, float]:
    x = max(op.inputs, key=lambda t: t.numel, default=None)
    if x is None or not op.outputs:
        return f"reduce.all.{short}", n, n / 1024
    out = float(op.outputs[0].numel)
    dims: Any = op.params.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(x.shape)))
    last = _inner(x) in [d % max(1, len(x.shape)) for d in dims]
    kind = "all" if out <= 1 else "inner" if last else "outer"
    # A row costs as much as 400 elements (rows of 49 to 4096 elements on an H200); a warp has several short ones.
    short_rows = min(1.0, 2.0 ** int(log2(max(1.0, n / out))) / 32.0)
    elements = n + (400.0 * short_rows * out if kind == "inner" else 0.0)
    return f"reduce.{kind}.{short}", elements, max(out / (4.0 if last else 32.0), n / 8192)


_BY_KIND: dict[str, Callable[[Op, str, float], tuple[str, float, float]]] = {
    "copy": _copy, "softmax": _softmax, "norm": _norm, "batch_norm": _batch_norm, "reduce": _reduction, "pool": _pool,
}  # fmt: skip
