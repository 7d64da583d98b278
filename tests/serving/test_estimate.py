"""Predictions of servers: physics that must hold, and the command."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera
from tessera.cli.predict import command
from tessera.errors import ArgumentError
from tessera.estimate.gemm import gemm_time
from tessera.serving.estimate import estimate_serving, sweep_serving
from tessera.serving.forward_pass import decode_pass
from tessera.serving.served_model import read_served_model
from tessera.units import format_bytes

from command_line import invoke

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "qwen3.5-35b-a3b", "glm-5", "gemma-3-4b")
CHIPS = ("h200", "h100", "b200", "a100", "l40s", "t4", "mi300x", "v100")


def test_estimate_has_it_under_the_name_of_the_issue():
    report = tessera.estimate.serving(
        "llama-3.1-8b", on="h200", batch=32, prompt=4096, generate=512, dtype="bf16", tp=1
    )
    names = ("time_to_first_token_s", "time_per_output_token_s", "tokens_per_s", "joules_per_token", "power_w")
    for value in [getattr(report, name) for name in (*names, "memory_bytes")]:
        assert value > 0
        assert 0 < value.error < value
    # All 32 prompts hold up the server in the time of an answer, and 31 of them a sequence that is under way.
    own_s = 1.33 * report.prefill.time_s / 512
    assert 32 / report.tokens_per_s == pytest.approx(report.time_per_output_token_s + own_s)
    json.dumps(report.to_dict())


def test_every_part_of_the_memory_is_named():
    arguments = ("llama-3.1-8b", "--serve", "--on", "h200", "--batch", "4")
    row = json.loads(invoke(command, *arguments, "--json").output)
    parts = row["weights_bytes"], row["cache_bytes"], row["engine_bytes"]
    assert sum(parts) == pytest.approx(row["memory_bytes"]["value"])
    shown = " ".join(invoke(command, *arguments).output.split())
    for size, name in zip(parts, ("weights", "cache", "engine"), strict=True):
        assert f"{format_bytes(size, 3)} {name}" in shown


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    chip=st.sampled_from(CHIPS),
    dtype=st.sampled_from(["bf16", "fp8", "fp4", "int4"]),
    tp=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 512),
    prompt=st.integers(1, 32_000),
)
def test_no_step_is_faster_than_the_bytes_that_it_must_read(model, chip, dtype, tp, batch, prompt):
    report = estimate_serving(model, on=chip, batch=batch, prompt=prompt, generate=64, dtype=dtype, tp=tp)
    d, on = read_served_model(model), report.deployment
    # One token of one sequence: the weights that it is multiplied by (embeddings are looked up), once.
    least = (d.active_parameters - 2 * d.shape.vocab * d.shape.hidden) * 0.5 / tp
    assert report.decode.time_s >= least / on.device.memory.bandwidth_bytes_per_s.value
    assert report.power_w <= 1.01 * tp * on.device.tdp_w.value
    assert report.joules_per_token > 0


@pytest.mark.parametrize("chip", ["h200", "h100", "a100", "b200", "l40s", "mi300x"])
@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_no_step_reads_its_cache_faster_than_the_memory_gives_it(chip, engine):
    steps = []
    for prompt in (8_192, 65_536):
        report = estimate_serving("llama-3.1-8b", on=chip, batch=8, prompt=prompt, generate=1, engine=engine)
        steps.append(report.decode_by_context[0][1].time_s)
    of_a_token = read_served_model("llama-3.1-8b").cache_bytes(1, 1, 2.0)
    more_bytes = 8 * (65_536 - 8_192) * of_a_token
    assert steps[1] - steps[0] >= 0.999 * more_bytes / report.deployment.device.memory.bandwidth_bytes_per_s.value


def test_more_work_takes_longer():
    def step(**changes):
        return estimate_serving(
            **{"model": "qwen3-32b", "on": "h200", "batch": 16, "prompt": 2048, "generate": 256, "tp": 2} | changes
        )

    base = step()
    assert step(prompt=8192).decode.time_s > base.decode.time_s
    assert step(batch=256).time_per_output_token_s > base.time_per_output_token_s
    assert step(batch=256).joules_per_token < base.joules_per_token
    assert step(dtype="fp8").decode.time_s < base.decode.time_s
    assert step(tp=4).decode.time_s < base.decode.time_s
    assert step(launch="eager").decode.time_s > base.decode.time_s
    assert step(arrivals="once").time_per_output_token_s < base.time_per_output_token_s
    contexts = [n for n, _ in base.decode_by_context]
    assert contexts == sorted(contexts)


def test_narrow_weights_are_read_faster_where_they_are_widened_by_the_kernel():
    steps = {
        dtype: estimate_serving("llama-3.1-70b", on="h200", tp=2, batch=1, dtype=dtype).decode.time_s
        for dtype in ("bf16", "fp8", "int4", "fp4")
    }
    assert steps["int4"] < steps["fp8"] < steps["bf16"]
    assert steps["fp4"] < steps["fp8"]


@pytest.mark.parametrize("arrivals", ["steady", "once"])
def test_joules_per_token_are_watts_over_tokens_per_second(arrivals):
    report = estimate_serving("llama-3.1-8b", on="h200", batch=64, arrivals=arrivals)
    assert report.joules_per_token * report.tokens_per_s == pytest.approx(report.power_w, rel=0.01)
    assert report.power_w <= 700


@pytest.mark.parametrize("on", ["v100", "t4", "rtx-2080-ti"])
def test_fp16_runs_on_the_tensor_cores_of_chips_without_bf16(on):
    reports = {d: estimate_serving("llama-3.1-8b", on=on, batch=8, dtype=d) for d in ("bf16", "fp16", "int4", "fp8")}
    prefills = {dtype: report.prefill.time_s for dtype, report in reports.items()}
    assert max(prefills["fp16"], prefills["int4"], prefills["fp8"]) < prefills["bf16"] / 3
    assert reports["bf16"].notes == (f"{on} has no bf16 units: bf16 products run on its fp32 vector units",)
    assert reports["fp16"].notes == reports["int4"].notes == ()
    assert reports["int4"].deployment.cache == "fp16"
    # 8.0e9 parameters x 2 x 1,024 tokens, by the chip's own kernels: at least a third of its fp16 peak.
    peak = reports["fp16"].deployment.device.matrix["fp16"].value
    assert prefills["fp16"] < 3 * 2 * 8.0e9 * 1024 / peak


def test_the_default_format_is_one_that_the_chip_has():
    report = estimate_serving("llama-3.1-8b", on="v100")
    assert (report.deployment.weights, report.deployment.cache) == ("fp16", "fp16")
    assert report.notes == ("v100 has no bf16 units: fp16 weights are taken",)
    assert estimate_serving("llama-3.1-8b", on="a100").deployment.weights == "bf16"
    assert "note  v100 has no bf16 units" in invoke(command, "llama-3.1-8b", "--serve", "--on", "v100,h200").output


def test_fp32_counts_every_parameter_at_four_bytes():
    report = estimate_serving("llama-3.1-8b", on="h200", dtype="fp32")
    assert report.weights_bytes == pytest.approx(4 * report.served.shape.parameters)
    assert report.deployment.cache == "fp32"
    assert report.cache_bytes == 2 * estimate_serving("llama-3.1-8b", on="h200").cache_bytes


@pytest.mark.parametrize("on", ["rtx-4090", "l40s", "h100"])
def test_more_gpus_than_a_node_has_exchange_over_the_network(on):
    reports = {tp: estimate_serving("llama-3.1-70b", on=on, batch=8, tp=tp, dtype="bf16") for tp in (8, 16, 32)}
    assert reports[8].notes == ()
    assert f"16 x {on} are 2 nodes of 8: exchanges cross the network, 400 Gb/s a GPU" in reports[16].notes
    assert relative(reports[16].time_per_output_token_s) > relative(reports[8].time_per_output_token_s)
    prompts = [report.prefill.time_s for report in reports.values()]
    assert prompts[2] > 0.5 * prompts[0], "four times the GPUs, and not even twice as fast"
    work = {tp: decode_pass(r.served, r.deployment, batch=8, context=1024) for tp, r in reports.items()}
    assert work[16].exchange_s > 1.5 * work[8].exchange_s


def test_a_rack_of_one_nvlink_domain_is_a_node():
    assert estimate_serving("llama-3.1-405b", on="gb200", tp=32, dtype="fp8").notes == ()
    (note,) = estimate_serving("llama-3.1-405b", on="gb200", tp=128, dtype="fp8").notes
    assert "2 nodes of 72" in note


def test_experts_need_experts():
    with pytest.raises(ArgumentError, match="no experts"):
        estimate_serving("llama-3.1-8b", on="h200", tp=8, ep=8)


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "big"}, {"num_attention_heads": 0}, {"vocab_size": -1}, {"num_hidden_layers": True}]
)
def test_a_configuration_with_impossible_sizes_is_refused(wrong):
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100} | wrong
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        estimate_serving(json.dumps(config), on="h200")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--html", "x.html"], "leave --html out; use --json instead"),
        (["--mode", "train"], "leave --mode out"),
        (["--state", "burst"], "leave --state out"),
        (["--seq", "4096"], "leave --seq out; use --prompt and --generate instead"),
    ],
)
def test_options_of_other_predictions_are_refused(words, fix):
    error = invoke(command, "llama-3.1-8b", "--serve", *words).code
    assert error.what == f"{words[0]} is not for --serve"
    assert error.fix == fix


def run_next(monkeypatch, *words):
    """The screen of a command, and the result of the next command that it offers."""

    def run(*line):
        monkeypatch.setattr("sys.argv", ["tessera", "predict", *line])
        return invoke(command, *line)

    screen = run(*words).output
    offered = screen.rpartition("next  tessera predict ")[2].split()
    return screen, offered, run(*offered, "--json")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("llama-3.1-70b --on h200", "--tp 2"),
        ("llama-3.1-70b --on h200 --batch 8,32", "--tp 2"),
        ("llama-3.1-70b --on h200 --tp 2 --batch 5000", "--batch 310"),
        ("llama-3.1-405b --on h100", "--dtype fp8"),
        ("llama-3.1-405b --on h100,a100 --precision bf16 --tp 8", "--dtype fp8"),
    ],
)
def test_what_does_not_fit_is_offered_what_does(monkeypatch, words, offered):
    screen, after, result = run_next(monkeypatch, *words.split(), "--serve")
    assert offered in " ".join(after)
    assert result.code == 0 and json.loads(result.output)["fits"] is True
    if "," not in words:
        assert screen.index("it does not fit") < screen.index("first token"), "said before the figures"


def test_the_best_limit_of_a_power_curve_is_offered_without_another_curve(monkeypatch):
    words = ["llama-3.1-8b", "--serve", "--on", "h100", "--batch", "64", "--power-curve"]
    _, after, result = run_next(monkeypatch, *words)
    assert after[after.index("--on") + 1].startswith("h100@") and "--power-curve" not in after
    assert result.code == 0 and json.loads(result.output)["on"] == after[after.index("--on") + 1]


def test_the_screen_says_what_is_in_a_time_and_whose_memory_it_is(monkeypatch):
    words = ["llama-3.1-70b", "--on", "h200", "--tp", "2", "--serve"]
    one = " ".join(run_next(monkeypatch, *words, "--batch", "1")[0].split())
    assert "ms: the prefill, and the way through the server (4.5 steps)" in one
    assert "ms: a decode step output" in one and "others" not in one
    busy = " ".join(run_next(monkeypatch, *words, "--batch", "8")[0].split())
    assert "ms: the prefill, prompts of others that are first, and the way through the server" in busy
    assert "ms: a decode step, and its share of the prompts that come meanwhile" in busy
    several = " ".join(run_next(monkeypatch, *words, "--batch", "1,8")[0].split())
    assert "memory of each GPU" in several


def test_larger_batches_are_offered_as_far_as_they_fit(monkeypatch):
    words = ["llama-3.1-70b", "--on", "h200", "--tp", "2", "--batch", "64", "--serve"]
    screen, after, result = run_next(monkeypatch, *words)
    assert "does not fit" not in screen and after[-1] == "64,256"
    assert all(row["fits"] for row in json.loads(result.output)["rows"])


def test_nothing_fits_a_model_that_no_node_holds(monkeypatch):
    monkeypatch.setattr("sys.argv", ["tessera", "predict", "deepseek-v3", "--serve", "--on", "t4"])
    result = invoke(command, "deepseek-v3", "--serve", "--on", "t4")
    assert result.code == 1 and "next  tessera hardware list" in result.output


def test_the_largest_batch_fits_and_one_more_does_not():
    report = estimate_serving("llama-3.1-70b", on="h100", tp=4, batch=8, prompt=4096, generate=512)
    most = report.largest_batch
    assert most > 8
    at = [
        estimate_serving("llama-3.1-70b", on="h100", tp=4, batch=n, prompt=4096, generate=512) for n in (most, most + 1)
    ]
    assert [r.fits for r in at] == [True, False]
    assert estimate_serving("llama-3.1-70b", on="h100").largest_batch == 0


@pytest.mark.parametrize(
    ("words", "refused", "reason"),
    [
        ("--on h200 --tp 1,3", "3 x h200", "3 GPUs do not share 32 heads evenly"),
        ("--on h200 --tp 8,64", "64 x h200", "64 GPUs do not share 32 heads evenly"),
        ("--on h100,h100@50W", "h100@50W", "h100 cannot be limited to 50W"),
        ("--on h200 --tp 1,2 --attention-dp 2", "h200", "--attention-dp 2 does not divide 1 GPUs"),
    ],
)
def test_one_impossible_combination_does_not_end_a_sweep(words, refused, reason):
    line = ("llama-3.1-8b", "--serve", "--dtype", "bf16", *words.split())
    result = invoke(command, *line, "--json")
    made = json.loads(result.output)
    assert result.code == 0 and len(made["rows"]) == 1
    assert [row["reason"] for row in made["refused"]] == [reason]
    shown = " ".join(invoke(command, *line).output.split())
    assert f"not possible {refused} bf16: {reason}" in shown
    assert "W of all GPUs" in shown


def test_what_is_not_possible_is_not_offered_again(monkeypatch):
    _, after, result = run_next(monkeypatch, "llama-3.1-8b", "--serve", "--tp", "1,3")
    assert after[after.index("--tp") + 1] == "1" and "on" in json.loads(result.output)


def test_a_sweep_in_which_nothing_is_possible_is_an_error():
    error = invoke(command, "llama-3.1-8b", "--serve", "--tp", "3,5").code
    assert "heads evenly" in error.what and "--attention-dp" in error.fix
    assert "no device" in invoke(command, "llama-3.1-8b", "--serve", "--on", "h100,nothing").code.what


def test_the_command_line_has_groups_of_attention_and_the_format_of_the_cache():
    words = ["deepseek-v3", "--serve", "--on", "h200", "--tp", "8", "--batch", "256", "--dtype", "fp8", "--json"]
    row = json.loads(invoke(command, *words, "--attention-dp", "8", "--cache-dtype", "bf16").output)
    same = estimate_serving("deepseek-v3", on="h200", tp=8, batch=256, dtype="fp8", attention_dp=8, cache_dtype="bf16")
    assert row["tokens_per_s"]["value"] == same.tokens_per_s
    assert (row["replicas"], row["cache_dtype"]) == (8, "bf16")
    error = invoke(command, "resnet18", "--attention-dp", "2").code
    assert error.what == "--attention-dp needs --serve"


def test_the_cheapest_point_meets_the_limits():
    options = {"on": ["h200", "b200"], "dtype": ["bf16", "fp8"], "tp": [1, 2], "batch": [1, 8, 64]}
    rows, free = sweep_serving("llama-3.1-70b", **options)
    _, fast = sweep_serving("llama-3.1-70b", **options, max_time_per_output_token_s=0.02)
    assert len(rows) == 24
    assert fast.time_per_output_token_s <= 0.02 < free.time_per_output_token_s
    assert free.joules_per_token == min(r.joules_per_token for r in rows if r.fits)
    assert sweep_serving("llama-3.1-70b", **options, max_time_per_output_token_s=1e-6)[1] is None


def test_the_cheapest_point_holds_its_power_limit(monkeypatch):
    options = {"dtype": ["fp8"], "tp": [8], "batch": [32]}
    rows, best = sweep_serving("deepseek-v3", on=["b200", "b200@350W", "b200@700W"], **options)
    assert [row.holds_limit for row in rows] == [True, False, True]
    assert best is rows[2]
    assert rows[1].joules_per_token < best.joules_per_token
    assert sweep_serving("deepseek-v3", on=["b200@350W"], **options)[1] is None
    monkeypatch.setenv("COLUMNS", "200")
    words = ["deepseek-v3", "--serve", "--on", "b200@300W,b200@350W", "--tp", "8", "--batch", "32"]
    assert "none fits and meets the limits" in invoke(command, *words).output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "fp5"}, "fp5"),
        ({"tp": 4, "ep": 3}, "does not divide"),
        ({"engine": "vlm"}, "did you mean 'vllm'"),
        ({"batch": 0}, "at least 1"),
        ({"arrivals": "never"}, "once"),
        ({"tp": 512}, "heads"),
        ({"tp": 3}, "heads evenly"),
        ({"batch": 2.5}, "whole number"),
    ],
)
def test_wrong_arguments_are_named(options, says):
    with pytest.raises(ArgumentError) as error:
        estimate_serving("qwen3-30b-a3b", on="h200", **options)
    assert says in f"{error.value.what} {error.value.fix}"


def test_the_command_agrees_with_python():
    words = ["llama-3.1-8b", "--serve", "--on", "h200,b200", "--dtype", "bf16,fp8", "--batch", "8", "--json"]
    rows = json.loads(invoke(command, *words).output)["rows"]
    assert len(rows) == 4
    same = estimate_serving("llama-3.1-8b", on="b200", batch=8, dtype="fp8")
    assert rows[3]["time_per_output_token_s"]["value"] == same.time_per_output_token_s
    assert rows[3]["joules_per_token"]["error"] == same.joules_per_token.error


def test_a_prompt_that_is_alone_waits_for_its_own_prefill_and_a_few_steps():
    alone = estimate_serving("llama-3.1-8b", on="h100", batch=1, prompt=2048)
    assert alone.prefill.time_s < alone.time_to_first_token_s
    assert alone.time_to_first_token_s < alone.prefill.time_s + 6 * alone.decode.time_s
    assert alone.time_per_output_token_s == alone.decode.time_s, "no prompts of others"
    busy = estimate_serving("llama-3.1-8b", on="h100", batch=64, prompt=2048)
    assert busy.time_to_first_token_s > 3 * alone.time_to_first_token_s


def test_sequences_longer_than_the_models_context_are_refused():
    with pytest.raises(ArgumentError, match="longer than a sequence of llama-2-7b") as caught:
        estimate_serving("llama-2-7b", on="h200", prompt=4000, generate=200)
    assert "4,096" in str(caught.value.why)
    with pytest.raises(ArgumentError, match="longer than a sequence of llama-3-8b") as caught:
        estimate_serving("meta-llama/Meta-Llama-3-8B-Instruct", on="h200", prompt=100_000)
    assert "8,192" in str(caught.value.why)
    assert estimate_serving("llama-3.1-8b", on="h200", prompt=100_000).prompt == 100_000
    assert estimate_serving("llama-2-7b", on="h200", prompt=3896, generate=200).batch == 1
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 1000}
    config |= {"intermediate_size": 128, "model_type": "llama"}
    assert estimate_serving(config, on="h200", prompt=500_000).batch == 1  # it does not say how much it allows


def test_a_language_models_name_without_serve_is_told_about_it():
    error = invoke(command, "llama-3.1-8b", "--on", "h200").code
    assert isinstance(error, ArgumentError)
    assert "tessera predict llama-3.1-8b --serve" in str(error.fix)


def relative(value):
    return value.error / value


def test_intervals_are_wider_on_chips_without_data():
    by_chip = {on: estimate_serving("llama-3.1-8b", on=on, batch=8) for on in ("h100", "l40s", "mi300x", "epyc-9654")}
    for name in ("time_per_output_token_s", "joules_per_token", "time_to_first_token_s"):
        widths = [relative(getattr(report, name)) for report in by_chip.values()]
        assert widths[0] < widths[1] < widths[2] < widths[3] + 1e-9
    # Not narrower than the chip's own kernels.
    device = by_chip["mi300x"].deployment.device
    product = gemm_time(device, 1024, 14336, 4096)
    assert relative(by_chip["mi300x"].prefill.time_s) > product.relative_error
    assert relative(by_chip["epyc-9654"].decode.time_s) >= 0.95


def test_experts_that_nobody_timed_are_said_to_be_so_and_widen():
    dense, experts = (estimate_serving(model, on="mi300x", batch=8) for model in ("llama-3.1-8b", "qwen3-30b-a3b"))
    assert "no fused experts were timed on chips like mi300x" in experts.provenance["experts"]
    assert relative(experts.decode.time_s) > relative(dense.decode.time_s)
    assert "experts" not in dense.provenance
    known = estimate_serving("qwen3-30b-a3b", on="h100", batch=8)
    assert "published servers" in known.provenance["experts"] and "no fused" not in known.provenance["experts"]


@pytest.mark.parametrize(
    ("on", "source"),
    [
        ("h200", "fitted on the H200"),
        ("b200", "fitted on public timings of the b200"),
        ("l40s", "shared by the chips with public timings, carried over"),
        ("mi300x", "H200 constants carried over by datasheet"),
        ("epyc-9654", "not validated on CPUs"),
    ],
)
def test_the_provenance_of_a_chip_is_on_the_screen_and_in_the_json(on, source):
    words = ("llama-3.1-8b", "--serve", "--on", on)
    assert source in json.loads(invoke(command, *words, "--json").output)["provenance"]["latency"]
    for line in (words, (*words[:-1], f"{on},a100")):
        assert source in " ".join(invoke(command, *line).output.split())


def test_joules_and_time_of_a_step_are_those_of_its_phases_and_its_waiting() -> None:
    for chip in ("h200", "h200@300W"):
        report = estimate_serving("llama-3.1-8b", on=chip, batch=64, prompt=1024, generate=256)
        prompts = report.batch / report.generate
        joules = report.decode.energy_j + prompts * report.prefill.energy_j + report.waiting_j
        assert report.joules_per_token * report.batch == pytest.approx(joules)
        step_s = report.batch / report.tokens_per_s
        assert step_s == pytest.approx(report.decode.time_s + prompts * report.prefill.time_s + report.waiting_s)
        assert report.power_w == pytest.approx(joules / step_s)
        assert report.waiting_j / report.waiting_s > 70, "a GPU that waits draws more than one that idles"


def test_a_limit_of_the_gpu_does_not_stretch_the_time_of_the_scheduler() -> None:
    fast, slow = (
        estimate_serving("llama-3.1-8b", on=chip, batch=64, prompt=1024, generate=256) for chip in ("h200", "h200@200W")
    )
    assert slow.prefill.time_s > 1.2 * fast.prefill.time_s
    assert slow.waiting_s == pytest.approx(fast.waiting_s)


def test_the_ranks_of_experts_that_divide_the_gpus_are_offered() -> None:
    with pytest.raises(ArgumentError, match="--ep 3 does not divide 8 GPUs") as caught:
        estimate_serving("deepseek-v3", on="h200", tp=8, ep=3)
    assert caught.value.fix == "one of: 1, 2, 4, 8"
