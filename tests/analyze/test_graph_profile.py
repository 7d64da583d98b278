"""`graph.profile(step_fn)`: operators as a kernel author sees them."""

from __future__ import annotations

import json

import pytest
import torch

from tessera import graph
from tessera.analyze.graph_profile import (
    make_label,
    merge_rewrites,
    occupancy_pct,
    parse_fused,
    profile_operators,
    tile_of,
)
from tessera.errors import ArgumentError
from tessera.graph.rewrites import Rewrite, announce_rewrites, collect_rewrites
from tessera.timeline import Builder, Launch


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "256x128x64"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8_stage3_warpsize2x2x1", "128x64"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>", "128x128"),
        ("cunn_SoftMaxForward", None),
    ],
)
def test_tiles_are_read_off_names(name, tile):
    assert tile_of(name) == tile


def test_labels():
    none = Launch()
    assert (
        make_label("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "kernel", "aten::mm", none) == "MatMul[256x128x64]"
    )
    assert make_label("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "kernel", None, none) == "FusedOp[FlashAttn]"
    reduce = Launch(collective_type="allreduce", group="dp")
    assert make_label("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collective", None, reduce) == "Allreduce[dp]"
    assert make_label("triton_poi_fused_add_gelu_0", "kernel", None, none) == "FusedOp[add+gelu]"
    assert make_label("k", "kernel", "aten::_log_softmax", none) == "LogSoftmax"
    assert make_label("k", "op", "autograd::engine::evaluate_function: MulBackward0", none) == "MulBackward0"
    assert make_label("Memcpy HtoD", "memcpy", None, Launch(memcpy_dir="HtoD")) == "Memcpy[HtoD]"
    assert parse_fused("nvjet_bias_NNT", "aten::addmm") == ("matmul", "bias")


def test_occupancy_is_what_the_launch_allows():
    # 384 threads of 168 registers: 12 warps of 5376, one block fits 65536 registers: 12 of 64 warps.
    assert occupancy_pct(Launch(block=(384, 1, 1), registers=168)) == (pytest.approx(18.75), 1)
    assert occupancy_pct(Launch(block=(128,), registers=16)) == (100.0, 16)
    assert occupancy_pct(Launch(block=(128,), registers=16, shared_bytes=100_000)) == (pytest.approx(12.5), 2)
    assert occupancy_pct(Launch()) == (None, None)


def test_waves_and_time_per_tile():
    build = Builder()
    build.meta["deviceProperties"] = [{"id": 0, "numSms": 132}]
    launch = build.intern_launch(Launch(grid=(2, 132, 1), block=(384, 1, 1), registers=168))
    for i in range(3):
        build.add("kernel", "nvjet_256x128_64", i * 300_000, i * 300_000 + 200_000, device=0, stream=7, launch=launch)
    build.add("memcpy", "Memcpy DtoD", 10**6, 10**6 + 100_000, device=0, stream=7, bytes=10**8)
    found = profile_operators(build.build())
    gemm, copy = found.rows
    assert (gemm.tiles, gemm.waves, gemm.calls) == (264, 2, 3)
    assert gemm.tile_latency_s == pytest.approx(1e-4)
    assert copy.bandwidth_bytes_per_s == pytest.approx(1e12)
    assert gemm.why["energy_j"] == "needs power samples"
    text = str(found)
    assert "MatMul[256x128x64]" in text
    assert "bandwidth=1 TB/s" in text
    assert json.loads(found.to_json())["rows"][0]["tiles"] == 264


def test_a_step_on_the_cpu():
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    found = graph.profile(lambda: layer(x).relu().sum().backward(), steps=3, warmup=1)
    assert found.steps == 3
    assert any(r.op == "aten::linear" and r.calls == 3 for r in found.rows)
    assert found.step_s > 0
    assert "one step:" in str(found)
    with pytest.raises(ArgumentError):
        graph.profile(lambda: None, steps=0)
    with pytest.raises(ArgumentError, match="step_fn is a int, which cannot be called"):
        graph.profile(3)


def test_rewrites_are_read_off_names_and_joined_with_what_was_told():
    build = Builder()
    names = ("triton_per_fused_add_native_layer_norm_2", "triton_per_fused_add_native_layer_norm_2", "nvjet_bias_NNT",
             "flash_fwd_kernel")  # fmt: skip
    for i, name in enumerate(names):
        build.add("kernel", name, i * 1000, i * 1000 + 900, device=0, stream=7)
    found = profile_operators(build.build(), steps=2)
    seen = {r.rule: r for r in found.rewrites}
    assert set(seen) == {"fuse_reduction", "fuse_epilogue", "flash_attention"}
    assert (seen["fuse_reduction"].times, seen["fuse_reduction"].by) == (1, "inductor")
    assert seen["fuse_reduction"].saved_j is None
    assert {r.basis for r in found.rewrites} == {"seen"}
    assert "rewritten: fuse_epilogue: matmul + bias -> one kernel" in str(found)
    told = Rewrite(rule="flash_attention", before="a", after="b", by="tessera", times=3, saved_bytes=3e6, saved_j=-0.5,
                   saved_error_j=0.1, saved_s=1e-3)  # fmt: skip
    both = merge_rewrites(found.rewrites, [told])
    # Inductor's kernels are in what the program told; a library's epilogue is not.
    assert [r.rule for r in both] == ["flash_attention", "fuse_epilogue"]
    from tessera.report.rewrite import rewrite_line

    assert rewrite_line(told).startswith(
        "flash_attention: a -> b  x3  saves 2.861 MiB, -500 mJ ± 100 mJ, 1 ms  [tessera]"
    )


def test_rewritten_programs_are_heard_once():
    rewrites = [Rewrite(rule="fuse_elementwise", before="a", after="b", by="inductor")]
    announce_rewrites(rewrites)  # nobody listens
    with collect_rewrites() as heard:
        announce_rewrites(rewrites)
        announce_rewrites(rewrites)
    assert heard == [rewrites]


def test_collectives_of_gloo_have_their_group_and_bandwidth():
    builder = Builder()
    builder.add("op", "aten::mm", 0, 1_000, thread=1)
    launch = Launch(collective_type="all_reduce", collective_bytes=4_000_000, group="3", group_label="dp")
    builder.add("op", "gloo:all_reduce", 2_000_000, 4_000_000, thread=7, launch=builder.intern_launch(launch))
    builder.add("op", "gloo:broadcast", 5_000_000, 6_000_000, thread=7, shapes=builder.intern("[250]f32"))
    rows = {row.label: row for row in profile_operators(builder.build()).rows}
    assert rows["AllReduce[dp]"].bandwidth_bytes_per_s == pytest.approx(2e9)
    assert rows["Broadcast[world]"].bandwidth_bytes_per_s == pytest.approx(1e6)
    assert rows["AllReduce[dp]"].occupancy_pct is None and "MatMul" in rows
