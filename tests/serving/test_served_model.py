"""The sizes of served models, from names and configurations."""

from __future__ import annotations

import contextlib
import json
import math

import pytest

from tessera.errors import ArgumentError
from tessera.serving.estimate import estimate_serving
from tessera.serving.served_model import list_models, read_served_model


# Parameters as each model's card states them, in billions.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.0, 8.0),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", 405, 405),
        ("deepseek-ai/DeepSeek-R1", 671, 37),
        ("nvidia/DeepSeek-V3.1-NVFP4", 671, 37),
        ("openai/gpt-oss-120b", 117, 5.1),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", 235, 22),
        ("Qwen/Qwen3-32B", 32.8, 32.8),
        ("Qwen/Qwen3.5-397B-A17B", 397, 17),
        ("MiniMaxAI/MiniMax-M2.5", 229, 10),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 109, 17),
        ("google/gemma-3-27b-it", 27, 27),
    ],
)
def test_a_name_has_the_parameters_of_its_card(name, total, active):
    served = read_served_model(name)
    assert served.shape.parameters / 1e9 == pytest.approx(total, rel=0.06)
    assert served.active_parameters / 1e9 == pytest.approx(active, rel=0.16)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "fp8"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "fp4"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int4"),
        ("RedHatAI/Llama-3-8B-Instruct-FP8-dynamic", "fp8"),
        ("meta-llama/Llama-3.1-8B-Instruct", None),
        ("deepseek-ai/DeepSeek-R1", "fp8"),  # published in fp8 alone
        ("unsloth/DeepSeek-V3-bf16", None),
    ],
)
def test_a_name_tells_the_format_of_its_weights(name, stored) -> None:
    assert read_served_model(name).weights == stored
    report = estimate_serving(name, on="b200", tp=8)
    assert report.deployment.weights == (stored or "bf16")
    assert any(f"{stored} weights" in note for note in report.notes) == bool(stored)
    assert estimate_serving(name, on="b200", tp=8, dtype="int8").deployment.weights == "int8"


def test_every_listed_model_is_read():
    for name in list_models():
        served = read_served_model(name)
        assert served.full_layers > 0
        assert served.cache_bytes(1000, 1, 2.0) > 0


@pytest.mark.parametrize("value", ["x", {}, [1], 1.5, math.nan, True, -1, 10**30])
@pytest.mark.parametrize(
    "key",
    ["layer_types", "quantization_config", "sliding_window", "moe_layer_freq", "attn_config", "mlp_only_layers",
     "attention_chunk_size", "no_rope_layers", "num_hidden_layers", "moe_intermediate_size", "text_config"],
)  # fmt: skip
def test_a_damaged_configuration_is_read_or_refused(key, value) -> None:
    config = list_models()["qwen3-30b-a3b"] | {"attention_chunk_size": 8192}
    with contextlib.suppress(ArgumentError):
        assert read_served_model(config | {key: value}).active_parameters > 0


def test_an_unknown_name_says_what_to_give():
    with pytest.raises(ArgumentError, match=r"did you mean 'llama-3\.1-70b'") as error:
        read_served_model("lama-3.1-70b")
    assert "config.json" in error.value.fix


def test_a_configuration_a_file_and_its_text_are_the_same(tmp_path):
    config = list_models()["qwen3-8b"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    shapes = [
        read_served_model(model).shape for model in (config, str(path), f"hf:{path}", json.dumps(config), "qwen3-8b")
    ]
    assert all(shape == shapes[0] for shape in shapes)


def test_windows_latent_and_linear_attention_shrink_the_cache():
    full = read_served_model("llama-3.1-70b").cache_bytes(100_000, 1, 2.0)
    assert full == 80 * 100_000 * 2 * 8 * 128 * 2.0
    gpt_oss = read_served_model("gpt-oss-120b")
    assert gpt_oss.cache_bytes(100_000, 1, 2.0) == pytest.approx((18 * 100_000 + 18 * 128) * 2 * 8 * 64 * 2.0)
    assert read_served_model("deepseek-r1").cache_bytes(1000, 8, 1.0) == 61 * 1000 * 576
    linear = read_served_model("qwen3.5-397b-a17b")
    growth = linear.cache_bytes(2000, 1, 2.0) - linear.cache_bytes(1000, 1, 2.0)
    assert growth == 15 * 1000 * 2 * 2 * 256 * 2.0


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"model_type": "gemma2"}, 6),
        ({"model_type": "gemma3_text"}, 10),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, 8),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, 9),
        ({"model_type": "mistral"}, 12),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 8}, 0),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 8}, 4),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 12}, 0),
        ({"model_type": "llama"}, 0),
    ],
)
def test_windows_are_read_from_configurations_that_list_no_kinds_of_layers(changes, windowed) -> None:
    config = {**list_models()["qwen3-8b"], "num_hidden_layers": 12, "sliding_window": 4096} | changes
    served = read_served_model(config)
    assert (served.windowed_layers, served.full_layers) == (windowed, 12 - windowed)
    assert served.window == (4096 if windowed else 0)


def test_queries_that_are_not_compressed_are_one_product() -> None:
    compressed = list_models()["deepseek-v3"]
    plain = read_served_model(compressed | {"q_lora_rank": None}).attention_matrices(1)
    queries, keys = (128 * (128 + 64), 7168), (512 + 64, 7168)
    assert plain[:2] == [keys, queries]
    assert plain[2:] == read_served_model(compressed).attention_matrices(1)[2:]


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, 9),
        ({"no_rope_layers": [1, 1, 0] * 4}, 8),
        ({"no_rope_layer_interval": 2}, 6),
        ({"layer_types": ["chunked_attention"] * 11 + ["full_attention"]}, 11),
    ],
)
def test_attention_in_chunks_is_a_window(changes, windowed) -> None:
    config = {**list_models()["qwen3-8b"], "model_type": "llama4_text", "num_hidden_layers": 12} | changes
    served = read_served_model(config | {"attention_chunk_size": 8192})
    assert (served.windowed_layers, served.full_layers, served.window) == (windowed, 12 - windowed, 8192)


@pytest.mark.parametrize("name", ["gemma-2-9b", "gemma-3-27b", "gpt-oss-20b"])
def test_a_published_configuration_has_the_windows_of_its_name(name) -> None:
    published = {key: value for key, value in list_models()[name].items() if key != "sliding_layers"}
    assert read_served_model(published).windowed_layers == read_served_model(name).windowed_layers


@pytest.mark.parametrize(
    ("stored", "dtype", "told"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4", "int4 weights"),
        ({"quant_method": "gptq", "bits": 8}, "int8", "int8 weights"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8", "fp8 weights"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", "int4 weights"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
            "int4 weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
            "fp8 weights",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "bf16", "compressed-tensors"),
        ({"quant_method": "aqlm"}, "bf16", "aqlm"),
        ({"quant_method": "gptq", "bits": 3}, "bf16", "gptq of 3 bits"),
    ],
)
def test_weights_are_in_the_format_of_the_configuration(stored, dtype, told) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 32000,
        "quantization_config": stored,
    }
    report = estimate_serving(config, on="h200")
    assert report.deployment.weights == dtype
    assert any(told in note for note in report.notes)
    assert estimate_serving(config, on="h200", dtype="fp16").deployment.weights == "fp16"
