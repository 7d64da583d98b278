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


def test_a_configuration_without_sizes_names_the_keys():
    with pytest.raises(ArgumentError, match="does not say heads and vocab") as caught:
        read_model_shape({"model_type": "resnet", "hidden_size": 3, "num_layers": 4})
    assert "num_attention_heads" in caught.value.why


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
