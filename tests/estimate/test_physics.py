"""No kernel is faster than its bytes and its FLOPs allow: every family of operators, on every chip of the catalogue."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.device import Device
from tessera.estimate.gemm import gemm_time
from tessera.estimate.ops import OpModel
from tessera.estimate.power import DeviceWork, PowerModel
from tessera.graph.flops import params_of, work_of
from tessera.graph.ir import DTYPE_BYTES, Op, TensorSpec
from tessera.hardware import catalogue, lookup

DEVICES = [d for d in catalogue().values() if d.memory.bandwidth_bytes_per_s is not None]
MODELS = {device.id: OpModel(device) for device in DEVICES}
some = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
dtypes = st.sampled_from(["fp32", "bf16", "fp16"])
sizes = st.sampled_from([1, 7, 64, 200, 1024, 4096])
# Kernels that only move data, by the name that decides their rates.
MOVERS = {
    "elementwise": ("neg", "add", "gelu", "silu_backward", "hardswish"),
    "copy": ("clone", "cat", "_to_copy", "roll"),
    "fill": ("fill_",),
    "softmax": ("_softmax", "_log_softmax"),
    "norm": ("native_layer_norm", "rms_norm"),
    "reduce": ("sum", "amax"),
    "random": ("native_dropout",),
    "sort": ("sort",),
    "foreach": ("_foreach_add_", "_fused_adamw_"),
    "resample": ("upsample_bilinear2d",),
}


def tensor(storage: int, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(storage, shape, stride, dtype, int(prod(shape) * DTYPE_BYTES[dtype]))


def make_op(name: str, kind: str, inputs: list[TensorSpec], outputs: list[TensorSpec], **params: object) -> Op:
    work = work_of(name, kind, inputs, outputs, params, tf32=False)
    return Op(
        0,
        name,
        kind,
        "",
        "forward",
        tuple(inputs),
        tuple(outputs),
        work.flops,
        work.precision,
        work.unit,
        work.kernels,
        work.params,
    )


def check(op: Op, least_bytes: float) -> None:
    """Cold: every chip moves at least these bytes, at no more than its bandwidth. Warm: nothing beats the FLOPs."""
    for device in DEVICES:
        of = MODELS[device.id].chip
        for crossing in (float(op.bytes_in + op.bytes_out), 0.0, None):
            kernel = MODELS[device.id].time(op, crossing)
            told = device.id, op.name, crossing, kernel
            assert kernel.seconds >= kernel.hbm_bytes / of.bandwidth * (1 - 1e-9), told
            assert kernel.clock_s <= kernel.seconds * (1 + 1e-9), told
            if crossing:
                assert kernel.seconds >= 0.999 * least_bytes / of.bandwidth, told
            if op.flops:
                assert kernel.seconds >= op.flops / peak_of(device, kernel.unit) * (1 - 1e-9), told


def peak_of(device: Device, unit: str) -> float:
    kind, _, name = unit.partition(".")
    table = device.matrix if kind == "matrix" else device.vector
    return table[name].value * (MODELS[device.id].chip.boost_over_quoted if kind == "matrix" else 1.0)


@some
@given(m=sizes, n=sizes, k=sizes, batch=st.sampled_from([1, 3, 32]), dtype=dtypes)
def test_products(m: int, n: int, k: int, batch: int, dtype: str) -> None:
    a, b, out = tensor(0, (batch, m, k), dtype), tensor(1, (batch, k, n), dtype), tensor(2, (batch, m, n), dtype)
    op = make_op("aten.bmm", "gemm", [a, b], [out])
    check(op, a.nbytes + b.nbytes + out.nbytes)


@some
@given(
    batch=st.sampled_from([1, 8, 64]),
    cin=st.sampled_from([3, 64, 512, 4096]),
    cout=st.sampled_from([64, 512, 4096]),
    kernel=st.sampled_from([1, 3, 7]),
    side=st.sampled_from([1, 7, 56]),
    depthwise=st.booleans(),
    backward=st.booleans(),
    dtype=dtypes,
)
def test_convolutions(batch, cin, cout, kernel, side, depthwise, backward, dtype) -> None:
    cout = cin if depthwise else cout
    x, out = tensor(0, (batch, cin, side, side), dtype), tensor(2, (batch, cout, side, side), dtype)
    w = tensor(1, (cout, 1 if depthwise else cin, kernel, kernel), dtype)
    geometry = {"stride": (1, 1), "dilation": (1, 1), "groups": cin if depthwise else 1}
    if backward:
        grads = [tensor(3, x.shape, dtype), tensor(4, w.shape, dtype)]
        op = make_op("aten.convolution_backward", "conv", [out, x, w], grads, **geometry)
        # Both gradients read that of the output, one the weight, the other the input: at least once.
        check(op, out.nbytes + x.nbytes + w.nbytes)
    else:
        check(make_op("aten.convolution", "conv", [x, w], [out], **geometry), x.nbytes + w.nbytes + out.nbytes)


@some
@given(
    batch=st.sampled_from([1, 8]),
    heads=st.sampled_from([8, 32]),
    group=st.sampled_from([1, 8]),
    q=st.sampled_from([1, 128, 1000]),
    more=st.sampled_from([0, 4096]),
    dim=st.sampled_from([64, 128]),
    backward=st.booleans(),
    dtype=dtypes,
)
def test_attention(batch, heads, group, q, more, dim, backward, dtype) -> None:
    kv_heads = heads // group
    queries = tensor(0, (batch, heads, q, dim), dtype)
    keys, values = (tensor(i, (batch, kv_heads, q + more, dim), dtype) for i in (1, 2))
    params = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "q_len": q,
        "kv_len": q + more,
        "head_dim": dim,
        "v_dim": dim,
    }
    params |= {"causal": False, "mask": False, "dropout": 0.0, "backward": backward}
    op = make_op("tessera.sdpa", "attention", [queries, keys, values], [tensor(3, queries.shape, dtype)], **params)
    check(op, 2 * queries.nbytes + keys.nbytes + values.nbytes)


@some
@given(
    hidden=st.sampled_from([64, 1024, 4096]),
    batch=st.sampled_from([1, 32]),
    steps=st.sampled_from([1, 20]),
    layers=st.sampled_from([1, 2]),
    directions=st.sampled_from([1, 2]),
    cell=st.sampled_from([("lstm", 4), ("gru", 3)]),
    dtype=dtypes,
)
def test_recurrent_layers(hidden, batch, steps, layers, directions, cell, dtype) -> None:
    name, gates = cell
    x, out = (tensor(i, (steps, batch, hidden * d), dtype) for i, d in ((0, 1), (1, directions)))
    weights = []
    for layer in range(layers):
        wide = hidden if layer == 0 else hidden * directions
        for d in range(directions):
            at = 10 + 4 * layer + 2 * d
            weights += [tensor(at, (gates * hidden, wide), dtype), tensor(at + 1, (gates * hidden, hidden), dtype)]
    params = {
        "gates": gates,
        "cell": name,
        "hidden": hidden,
        "input": hidden,
        "layers": layers,
        "directions": directions,
    }
    op = make_op("tessera.rnn", "rnn", [x, *weights], [out], **params, steps=steps, batch=batch, out=hidden)
    check(op, x.nbytes + out.nbytes + sum(w.nbytes for w in weights))
    # Recurrent weights larger than the cache come from memory in every step.
    recurrent = gates * hidden * hidden * DTYPE_BYTES[dtype] * directions
    for device in DEVICES:
        of = MODELS[device.id].chip
        beyond = max(0.0, recurrent - of.cache_bytes)
        kernel = MODELS[device.id].time(op, 0.0)
        assert kernel.seconds >= (steps - 1) * layers * beyond / of.bandwidth, (device.id, kernel)


@some
@given(
    which=st.sampled_from([(kind, name) for kind, names in MOVERS.items() for name in names]),
    rows=st.sampled_from([1, 64, 4096, 65536]),
    width=st.sampled_from([1, 96, 1024, 8192]),
    dtype=dtypes,
)
def test_kernels_that_move_data(which: tuple[str, str], rows: int, width: int, dtype: str) -> None:
    kind, name = which
    shape = (1, rows, width, 1) if kind == "resample" else (rows, width)
    x, out = tensor(0, shape, dtype), tensor(1, (rows, 1) if kind == "reduce" else shape, dtype)
    inputs = [] if kind == "fill" else [x]
    op = make_op(f"aten.{name}", kind, inputs, [out], **({"dim": -1} if kind in ("softmax", "reduce") else {}))
    check(op, sum(t.nbytes for t in (*inputs, out)))


@some
@given(rows=st.sampled_from([1, 8, 4096, 100_000]), width=st.sampled_from([4, 64, 4096]), dtype=dtypes)
def test_rows_looked_up_and_written(rows: int, width: int, dtype: str) -> None:
    table, ids, out = tensor(0, (200_000, width), dtype), tensor(1, (rows,), "int64"), tensor(2, (rows, width), dtype)
    check(make_op("aten.embedding", "gather", [table, ids], [out]), 2 * out.nbytes)
    grad = make_op("aten.embedding_dense_backward", "scatter", [out, ids], [table])
    check(grad, out.nbytes + table.nbytes)


def make_bags(bags: int, size: int, shape: tuple[int, int], dtype: str) -> Op:
    ids, offsets = tensor(1, (bags * size,), "int64"), tensor(2, (bags,), "int64")
    out, owner = tensor(3, (bags, shape[1]), dtype), tensor(4, (bags * size,), "int64")
    return make_op("aten._embedding_bag", "gather", [tensor(0, shape, dtype), ids, offsets], [out, owner])


@some
@given(bags=st.sampled_from([1, 256, 4096]), size=st.sampled_from([1, 20, 500]), dtype=dtypes)
def test_bags_read_every_row_that_they_add_up(bags: int, size: int, dtype: str) -> None:
    shape = (10_000_000, 128)
    op = make_bags(bags, size, shape, dtype)
    rows_bytes = bags * size * shape[1] * DTYPE_BYTES[dtype]
    assert op.looked_up_bytes == rows_bytes
    check(op, rows_bytes + op.bytes_out)


@pytest.mark.parametrize(
    ("bags", "size", "shape", "dtype", "us"),
    [
        (2_048, 4, (200_000, 64), "bf16", 4.6),
        (4_096, 4, (200_000, 64), "fp32", 6.9),
        (16_384, 8, (100_000, 48), "fp32", 25.1),
    ],
)
def test_bags_as_traced(bags: int, size: int, shape: tuple[int, int], dtype: str, us: float) -> None:
    """`us` on an H200 (h200_heldout_traces: dlrm; h200_heldout5_traces: mmoe_bags, of which nothing was fitted)."""
    op = make_bags(bags, size, shape, dtype)
    kernel = MODELS["h200"].time(op, float(op.looked_up_bytes + op.bytes_out))
    assert kernel.seconds == pytest.approx(us * 1e-6, rel=0.3)


@pytest.mark.parametrize(
    ("rows", "shape", "us"),
    [
        (282_624, (12_288, 128), 124),
        (900_000, (60_000, 256), 571),
        (900_000, (60_000, 8), 194),
        (8_192, (4_096, 768), 40),
    ],
)
def test_rows_added_after_a_sort(rows: int, shape: tuple[int, int], us: float) -> None:
    """Backward of `x[index]`; `us` as traced on an H200 (h200_heldout4_traces: schnet, gat, expert_choice)."""
    table, values, ids = tensor(0, shape, "fp32"), tensor(1, (rows, shape[1]), "fp32"), tensor(2, (rows,), "int64")
    op = make_op("aten.index_put", "scatter", [table, values, ids], [table], accumulate=True)
    check(op, 0.0)
    kernel = MODELS["h200"].time(op, float(values.nbytes))
    assert kernel.seconds == pytest.approx(us * 1e-6, rel=0.35)


def test_numbers_named_one_by_one_are_not_rows() -> None:
    """A table of 16 numbers looked up 11.5 million times (h200_heldout6_traces: stablelm_10layers_four_bits)."""
    table, ids = tensor(0, (16,), "bf16"), tensor(1, (5_767_168, 2), "int64")
    op = make_op("aten.index", "gather", [table, ids], [tensor(2, (5_767_168, 2), "bf16")])
    assert MODELS["h200"].time(op, float(ids.nbytes)).seconds == pytest.approx(35e-6, rel=1.2)  # was 4 ms


def test_a_scan_knows_its_dimension() -> None:
    """A thread goes down a column (h200_heldout6_traces: min_gru_6layers_autocast_train)."""
    x = tensor(0, (8, 2048, 1536), "fp32")
    op = make_op("aten.logcumsumexp", "sort", [x], [x], **params_of("logcumsumexp", (None, 1), {}))
    assert MODELS["h200"].time(op, float(op.bytes_in + op.bytes_out)).seconds == pytest.approx(1.08e-3, rel=0.3)


def test_values_of_one_row_are_added_one_after_the_other() -> None:
    table, ids = tensor(0, (400, 4), "fp32"), tensor(2, (160_000,), "int64")
    inputs = [table, tensor(1, (160_000, 4), "fp32"), ids]
    op = make_op("aten.index_put", "scatter", inputs, [table], accumulate=True, longest_run=80_200)
    # A table of relative positions, of which half have one bucket (h200_heldout5_traces: hstu_autocast_train_b32_s400).
    assert MODELS["h200"].time(op, 0.0).seconds == pytest.approx(14.1e-3, rel=0.1)
    even = make_op("aten.index_put", "scatter", inputs, [table], accumulate=True, longest_run=None)
    assert MODELS["h200"].time(even, 0.0).seconds < 0.2e-3


@pytest.mark.parametrize(
    ("rows", "shape", "us"),
    [(16_777_216, (4_194_304, 2), 7789), (851_968, (1_000_000, 16), 1264), (4096, (50_000, 1024), 130)],
)
def test_the_gradient_of_a_look_up_costs_by_the_rows_it_hits(rows: int, shape: tuple[int, int], us: float) -> None:
    grad, ids = tensor(0, (rows, shape[1]), "fp32"), tensor(1, (rows,), "int64")
    op = make_op("aten.embedding_dense_backward", "scatter", [grad, ids], [tensor(2, shape, "fp32")])
    # h200_heldout5, heldout4 and heldout traces: hash_grid, deepfm, gpt2_medium
    kernel = MODELS["h200"].time(op, float(op.bytes_in + op.bytes_out))
    assert kernel.seconds == pytest.approx(us * 1e-6, rel=0.35)


@pytest.mark.parametrize(
    ("shape", "dtype", "us"),
    [
        ((30_000, 128), "fp32", 36),
        ((180_000, 128), "fp32", 166),
        ((200_000, 512), "fp32", 142),
        ((7020, 8960), "bf16", 45),
    ],
)
def test_sums_of_columns_end_in_one_block(shape: tuple[int, int], dtype: str, us: float) -> None:
    """As traced on an H200 (heldout5: mesh_graph, siren, video_dit)."""
    x = tensor(0, shape, dtype)
    op = make_op("aten.sum", "reduce", [x], [tensor(1, (1, shape[1]), dtype)], dim=[0])
    assert MODELS["h200"].time(op, float(x.nbytes)).seconds == pytest.approx(us * 1e-6, rel=0.35)


def test_products_of_three_numbers_share_a_warp() -> None:
    x = tensor(0, (16_777_216, 3), "fp32")
    op = make_op("aten.prod", "reduce", [x], [tensor(1, (16_777_216,), "fp32")], dim=-1)
    # h200_heldout5_traces: hash_grid_train_p131072
    assert MODELS["h200"].time(op, float(op.bytes_in + op.bytes_out)).seconds == pytest.approx(217e-6, rel=0.35)


@pytest.mark.parametrize(("shape", "us"), [((36_864, 128), 185), ((180_000, 128), 225), ((12_800, 256), 60)])
def test_a_layer_norm_of_few_columns_sums_its_gradient_in_few_blocks(shape: tuple[int, int], us: float) -> None:
    """h200_heldout5_traces: pairformer, mesh_graph, hstu."""
    x, w, row = tensor(0, shape, "fp32"), tensor(1, shape[1:], "fp32"), tensor(2, (shape[0], 1), "fp32")
    op = make_op("aten.native_layer_norm_backward", "norm", [x, x, row, row, w], [x, w, w], normalized=shape[1:])
    kernel = MODELS["h200"].time(op, 2.0 * x.nbytes)
    assert kernel.seconds == pytest.approx(us * 1e-6, rel=0.35)


def test_a_softmax_over_channels_is_another_kernel() -> None:
    x = tensor(0, (6, 150, 384, 384), "fp32")
    op = make_op("aten._log_softmax", "softmax", [x], [tensor(1, x.shape, "fp32")], dim=1)
    # h200_heldout5_traces: upernet_convnext_tiny_train_b6_s384
    assert MODELS["h200"].time(op, 2.0 * x.nbytes).seconds == pytest.approx(1055e-6, rel=0.4)


@pytest.mark.parametrize(("numbers", "us"), [(4096, 34), (12_000, 67)])
def test_long_rows_are_sorted_by_many_kernels(numbers: int, us: float) -> None:
    x = tensor(0, (numbers,), "int64")
    op = make_op("aten.sort", "sort", [x], [x, tensor(1, x.shape, "int64")], dim=-1)
    # h200_heldout_traces: olmoe_6layers; heldout5: gpt_oss_20b_4layers_b2_s1500
    assert MODELS["h200"].time(op, 0.0).seconds == pytest.approx(us * 1e-6, rel=0.35)


def test_rows_written_without_adding_are_not_sorted() -> None:
    table, values, ids = tensor(0, (65_536, 8), "fp32"), tensor(1, (65_536, 8), "fp32"), tensor(2, (65_536,), "int64")
    inputs = [table, values, ids]
    ops = [make_op("aten.index_put", "scatter", inputs, [table], accumulate=adds) for adds in (False, True)]
    written, added = (MODELS["h200"].time(op).seconds for op in ops)
    assert written < 0.5 * added


@pytest.mark.parametrize("name", ["aten.index", "aten.gather"])
def test_whole_rows_are_looked_up_as_by_index_select(name: str) -> None:
    table, out = tensor(0, (60_000, 8), "fp32"), tensor(2, (900_000, 8), "fp32")
    ids = tensor(1, (900_000,), "int64")
    if name == "aten.gather":  # an index that was expanded along the row
        ids = replace(ids, shape=out.shape, stride=(1, 0))
    # 545 us on an H200 (h200_heldout4_traces: gat_train_n60k_e900k), a block for every row.
    kernel = MODELS["h200"].time(make_op(name, "gather", [table, ids], [out]), 2.0 * out.nbytes)
    assert kernel.seconds == pytest.approx(545e-6, rel=0.15)


@pytest.mark.parametrize(
    ("dtype", "hidden", "layers", "batch", "steps", "ms"),
    [("fp32", 650, 2, 32, 128, 5.31), ("bf16", 512, 1, 64, 256, 2.42)],
)
def test_recurrent_layers_backward(dtype: str, hidden: int, layers: int, batch: int, steps: int, ms: float) -> None:
    """An LSTM alone: both passes less the forward one, as recorded on an H200 (h200_ops)."""
    sizes = {"gates": 4, "hidden": hidden, "input": hidden, "layers": layers, "batch": batch, "steps": steps}
    x = tensor(0, (batch, steps, hidden), dtype)
    params = {**sizes, "cell": "lstm", "directions": 1, "out": hidden, "backward": True}
    op = make_op("tessera.rnn_backward", "rnn", [x], [tensor(1, x.shape, dtype)], **params)
    op = replace(op, precision="tf32", unit="matrix") if dtype == "fp32" else op
    assert MODELS["h200"].time(op, 0.0).seconds == pytest.approx(1e-3 * ms, rel=0.15)


def test_windows_of_a_depthwise_convolution_overlap_inside_the_sm() -> None:
    x, w = tensor(0, (32, 96, 56, 56), "bf16"), tensor(1, (96, 1, 7, 7), "bf16")
    op = make_op("aten.convolution", "conv", [x, w], [tensor(2, x.shape, "bf16")], stride=(1, 1), groups=96)
    assert MODELS["h200"].time(op).l2_bytes < 3 * (2 * x.nbytes + w.nbytes)


def test_a_convolution_that_has_hardly_begun_keeps_few_sms_busy() -> None:
    x, w = tensor(0, (1, 1056, 7, 7), "fp16"), tensor(1, (1056, 8, 3, 3), "fp16")
    op = make_op("aten.convolution", "conv", [x, w], [tensor(2, x.shape, "fp16")], stride=(1, 1), groups=132)
    time = MODELS["h200"].time(op)
    assert time.busy <= 1 - time.overhead_s / time.seconds


def test_few_planes_of_a_batch_norm_keep_few_sms_busy() -> None:
    def time(channels: int, side: int) -> float:
        x, w = tensor(0, (1, channels, side, side), "fp32"), tensor(1, (channels,), "fp32")
        inputs, outputs = [x, w, w, w, w], [tensor(2, x.shape, "fp32")]
        return MODELS["h200"].time(make_op("aten.native_batch_norm", "batch_norm", inputs, outputs), 0.0).seconds

    # 27 us on an H200 (h200_heldout_traces: lraspp_mobilenet_v3_large_b1_s512), a block for every channel.
    assert time(16, 256) == pytest.approx(27e-6, rel=0.3)
    assert time(16, 256) > 3 * time(256, 64)


def test_a_batch_norm_of_samples_without_a_plane_reads_channels_side_by_side() -> None:
    x, w = tensor(0, (512, 400), "fp32"), tensor(1, (400,), "fp32")
    op = make_op("aten.native_batch_norm", "batch_norm", [x, w, w, w, w], [tensor(2, x.shape, "fp32")])
    # 5 us for two on an H200 (h200_heldout4_traces: deepfm_b512), by a kernel for channels-last tensors.
    assert MODELS["h200"].time(op, 0.0).seconds < 5e-6


@pytest.mark.parametrize(
    ("x", "w", "groups", "stride", "us"),
    [
        (
            (8, 768, 399),
            (768, 48, 128),
            16,
            1,
            12_350,
        ),  # h200_heldout4_models: hubert_base_b8_8s as a graph, less its rest
        ((8, 3, 16, 224, 224), (768, 3, 2, 16, 16), 1, 16, 1307),  # h200_heldout4_traces: videomae_base_b8_f16
    ],
)
def test_long_windows_and_videos_run_without_matrix_units(
    x: tuple[int, ...], w: tuple[int, ...], groups: int, stride: int, us: float
) -> None:
    out = (x[0], w[0], 400) if groups > 1 else (x[0], w[0], 8, 14, 14)
    inputs = [tensor(0, x, "fp16"), tensor(1, w, "fp16")]
    op = make_op("aten.convolution", "conv", inputs, [tensor(2, out, "fp16")], stride=(stride,), groups=groups)
    kernel = MODELS["h200"].time(op, 0.0)
    assert kernel.unit == "vector.fp32"
    assert kernel.seconds == pytest.approx(us * 1e-6, rel=0.35)


def test_a_grouped_product_that_waits_for_its_weights_takes_no_longer_than_they_do() -> None:
    x, w = tensor(0, (4096, 2048), "bf16"), tensor(1, (64, 2048, 2048), "bf16")
    params = {"m": 64, "n": 2048, "k": 2048, "batch": 64}
    op = make_op("aten._grouped_mm", "gemm", [x, w], [tensor(2, (4096, 2048), "bf16")], **params)
    # 155 us on an H200 (h200_heldout_traces: olmoe_6layers_b1_s512).
    assert MODELS["h200"].time(op, float(op.bytes_in + op.bytes_out)).seconds == pytest.approx(155e-6, rel=0.2)


def test_weights_of_a_wide_convolution_come_from_memory() -> None:
    x, w = tensor(0, (1, 8192, 1, 1), "fp16"), tensor(1, (8192, 8192, 1, 1), "fp16")
    op = make_op("aten.convolution", "conv", [x, w], [tensor(2, x.shape, "fp16")], stride=(1, 1), groups=1)
    kernel = OpModel(lookup("t4")).time(op, float(op.bytes_in + op.bytes_out))
    assert kernel.hbm_bytes == pytest.approx(w.nbytes, rel=0.001)
    assert kernel.seconds > 419e-6


@pytest.mark.parametrize(("channels", "wide"), [(256, 256), (128, 512), (1024, 256)])
def test_planes_that_do_not_start_at_16_bytes_take_longer(channels: int, wide: int) -> None:
    def point_s(side: int) -> float:
        """Seconds of one point of a 1x1 convolution's planes."""
        x, w = tensor(0, (64, channels, side, side), "bf16"), tensor(1, (wide, channels, 1, 1), "bf16")
        out = tensor(2, (64, wide, side, side), "bf16")
        op = make_op("aten.convolution", "conv", [x, w], [out], stride=(1, 1), groups=1)
        return OpModel(lookup("h200")).time(op, float(op.bytes_in + op.bytes_out)).seconds / side**2

    # 28 * 28 is a multiple of 8, which Hopper's own kernels need; an older generation's multiply the others.
    assert min(point_s(27), point_s(29)) > 2.4 * point_s(28)


def test_recurrent_weights_are_read_at_every_step() -> None:
    hidden, steps = 8192, 100
    x = tensor(0, (steps, 1, hidden), "fp16")
    weights = [tensor(1 + i, (4 * hidden, hidden), "fp16") for i in (0, 1)]
    params = {
        "gates": 4,
        "cell": "lstm",
        "hidden": hidden,
        "input": hidden,
        "layers": 1,
        "directions": 1,
        "steps": steps,
        "batch": 1,
    }
    op = make_op("tessera.rnn", "rnn", [x, *weights], [tensor(9, x.shape, "fp16")], **params, out=hidden)
    kernel = OpModel(lookup("h200")).time(op, float(op.bytes_in + op.bytes_out))
    assert kernel.seconds > 0.99 * steps * weights[1].nbytes / 4.8e12
    small = OpModel(lookup("h200")).time(op, 0.0)
    assert small.hbm_bytes > 0.9 * (steps - 1) * weights[1].nbytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["h200", "h100", "a100", "b200", "l4", "l40s", "mi300x", "rtx-4090"])
def test_a_larger_product_takes_no_less_time_and_energy_under_the_power_limit(name: str, precision: str) -> None:
    """Tiles that tie in time differ in the bytes they load: the choice once made 20480 rows slower than 28672."""
    device = lookup(name)
    power = PowerModel.from_device(device)
    sizes = (4096, 6144, 8192, 12288, 16384, 20480, 24576, 28672, 32768)
    kernels = [gemm_time(device, m, 8192, 8192, precision=precision) for m in sizes]
    found = [power.estimate(DeviceWork.of(kernel)) for kernel in kernels]
    for smaller, larger in pairwise(found):
        assert larger.seconds > smaller.seconds and larger.energy_j > smaller.energy_j
