"""Predictions of our own operators: counted as torch's are that do the same, forward and backward; complex products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tessera
from tessera.estimate.ops import OpModel
from tessera.graph.capture import capture
from tessera.graph.ir import Graph
from tessera.graph.op_kinds import kind_of
from tessera.hardware import lookup

torch = pytest.importorskip("torch")
from tessera import op  # noqa: E402

F = torch.nn.functional


def tensor(*shape: int, dtype: Any = torch.bfloat16, grad: bool = False) -> Any:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=grad)


def graph_of(call: Callable[..., Any], *given: Any, train: bool = False) -> Graph:
    def run(*tensors: Any) -> Any:
        found = call(*tensors)
        if train:
            torch.autograd.backward(found, torch.ones_like(found))
        return found

    return capture(run, given)


def cost(graph: Graph, kinds: tuple[str, ...]) -> tuple[float, float, list[str]]:
    """FLOPs and bytes of the operators of these kinds, and their phases."""
    ops = [o for o in graph.kernels if o.kind in kinds]
    return sum(o.flops for o in ops), sum(o.bytes_in + o.bytes_out for o in ops), [o.phase for o in ops]


def attended(ours: Graph, theirs: Graph, phases: list[str]) -> None:
    """Both have the same FLOPs and bytes, as captured and as predicted."""
    a, b = (cost(g, ("attention",)) for g in (ours, theirs))
    assert a[2] == b[2] == phases and a[0] == b[0] > 0 and a[1] == pytest.approx(b[1], rel=0.02)
    reports = [tessera.predict(g, on="h200", launch="graph", calibration=None) for g in (ours, theirs)]
    flops, moved = ([getattr(r.prediction, name) for r in reports] for name in ("flops", "hbm_bytes"))
    assert flops[0] == flops[1] and moved[0] == pytest.approx(moved[1], rel=0.02) and moved[0] > 1e7
    assert reports[0].total_latency_s == pytest.approx(reports[1].total_latency_s, rel=0.05)


@pytest.mark.parametrize(
    ("causal", "kv_heads", "dtype"), [(False, 16, torch.bfloat16), (True, 4, torch.float16), (True, 16, torch.float32)]
)
def test_our_attention_is_counted_as_torch_s(causal: bool, kv_heads: int, dtype: Any) -> None:
    from tessera.op.attention_ops import attention

    def tensors() -> list[Any]:
        return [tensor(8, heads, 2048, 64, dtype=dtype) for heads in (16, kv_heads, kv_heads)]

    options = (0.125, causal, 64, 32, 2, 4, "ieee")
    gqa = kv_heads < 16
    attended(
        graph_of(lambda *qkv: attention(*qkv, *options), *tensors()),
        graph_of(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=gqa), *tensors()),
        ["forward"],
    )


def test_a_tile_of_attention_is_counted_as_torch_s() -> None:
    pytest.importorskip("triton")  # its compiler checks the tile
    qkv = [tensor(8, 16, 2048, 64) for _ in range(3)]
    ours = graph_of(lambda q, k, v: op.flash_attention(q, k, v, causal=True, tile_shape=(64, 32)), *qkv)
    attended(ours, graph_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *qkv), ["forward"])


def test_tf32_attention_runs_on_the_matrix_units() -> None:
    from tessera.op.attention_ops import attention

    q, model, found = tensor(2, 8, 1024, 64, dtype=torch.float32), OpModel(lookup("h200")), {}
    for fp32 in ("ieee", "tf32"):
        given = (0.125, False, 64, 32, 2, 4, fp32)
        graph = graph_of(lambda x, given=given: attention(x, x, x, *given), q)
        [one] = [o for o in graph.kernels if o.kind == "attention"]
        found[fp32] = (one.precision, one.unit, model.time(one).seconds)
    assert found["ieee"][:2] == ("fp32", "vector") and found["tf32"][:2] == ("tf32", "matrix")
    assert found["tf32"][2] < found["ieee"][2]


def rows_alike(ours: Graph, theirs: Graph, kind: str) -> None:
    a, b = (cost(g, (kind,)) for g in (ours, theirs))
    assert a[2] == b[2] and a[1] == pytest.approx(b[1], rel=0.02) and a[1] > 1e7
    seconds = [
        sum(OpModel(lookup("h200")).time(o).seconds for o in g.kernels if o.kind == kind) for g in (ours, theirs)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_softmax_and_norms_are_counted_as_torch_s(train: bool) -> None:
    from tessera.op import row_ops

    x, weight, bias = tensor(4096, 1536, grad=train), tensor(1536, grad=train), tensor(1536, grad=train)
    rows_alike(
        graph_of(lambda x: row_ops.softmax(x, x.dtype), x, train=train),
        graph_of(lambda x: torch.softmax(x, 1), x, train=train),
        "softmax",
    )
    rows_alike(
        graph_of(lambda x, w, b: row_ops.norm(x, None, w, b, 1e-5, True)[0], x, weight, bias, train=train),
        graph_of(lambda x, w, b: F.layer_norm(x, (1536,), w, b), x, weight, bias, train=train),
        "norm",
    )
    rows_alike(
        graph_of(lambda x, w: row_ops.norm(x, None, w, None, 1e-5, False)[0], x, weight, train=train),
        graph_of(lambda x, w: F.rms_norm(x, (1536,), w), x, weight, train=train),
        "norm",
    )


@pytest.mark.parametrize("groups", [1, 4])
def test_a_tiled_convolution_is_counted_as_torch_s(groups: int) -> None:
    from tessera.op.conv import tiled_conv2d

    def tensors() -> tuple[Any, Any]:
        return tensor(8, 64, 28, 28, grad=True), tensor(128, 64 // groups, 3, 3, grad=True)

    sides = ([1, 1], [1, 1], [1, 1], groups, [64, 32, 32], 2, 4)
    ours = graph_of(lambda x, w: tiled_conv2d(x, w, *sides), *tensors(), train=True)
    theirs = graph_of(lambda x, w: F.conv2d(x, w, padding=1, groups=groups), *tensors(), train=True)
    a, b = (cost(g, ("conv",)) for g in (ours, theirs))
    assert a[0] == b[0] > 0 and a[1] == pytest.approx(b[1], rel=0.02) and a[2] == b[2] == ["forward", "backward"]


@pytest.mark.parametrize(("dtype", "products"), [(torch.bfloat16, 2), (torch.float32, 2 * 8)])
def test_a_mixture_reads_the_weights_of_all_its_experts(dtype: Any, products: int) -> None:
    tokens, logits, w1, w2 = (tensor(*s, dtype=dtype) for s in ((512, 256), (512, 8), (8, 1024, 256), (8, 256, 1024)))
    graph = graph_of(op.moe, tokens, logits, w1, w2)
    found = [o for o in graph.kernels if o.kind == "gemm"]
    assert len(found) == products and sum(o.flops for o in found) == 2 * 2 * (512 * 2) * 256 * 1024
    rows = 2 * (512 * 2) * (256 + 1024) * dtype.itemsize
    assert sum(o.bytes_in + o.bytes_out for o in found) == (w1.numel() + w2.numel()) * dtype.itemsize + rows
    assert not [o for o in graph.ops if o.name == "aten.promote_types"]  # the host's, and no kernel


def test_our_names_are_ours_alone() -> None:
    assert kind_of("tessera.norm") == kind_of("tessera::norm_backward") == "norm"
    assert kind_of("aten.norm") == kind_of("norm") == "reduce"
    assert kind_of("tessera::attention") == "attention" and kind_of("tessera.sdpa_backward") == "attention"


# -- complex numbers ------------------------------------------------------------------------------------------------


def fp32(*shape: int) -> Any:
    return tensor(*shape, dtype=torch.float32)


@pytest.mark.parametrize(("dtype", "runs"), [(torch.complex64, "fp32"), (torch.complex128, "fp64")])
def test_a_complex_product_is_four_real_ones(dtype: Any, runs: str) -> None:
    graph = graph_of(torch.matmul, tensor(512, 256, dtype=dtype), tensor(256, 128, dtype=dtype))
    [product] = graph.kernels
    assert product.flops == 8 * 512 * 256 * 128 and product.precision == runs
    assert product.bytes_in + product.bytes_out == (512 * 256 + 256 * 128 + 512 * 128) * dtype.itemsize
    assert graph.assumptions == (f"complex products run as real {runs}, four multiply-adds for each",)
    report = tessera.predict(graph, on="h200", launch="graph", calibration=None)
    real = {"complex64": torch.float32, "complex128": torch.float64}[str(dtype).removeprefix("torch.")]
    wide = graph_of(torch.matmul, tensor(512, 512, dtype=real), tensor(512, 256, dtype=real))
    as_real = tessera.predict(wide, on="h200", launch="graph", calibration=None)
    assert report.prediction is not None and report.prediction.flops == wide.flops
    assert report.total_latency_s == pytest.approx(as_real.total_latency_s, rel=0.2)
    assert "complex" in report.descriptors[0].provenance
    assert report.prediction.error_s > as_real.prediction.error_s  # type: ignore[union-attr]


@pytest.mark.parametrize("shapes", [((9, 7), (7, 5)), ((4, 9, 7), (4, 7, 5)), ((9, 7), (7,)), ((7,), (7,))])
def test_complex_products_of_all_ranks_are_predicted(shapes: Any) -> None:
    graph = graph_of(torch.matmul, *(tensor(*s, dtype=torch.complex64) for s in shapes))
    assert tessera.predict(graph, on="a100", calibration=None).total_energy_j > 0


def test_a_spectral_convolution_is_predicted() -> None:
    given = fp32(16, 64, 64, 64), fp32(64, 64, 31, 31)
    graph = graph_of(lambda x, w: op.spectral_conv2d(x, w, padding=15), *given)
    [product] = [o for o in graph.kernels if o.kind == "gemm"]
    assert product.precision == "fp32" and product.flops == 4 * 2 * 16 * 64 * 64 * product.params["batch"]
    report = tessera.predict(graph, on="h200", calibration=None)
    assert report.prediction is not None and "complex products run as real fp32" in report.prediction.assumptions[0]
    assert sum(d.kind == "fft" for d in report.descriptors) == 3


def test_a_spectral_layer_trains_and_keeps_its_format_in_a_what_if() -> None:
    """As a Fourier neural operator has it: a complex weight at each frequency."""

    def layer(x: Any, w: Any) -> Any:
        return torch.fft.irfft2(torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x), w))

    x, w = tensor(4, 8, 32, 32, dtype=torch.float32, grad=True), tensor(8, 8, 32, 17, dtype=torch.complex64, grad=True)
    graph = graph_of(layer, x, w, train=True)
    products = [o for o in graph.kernels if o.kind == "gemm"]
    assert [o.phase for o in products] == ["forward", "backward", "backward"]
    assert len({o.flops for o in products}) == 1 and all(o.params["complex"] for o in products)
    for precision in ("bf16", "fp8", None):
        report = tessera.predict(graph, on="h200", precision=precision, calibration=None)
        assert {d.flops for d in report.descriptors if d.kind == "gemm"} == {products[0].flops}
        assert 0 < report.average_utilization <= 1 and report.average_power_w <= 701  # type: ignore[operator]
