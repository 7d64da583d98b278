"""The `ModelShape` of a module or of a configuration of Hugging Face: the sizes that a plan is made from."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, TesseraError, is_number
from .training_model import ModelShape

if TYPE_CHECKING:
    from torch import nn

    from .block_stack import BlockStack

# Keys of configurations, by what they hold; the first key that is set counts.
_KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "ffn_embed_dim"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "topk": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k", "moe_topk", "moe_top_k"),
    "moe_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense_layers": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
}
_PARTS = ("attn_config", "ffn_config")  # tables inside a configuration that have some of these keys (DBRX, MPT)
# One of so many layers has experts, after the first dense ones.
_EXPERTS_EVERY = (
    "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", "expert_layer_period",
)  # fmt: skip
# The lists that name the kind of each layer, the kinds that are modelled, and keys of other layers (Mamba, Kimi's
# linear attention, Step's shared queries), of which the lists say whether there are any.
_KINDS = ("layer_types", "layers_block_type", "block_types")
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention", "linear_attention")
_OTHER_KEYS = ("mamba_", "ssm_", "state_size", "linear_attn_config", "share_q_dim")
# Model types of transformers whose MLP has two matrices, and those that share the embedding's matrix unless the
# configuration denies it.
_TWO_MATRICES = frozenset({
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt",
    "codegen", "bert", "roberta", "xlm-roberta", "nemotron", "persimmon", "stablelm_epoch", "vit",
})  # fmt: skip
_TIED = frozenset({
    "gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "bert", "roberta", "gemma", "gemma2", "gemma3",
    "gemma3_text", "cohere", "cohere2", "starcoder2",
})  # fmt: skip
# Model types of transformers that are not decoders: in encoders all tokens see each other and nothing is generated; in
# encoder-decoders, half of them do.
_ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "modernbert", "mpnet",
    "camembert", "vit", "dinov2", "wav2vec2", "hubert",
})  # fmt: skip
_ENCODER_DECODERS = frozenset({
    "t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper", "led", "blenderbot",
})  # fmt: skip


def read_model_shape(model: Any) -> ModelShape:
    """Return the sizes of a decoder: an `nn.Module` (also on the meta device), or a configuration of Hugging Face.

    A configuration is an object, a mapping, the JSON itself, or the path of a config.json (a leading "hf:" is allowed).
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, (str, Path)):
        return _read_config_shape(read_config(str(model).removeprefix("hf:")))
    if isinstance(model, Mapping):
        return _read_config_shape(model)
    config = getattr(model, "config", model)
    if hasattr(config, "to_dict"):  # a configuration of transformers, or a model with one
        return _read_config_shape(config.to_dict())
    if hasattr(model, "named_modules"):
        return _read_module_shape(model)
    raise ArgumentError(
        f"{type(model).__name__} is not a model",
        fix="give an nn.Module, a ModelShape, or a configuration of Hugging Face (an object, a mapping, a path)",
    )


def read_config(text: str) -> Mapping[str, Any]:
    """Return the configuration of a model: the JSON object itself, or that of a file."""
    try:
        source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        config = json.loads(source)
    except OSError as e:
        raise ArgumentError(
            f"cannot read {text!r}",
            why=e.strerror,
            fix="give hf: a file config.json or the JSON itself; nothing is downloaded",
        ) from e
    except ValueError as e:
        raise ArgumentError(f"hf:{text[:40]} is not JSON", why=str(e), fix='hf:\'{"model_type": "llama"}\'') from e
    if not isinstance(config, dict):
        raise ArgumentError("the configuration is not a JSON object", fix='hf:\'{"model_type": "llama"}\'')
    return config


@contextlib.contextmanager
def refuse_damaged() -> Iterator[None]:
    """Raise what a value of another type than its key's causes as an ArgumentError: a configuration is a stranger's."""
    try:
        yield
    except TesseraError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as e:
        raise ArgumentError(
            "a value of the configuration is not of the type of its key",
            why=f"{type(e).__name__}: {e}",
            fix="compare it with the config.json of a model of that kind",
        ) from e


@refuse_damaged()
def _read_config_shape(config: Mapping[str, Any]) -> ModelShape:
    whole, config = config, config.get("text_config") or config  # the language model inside one with vision
    if not isinstance(config, Mapping):
        config = config.to_dict()
    for part in _PARTS:
        config = {**(config.get(part) or {}), **config}
    kind = str(config.get("model_type", ""))
    _check_decoder(config, kind)
    _check_layers(config, kind)
    sizes: dict[str, Any] = {}
    for size, names in _KEYS.items():
        value = next((config[n] for n in names if config.get(n) is not None), None)
        if value is not None:
            sizes[size] = _read_size(value, names)
    needed = ["hidden", "layers", "heads", "vocab"] + ["topk"] * (sizes.get("experts", 0) > 1)
    missing = [size for size in needed if not sizes.get(size)]
    if missing:
        raise ArgumentError(
            f"the configuration of {kind or 'this model'} does not say {' and '.join(missing)}",
            why=f"looked for {', '.join(n for size in missing for n in _KEYS[size])}",
            fix="add them to it, or in Python give a ModelShape(hidden=..., layers=..., heads=..., ffn=..., vocab=...)",
        )
    _check_heads(sizes, bool(config.get("kv_lora_rank")))
    sizes.setdefault("ffn", 4 * sizes["hidden"])  # the default of GPT-2, BLOOM, Falcon and MPT, which do not state it
    if config.get("multi_query") and "kv_heads" not in sizes:
        sizes["kv_heads"] = 1
    if sizes.get("experts", 0) > 1:
        sizes |= _read_expert_sizes(config, sizes)
    else:
        for size in ("experts", "topk", "moe_ffn", "shared_experts", "dense_layers"):
            sizes.pop(size, None)
    if sizes.get("head_dim") == sizes["hidden"] // sizes["heads"]:
        del sizes["head_dim"]  # ModelShape's default applies
    tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings", kind in _TIED))
    sizes |= {"gated": kind not in _TWO_MATRICES, "mla": bool(config.get("kv_lora_rank")), "tied": bool(tied)}
    return ModelShape(**sizes)


def _read_expert_sizes(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the widths of experts, and how many layers have none."""
    if wide := config.get("intermediate_size_mlp"):  # Llama 4's dense layers; one more expert takes every token
        return {
            "ffn": _read_size(wide, ("intermediate_size_mlp",)),
            "moe_ffn": sizes["ffn"],
            "shared_experts": 1,
            "dense_layers": _count_dense_layers(config, sizes),
        }
    width = sizes.get("moe_ffn", sizes["ffn"])
    found = {"moe_ffn": width, "dense_layers": _count_dense_layers(config, sizes)}
    if shared := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
        found["shared_experts"] = round(shared / width)
    return found


def _count_dense_layers(config: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return layers without experts: the first ones, and those between the layers that have them."""
    layers, first = sizes["layers"], sizes.get("dense_layers", 0)
    if isinstance(listed := config.get("moe_layers"), list) and listed:
        return layers - len(listed)
    every = next((config[name] for name in _EXPERTS_EVERY if config.get(name)), 1)
    having = sum(map(bool, every)) if isinstance(every, list) else (layers - first) // _read_size(every, _EXPERTS_EVERY)
    return layers - having + len(config.get("mlp_only_layers") or ())


def _check_decoder(config: Mapping[str, Any], kind: str) -> None:
    """Refuse models that are not decoders, or not only: their passes differ."""
    if config.get("is_encoder_decoder") or kind in _ENCODER_DECODERS:
        what = "an encoder with a decoder"
    elif kind in _ENCODERS and not config.get("is_decoder"):
        what = "an encoder"
    else:
        return
    raise ArgumentError(
        f"{kind or 'the model'} is {what}",
        why="its configuration would be read as that of a decoder, which it is not",
        fix="predict its forward pass (tessera predict hf:config.json), or plan its module with inputs",
    )


def _check_layers(config: Mapping[str, Any], kind: str) -> None:
    """Refuse layers whose work is not that of attention: their parameters, FLOPs and cache would all be wrong."""
    kinds = [str(layer) for name in _KINDS for layer in config.get(name) or ()]
    other = sorted(set(kinds) - set(_ATTENTION))
    if "linear_attention" in kinds and not config.get("linear_num_value_heads"):
        other.append("linear_attention without linear_num_value_heads")
    if not kinds:
        other = [str(key) for key, value in config.items() if str(key).startswith(_OTHER_KEYS) and value]
        if 0 in (config.get("attn_type_list") or ()):  # MiniMax-01: lightning attention
            other.append("attn_type_list")
    if other:
        raise ArgumentError(
            f"{kind or 'the model'} has layers that are not modelled: {', '.join(other[:3])}",
            why="they would be read as layers of attention, which they are not",
            fix="predict its forward pass (tessera predict hf:config.json), or plan its module with inputs",
        )


def _check_heads(sizes: Mapping[str, Any], latent: bool) -> None:
    """Refuse numbers of heads that no model has."""
    hidden, heads, keys = sizes["hidden"], sizes["heads"], sizes.get("kv_heads") or sizes["heads"]
    if not sizes.get("head_dim") and not latent and hidden % heads:
        raise ArgumentError(
            f"{heads} heads do not divide a width of {hidden}",
            fix="correct num_attention_heads or hidden_size, or add head_dim",
        )
    if heads % keys:
        raise ArgumentError(
            f"{heads} heads do not share {keys} heads of keys evenly",
            fix="correct num_attention_heads or num_key_value_heads",
        )


def _read_size(value: Any, names: tuple[str, ...]) -> int:
    """Return a size of a configuration; 0 if it says that there is none."""
    if not (is_number(value) and 0 <= value < 1e12):
        raise ArgumentError(f"{' or '.join(names)} is {value!r}, not a size", fix="a whole number of at least 1")
    return int(value)


def _read_module_shape(module: nn.Module) -> ModelShape:
    from .block_stack import find_hidden, find_pairs, require_stack, width_of

    stack = require_stack(module, "the shape of a decoder")
    kinds = Counter(type(block) for _, block in stack.named_blocks() if find_hidden(block))
    kind = kinds.most_common(1)[0][0] if kinds else None
    blocks = [block for _, block in stack.named_blocks() if type(block) is kind]
    block = blocks[0] if blocks else module
    pairs = find_pairs(block)
    attention = next((p for p in pairs if p.kind == "attention"), None)
    mlp = next((p for p in pairs if p.kind == "mlp"), None)
    vocabulary = _read_vocabulary(module, stack)
    experts = _read_experts(blocks)
    lacks = []
    if attention is None or not attention.heads:
        lacks.append("an attention with its number of heads (q, k, v or qkv, out; num_heads, n_head or head_dim)")
    if mlp is None and not experts:
        lacks.append("an MLP (two or three Linear layers: hidden to ffn and back)")
    if vocabulary is None:
        lacks.append("an nn.Embedding of words or a Linear head")
    if lacks or attention is None or vocabulary is None or attention.heads is None:
        raise ArgumentError(
            f"{type(module).__name__} does not look like a decoder",
            why=f"looked in {stack.path or 'the sequence'} for {'; '.join(lacks)}",
            fix="give a ModelShape(hidden=..., layers=..., heads=..., ffn=..., vocab=...)",
        )
    sizes = dict(experts)
    if mlp is not None:
        sizes["ffn"] = width_of(block.get_submodule(mlp.row))[0]
        sizes["gated"] = len(mlp.columns) == 2 or len(mlp.parts) == 2
    hidden = find_hidden(block)
    inner = width_of(block.get_submodule(attention.row))[0]
    return ModelShape(
        hidden=hidden,
        layers=len(blocks),
        heads=attention.heads,
        kv_heads=attention.key_heads or 0,
        head_dim=inner // attention.heads if inner != hidden else 0,
        vocab=vocabulary,
        tied=stack.tied,
        **sizes,
    )


def _read_vocabulary(module: nn.Module, stack: BlockStack) -> int | None:
    from .block_stack import width_of

    if stack.embedding is not None:
        return int(module.get_submodule(stack.embedding).num_embeddings)
    return width_of(module.get_submodule(stack.head))[1] if stack.head is not None else None


def _read_experts(blocks: list[nn.Module]) -> dict[str, Any]:
    """Return the experts of a block as ModelShape's arguments; nothing if there are none."""
    from .block_stack import find_experts, find_hidden, find_pairs, is_matrix, read_first, width_of

    found = [(block, e) for block in blocks if (e := find_experts(block)) is not None]
    if not found:
        return {}
    block, (path, experts) = found[0]
    owner = block.get_submodule(path.rpartition(".")[0])
    near = [owner, experts, *(getattr(owner, name, None) for name in ("gate", "router", "config"))]
    topk = read_first(near, ("top_k", "topk", "num_experts_per_tok", "k", "n_activated_experts"))
    stacked = [p for p in experts.parameters(recurse=False) if p.dim() == 3]
    if stacked:
        hidden, count = find_hidden(block), stacked[0].shape[0]
        width = min((n for p in stacked for n in p.shape[1:] if n != hidden), default=hidden)
        matrices = round(sum(p.numel() for p in stacked) / (count * hidden * width))
    else:
        count = len(list(experts.children()))
        expert = next(experts.children())
        matrices = sum(map(is_matrix, expert.modules()))
        width = next((width_of(expert.get_submodule(pair.row))[0] for pair in find_pairs(expert)), 0)
    if topk is None or not width:
        raise ArgumentError(
            f"the experts {path} do not say how many of them a token goes to",
            why="looked for top_k, topk, num_experts_per_tok or k beside them",
            fix="give a ModelShape(experts=..., topk=..., moe_ffn=..., ...)",
        )
    dense = len(blocks) - len(found)
    return {"experts": count, "topk": topk, "moe_ffn": width, "gated": matrices == 3, "dense_layers": dense}
