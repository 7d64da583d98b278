"""What a training step takes: FLOPs by hand, published memory, what must never grow, and rows that cannot be scored."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys

import pytest

from tessera.dist.training import choose_recompute, estimate_training
from tessera.dist.training_memory import GIB, estimate_memory
from tessera.dist.training_model import ModelShape, TrainingJob
from tessera.errors import ArgumentError

from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "measure"))
import published_training as published

GPT3 = ModelShape(hidden=12288, layers=96, heads=96, ffn=49152, vocab=51200, gated=False, tied=True)
LLAMA_8B = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
MIXTRAL = ModelShape(
    hidden=4096, layers=32, heads=32, kv_heads=8, vocab=32000, experts=8, topk=2, moe_ffn=14336, ffn=14336
)
DEEPSEEK = ModelShape(
    hidden=7168,
    layers=61,
    heads=128,
    vocab=129280,
    ffn=18432,
    experts=256,
    topk=8,
    moe_ffn=2048,
    shared_experts=1,
    dense_layers=3,
    mla=True,
)
JOB = TrainingJob(model=LLAMA_8B, on="h100", gpus=8, seq=8192, global_batch=128, tp=2)
ROW = {
    "source": "made",
    "model": "Llama3-8B",
    "hidden": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "gpus": 8,
    "gpu": "h100-sxm",
    "precision": "bf16",
    "seq": 8192,
    "micro_batch": 1,
    "global_batch": 128,
    "tp": 1,
    "pp": 1,
    "dp": 8,
    "step_s": 13.0,
}


def test_flops_of_gpt3_are_those_of_the_published_formula():
    """Narayanan et al., arXiv 2104.04473: 72 s l h^2 (1 + s / 6h + V / 12lh) without recomputation."""
    s, layers, h, vocab = 2048, 96, 12288, 51200
    by_hand = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert GPT3.training_flops(s, causal=False) == pytest.approx(by_hand, rel=1e-12)


def test_flops_with_grouped_keys_and_a_gated_mlp():
    weights = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    scores = 32 * 3 * 4 * 8192**2 * 4096 / 2
    assert LLAMA_8B.training_flops(8192) == pytest.approx(6 * weights * 8192 + scores, rel=1e-12)
    assert LLAMA_8B.parameters == pytest.approx(8.03e9, rel=1e-3)


def test_flops_of_experts_count_the_chosen_ones_and_parameters_all():
    token = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 8 + 2 * 3 * 4096 * 14336) + 4096 * 32000
    scores = 32 * 3 * 4 * 4096**2 * 4096 / 2
    assert MIXTRAL.training_flops(4096) == pytest.approx(6 * token * 4096 + scores, rel=1e-12)
    assert MIXTRAL.parameters == pytest.approx(46.7e9, rel=0.01)
    assert DEEPSEEK.parameters == pytest.approx(671e9, rel=0.005)


def test_memory_of_a_trillion_parameters():
    """Korthikanti et al., arXiv 2205.05198, figure 1: Megatron 1T on 512 A100s, GiB of states and of activations."""
    model = ModelShape(hidden=25600, layers=128, heads=160, ffn=102400, vocab=51200, gated=False, tied=True)
    job = TrainingJob(
        model=model,
        on="a100",
        gpus=512,
        seq=2048,
        global_batch=512,
        tp=8,
        pp=64,
        precision="fp16",
        attention="unfused",
        sharding="none",
        sequence_parallel=False,
    )
    none = estimate_memory(job, "none")
    embedding = 18 * 51200 * 25600 / 8 / GIB  # on the first stage, which the paper's mean over stages leaves out
    assert (none.weights + none.gradients + none.optimizer) / GIB == pytest.approx(32.96 + embedding, rel=0.01)
    assert none.activations / GIB == pytest.approx(131.25, rel=0.10)
    selective = estimate_memory(dataclasses.replace(job, sequence_parallel=True), "selective")
    assert selective.activations / GIB == pytest.approx(26.56, rel=0.05)


def test_memory_of_a_measured_run_and_of_one_that_ran_out():
    """BigScience's prequel on 384 A100 80GB: 54-56 GB were read with tp 8, pp 6; tp 2, pp 6 ran out."""
    model = ModelShape(hidden=14336, layers=72, heads=64, ffn=57344, vocab=250000, gated=False, tied=True)
    job = TrainingJob(
        model=model,
        on="a100",
        gpus=384,
        seq=2048,
        global_batch=2048,
        micro_batch=4,
        tp=8,
        pp=6,
        precision="fp16",
        attention="unfused",
        recompute="full",
        sequence_parallel=False,
        gradient_bytes=2.0,
        optimizer_bytes=28.0,
    )
    assert estimate_memory(job, "full").total / GIB == pytest.approx(55, rel=0.10)
    assert not estimate_training(dataclasses.replace(job, tp=2, micro_batch=1, shard_ranks=0)).fits


@pytest.mark.parametrize("model", [LLAMA_8B, GPT3, MIXTRAL, DEEPSEEK])
@pytest.mark.parametrize("attention", ["flash", "flash2", "unfused"])
def test_recomputing_never_saves_time_and_never_costs_memory(model, attention):
    job = TrainingJob(model=model, on="h200", gpus=128, seq=4096, global_batch=128, tp=4, pp=2, attention=attention)
    costs = [estimate_training(dataclasses.replace(job, recompute=r)) for r in ("none", "selective", "full")]
    times, memory = [c.step_s for c in costs], [c.memory_bytes for c in costs]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("on", ["a100", "h100", "gb300", "mi300x"])
def test_more_replicas_are_never_slower_at_the_same_batch(sharding, on):
    job = TrainingJob(model=LLAMA_8B, on=on, gpus=8, seq=4096, global_batch=1024, sharding=sharding, recompute="full")
    costs = [estimate_training(dataclasses.replace(job, gpus=n, shard_ranks=0)) for n in (8, 16, 64, 256)]
    times = [c.step_s for c in costs]
    assert times == sorted(times, reverse=True)
    if sharding != "none":
        assert costs[-1].memory_bytes < costs[0].memory_bytes


def test_a_faster_network_a_shorter_pipeline_and_more_chunks_are_never_slower():
    job = TrainingJob(model=GPT3, on="h100", gpus=512, seq=2048, global_batch=256, tp=8, pp=8)
    times = [
        estimate_training(dataclasses.replace(job, network_bytes_per_s=speed)).step_s for speed in (5e9, 25e9, 50e9)
    ]
    assert times == sorted(times, reverse=True)
    bubble = [estimate_training(dataclasses.replace(job, vp=vp)).parts["pipeline bubble"] for vp in (1, 2, 6)]
    assert bubble == sorted(bubble, reverse=True)


def test_parts_sum_to_the_step_and_a_tight_memory_asks_for_recomputation():
    cost = estimate_training(JOB)
    assert sum(cost.parts.values()) == pytest.approx(cost.step_s)
    assert 0 < cost.error_s < cost.step_s
    assert cost.tokens_per_s_per_gpu == pytest.approx(128 * 8192 / cost.step_s / 8)
    assert json.loads(json.dumps(cost.to_dict()))["energy_j"] == pytest.approx(cost.power_w * cost.step_s)
    assert choose_recompute(dataclasses.replace(JOB, micro_batch=16)) == "full"
    assert choose_recompute(dataclasses.replace(JOB, on="b200")) == "none"


def test_a_layout_that_does_not_divide_and_unknown_words_are_refused():
    with pytest.raises(ArgumentError, match="do not divide"):
        dataclasses.replace(JOB, tp=3)
    with pytest.raises(ArgumentError, match="sharding 'zero9'"):
        dataclasses.replace(JOB, sharding="zero9")
    with pytest.raises(ArgumentError, match="topk"):
        ModelShape(hidden=64, layers=1, heads=1, vocab=64, experts=8, moe_ffn=64)


def test_published_rows_that_lack_something_are_skipped_with_the_reason(tmp_path, capsys, monkeypatch):
    needed = ("hidden", "heads", "layers", "vocab", "gpus", "gpu", "precision", "seq", "step_s")
    broken = [{key: value for key, value in ROW.items() if key != name} for name in needed]
    broken[2]["model"] = "nameless"
    broken += [{**ROW, "gpu": "abacus"}, {**ROW, "precision": "int3"}, {**ROW, "tp": 3}, {**ROW, "hidden": "many"}]
    broken += [{**ROW, "gpus": -8}, {**ROW, "seq": float("inf")}, {}, {"model": None, "overlap": ["x"], "network": 4}]
    lines = [json.dumps(row) for row in broken] + ["not json", "[1, 2]", "", json.dumps(ROW)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    scores, skipped = published.score_file(path)
    assert len(scores) == 1
    assert sum(skipped.values()) == len(broken) + 2
    for reason in ("hidden is missing", "gpu 'abacus' is not in the catalogue", "not a JSON object", "seq is missing"):
        assert reason in skipped
    monkeypatch.setattr(sys, "argv", ["published_training.py", str(path), "--json"])
    published.main()
    result = json.loads(capsys.readouterr().out)
    assert {"scored", "skipped", "median_error", "within_30", "memory_median_error", "coverage"} <= set(result)
    assert scores[0].error is not None and result["median_error"] == pytest.approx(abs(scores[0].error))
    assert result["median_error"] < 0.3  # one row, not the accuracy of the model


def test_a_published_file_may_be_plain_or_gzipped_under_any_name_with_numbers_as_strings(tmp_path):
    row = {**ROW, "hidden": "4,096", "gpus": "8", "seq": " 8192 ", "step_s": "13.0", "kv_heads": None, "params": "none"}
    plain, packed = tmp_path / "rows.gz", tmp_path / "rows.txt"
    plain.write_text(json.dumps(row) + "\n")
    packed.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n\xff\xfe\n"))
    for path, broken in ((plain, 0), (packed, 1)):
        scores, skipped = published.score_file(path)
        assert (len(scores), skipped.total()) == (1, broken)
        assert (scores[0].job.model.hidden, scores[0].job.gpus, scores[0].step_s) == (4096, 8, 13.0)


def test_what_a_published_row_leaves_out_follows_from_the_rest():
    flops = published.build_job(ROW).model.training_flops(8192, causal=False) * 128
    row = {**ROW, "seq": None, "tflops_per_gpu": flops / 13.0 / 8 / 1e12}
    assert published.build_job(row).seq == 8192
    named = {key: ROW[key] for key in ("gpus", "gpu", "precision", "seq", "tp", "pp", "dp", "step_s")}
    assert published.build_job({**named, "model": "Nemotron-22B", "hidden": None}).model.hidden == 6144


def test_the_release_of_a_published_row_says_how_its_experts_run():
    experts = {"experts": 256, "topk": 8, "moe_ffn": 2048, "gpus": 64, "dp": 64, "ep": 32, "precision": "mxfp8"}
    row = {**ROW, **experts, "gpu": "gb300", "model": "DeepSeek-V3"}
    old, new = (published.build_job({**row, "source": f"megatron-bridge-{release}"}) for release in ("26.02", "26.06"))
    assert (old.exchange, old.graphs, old.overlap_experts) == ("deduplicated", False, False)
    assert (new.exchange, new.graphs, new.fused_experts, new.attention) == ("deduplicated", True, True, "flash8")
    qwen = published.build_job({**row, "gpu": "h100", "model": "Qwen3-235B-A22B", "source": "megatron-bridge-26.04"})
    assert (qwen.exchange, qwen.overlap_experts) == ("all_to_all", True)


def test_a_published_row_keeps_its_own_layout():
    row = {
        **ROW,
        "precision": "mxfp8",
        "tp": 2,
        "cp": 2,
        "dp": 2,
        "network": "4x100Gb RoCE per node",
        "gpu_variant": "H100 96GB HBM2e 500W",
        "sharding": "fsdp2",
    }
    job = published.build_job(row)
    assert (job.precision, job.tp, job.cp, job.dp, job.sharding) == ("fp8", 2, 2, 2, "zero3")
    assert job.network_bytes_per_s == pytest.approx(4 * 100e9 / 8 / 8)
    assert job.device.tdp_w is not None
    assert job.device.tdp_w.value == 500


def test_an_optimizer_on_the_host_frees_its_memory_and_waits_for_the_link() -> None:
    job = TrainingJob(model=LLAMA_8B, on="h100", gpus=8, seq=4096, global_batch=8, recompute="none")
    speeds = {"host_bytes_per_s": 50e9, "host_memory_bytes_per_s": 75e9}
    here, there = estimate_training(job), estimate_training(dataclasses.replace(job, offload=("optimizer",), **speeds))
    assert (there.memory.optimizer, here.parts["host"]) == (0.0, 0.0)
    assert there.memory_bytes < here.memory_bytes
    shard = LLAMA_8B.parameters / 8
    assert there.parts["host"] == pytest.approx(shard * (6 / 50e9 + 34 / 75e9))
    with pytest.raises(ArgumentError, match="the speed of the host"):
        dataclasses.replace(job, offload=("optimizer",))


def test_a_pipeline_inside_the_domain_sends_over_its_link_and_replicas_then_cross_nodes() -> None:
    job = TrainingJob(model=LLAMA_8B, on="h100", gpus=64, seq=4096, global_batch=64, tp=2, pp=4, recompute="none")
    far, near = (
        estimate_training(dataclasses.replace(job, placement=p)) for p in (job.placement, ("tp", "cp", "pp", "dp"))
    )
    assert near.parts["pipeline sends"] < 0.2 * far.parts["pipeline sends"]
    assert near.parts["data parallel"] > far.parts["data parallel"]
    one = estimate_training(dataclasses.replace(job, domain_gpus=64))
    assert one.parts["pipeline sends"] == near.parts["pipeline sends"]


def test_joules_are_counted_by_part_and_grow_with_what_is_sent_and_offloaded() -> None:
    job = TrainingJob(model=LLAMA_8B, on="h100", gpus=64, seq=4096, global_batch=64, tp=2, recompute="none")
    here = estimate_training(job)
    assert set(here.energy_parts) == {"compute", "memory", "links", "waiting", "host"}
    assert sum(here.energy_parts.values()) == pytest.approx(here.energy_j)
    assert 0 < here.error_j < here.energy_j
    assert here.power_w < 700
    speeds = {"host_bytes_per_s": 50e9, "host_memory_bytes_per_s": 75e9}
    there = estimate_training(dataclasses.replace(job, offload=("optimizer",), **speeds))
    assert there.energy_parts["host"] > here.energy_parts["host"] == 0
    assert there.energy_parts["waiting"] > here.energy_parts["waiting"]
    assert there.host_bytes == pytest.approx(16 * LLAMA_8B.parameters / 64, rel=0.01)
    alone = estimate_training(dataclasses.replace(job, gpus=1, tp=1, global_batch=1, shard_ranks=0))
    assert alone.energy_parts["links"] == 0 < here.energy_parts["links"]


def test_experts_travel_once_to_a_node_and_under_compute_where_the_job_says_so() -> None:
    job = TrainingJob(model=DEEPSEEK, on="h100", gpus=256, seq=4096, global_batch=512, pp=8, ep=32, recompute="full")
    once = estimate_training(job)
    each = estimate_training(dataclasses.replace(job, exchange="all_to_all"))
    under = estimate_training(dataclasses.replace(job, overlap_experts=True))
    assert each.parts["expert parallel"] > 1.5 * once.parts["expert parallel"] > 3 * under.parts["expert parallel"]
    fused = estimate_training(dataclasses.replace(job, fused_experts=True, graphs=True))
    assert fused.parts["compute"] < once.parts["compute"]
    with pytest.raises(ArgumentError, match="no exchange 'pigeons'"):
        dataclasses.replace(job, exchange="pigeons")


def test_experts_that_are_shared_out_are_gathered_and_gradients_of_zero2_leave_after_each_microbatch() -> None:
    job = TrainingJob(model=MIXTRAL, on="h100", gpus=64, seq=4096, global_batch=512, ep=8, recompute="full")
    job = dataclasses.replace(job, sharding="zero3", shard_ranks=0)
    shared, whole = (estimate_training(dataclasses.replace(job, ep=ep)) for ep in (4, 8))
    assert shared.energy_parts["links"] > whole.energy_parts["links"]
    once, often = (estimate_training(dataclasses.replace(job, sharding=s, shard_ranks=0)) for s in ("zero1", "zero2"))
    assert often.parts["data parallel"] > 1.5 * once.parts["data parallel"]
    assert often.memory_bytes < once.memory_bytes
