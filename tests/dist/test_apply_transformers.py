"""Models of transformers: their shapes, and that they can be divided as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoders import make_words, next_word_loss
from gloo_ranks import GlooRanks
from tessera.dist import Layout, apply_layout, read_model_shape

from models import declare_torchvision

declare_torchvision()
transformers = pytest.importorskip("transformers")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 96, "vocab_size": 64},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 64, "bos_token_id": 0}
        | {"eos_token_id": 0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        | {"intermediate_size": 96, "vocab_size": 64},
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 96, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    ),
}


def make(kind: str) -> Any:
    torch.manual_seed(2)
    architecture, sizes = KINDS[kind]
    return getattr(transformers, architecture)(transformers.AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_and_its_configuration_have_the_same_shape(kind):
    with torch.device("meta"):
        model = make(kind)
    shape = read_model_shape(model.config)
    assert read_model_shape(model) == shape
    count = sum(p.numel() for p in model.parameters())
    for part in model.modules():
        if part is not model and kind != "phi3":  # by its structure alone; Phi-3's heads are in its configuration
            part.config = None
    model.config = None
    by_structure = read_model_shape(model)
    assert {**vars_of(by_structure), "kv_heads": shape.key_heads} == {**vars_of(shape), "kv_heads": shape.key_heads}
    assert shape.parameters == pytest.approx(count, rel=0.2)  # biases, norms and positions are not counted


def vars_of(shape: Any) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in shape.__slots__}


def compare(rank: int, kind: str, settings: dict[str, Any]) -> tuple[float, float, int]:
    whole, words = make(kind), make_words(4)
    expected = next_word_loss(whole(words), words)
    expected.backward()
    parallel = apply_layout(make(kind), Layout(**settings))
    loss = parallel.step({"input_ids": words}, words, next_word_loss)
    gradients = parallel.gradients()
    wanted = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False) if p.grad is not None}
    assert set(gradients) == set(wanted), set(gradients) ^ set(wanted)
    errors = [(gradients[n] - g).abs().max() / g.abs().max() for n, g in wanted.items()]
    return float((loss - expected).detach()), float(max(errors)), sum(s.how == "rows" for s in parallel.splits)


def test_models_are_divided():
    with GlooRanks(2) as ranks:
        for kind in ("gpt2", "qwen3", "phi3"):
            for loss_error, gradient_error, rows in ranks.run(compare, kind, {"tp": 2}):
                assert abs(loss_error) < 1e-5 and gradient_error < 1e-4, kind
                assert rows == 4, kind  # attention and MLP of both layers
        for loss_error, gradient_error, _ in ranks.run(compare, "llama", {"pp": 2, "microbatches": 2}):
            assert abs(loss_error) < 1e-5 and gradient_error < 1e-4
