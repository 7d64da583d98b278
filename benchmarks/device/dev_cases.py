"""Models the predictor is developed on: about fifty, none of the public test set and none of the held-out families.

    python benchmarks/device/record_models.py benchmarks/device/dev_cases.py OUT_PREFIX

A case's `factory(device, dtype)` builds the model with random weights (nothing is downloaded) and its inputs, on any
device: "cuda" to measure, "meta" to predict. Inputs are a tuple (positional) or a dict (keywords).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from case_forms import (
    LAST,
    TRAIN_ADAMW,
    TRAIN_SGD,
    Factory,
    Inputs,
    beside,
    by_hand,
    case,
    decode,
    decoder,
    hf,
    images,
    layers_of,
    named,
    numbers,
    tokens,
    whole,
)

# -- torchvision ------------------------------------------------------------------------------------------------

BUILT_ON_CPU = {"regnet_y_400mf"}  # its widths are computed with tensors, which "meta" cannot answer


def vision(name: str, batch: int, size: int = 224) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import torchvision

        known = torchvision.models.segmentation if "_resnet50" in name else torchvision.models
        kwargs = {"weights_backbone": None} if "_resnet50" in name else {}
        with torch.device("cpu" if name in BUILT_ON_CPU else device):
            model = getattr(known, name)(weights=None, **kwargs)
        return model.to(device, dtype), (torch.randn(batch, 3, size, size, device=device, dtype=dtype),)

    return build


# -- Hugging Face -----------------------------------------------------------------------------------------------


def distilbert(batch: int, seq: int, head: str = "MaskedLM", labels: bool = False) -> Factory:
    return hf(f"DistilBertFor{head}", "DistilBertConfig", tokens(batch, seq, 30522, labels))


def roberta_large(batch: int, seq: int) -> Factory:
    size = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return hf(
        "RobertaModel",
        "RobertaConfig",
        tokens(batch, seq, 50000),
        vocab_size=50265,
        max_position_embeddings=514,
        **size,
    )


def llama(batch: int, seq: int, labels: bool = False) -> Factory:
    more = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
    return decoder("Llama", tokens(batch, seq, 128256, labels), 2048, 8192, 16, (32, 8), 128256, **more)


def opt_125m(batch: int, seq: int, labels: bool = False) -> Factory:
    return hf("OPTForCausalLM", "OPTConfig", tokens(batch, seq, 50272, labels))


def opt_350m(batch: int, seq: int) -> Factory:
    size = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096}
    return hf(
        "OPTForCausalLM",
        "OPTConfig",
        tokens(batch, seq, 50272),
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
        **size,
    )


def qwen2(batch: int, seq: int, labels: bool = False) -> Factory:
    inputs = tokens(batch, seq, 151936, labels)
    return decoder("Qwen2", inputs, 896, 4864, 24, (14, 2), 151936, tie_word_embeddings=True)


def t5_small(batch: int, seq: int, target: int, train: bool = False) -> Factory:
    names = f"input_ids {'labels' if train else 'decoder_input_ids'}"
    inputs = named(names, beside(whole(32128, batch, seq), whole(32128, batch, target)))
    size = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0}
    return hf("T5ForConditionalGeneration", "T5Config", inputs, **size)


def whisper_tiny(batch: int, target: int) -> Factory:
    inputs = named("input_features decoder_input_ids", beside(numbers((batch, 80, 3000)), whole(51865, batch, target)))
    size = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6}
    more = {"decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    return hf("WhisperForConditionalGeneration", "WhisperConfig", inputs, **size, **more)


def mixtral_tiny(batch: int, seq: int) -> Factory:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return decoder("Mixtral", tokens(batch, seq, 32000), 1024, 3584, 8, (16, 4), 32000, **experts)


def clip_vision(batch: int) -> Factory:
    return hf("CLIPVisionModel", "CLIPVisionConfig", images(batch, 224))


# -- plain torch.nn ---------------------------------------------------------------------------------------------


class LstmModel(nn.Module):
    def __init__(self, vocab: int = 33278, width: int = 650) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class Block(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1),
            nn.GroupNorm(8, cout),
            nn.SiLU(),
            nn.Conv2d(cout, cout, 3, padding=1),
            nn.GroupNorm(8, cout),
            nn.SiLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class UNet(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4, classes: int = 21) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.join = nn.ModuleList(Block(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


class Classifier(nn.Module):
    """A stack of encoder layers, pooled: in eval mode they take the fused native path."""

    def __init__(self, width: int, heads: int, layers: int, hidden: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def plain(make: Callable[[], nn.Module], *shape: int, vocab: int = 0) -> Factory:
    """A module of ours; its input is random numbers of this shape, or token ids where there is a vocabulary."""
    return by_hand(make, whole(vocab, *shape) if vocab else numbers(shape))


def wide_mlp() -> nn.Module:
    return layers_of(1024, 4096, 4096, 4096, 4096, 1000)


def small_mlp() -> nn.Module:
    return layers_of(784, 512, 512, 10)


def encoder() -> nn.Module:
    return Classifier(512, 8, 6, 2048)


def big_encoder() -> nn.Module:
    return Classifier(1024, 16, 12, 4096)


# -- the cases --------------------------------------------------------------------------------------------------


CASES = [
    # the ones that teach most come first, in case the time runs out
    case("llama1b_prefill_b1_s2048", llama(1, 2048), 1, "bf16"),
    case("llama1b_decode_b1_past1024", decode(llama(1, 1), 1, 1024), 1, "bf16"),
    case("swin_t_b64", vision("swin_t", 64), 64, "bf16"),
    case("efficientnet_b0_b128_cl", vision("efficientnet_b0", 128), 128, "bf16", **LAST),
    case("convnext_tiny_train_b32", vision("convnext_tiny", 32), 32, "bf16", **TRAIN_ADAMW),
    case("distilbert_train_b32_s128", distilbert(32, 128, labels=True), 32, "fp32", **TRAIN_ADAMW),
    case("t5_small_b16_s512", t5_small(16, 512, 128), 16, "fp32"),
    case("encoder_eval_b16_s256", plain(encoder, 16, 256, 512), 16, "bf16"),
    case("resnet34_b1", vision("resnet34", 1), 1),
    case("resnet34_train_b64", vision("resnet34", 64), 64, "fp32", **TRAIN_SGD),
    case("unet_b8", plain(UNet, 8, 3, 256, 256), 8, "bf16"),
    case("lstm_b32_s128", plain(LstmModel, 32, 128, vocab=33278), 32),
    case("mixtral_tiny_b2_s512", mixtral_tiny(2, 512), 2, "bf16"),
    case("resnet34_b128_cl", vision("resnet34", 128), 128, "bf16", **LAST),
    case("resnext50_b32", vision("resnext50_32x4d", 32), 32, "fp16"),
    case("resnext50_train_b32_cl", vision("resnext50_32x4d", 32), 32, "bf16", **TRAIN_SGD, **LAST),
    case("densenet121_b1", vision("densenet121", 1), 1, "bf16"),
    case("densenet121_train_b32", vision("densenet121", 32), 32, "fp32", **TRAIN_ADAMW),
    case("efficientnet_b0_b1", vision("efficientnet_b0", 1), 1),
    case("efficientnet_b0_train_b64", vision("efficientnet_b0", 64), 64, "bf16", **TRAIN_ADAMW),
    case("mobilenet_v3_large_b1", vision("mobilenet_v3_large", 1), 1),
    case("mobilenet_v3_large_b256", vision("mobilenet_v3_large", 256), 256, "fp16"),
    case("mobilenet_v3_large_train_b128", vision("mobilenet_v3_large", 128), 128, "fp32", **TRAIN_SGD),
    case("convnext_tiny_b1", vision("convnext_tiny", 1), 1, "fp16"),
    case("convnext_tiny_b64", vision("convnext_tiny", 64), 64, "fp32"),
    case("vgg16_b16", vision("vgg16", 16), 16),
    case("vgg16_b64_cl", vision("vgg16", 64), 64, "bf16", **LAST),
    case("squeezenet1_1_b1", vision("squeezenet1_1", 1), 1),
    case("squeezenet1_1_b128", vision("squeezenet1_1", 128), 128, "bf16"),
    case("shufflenet_v2_b64", vision("shufflenet_v2_x1_0", 64), 64),
    case("regnet_y_400mf_b1", vision("regnet_y_400mf", 1), 1, "fp16"),
    case("regnet_y_400mf_train_b128", vision("regnet_y_400mf", 128), 128, "bf16", **TRAIN_SGD),
    case("swin_t_b1", vision("swin_t", 1), 1, "fp32"),
    case("swin_t_train_b32", vision("swin_t", 32), 32, "fp32", **TRAIN_ADAMW),
    case("vit_b_32_b1", vision("vit_b_32", 1), 1),
    case("vit_b_32_b256", vision("vit_b_32", 256), 256, "fp16"),
    case("vit_b_32_train_b64", vision("vit_b_32", 64), 64, "bf16", **TRAIN_ADAMW),
    case("deeplabv3_resnet50_b2_s512", vision("deeplabv3_resnet50", 2, 512), 2, "bf16"),
    case("fcn_resnet50_b4_s520", vision("fcn_resnet50", 4, 520), 4),
    case("distilbert_b1_s128", distilbert(1, 128), 1),
    case("distilbert_b64_s256", distilbert(64, 256), 64, "bf16"),
    case("roberta_large_b8_s512", roberta_large(8, 512), 8, "bf16"),
    case("roberta_large_b1_s64", roberta_large(1, 64), 1, "fp16"),
    case("llama1b_prefill_b8_s512", llama(8, 512), 8, "fp16"),
    case("llama1b_decode_b32_past1024", decode(llama(32, 1), 32, 1024), 32, "bf16"),
    case("llama1b_train_b2_s1024", llama(2, 1024, labels=True), 2, "bf16", **TRAIN_ADAMW),
    case("opt_125m_b8_s1024", opt_125m(8, 1024), 8, "fp16"),
    case("opt_125m_train_b4_s512", opt_125m(4, 512, labels=True), 4, "fp32", **TRAIN_SGD),
    case("opt_350m_b1_s512", opt_350m(1, 512), 1, "bf16"),
    case("qwen2_05b_b1_s512", qwen2(1, 512), 1, "bf16"),
    case("qwen2_05b_train_b4_s512", qwen2(4, 512, labels=True), 4, "bf16", **TRAIN_ADAMW),
    case("t5_small_train_b16_s256", t5_small(16, 256, 64, train=True), 16, "bf16", **TRAIN_ADAMW),
    case("whisper_tiny_b4", whisper_tiny(4, 32), 4, "fp16"),
    case("clip_vision_b64", clip_vision(64), 64, "bf16"),
    case("clip_vision_b1", clip_vision(1), 1, "fp32"),
    case("lstm_train_b32_s128", plain(LstmModel, 32, 128, vocab=33278), 32, "fp32", **TRAIN_SGD),
    case("mlp_wide_b4096", plain(wide_mlp, 4096, 1024), 4096, "bf16"),
    case("mlp_wide_train_b1024", plain(wide_mlp, 1024, 1024), 1024, "fp32", **TRAIN_ADAMW),
    case("mlp_small_b64", plain(small_mlp, 64, 784), 64),
    case("encoder_train_b16_s256", plain(encoder, 16, 256, 512), 16, "bf16", **TRAIN_SGD),
    case("big_encoder_eval_b8_s512", plain(big_encoder, 8, 512, 1024), 8, "fp16"),
    case("unet_train_b4", plain(UNet, 4, 3, 256, 256), 4, "fp32", **TRAIN_ADAMW),
]
