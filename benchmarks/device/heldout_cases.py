"""Models the predictor is judged on: chosen by an evaluator, none in dev_cases.py, not looked at while it is built.

    python benchmarks/device/record_models.py benchmarks/device/heldout_cases.py OUT_PREFIX

The format is that of dev_cases.py, from which nothing is imported: a change there must not move these. What is in
case_forms.py makes these models too. The cases named `public_repeat_*` repeat four rows of the public recording, for
the drift of the host and the board against it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

sys.path.insert(0, str(Path(__file__).parent))

from case_forms import (
    LAST,
    TRAIN_ADAMW,
    TRAIN_SGD,
    Factory,
    Inputs,
    Maker,
    beside,
    by_hand,
    case,
    decode,
    decoder,
    hf,
    layers_of,
    loss,
    named,
    numbers,
    tokens,
    whole,
)

# -- torchvision and timm ---------------------------------------------------------------------------------------

# these compute widths, drop-path rates or initial weights with tensors, which "meta" cannot answer
BUILT_ON_CPU = {"regnet_x_8gf", "swin_v2_t", "maxvit_t", "inception_v3", "googlenet"}
NO_AUX = {"googlenet": {"aux_logits": False, "init_weights": False}, "inception_v3": {"init_weights": False}}


def vision(name: str, batch: int, size: int = 224) -> Factory:
    """A classifier, or a segmentation model where the name is one of torchvision.models.segmentation."""

    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import torchvision

        segments = name.startswith(("deeplabv3", "lraspp"))
        known = torchvision.models.segmentation if segments else torchvision.models
        kwargs = {"weights_backbone": None} if segments else NO_AUX.get(name, {})
        with torch.device("cpu" if name in BUILT_ON_CPU else device):
            model = getattr(known, name)(weights=None, **kwargs)
        return model.to(device, dtype), (torch.randn(batch, 3, size, size, device=device, dtype=dtype),)

    return build


def video(name: str, batch: int, frames: int, size: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import torchvision

        with torch.device(device):
            model = getattr(torchvision.models.video, name)(weights=None)
        return model.to(device, dtype), (torch.randn(batch, 3, frames, size, size, device=device, dtype=dtype),)

    return build


def timm_model(name: str, batch: int, size: int = 224) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import timm

        model = timm.create_model(name, pretrained=False)
        return model.to(device, dtype), (torch.randn(batch, 3, size, size, device=device, dtype=dtype),)

    return build


# -- Hugging Face -----------------------------------------------------------------------------------------------


def pairs(batch: int, seq: int, target: int, vocab: int, labels: bool = False) -> Maker:
    """Inputs of an encoder and its decoder."""
    names = f"input_ids {'labels' if labels else 'decoder_input_ids'}"
    return named(names, beside(whole(vocab, batch, seq), whole(vocab, batch, target)))


def albert(batch: int, seq: int) -> Factory:
    size = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    return hf("AlbertForMaskedLM", "AlbertConfig", tokens(batch, seq, 30000), **size)


def electra(batch: int, seq: int) -> Factory:
    return hf("ElectraForMaskedLM", "ElectraConfig", tokens(batch, seq, 30522, labels=True))


def bart_base(inputs: Maker) -> Factory:
    size = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    return hf("BartForConditionalGeneration", "BartConfig", inputs, **size, **heads)


def gpt_neo(batch: int, seq: int) -> Factory:
    """125M: every second layer attends locally."""
    return hf(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        tokens(batch, seq, 50257),
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        attention_types=[[["global", "local"], 6]],
    )


def gpt2(batch: int, seq: int, layers: int, width: int, heads: int, labels: bool = False) -> Factory:
    size = {"vocab_size": 50257, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return hf("GPT2LMHeadModel", "GPT2Config", tokens(batch, seq, 50257, labels), **size)


def falcon(batch: int, seq: int) -> Factory:
    """One head of keys for all queries; attention and MLP side by side."""
    return hf(
        "FalconForCausalLM",
        "FalconConfig",
        tokens(batch, seq, 65024),
        hidden_size=4544,
        num_hidden_layers=6,
        num_attention_heads=71,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        bias=False,
        alibi=False,
    )


def phi(batch: int, seq: int) -> Factory:
    return decoder("Phi", tokens(batch, seq, 51200), 2048, 8192, 24, (32, 32), 51200)


def gemma(batch: int, seq: int) -> Factory:
    return decoder("Gemma", tokens(batch, seq, 256000), 2048, 16384, 10, (8, 1), 256000, head_dim=256)


def mistral(batch: int, seq: int) -> Factory:
    return decoder("Mistral", tokens(batch, seq, 32000), 4096, 14336, 8, (32, 8), 32000, sliding_window=None)


def bloom(batch: int, seq: int) -> Factory:
    """560M, with linear biases to attention."""
    return hf("BloomForCausalLM", "BloomConfig", tokens(batch, seq, 250880), hidden_size=1024, n_layer=24, n_head=16)


def olmoe(batch: int, seq: int) -> Factory:
    experts = {"num_experts": 64, "num_experts_per_tok": 8}
    return decoder("Olmoe", tokens(batch, seq, 50304), 2048, 1024, 6, (16, 16), 50304, **experts)


def t5_base(batch: int, seq: int, target: int) -> Factory:
    size = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}
    return hf("T5ForConditionalGeneration", "T5Config", pairs(batch, seq, target, 32128), **size)


def wav2vec2(batch: int, seconds: int) -> Factory:
    return hf("Wav2Vec2ForCTC", "Wav2Vec2Config", named("input_values", numbers((batch, seconds * 16000))))


def llama_8b(batch: int, seq: int, layers: int, labels: bool = False) -> Factory:
    inputs = tokens(batch, seq, 128256, labels)
    return decoder("Llama", inputs, 4096, 14336, layers, (32, 8), 128256, max_position_embeddings=8192)


def opt_1_3b(batch: int, seq: int) -> Factory:
    size = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
    return hf("OPTForCausalLM", "OPTConfig", tokens(batch, seq, 50272), word_embed_proj_dim=2048, **size)


def bert_base(batch: int, seq: int) -> Factory:
    size = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    return hf("BertModel", "BertConfig", tokens(batch, seq, 30522), vocab_size=30522, **size)


# -- written by hand --------------------------------------------------------------------------------------------


class GruModel(nn.Module):
    def __init__(self, vocab: int = 20000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embedding(x))[0])


class HandAttention(nn.Module):
    """matmul, mask, softmax, matmul: no fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d // self.heads)
        hidden = torch.ones(s, s, device=x.device, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(b, s, d))


class HandModel(nn.Module):
    def __init__(self, width: int = 1024, heads: int = 16, layers: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.attention = nn.ModuleList(HandAttention(width, heads) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, attend in enumerate(self.attention):
            x = x + attend(self.norms[2 * i](x))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x)), approximate="tanh"))
        return self.head(x.mean(1))


class ResBlock(nn.Module):
    """Convolutions told the time, as diffusion models have them."""

    def __init__(self, cin: int, cout: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.time = nn.Linear(time, cout)
        self.norm2, self.conv2 = nn.GroupNorm(32, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class CrossBlock(nn.Module):
    """Attention over the pixels, then from the pixels to a text, then a gated MLP."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.n1, self.n2, self.n3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o1 = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(context, 2 * width, bias=False)
        self.o2, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (8, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        y = y + self.o1(self.attend(*self.qkv(self.n1(y)).chunk(3, -1)))
        y = y + self.o2(self.attend(self.q(self.n2(y)), *self.kv(text).chunk(2, -1)))
        value, gate = self.up(self.n3(y)).chunk(2, -1)
        y = y + self.down(value * F.gelu(gate))
        return x + y.transpose(1, 2).reshape(b, c, h, w)


class DiffusionUNet(nn.Module):
    """Predicts the noise in a latent image; with `labels` it answers with the squared error as its loss."""

    def __init__(self, width: int = 320, context: int = 768) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.width, self.first = width, nn.Conv2d(4, width, 3, padding=1)
        ins = [width, *widths[:-1]]
        self.down = nn.ModuleList(ResBlock(a, b, 4 * width) for a, b in zip(ins, widths, strict=True))
        self.down_text = nn.ModuleList(CrossBlock(w, context) for w in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle, self.middle_text = ResBlock(widths[-1], widths[-1], 4 * width), CrossBlock(widths[-1], context)
        outs = [*widths[-2::-1], width]
        self.up = nn.ModuleList(ResBlock(2 * w, o, 4 * width) for w, o in zip(widths[::-1], outs, strict=True))
        self.up_text = nn.ModuleList(CrossBlock(o, context) for o in outs)
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | SimpleNamespace:
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(10000) / (self.width // 2)))
        angles = t[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        x, kept = self.first(x), []
        for i, (block, attend) in enumerate(zip(self.down, self.down_text, strict=True)):
            x = attend(block(self.shrink[i - 1](x) if i else x, time), text)
            kept.append(x)
        x = self.middle_text(self.middle(x, time), text)
        for i, (block, attend) in enumerate(zip(self.up, self.up_text, strict=True)):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest") if i else x
            x = attend(block(torch.cat([x, kept.pop()], 1), time), text)
        x = self.last(F.silu(self.norm(x)))
        return x if labels is None else loss(F.mse_loss(x, labels))


class Squared(torch.autograd.Function):
    """Leaky squared ReLU with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, x * x, 0.01 * x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.where(x > 0, 2 * x, torch.full_like(x, 0.01))


class CustomGradient(nn.Module):
    def __init__(self, width: int = 2048, layers: int = 6) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + Squared.apply(linear(norm(x)))
        return self.head(x)


class Dlrm(nn.Module):
    """Click prediction: 26 tables, each summed over a bag, their pairwise products, and two MLPs."""

    def __init__(self, tables: int = 26, rows: int = 200_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = layers_of(13, 512, 256, width)
        self.top = layers_of(width + (tables + 1) * tables // 2, 1024, 1024, 512, 2)
        rows_of, cols_of = torch.tril_indices(tables + 1, tables + 1, -1, device="cpu")
        self.register_buffer("pairs", rows_of * (tables + 1) + cols_of, persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        bags = torch.stack([x, *(table(sparse[i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(bags, bags.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], 1))


def clicks(batch: int) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        bags = torch.randint(0, 200_000, (26, batch, 4), device=device)
        return torch.randn(batch, 13, device=device, dtype=dtype), bags

    return make


def noisy(batch: int, size: int, labels: bool = False) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        x = torch.randn(batch, 4, size, size, device=device, dtype=dtype)
        t = torch.randint(0, 1000, (batch,), device=device)
        text = torch.randn(batch, 77, 768, device=device, dtype=dtype)
        return {"x": x, "t": t, "text": text} | ({"labels": torch.randn_like(x)} if labels else {})

    return make


# -- the cases --------------------------------------------------------------------------------------------------


CASES = [
    # the drift against the public recording
    case("public_repeat_resnet18_b1", vision("resnet18", 1), 1),
    case("public_repeat_resnet50_train_b64", vision("resnet50", 64), 64, "bf16", **TRAIN_SGD),
    case("public_repeat_bert_base_b1_s128", bert_base(1, 128), 1, "bf16"),
    case("public_repeat_gpt2_train_b8_s1024", gpt2(8, 1024, 12, 768, 12, labels=True), 8, "bf16", **TRAIN_ADAMW),
    # every kind once, then more of each, in case the time runs out
    case("vit_b_16_train_b64", vision("vit_b_16", 64), 64, "bf16", **TRAIN_ADAMW),
    case("llama8b_8layers_decode_b1_past2048", decode(llama_8b(1, 1, 8), 1, 2048), 1, "bf16"),
    case("diffusion_unet_b1_s64", by_hand(DiffusionUNet, noisy(1, 64)), 1, "fp16"),
    case("hand_attention_b4_s1024", by_hand(HandModel, numbers((4, 1024, 1024))), 4, "fp16"),
    case("dlrm_train_b4096", by_hand(Dlrm, clicks(4096)), 4096, "fp32", **TRAIN_SGD),
    case("gru_b64_s100", by_hand(GruModel, whole(20000, 64, 100)), 64),
    case("custom_gradient_train_b512", by_hand(CustomGradient, numbers((512, 2048))), 512, "fp32", **TRAIN_SGD),
    case("olmoe_6layers_b1_s512", olmoe(1, 512), 1, "bf16"),
    case("wide_resnet50_2_b64_cl", vision("wide_resnet50_2", 64), 64, "bf16", **LAST),
    case("resnet101_train_b32_cl", vision("resnet101", 32), 32, "bf16", **TRAIN_SGD, **LAST),
    case("mixer_b16_b64", timm_model("mixer_b16_224", 64), 64, "fp16"),
    case("bart_base_train_b8_s256", bart_base(pairs(8, 256, 256, 50265, labels=True)), 8, "bf16", **TRAIN_ADAMW),
    case("wav2vec2_base_b4_5s", wav2vec2(4, 5), 4),
    case("gemma_10layers_b2_s1024", gemma(2, 1024), 2, "bf16"),
    case("mistral_8layers_b1_s4096", mistral(1, 4096), 1, "bf16"),
    case("bloom_560m_b4_s512", bloom(4, 512), 4, "bf16"),
    case("electra_small_train_b4_s64", electra(4, 64), 4, "fp32", **TRAIN_ADAMW),
    case("efficientnet_v2_s_train_b32", vision("efficientnet_v2_s", 32), 32, "bf16", **TRAIN_ADAMW),
    case("resnet101_b1", vision("resnet101", 1), 1),
    case("googlenet_b1", vision("googlenet", 1), 1),
    case("inception_v3_b32_s299", vision("inception_v3", 32, 299), 32, "fp16"),
    case("mnasnet1_0_b1", vision("mnasnet1_0", 1), 1),
    case("efficientnet_b3_b32_s300", vision("efficientnet_b3", 32, 300), 32),
    case("convnext_small_b32", vision("convnext_small", 32), 32, "bf16"),
    case("vit_b_16_b1", vision("vit_b_16", 1), 1),
    case("vit_l_16_b32", vision("vit_l_16", 32), 32, "bf16"),
    case("swin_v2_t_b16_s256", vision("swin_v2_t", 16, 256), 16, "fp16"),
    case("maxvit_t_b8", vision("maxvit_t", 8), 8),
    case("regnet_x_8gf_train_b32", vision("regnet_x_8gf", 32), 32, "fp32", **TRAIN_SGD),
    case("lraspp_mobilenet_v3_large_b1_s512", vision("lraspp_mobilenet_v3_large", 1, 512), 1),
    case("deeplabv3_mobilenet_v3_large_b8_s520", vision("deeplabv3_mobilenet_v3_large", 8, 520), 8, "bf16"),
    case("r3d_18_b2_f16_s112", video("r3d_18", 2, 16, 112), 2, "bf16"),
    case("deit_small_b1", timm_model("deit_small_patch16_224", 1), 1, "bf16"),
    case("beit_base_b16", timm_model("beit_base_patch16_224", 16), 16, "bf16"),
    case("resmlp_24_train_b32", timm_model("resmlp_24_224", 32), 32, "fp32", **TRAIN_SGD),
    case("albert_base_b16_s256", albert(16, 256), 16),
    case("gpt_neo_125m_b1_s256", gpt_neo(1, 256), 1),
    case("gpt2_medium_train_b4_s1024", gpt2(4, 1024, 24, 1024, 16, labels=True), 4, "bf16", **TRAIN_ADAMW),
    case("falcon_6layers_b4_s1024", falcon(4, 1024), 4, "bf16"),
    case("phi_1_5_b1_s128", phi(1, 128), 1, "fp16"),
    case("t5_base_b4_s512", t5_base(4, 512, 128), 4, "bf16"),
    case("llama8b_4layers_b1_s2048", llama_8b(1, 2048, 4), 1, "bf16"),
    case("llama8b_4layers_train_b1_s2048", llama_8b(1, 2048, 4, labels=True), 1, "bf16", **TRAIN_ADAMW),
    case("opt_1_3b_b1_s128", opt_1_3b(1, 128), 1, "fp16"),
    case("hand_attention_train_b4_s512", by_hand(HandModel, numbers((4, 512, 1024))), 4, "fp16", **TRAIN_SGD),
    case("diffusion_unet_train_b8_s32", by_hand(DiffusionUNet, noisy(8, 32, labels=True)), 8, "fp32", **TRAIN_ADAMW),
    case("dlrm_b2048", by_hand(Dlrm, clicks(2048)), 2048, "bf16"),
    case("gru_train_b32_s64", by_hand(GruModel, whole(20000, 32, 64)), 32, "fp32", **TRAIN_ADAMW),
    case("cait_s24_b8", timm_model("cait_s24_224", 8), 8, "fp32"),
]
