"""The sizes of a model, from a module or a configuration."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from decoders import GPT
from tessera.dist import ModelShape, read_model_shape
from tessera.errors import ArgumentError

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_configuration_is_read_from_all_its_forms(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    expected = ModelShape(hidden=64, layers=3, heads=8, kv_heads=2, ffn=160, vocab=512)
    for form in (LLAMA, json.dumps(LLAMA), path, f"hf:{path}", {"model_type": "x_vl", "text_config": LLAMA}, expected):
        assert read_model_shape(form) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_inner": None},
            ModelShape(hidden=48, layers=2, heads=4, ffn=192, vocab=100, gated=False, tied=True),
        ),
        (
            LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
            ModelShape(
                hidden=64, layers=3, heads=8, kv_heads=2, ffn=160, vocab=512, experts=8, topk=2, moe_ffn=160
            ),
        ),
        (
            LLAMA | {"model_type": "deepseek_v3", "n_routed_experts": 16, "num_experts_per_tok": 4, "kv_lora_rank": 512,
                     "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
            ModelShape(hidden=64, layers=3, heads=8, kv_heads=2, ffn=160, vocab=512, experts=16, topk=4, moe_ffn=32,
                       shared_experts=1, dense_layers=1, mla=True),
        ),
    ],
)  # fmt: skip
def test_kinds_of_configurations(config, expected):
    assert read_model_shape(config) == expected


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


# Parameters in billions, all and active, as the cards of the models state them.
@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (
            {"model_type": "llama4", "text_config": {
                "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
                "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "num_hidden_layers": 48, "num_local_experts": experts, "num_experts_per_tok": 1,
                "interleave_moe_layer_step": step, "vocab_size": 202048}},
            total, 17,
        )
        for experts, step, total in ((16, 1, 109), (128, 2, 400))
    ] + [
        (
            {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
             "attn_config": {"kv_n_heads": 8},
             "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
            132, 36,
        ),
    ],
)  # fmt: skip
def test_published_configurations_have_the_parameters_of_their_cards(config, total, active):
    shape = read_model_shape(config)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.015)
    idle = shape.expert_parameters() * (1 - shape.topk / shape.experts)
    assert (shape.parameters - idle) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("places", "having"),
    [
        ({}, 12),
        ({"decoder_sparse_step": 2}, 6),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}, 10),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 1}, 9),
        ({"moe_layer_freq": [0, *[1] * 11]}, 11),
        ({"moe_layer_start_index": 2, "moe_layer_interval": 2}, 5),
        ({"moe_layers": [3, 7, 11], "interleave_moe_layer_step": 4}, 3),
    ],
)
def test_layers_without_experts_are_dense(places, having) -> None:
    config = LLAMA | EXPERTS | {"model_type": "qwen3_moe", "num_hidden_layers": 12}
    shape = read_model_shape(config | places)
    assert shape.moe_layers == having
    assert shape.layers == 12
    with pytest.raises(ArgumentError, match="not a size"):
        read_model_shape(config | {"moe_layer_freq": "([0]*3+[1]*9)"})


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ({"mamba_d_state": 16, "attn_layer_period": 8}, "mamba_d_state"),
        ({"state_size": 128}, "state_size"),
        ({"ssm_state_size": 128, "hybrid_override_pattern": "M-M*"}, "ssm_state_size"),
        ({"layer_types": ["mamba", "mamba", "attention"]}, "mamba"),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, "recurrent"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention without"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "linear_attn_config"),
    ],
)
def test_layers_that_are_not_attention_are_refused(layers, told) -> None:
    with pytest.raises(ArgumentError, match=f"hybrid has layers that are not modelled: {told}") as caught:
        read_model_shape(LLAMA | {"model_type": "hybrid"} | layers)
    assert caught.value.fix


@pytest.mark.parametrize(
    "layers", [{"layer_types": ["attention"] * 3, "mamba_n_heads": 48}, {"attn_type_list": [1, 1, 1]}]
)
def test_keys_of_layers_that_a_model_does_not_have_change_nothing(layers) -> None:
    assert read_model_shape(LLAMA | layers) == read_model_shape(LLAMA)


def test_a_configuration_without_sizes_names_the_keys():
    with pytest.raises(ArgumentError, match="does not say heads and vocab") as caught:
        read_model_shape({"model_type": "resnet", "hidden_size": 3, "num_layers": 4})
    assert "num_attention_heads" in caught.value.why
    with pytest.raises(ArgumentError, match="does not say topk") as caught:
        read_model_shape(LLAMA | {"num_local_experts": 8})
    assert "num_experts_per_tok" in caught.value.why


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("fused", ModelShape(hidden=32, layers=4, heads=4, kv_heads=4, ffn=128, vocab=64, gated=False, tied=True)),
        ("grouped", ModelShape(hidden=32, layers=4, heads=4, kv_heads=2, ffn=96, vocab=64, tied=True)),
        (
            "experts",
            ModelShape(
                hidden=32, layers=4, heads=4, kv_heads=2, vocab=64, experts=4, topk=2, moe_ffn=64, tied=True
            ),
        ),
    ],
)  # fmt: skip
def test_a_module_of_a_stranger_on_the_meta_device(kind, expected):
    with torch.device("meta"):
        model = GPT(kind, tied=True)
    assert read_model_shape(model) == expected


def test_what_is_no_decoder_says_what_was_looked_for():
    with pytest.raises(ArgumentError, match="has no stack of blocks"):
        read_model_shape(nn.Linear(2, 2))
    stack = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)])
    with pytest.raises(ArgumentError, match="does not look like a decoder") as caught:
        read_model_shape(stack)
    assert "an attention with its number of heads" in caught.value.why and "an MLP" not in caught.value.why
    with pytest.raises(ArgumentError, match="int is not a model"):
        read_model_shape(3)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"model_type": "t5", "num_heads": 12, "num_layers": 12}, "t5 is an encoder with a decoder"),
        ({"model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12}, "bert is an encoder"),
        ({"model_type": "llama", "num_attention_heads": 33, "num_hidden_layers": 2}, "33 heads do not divide"),
        (
            {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 8, "num_hidden_layers": 2},
            "12 heads do not share 8",
        ),
    ],
)
def test_configurations_that_are_no_decoders_or_have_impossible_heads_are_refused(sizes, told) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        read_model_shape({"hidden_size": 768, "vocab_size": 30522, **sizes})
    assert caught.value.fix
