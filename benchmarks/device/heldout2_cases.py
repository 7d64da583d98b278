"""A second set the predictor is judged on: chosen by an outsider, none in dev_cases.py, heldout_cases.py or the public rows.

    python benchmarks/device/record_models.py benchmarks/device/heldout2_cases.py OUT_PREFIX --quick

The format is that of dev_cases.py, from which nothing is imported: a change there must not move these. What is in
case_forms.py makes these models too. Autocast, TF32 matrix products and gradient checkpointing are part of the models
here, as a user writes them; the `dtype` of a case is that of its weights and inputs.
"""

from __future__ import annotations

import itertools
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
    Res,
    Wrapper,
    autocast,
    beside,
    built_on,
    by_hand,
    case,
    decode,
    decoder,
    hf,
    ids,
    images,
    layers_of,
    loss,
    named,
    numbers,
    tf32,
    tokens,
    vision,
    waves,
    whole,
    wrapped,
)

# -- how a model is run -----------------------------------------------------------------------------------------


def checkpointed(model: nn.Module) -> nn.Module:
    """Every layer of a Hugging Face model is computed again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


# -- torchvision and timm ---------------------------------------------------------------------------------------


def timm_model(name: str, batch: int, size: int = 224) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import timm

        with built_on(device):
            model = timm.create_model(name, pretrained=False)
        return model.to(device, dtype), (torch.randn(batch, 3, size, size, device=device, dtype=dtype),)

    return build


# -- Hugging Face -----------------------------------------------------------------------------------------------


def qwen3_4b(batch: int, seq: int, layers: int) -> Factory:
    """Queries and keys are normalised; the heads are wider together than the model."""
    tied = {"head_dim": 128, "tie_word_embeddings": True}
    return decoder("Qwen3", tokens(batch, seq, 151936), 2560, 9728, layers, (32, 8), 151936, **tied)


def qwen25_7b(batch: int, seq: int, layers: int) -> Factory:
    return decoder("Qwen2", tokens(batch, seq, 152064), 3584, 18944, layers, (28, 4), 152064)


def qwen25_1_5b(batch: int, seq: int, layers: int) -> Factory:
    inputs = tokens(batch, seq, 151936, labels=True)
    tied = {"tie_word_embeddings": True, "use_cache": False}
    return decoder("Qwen2", inputs, 1536, 8960, layers, (12, 2), 151936, **tied)


def qwen3_moe(batch: int, seq: int, layers: int) -> Factory:
    """30B-A3B, cut: 128 experts, 8 of them for a token."""
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    inputs = tokens(batch, seq, 151936)
    return decoder("Qwen3Moe", inputs, 2048, 6144, layers, (32, 4), 151936, head_dim=128, **experts)


def gemma3_1b(batch: int, seq: int) -> Factory:
    """Five layers of six attend to a window of 512."""
    return hf(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        tokens(batch, seq, 262144),
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        vocab_size=262144,
    )


def phi3_mini(batch: int, seq: int, layers: int) -> Factory:
    inputs = tokens(batch, seq, 32000)
    return decoder("Phi3", inputs, 3072, 8192, layers, (32, 32), 32064, max_position_embeddings=8192)


def pythia_410m(batch: int, seq: int) -> Factory:
    return hf(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        tokens(batch, seq, 50304, labels=True),
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        vocab_size=50304,
    )


def modernbert(batch: int, seq: int) -> Factory:
    return hf("ModernBertForMaskedLM", "ModernBertConfig", tokens(batch, seq, 50000))


def deberta_v3_base(batch: int, seq: int) -> Factory:
    return hf(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        tokens(batch, seq, 128000),
        vocab_size=128100,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        max_relative_positions=-1,
    )


def xlmr_base(batch: int, seq: int) -> Factory:
    return hf(
        "XLMRobertaForSequenceClassification",
        "XLMRobertaConfig",
        named("input_ids labels", beside(whole(250002, batch, seq), whole(3, batch))),
        vocab_size=250002,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_labels=3,
    )


def esm2_150m(batch: int, seq: int) -> Factory:
    """Proteins: thirty narrow layers."""
    return hf(
        "EsmForMaskedLM",
        "EsmConfig",
        lambda device, dtype: {"input_ids": torch.randint(4, 24, (batch, seq), device=device)},
        vocab_size=33,
        pad_token_id=1,
        mask_token_id=32,
        hidden_size=640,
        num_hidden_layers=30,
        num_attention_heads=20,
        intermediate_size=2560,
        position_embedding_type="rotary",
        token_dropout=False,
        emb_layer_norm_before=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def segformer_b2(batch: int, size: int) -> Factory:
    return hf(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        images(batch, size),
        depths=[3, 4, 6, 3],
        hidden_sizes=[64, 128, 320, 512],
        decoder_hidden_size=768,
        num_labels=150,
    )


def dinov2_base(batch: int, size: int) -> Factory:
    return hf("Dinov2Model", "Dinov2Config", images(batch, size), image_size=size, patch_size=14)


class ClipLogits(Wrapper):
    """Images against texts."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, pixel_values=pixel_values).logits_per_image


def clip_l14(batch: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        from transformers import CLIPConfig, CLIPModel

        text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
        seen = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
        config = CLIPConfig(
            text_config={**text, "projection_dim": 768},
            vision_config={**seen, "patch_size": 14, "projection_dim": 768},
            projection_dim=768,
        )
        with torch.device(device):
            model = CLIPModel(config)
        inputs = {"input_ids": ids(device, batch, 77, 49408), **images(batch, 224)(device, dtype)}
        return ClipLogits(model).to(device, dtype), inputs

    return build


class WhisperDecode(nn.Module):
    """One token of a transcript; keys and values of the sound (1500 frames) are in the cache."""

    def __init__(self, model: nn.Module, batch: int, past: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers import DynamicCache, EncoderDecoderCache

        c = model.config
        own, cross = DynamicCache(), DynamicCache()

        def pair(length: int) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (batch, c.decoder_attention_heads, length, c.d_model // c.decoder_attention_heads)
            return torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)

        self.past = [pair(past) for _ in range(c.decoder_layers)]
        for i, (k, v) in enumerate(self.past):
            own.update(k, v, i)
            cross.update(*pair(1500), i)
        self.model, self.cache = model, EncoderDecoderCache(own, cross)

    def forward(self, decoder_input_ids: torch.Tensor, frames: torch.Tensor) -> Any:
        for layer, (k, v) in zip(self.cache.self_attention_cache.layers, self.past, strict=True):
            layer.keys, layer.values = k, v
        return self.model(
            decoder_input_ids=decoder_input_ids, encoder_outputs=(frames,), past_key_values=self.cache, use_cache=True
        )


WHISPER_SMALL = {
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}


def whisper_small_decode(batch: int, past: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        with torch.device(device):
            model = WhisperForConditionalGeneration(WhisperConfig(**WHISPER_SMALL))
        model = WhisperDecode(model.to(device, dtype), batch, past, device, dtype)
        frames = torch.randn(batch, 1500, 768, device=device, dtype=dtype)
        return model, {"decoder_input_ids": ids(device, batch, 1, 51865), "frames": frames}

    return build


def whisper_large_encoder(batch: int, layers: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        size = {"d_model": 1280, "encoder_layers": layers, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
        with torch.device(device):
            model = WhisperEncoder(WhisperConfig(num_mel_bins=128, **size))
        sound = torch.randn(batch, 128, 3000, device=device, dtype=dtype)
        return model.to(device, dtype), {"input_features": sound}

    return build


# -- pictures and sounds are made -------------------------------------------------------------------------------


class DitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulate = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(F.silu(c))[:, None].chunk(6, -1)
        y = self.qkv(self.n1(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1))
        q, k, v = y.permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.n2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class Dit(nn.Module):
    """DiT-XL/2, cut: a transformer over latent patches, told time and class by scales and shifts."""

    def __init__(self, width: int = 1152, heads: int = 16, layers: int = 10, size: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, (size // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.head = nn.Linear(width, 2 * 2 * 8)
        self.size = size

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c = self.time(waves(t, 256).to(x.dtype)) + self.label(y)
        x = self.patch(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, c)
        x = self.head(self.norm(x))
        n = self.size // 2
        return x.view(-1, n, n, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, self.size, self.size)


class PixelAttention(nn.Module):
    """One head over all pixels, with convolutions of one pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, eps=1e-6)
        self.q, self.k, self.v, self.out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).flatten(2).transpose(1, 2)[:, None] for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class VaeDecoder(nn.Module):
    """Stable Diffusion's: a latent of 64 x 64 becomes a picture of 512 x 512."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 512, 3, padding=1)
        self.middle = nn.ModuleList([Res(512, 512), PixelAttention(512), Res(512, 512)])
        steps: list[nn.Module] = []
        for i, (a, b) in enumerate([(512, 512), (512, 512), (512, 256), (256, 128)]):
            steps += [Res(a, b), Res(b, b), Res(b, b)]
            if i < 3:
                steps += [nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(b, b, 3, padding=1)]
        self.up = nn.ModuleList(steps)
        self.norm, self.last = nn.GroupNorm(32, 128, eps=1e-6), nn.Conv2d(128, 3, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.first(z)
        for step in itertools.chain(self.middle, self.up):
            x = step(x)
        return self.last(F.silu(self.norm(x)))


class DdpmUNet(nn.Module):
    """Noise in pictures of 32 x 32, attention at 16 x 16; answers with the squared error as its loss."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        widths, time = [width, 2 * width, 2 * width, 2 * width], 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, kept, w = nn.ModuleList(), nn.ModuleList(), [width], width
        for i, out in enumerate(widths):
            for _ in range(2):
                attend = PixelAttention(out) if i == 1 else nn.Identity()
                self.down.append(nn.ModuleList([Res(w, out, time, 0.1), attend]))
                kept.append(w := out)
            if i < 3:
                self.down.append(nn.Conv2d(out, out, 3, stride=2, padding=1))
                kept.append(out)
        self.middle = nn.ModuleList([Res(w, w, time, 0.1), Res(w, w, time, 0.1)])
        self.centre = PixelAttention(w)
        for i, out in reversed(list(enumerate(widths))):
            for _ in range(3):
                attend = PixelAttention(out) if i == 1 else nn.Identity()
                self.up.append(nn.ModuleList([Res(w + kept.pop(), out, time, 0.1), attend]))
                w = out
            if i:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(out, out, 3, padding=1)))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        time = self.time(waves(t, self.width).to(x.dtype))
        x = self.first(x)
        kept = [x]
        for step in self.down:
            x = step(x) if isinstance(step, nn.Conv2d) else step[1](step[0](x, time))
            kept.append(x)
        x = self.middle[1](self.centre(self.middle[0](x, time)), time)
        for step in self.up:
            up = isinstance(step, nn.Sequential)
            x = step(x) if up else step[1](step[0](torch.cat([x, kept.pop()], 1), time))
        x = self.last(F.silu(self.norm(x)))
        return loss(F.mse_loss(x.float(), labels))


class HifiBlock(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.wide = nn.ModuleList(
            nn.Conv1d(width, width, kernel, dilation=d, padding=d * (kernel - 1) // 2) for d in (1, 3, 5)
        )
        self.near = nn.ModuleList(nn.Conv1d(width, width, kernel, padding=(kernel - 1) // 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, near in zip(self.wide, self.near, strict=True):
            x = x + near(F.leaky_relu(wide(F.leaky_relu(x, 0.1)), 0.1))
        return x


class HifiGan(nn.Module):
    """Sound from a mel spectrogram (V1, without its weight norm): 256 samples a frame."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, padding=3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in ((8, 16), (8, 16), (2, 4), (2, 4)):
            self.ups.append(nn.ConvTranspose1d(width, width // 2, kernel, rate, padding=(kernel - rate) // 2))
            width //= 2
            self.blocks.append(nn.ModuleList(HifiBlock(width, k) for k in (3, 7, 11)))
        self.last = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        x = self.first(mel)
        for up, blocks in zip(self.ups, self.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = torch.stack([block(x) for block in blocks]).sum(0) / 3
        return torch.tanh(self.last(F.leaky_relu(x)))


# -- other models written by hand -------------------------------------------------------------------------------


def convs3d(cin: int, cout: int, stride: int) -> nn.Sequential:
    steps: list[nn.Module] = []
    for a, s in ((cin, stride), (cout, 1)):
        steps += [
            nn.Conv3d(a, cout, 3, stride=s, padding=1),
            nn.InstanceNorm3d(cout, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        ]
    return nn.Sequential(*steps)


class UNet3d(nn.Module):
    """Organs in a scan, as nnU-Net has it."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256, 320), classes: int = 5) -> None:
        super().__init__()
        ins = (1, *widths[:-1])
        self.down = nn.ModuleList(
            convs3d(a, b, 2 if i else 1) for i, (a, b) in enumerate(zip(ins, widths, strict=True))
        )
        pairs = list(itertools.pairwise(widths[::-1]))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in pairs)
        self.join = nn.ModuleList(convs3d(2 * b, b, 1) for _, b in pairs)
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for step in self.down:
            x = step(x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


class Nerf(nn.Module):
    """Colour and density of points: eight layers of 256 over waves of place and direction."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        ins = [63, *[width] * 4, width + 63, width, width]
        self.layers = nn.ModuleList(nn.Linear(i, width) for i in ins)
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    @staticmethod
    def waves(x: torch.Tensor, n: int) -> torch.Tensor:
        angles = (x[..., None] * 2.0 ** torch.arange(n, device=x.device)).flatten(-2)
        return torch.cat([x, angles.sin(), angles.cos()], -1)

    def forward(self, points: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        place = self.waves(points, 10)
        x = place
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat([x, place], -1) if i == 5 else x))
        seen = F.relu(self.view(torch.cat([self.feature(x), self.waves(directions, 4)], -1)))
        return torch.cat([torch.sigmoid(self.colour(seen)), F.relu(self.density(x))], -1)


class DcnV2(nn.Module):
    """Clicks: one table for 26 fields, three full cross layers beside an MLP with BatchNorm."""

    def __init__(self, fields: int = 26, rows: int = 40_000, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(fields * rows, width)
        self.register_buffer("offsets", torch.arange(fields) * rows, persistent=False)
        d = fields * width + 13
        self.cross = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.deep = nn.Sequential(
            nn.Linear(d, 768),
            nn.BatchNorm1d(768),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(768, 768),
            nn.BatchNorm1d(768),
            nn.ReLU(),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(d + 768, 2)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x0 = torch.cat([self.table(sparse + self.offsets).flatten(1), dense], 1)
        x = x0
        for cross in self.cross:
            x = x0 * cross(x) + x
        return self.head(torch.cat([x, self.deep(x0)], 1))


class TwoTower(nn.Module):
    """People against things, every other thing of the batch a wrong answer."""

    def __init__(self, people: int = 500_000, things: int = 200_000, width: int = 128) -> None:
        super().__init__()
        self.person, self.thing = nn.Embedding(people, width), nn.Embedding(things, width)
        self.left, self.right = layers_of(2 * width, 512, 256, width), layers_of(width, 512, 256, width)

    def forward(self, person: torch.Tensor, history: torch.Tensor, thing: torch.Tensor) -> torch.Tensor:
        left = self.left(torch.cat([self.person(person), self.thing(history).mean(1)], 1))
        right = self.right(self.thing(thing))
        return F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).t() / 0.05


class Forecast(nn.Module):
    """A day of hourly readings; which of 24 bins comes next."""

    def __init__(self, inputs: int = 32, width: int = 256) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, 3, batch_first=True, dropout=0.2)
        self.head = layers_of(width, 128, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Seq2Seq(nn.Module):
    """Translation as before transformers: a GRU cell a step, attending to what the encoder said."""

    def __init__(self, vocab: int = 16000, width: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(2 * width, width)
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, last = self.encoder(self.source(source))
        keys, h, answers = self.key(memory), torch.cat([last[0], last[1]], -1), []
        for x in self.target(target).unbind(1):
            weights = torch.softmax(self.score(torch.tanh(keys + self.query(h)[:, None])), 1)
            context = (weights * memory).sum(1)
            h = self.cell(torch.cat([x, context], -1), h)
            answers.append(self.head(torch.cat([h, context], -1)))
        return torch.stack(answers, 1)


# -- the cases --------------------------------------------------------------------------------------------------

LATENTS = beside(numbers((16, 4, 32, 32)), whole(1000, 16), whole(1000, 16))
NOISY = named("x t labels", beside(numbers((64, 3, 32, 32)), whole(1000, 64), numbers((64, 3, 32, 32))))
VISITS = beside(whole(500_000, 4096), whole(200_000, 4096, 20), whole(200_000, 4096))

CASES = [
    # every kind once, then more of each, in case the time runs out
    case("qwen3_4b_6layers_b1_s3072", qwen3_4b(1, 3072, 6), 1, "bf16"),
    case("qwen25_7b_6layers_decode_b16_past1500", decode(qwen25_7b(16, 1, 6), 16, 1500), 16, "bf16"),
    case("pythia_410m_autocast_train_b4_s1024", autocast(pythia_410m(4, 1024)), 4, "fp32", **TRAIN_ADAMW),
    case("convnextv2_tiny_b128_cl", timm_model("convnextv2_tiny", 128), 128, "bf16", **LAST),
    case("sd_vae_decoder_b1_s64", by_hand(VaeDecoder, numbers((1, 4, 64, 64))), 1, "fp16"),
    case("resnet152_autocast_train_b48_cl", autocast(vision("resnet152", 48)), 48, "fp32", **TRAIN_SGD, **LAST),
    case("deberta_v3_base_b8_s256", deberta_v3_base(8, 256), 8),
    case("whisper_small_decode_b8_past64", whisper_small_decode(8, 64), 8, "fp16"),
    case(
        "dcn_v2_train_b8192",
        by_hand(DcnV2, beside(numbers((8192, 13)), whole(40_000, 8192, 26))),
        8192,
        "fp32",
        **TRAIN_ADAMW,
    ),
    case("modernbert_base_b16_s512", modernbert(16, 512), 16, "bf16"),
    case(
        "qwen25_1_5b_8layers_checkpoint_train_b4_s1024",
        wrapped(checkpointed, qwen25_1_5b(4, 1024, 8)),
        4,
        "bf16",
        **TRAIN_ADAMW,
    ),
    case("esm2_150m_tf32_b8_s512", tf32(esm2_150m(8, 512)), 8),
    case("hifigan_b1_f400", by_hand(HifiGan, numbers((1, 80, 400))), 1),
    case("forecast_lstm_train_b256", by_hand(Forecast, numbers((256, 24, 32))), 256, "fp32", **TRAIN_ADAMW),
    case("mobilenet_v3_small_b512_cl", vision("mobilenet_v3_small", 512), 512, "fp16", **LAST),
    case("ddpm_unet_autocast_train_b64", autocast(by_hand(DdpmUNet, NOISY)), 64, "fp32", **TRAIN_ADAMW),
    case("swin_b_b16", vision("swin_b", 16), 16, "fp16"),
    case("clip_vit_l14_b32", clip_l14(32), 32, "fp16"),
    case("xlmr_base_train_b32_s128", xlmr_base(32, 128), 32, "fp32", **TRAIN_ADAMW),
    case("phi3_mini_6layers_decode_b1_past4000", decode(phi3_mini(1, 1, 6), 1, 4000), 1, "fp16"),
    case("dit_xl_10layers_b16", by_hand(Dit, LATENTS), 16, "bf16"),
    case(
        "efficientnet_b4_autocast_train_b16_s380", autocast(vision("efficientnet_b4", 16, 380)), 16, "fp32", **TRAIN_SGD
    ),
    case("regnet_y_16gf_b64_cl", vision("regnet_y_16gf", 64), 64, "bf16", **LAST),
    case("seq2seq_gru_b32_s40", by_hand(Seq2Seq, beside(whole(16000, 32, 40), whole(16000, 32, 40))), 32),
    case("unet3d_b1_s128", by_hand(UNet3d, numbers((1, 1, 128, 128, 128))), 1, "fp16"),
    case("segformer_b2_b4_s512", segformer_b2(4, 512), 4, "fp16"),
    case("gmlp_s16_train_b64", timm_model("gmlp_s16_224", 64), 64, "bf16", **TRAIN_ADAMW),
    case("gemma3_1b_b2_s1024", gemma3_1b(2, 1024), 2, "bf16"),
    case("qwen3_moe_4layers_b4_s256", qwen3_moe(4, 256, 4), 4, "bf16"),
    case("deeplabv3_resnet101_train_b4_s384", vision("deeplabv3_resnet101", 4, 384), 4, "fp32", **TRAIN_SGD),
    case(
        "vit_small_autocast_train_b256", autocast(timm_model("vit_small_patch16_224", 256)), 256, "fp32", **TRAIN_ADAMW
    ),
    case("nerf_tf32_b131072", tf32(by_hand(Nerf, numbers((131072, 3), (131072, 3)))), 131072),
    case("whisper_large_v3_8layers_encoder_b4", whisper_large_encoder(4, 8), 4, "fp16"),
    case("densenet201_b16", vision("densenet201", 16), 16),
    case("two_tower_train_b4096", by_hand(TwoTower, VISITS), 4096, "fp32", **TRAIN_SGD),
    case("dinov2_base_b8_s518", dinov2_base(8, 518), 8, "bf16"),
]
