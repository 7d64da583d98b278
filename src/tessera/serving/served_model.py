"""`ServedModel`: the sizes of a language model that decide what serving it takes, from a name or a configuration."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..dist.model_shape import read_config, read_model_shape, refuse_damaged
from ..dist.training_model import ModelShape
from ..errors import ArgumentError, did_you_mean

# Words of a model's name that do not change its sizes: tuning, date, format of the weights.
_VARIANT = re.compile(
    r"-(instruct|thinking|chat|it|base|hf|fp8|bf16|nvfp4|fp4|awq|gptq|mxfp4|dynamic|static|pertensor|turbo|preview"
    r"|\d{4}|v\d+(\.\d+)?|99(\.9)?)$"
)
# Names of the same sizes.
_SAME = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "kimi-k2.5": "kimi-k2",
    "minimax-m2": "minimax-m2.5",
    "minimax-m2.7": "minimax-m2.5",
    "glm-5.1": "glm-5",
    "glm-4.6": "glm-4.5",
    "glm-4.7": "glm-4.5",
    "deepseek-v3.1-terminus": "deepseek-v3",
    "mistral-large": "mistral-large-123b",
    "phi-4-14b": "phi-4",
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-405b": "llama-3.1-405b",
    "qwen3-vl-235b-a22b": "qwen3-235b-a22b",
    "qwen3-vl-30b-a3b": "qwen3-30b-a3b",
    "qwen3-omni-30b-a3b": "qwen3-30b-a3b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3-vl-8b": "qwen3-8b",
    "qwen3-vl-4b": "qwen3-4b",
    "qwen3-vl-32b": "qwen3-32b",
    "gptj": "gpt-j-6b",
    "gptj-6b": "gpt-j-6b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
}
# Published in another format than their sisters of the same sizes: Kimi K2.5's experts in 4 bits (its config.json).
_PUBLISHED_IN = {"kimi-k2.5": {"quantization_config": {"quant_method": "awq"}}}
# Models of these sizes that were made for shorter sequences (max_position_embeddings of their config.json).
_CONTEXTS = {"llama-3-8b": 8192, "llama-3-70b": 8192}


# Formats of weights by the method that a config.json names (quantization_config), if it states no bits or the same.
_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "awq": "int4", "gptq": "int4"}
_METHODS |= dict.fromkeys(("fp4", "mxfp4", "nvfp4"), "fp4")
_INTEGERS = frozenset({"awq", "gptq", "bitsandbytes"})
# One of so many layers sees all keys, the others the keys of a window; 0: all layers have the window. By model_type,
# for a config.json without layer_types and sliding_window_pattern, as most are published: what transformers then takes
# (configuration_*.py of each; Mistral and those like it have one window for all layers).
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4, "gemma3n_text": 5, "gemma3_text": 6}
_FULL_EVERY |= dict.fromkeys(("mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2"), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: ranks of queries and of keys with values, and the sizes of a head's parts.

    `query_rank` 0: queries are not compressed, as in DeepSeek-V2-Lite.
    """

    query_rank: int
    key_rank: int
    rotary: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers whose attention keeps a state of fixed size for each sequence (gated delta networks)."""

    layers: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyIndex:
    """Sparse attention: an index of small keys chooses the `most` keys that a query sees."""

    most: int
    heads: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Sizes of a decoder: its `shape`, and what makes its attention cheaper than attention to all keys in all layers.

    `windowed_layers` see `window` keys; the other layers that are not `linear` see all keys. `context` is the most
    tokens of a sequence; None if the configuration does not tell. `weights` is the format in which the configuration
    says they are stored; `unknown_weights` names one that is not modelled.
    """

    name: str
    shape: ModelShape
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    index: KeyIndex | None = None
    window: int = 0
    windowed_layers: int = 0
    expert_format: str | None = None
    context: int | None = None
    weights: str | None = None
    unknown_weights: str | None = None

    @property
    def full_layers(self) -> int:
        """Return the number of layers whose attention sees all keys (or those that an index chooses)."""
        return self.shape.layers - self.windowed_layers - (self.linear.layers if self.linear else 0)

    def attention_matrices(self, ranks: int) -> list[tuple[float, float]]:
        """Return the projections of one attention on one of `ranks`: (outputs, inputs) of each."""
        s, heads = self.shape, self.shape.heads / ranks
        if self.latent is not None:
            m = self.latent
            down, queries = (m.query_rank + m.key_rank + m.rotary, s.hidden), m.query_rank or s.hidden
            # Keys and values stay compressed: queries are multiplied up to them, and results down from them.
            up, absorbed = heads * (m.plain + m.rotary), heads * m.plain
            values = heads * m.value
            return [down, (up, queries), (absorbed, m.key_rank), (values, m.key_rank), (s.hidden, values)]
        size, keys = s.head_size, max(s.key_heads / ranks, 1.0)
        return [((heads + 2 * keys) * size, s.hidden), (s.hidden, heads * size)]

    def linear_matrices(self, ranks: int) -> list[tuple[float, float]]:
        """Return the projections of one linear attention on one of `ranks`."""
        if self.linear is None:
            return []
        n, h = self.linear, self.shape.hidden
        keys, values = n.key_heads * n.key_size / ranks, n.value_heads * n.value_size / ranks
        return [(2 * keys + 2 * values + 2 * n.value_heads / ranks, h), (h, values)]

    def cache_elements(self, ranks: int) -> float:
        """Return elements that one token adds to the cache of one rank, in one layer that sees all keys."""
        if self.latent is not None:
            return float(self.latent.key_rank + self.latent.rotary)
        return 2.0 * max(self.shape.key_heads / ranks, 1.0) * self.shape.head_size

    def state_bytes(self, ranks: int) -> float:
        """Return bytes of one sequence's states of linear attention on one rank, in fp32 as servers keep them."""
        if self.linear is None:
            return 0.0
        n = self.linear
        return 4.0 * n.layers * n.value_heads * n.key_size * n.value_size / ranks

    def cache_bytes(self, tokens: int, ranks: int, element_bytes: float) -> float:
        """Return bytes of one sequence of `tokens` in the cache of one rank, all layers."""
        seen = self.full_layers * tokens + self.windowed_layers * min(tokens, self.window or tokens)
        extra = self.full_layers * tokens * self.index.size if self.index else 0.0  # the index keeps fp8 keys
        return seen * self.cache_elements(ranks) * element_bytes + extra + self.state_bytes(ranks)

    @property
    def active_parameters(self) -> float:
        """Return the parameters by which one token is multiplied."""
        s = self.shape
        idle = s.expert_parameters() * (1 - s.topk / s.experts) if s.experts else 0.0
        return s.parameters - idle


@functools.cache
def list_models() -> dict[str, dict[str, Any]]:
    """Return configurations of public models by name: the sizes of each model's config.json."""
    text = (resources.files(__package__) / "models.json").read_text(encoding="utf-8")
    models: dict[str, dict[str, Any]] = json.loads(text)
    return models


def read_served_model(model: Any) -> ServedModel:
    """Return the sizes of a model: a public name ("meta-llama/Llama-3.1-70B"), a configuration, or a module.

    A configuration is what `dist.read_model_shape` takes: an object, a mapping, JSON, or the path of a config.json.
    """
    if isinstance(model, ServedModel):
        return model
    if isinstance(model, ModelShape):
        return ServedModel(name="model", shape=model)
    if isinstance(model, (str, Path)):
        text = str(model).removeprefix("hf:")
        if text.lstrip().startswith("{") or text.endswith(".json") or Path(text).is_file():
            return _model_of(read_config(text), Path(text).stem if not text.startswith("{") else "model")
        return _model_of(*_find_model(text))
    config = getattr(model, "config", model)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return _model_of(config, str(config.get("_name_or_path") or config.get("model_type") or "model"))
    return ServedModel(name=type(model).__name__, shape=read_model_shape(model))


def _find_model(name: str) -> tuple[dict[str, Any], str]:
    models = list_models()
    short = name.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    short = re.sub(r"^llama(?=\d)", "llama-", short)
    tried = [short]
    while (shorter := _VARIANT.sub("", tried[-1])) != tried[-1]:
        tried.append(shorter)
    for word in tried:
        known_as = _SAME.get(word, word)
        if word in _CONTEXTS:
            return models[known_as] | {"max_position_embeddings": _CONTEXTS[word]} | _read_stored(short), word
        if known_as in models:
            return models[known_as] | _PUBLISHED_IN.get(word, {}) | _read_stored(short), known_as
    known = [*models, *_SAME]
    raise ArgumentError(
        f"the sizes of {name!r} are not known{did_you_mean(tried[-1], known)}",
        why="nothing is downloaded",
        fix=f"give its config.json (hf:config.json), or one of {len(models)} names such as llama-3.1-70b",
    )


def _read_stored(name: str) -> dict[str, Any]:
    """Return what a name says of the format of its weights ("...-instruct-awq"), as a configuration does."""
    words = name.split("-")
    method = next((word for word in words if word in _METHODS), None)
    return {"quantization_config": method and {"quant_method": method}} if method or "bf16" in words else {}


@refuse_damaged()
def _model_of(config: Mapping[str, Any], name: str) -> ServedModel:
    text = config.get("text_config") or config
    c: Mapping[str, Any] = text if isinstance(text, Mapping) else text.to_dict()
    latent = index = linear = None
    if c.get("kv_lora_rank"):
        latent = LatentAttention(
            query_rank=int(c.get("q_lora_rank") or 0),
            key_rank=int(c["kv_lora_rank"]),
            rotary=int(c.get("qk_rope_head_dim", 64)),
            plain=int(c.get("qk_nope_head_dim", 128)),
            value=int(c.get("v_head_dim", 128)),
        )
    if c.get("index_topk"):
        index = KeyIndex(most=int(c["index_topk"]), heads=int(c["index_n_heads"]), size=int(c["index_head_dim"]))
    layers, kinds = int(c.get("num_hidden_layers") or 0), c.get("layer_types") or ()
    if c.get("linear_num_value_heads"):
        every = int(c.get("full_attention_interval") or 4)
        linear = LinearAttention(
            layers=sum("linear" in str(kind) for kind in kinds) or layers - layers // every,
            key_heads=int(c["linear_num_key_heads"]),
            value_heads=int(c["linear_num_value_heads"]),
            key_size=int(c["linear_key_head_dim"]),
            value_size=int(c["linear_value_head_dim"]),
        )
    experts = "fp4" if c.get("model_type") == "gpt_oss" else None  # all other weights are in 16 bits
    weights, unknown = (None, None) if experts else read_weights(config.get("quantization_config") or c)
    windowed = int(c.get("sliding_layers") or sum(str(kind).startswith(("sliding", "chunked")) for kind in kinds))
    windowed = windowed if windowed or kinds else _count_windowed_layers(c, layers)
    return ServedModel(
        name=name,
        shape=read_model_shape(c),
        latent=latent,
        linear=linear,
        index=index,
        window=int(c.get("sliding_window") or c.get("attention_chunk_size") or 0) if windowed else 0,
        windowed_layers=windowed,
        expert_format=experts,
        weights=weights,
        unknown_weights=unknown,
        context=int(c["max_position_embeddings"]) if c.get("max_position_embeddings") else None,
    )


def _count_windowed_layers(c: Mapping[str, Any], layers: int) -> int:
    """Layers whose attention sees a window, of a configuration that does not list the kind of each layer."""
    if c.get("attention_chunk_size"):  # Llama 4: layers with rotary positions see a chunk, at most all of it
        rotary = c.get("no_rope_layers")  # 1 for each layer that has them
        return sum(map(bool, rotary)) if rotary else layers - layers // int(c.get("no_rope_layer_interval") or 4)
    if not c.get("sliding_window") or c.get("use_sliding_window") is False:
        return 0
    if c.get("use_sliding_window"):  # Qwen's: the layers after the first ones
        return max(0, layers - int(c.get("max_window_layers") or layers))
    every = c.get("sliding_window_pattern") or _FULL_EVERY.get(str(c.get("model_type")), 1)
    every = len(every) if isinstance(every, str) else int(every)  # "LLLG" is the same as 4
    return layers - layers // every if every else layers


def read_weights(config: Any) -> tuple[str | None, str | None]:
    """Return the format of stored weights from a quantization_config, or the name of one that is not modelled."""
    if not isinstance(config, Mapping):
        config = config.to_dict()
    c = config.get("quantization_config") or config
    method = str(c.get("quant_method") or "").lower()
    if not method:
        return None, None
    if method == "compressed-tensors":
        return _read_groups(c.get("config_groups") or {})
    bits = c.get("bits") or (8 if c.get("load_in_8bit") else 4 if c.get("load_in_4bit") else None)
    if method in _INTEGERS and bits is not None:
        return (f"int{bits}", None) if bits in (4, 8) else (None, f"{method} of {bits} bits")
    return (_METHODS[method], None) if method in _METHODS else (None, method)


def _read_groups(groups: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the format of weights in the way of compressed-tensors: each group of layers has one, the first counts."""
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    name = f"{'int' if weights.get('type') == 'int' else 'fp'}{weights.get('num_bits')}"
    return (name, None) if name in ("int4", "int8", "fp8", "fp4") else (None, "compressed-tensors")
