"""A fifth set the predictor is judged on: chosen by somebody who has not seen how it predicts, none in the other sets.

    python benchmarks/device/record_models.py benchmarks/device/heldout5_cases.py OUT_PREFIX --quick

The form is that of heldout4_cases.py. Models of torch, torchvision and transformers only, with random weights.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
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

# -- models of transformers and torchvision ---------------------------------------------------------------------


class Field(Wrapper):
    """Answers with one field of what the model answers with."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__(model)
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(self.model(*args, **kwargs), self.name)


def field(name: str, factory: Factory) -> Factory:
    return wrapped(partial(Field, name), factory)


def clips(name: str, *shape: int) -> Factory:
    """A classifier of torchvision.models.video."""

    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import torchvision

        with built_on(device):
            model = getattr(torchvision.models.video, name)(weights=None)
        return model.to(device, dtype), (torch.randn(shape, device=device, dtype=dtype),)

    return build


def qwen3_8b(batch: int, seq: int, layers: int) -> Factory:
    return decoder("Qwen3", tokens(batch, seq, 151936), 4096, 12288, layers, (32, 8), 151936, head_dim=128)


def qwen3_06b(inputs: Maker, layers: int) -> Factory:
    return decoder("Qwen3", inputs, 1024, 3072, layers, (16, 8), 151936, head_dim=128)


def granite_moe_3b(batch: int, seq: int, layers: int) -> Factory:
    experts = {"num_local_experts": 40, "num_experts_per_tok": 8}
    return decoder("GraniteMoe", tokens(batch, seq, 49155), 1536, 512, layers, (24, 8), 49155, **experts)


def gpt_oss_20b(batch: int, seq: int, layers: int) -> Factory:
    more = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4}
    return decoder("GptOss", tokens(batch, seq, 201088), 2880, 2880, layers, (64, 8), 201088, **more)


def ernie_moe(batch: int, seq: int, layers: int) -> Factory:
    """The first layer has no experts; the others 64 of them, 6 for a token, and two for all."""
    inputs = tokens(batch, seq, 103424, labels=True)
    return decoder("Ernie4_5_Moe", inputs, 2560, 12288, layers, (20, 4), 103424, moe_intermediate_size=1536)


def lfm2(batch: int, seq: int) -> Factory:
    """Short convolutions, with attention in every third layer."""
    kinds = ["conv", "conv", "full_attention"] * 4
    return decoder("Lfm2", tokens(batch, seq, 65536), 2048, 12288, 12, (32, 8), 65536, layer_types=kinds)


def qwen3_next(batch: int, seq: int, layers: int) -> Factory:
    """Gated delta rule in three layers of four, in torch alone."""
    more = {"head_dim": 256, "num_experts": 32, "num_experts_per_tok": 4}
    return decoder("Qwen3Next", tokens(batch, seq, 151936), 2048, 5632, layers, (16, 2), 151936, **more)


class Dora(nn.Module):
    """A frozen layer, changed in direction by two narrow matrices and in length by a vector."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device, dtype=base.weight.dtype)
        self.length = nn.Parameter(base.weight.detach().norm(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = self.base.weight + self.up.weight @ self.down.weight
        scale = self.length / moved.norm(dim=1).detach()
        return scale * (self.base(x) + self.up(self.down(x)))


def with_dora(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part, names in (layer.self_attn, ("q_proj", "v_proj")), (layer.mlp, ("gate_up_proj", "down_proj")):
            for name in names:
                setattr(part, name, Dora(getattr(part, name), 32))
    return model


def glm4_9b(batch: int, seq: int, layers: int) -> Factory:
    inputs = tokens(batch, seq, 151552, labels=True)
    return decoder("Glm4", inputs, 4096, 13696, layers, (32, 2), 151552, head_dim=128, pad_token_id=0)


class Contrast(Wrapper):
    """Embeds pairs of texts by their last token; the other texts of the batch are what they are told from."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out = self.model.model(input_ids=input_ids).last_hidden_state[:, -1]
        one, other = F.normalize(out.float(), dim=-1).chunk(2)
        return one @ other.T * 20


def eurobert_210m(batch: int, seq: int) -> Factory:
    return hf("EuroBertForMaskedLM", "EuroBertConfig", tokens(batch, seq, 128256, labels=True), num_key_value_heads=12)


def dinov3_vit_l(batch: int, size: int) -> Factory:
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return hf("DINOv3ViTModel", "DINOv3ViTConfig", images(batch, size), num_register_tokens=4, **wide)


def hiera_base(batch: int) -> Factory:
    return hf("HieraForImageClassification", "HieraConfig", images(batch, 224), num_labels=1000)


def pvt_v2_b2(batch: int) -> Factory:
    widths = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512]}
    return hf("PvtV2ForImageClassification", "PvtV2Config", images(batch, 224), num_labels=1000, **widths)


def mobilevit_v2(batch: int) -> Factory:
    return hf("MobileViTV2ForImageClassification", "MobileViTV2Config", images(batch, 256), num_labels=1000)


def upernet_convnext_tiny(batch: int, size: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        from transformers import ConvNextConfig

        widths = {"depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768]}
        backbone = ConvNextConfig(out_features=["stage1", "stage2", "stage3", "stage4"], **widths)
        more = {"backbone_config": backbone, "num_labels": 150, "auxiliary_in_channels": 384}
        return hf("UperNetForSemanticSegmentation", "UperNetConfig", images(batch, size), **more)(device, dtype)

    return build


def parakeet_06b(batch: int, frames: int, layers: int) -> Factory:
    encoder = {"num_hidden_layers": layers, "num_mel_bins": 128}
    inputs = named("input_features", numbers((batch, frames, 128)))
    return hf("ParakeetForCTC", "ParakeetCTCConfig", inputs, encoder_config=encoder)


def moonshine_tiny(batch: int, seconds: int, target: int) -> Factory:
    sound = beside(numbers((batch, 16000 * seconds)), whole(32768, batch, target))
    return hf("MoonshineForConditionalGeneration", "MoonshineConfig", named("input_values decoder_input_ids", sound))


def distil_whisper_medium(batch: int, target: int) -> Factory:
    widths = {"d_model": 1024, "encoder_layers": 24, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 16, "decoder_attention_heads": 16}
    feeds = {"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}
    inputs = named("input_features labels", beside(numbers((batch, 80, 3000)), whole(51865, batch, target)))
    return hf("WhisperForConditionalGeneration", "WhisperConfig", inputs, **widths, **heads, **feeds)


def dac_16k(batch: int, samples: int) -> Factory:
    return hf("DacModel", "DacConfig", named("input_values", numbers((batch, 1, samples))))


# -- decoders by hand -------------------------------------------------------------------------------------------


def apart(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, width of a head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def together(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def turned(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Rotary positions, the tokens being the last axis but one."""
    at = torch.arange(first, first + x.shape[-2], device=x.device)
    c, s = waves(at, x.shape[-1]).to(x.dtype).chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, a * s + b * c], -1)


class Gated(nn.Module):
    def __init__(self, width: int, up: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * up, bias=False), nn.Linear(up, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class LatentAttention(nn.Module):
    """Attention of one new token over a cache of 512 + 64 numbers a token, the key and value products absorbed."""

    def __init__(self, width: int, heads: int, latent: int = 512, turning: int = 64, each: int = 128) -> None:
        super().__init__()
        self.heads, self.split, self.each = heads, [latent, turning], each
        self.q, self.kv = nn.Linear(width, heads * (each + turning)), nn.Linear(width, latent + turning)
        self.norm = nn.RMSNorm(latent)
        self.to_latent = nn.Parameter(torch.randn(heads, each, latent) * latent**-0.5)
        self.from_latent = nn.Parameter(torch.randn(heads, latent, each) * latent**-0.5)
        self.out = nn.Linear(heads * each, width)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        plain, turning = apart(self.q(x), self.heads).split([self.each, self.split[1]], -1)
        q = torch.cat([plain @ self.to_latent, turned(turning, past.shape[1])], -1).squeeze(2)
        latent, place = self.kv(x).split(self.split, -1)
        cache = torch.cat([past, torch.cat([self.norm(latent), turned(place, past.shape[1])], -1)], 1)
        score = q @ cache.transpose(1, 2) * (self.each + self.split[1]) ** -0.5
        seen = score.float().softmax(-1).to(x.dtype) @ cache[..., : self.split[0]]
        return self.out((seen[:, :, None] @ self.from_latent).flatten(1))[:, None]


class LatentDecoder(nn.Module):
    def __init__(self, width: int = 2048, layers: int = 8, vocab: int = 102400) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.attends = nn.ModuleList(LatentAttention(width, 16) for _ in range(layers))
        self.feeds = nn.ModuleList(Gated(width, 10944) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))

    def forward(self, past: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        for i, (attend, feed) in enumerate(zip(self.attends, self.feeds, strict=True)):
            x = x + attend(self.norms[2 * i](x), past[i])
            x = x + feed(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class Residual(nn.Module):
    """x + what the part makes of x after a norm."""

    def __init__(self, norm: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = norm, part

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return x + self.part(self.norm(x), *more)


class StateSpaceDual(nn.Module):
    """The mixer of Mamba-2 in blocks of tokens: products inside a block, a state from block to block."""

    def __init__(self, width: int, each: int = 64, state: int = 128, block: int = 128) -> None:
        super().__init__()
        inner = 2 * width
        self.heads, self.block, self.split = inner // each, block, [inner, state, state]
        self.into = nn.Linear(width, 2 * inner + 2 * state + self.heads, bias=False)
        self.conv = nn.Conv1d(inner + 2 * state, inner + 2 * state, 4, padding=3, groups=inner + 2 * state)
        self.rate = nn.Parameter(torch.zeros(self.heads))
        self.bias = nn.Parameter(torch.full((self.heads,), -3.0))
        self.norm, self.out = nn.RMSNorm(inner), nn.Linear(inner, width, bias=False)

    def scan(self, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        x, b, c, dt = (t.unflatten(1, (-1, self.block)) for t in (x * dt[..., None], b, c, dt))
        fade = (
            (dt.float() * -torch.exp(self.rate.float())).cumsum(2).permute(0, 1, 3, 2)
        )  # batch, blocks, heads, tokens
        later = torch.ones(self.block, self.block, dtype=torch.bool, device=x.device).triu(1)
        within = (fade[..., :, None] - fade[..., None, :]).masked_fill(later, float("-inf")).exp()
        x = x.transpose(2, 3)  # batch, blocks, heads, tokens, each
        near = ((c @ b.transpose(-1, -2))[:, :, None] * within).to(x.dtype) @ x
        left = (fade[..., -1:] - fade).exp().to(x.dtype)
        states = (x * left[..., None]).transpose(-1, -2) @ b[:, :, None]  # ..., each, state
        total = F.pad(fade[..., -1].cumsum(1), (0, 0, 1, 0))
        n = states.shape[1]
        over = total[:, :-1, None] - total[:, None, 1:]  # from the end of one block to the begin of another
        before = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1)
        over = over.masked_fill(~before[..., None], float("-inf")).exp().to(x.dtype)
        come = torch.einsum("bzch,bchpn->bzhpn", over, states)
        far = c[:, :, None] @ come.transpose(-1, -2) * fade.exp().to(x.dtype)[..., None]
        return (near + far).transpose(2, 3).flatten(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.split[0]
        gate, xbc, dt = self.into(x).split([inner, sum(self.split), self.heads], -1)
        xbc = F.silu(self.conv(xbc.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        value, b, c = xbc.split(self.split, -1)
        y = self.scan(value.unflatten(-1, (self.heads, -1)), b, c, F.softplus(dt + self.bias))
        return self.out(self.norm(y.flatten(2) * F.silu(gate)))


def mamba2() -> nn.Module:
    width, vocab = 1024, 50288
    layers = [Residual(nn.RMSNorm(width), StateSpaceDual(width)) for _ in range(10)]
    return nn.Sequential(nn.Embedding(vocab, width), *layers, nn.RMSNorm(width), nn.Linear(width, vocab, bias=False))


# -- making images, video and sound -----------------------------------------------------------------------------


class SingleStream(nn.Module):
    """The single-stream block of Flux: attention and feed-forward side by side from one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.split = heads, [width, width, width, 4 * width]
        self.norm, self.tell = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 3 * width)
        self.into, self.out = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)

    def forward(self, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.tell(F.silu(told))[:, None].chunk(3, -1)
        q, k, v, up = self.into(self.norm(x) * (1 + scale) + shift).split(self.split, -1)
        q, k, v = (apart(t, self.heads) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(turned(self.q_norm(q)), turned(self.k_norm(k)), v)
        return x + gate * self.out(torch.cat([together(seen), F.gelu(up, approximate="tanh")], -1))


class FluxSingle(nn.Module):
    def __init__(self, width: int = 3072, layers: int = 8) -> None:
        super().__init__()
        self.width = width
        self.latent, self.text, self.time = nn.Linear(64, width), nn.Linear(4096, width), layers_of(256, width, width)
        self.blocks = nn.ModuleList(SingleStream(width, 24) for _ in range(layers))
        self.out = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor, text: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        told = self.time(waves(t, 256).to(x.dtype))
        h = torch.cat([self.text(text), self.latent(x)], 1)
        for block in self.blocks:
            h = block(h, told)
        return self.out(h[:, text.shape[1] :])


class VideoBlock(nn.Module):
    """Attention over all frames, attention to the text, feed-forward: as in Wan."""

    def __init__(self, width: int, heads: int, up: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=i == 1) for i in range(3))
        self.tell = nn.Parameter(torch.randn(6, width) * width**-0.5)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.ask, self.offer, self.answer = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.feed = nn.Sequential(nn.Linear(width, up), nn.GELU("tanh"), nn.Linear(up, width))

    def across(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        k, v = self.offer(text).chunk(2, -1)
        q, k, v = (apart(t, self.heads) for t in (self.ask(x), k, v))
        return self.answer(together(F.scaled_dot_product_attention(q, k, v)))

    def forward(self, x: torch.Tensor, text: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = (told + self.tell).unsqueeze(2).unbind(1)
        q, k, v = self.qkv(self.norms[0](x) * (1 + scale) + shift).chunk(3, -1)
        q, k, v = (apart(t, self.heads) for t in (self.q_norm(q), self.k_norm(k), v))
        x = x + gate * self.out(together(F.scaled_dot_product_attention(turned(q), turned(k), v)))
        x = x + self.across(self.norms[1](x), text)
        return x + gate2 * self.feed(self.norms[2](x) * (1 + scale2) + shift2)


class VideoDit(nn.Module):
    def __init__(self, width: int = 1536, layers: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv3d(16, width, (1, 2, 2), (1, 2, 2))
        self.text, self.time, self.tell = (
            nn.Linear(4096, width),
            layers_of(256, width, width),
            nn.Linear(width, 6 * width),
        )
        self.blocks = nn.ModuleList(VideoBlock(width, 12, 8960) for _ in range(layers))
        self.out = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor, text: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        told = self.tell(self.time(waves(t, 256).to(text.dtype))).unflatten(-1, (6, -1))
        h, text = self.patch(x).flatten(2).transpose(1, 2), self.text(text)
        for block in self.blocks:
            h = block(h, text, told)
        return loss(F.mse_loss(self.out(h).float(), labels))


class Frames(nn.Module):
    """A block of a video autoencoder: convolutions over time and space that see no later frame."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.g1, self.g2 = nn.Parameter(torch.ones(cin, 1, 1, 1)), nn.Parameter(torch.ones(cout, 1, 1, 1))
        self.c1, self.c2 = nn.Conv3d(cin, cout, 3, padding=(0, 1, 1)), nn.Conv3d(cout, cout, 3, padding=(0, 1, 1))
        self.skip = nn.Conv3d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for gain, conv in (self.g1, self.c1), (self.g2, self.c2):
            h = F.silu(F.normalize(h, dim=1) * gain * h.shape[1] ** 0.5)
            h = conv(F.pad(h, (0, 0, 0, 0, 2, 0)))
        return self.skip(x) + h


class VideoVaeDecoder(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (384, 384, 192, 96)) -> None:
        super().__init__()
        self.into, self.out = nn.Conv3d(16, widths[0], 1), nn.Conv3d(widths[-1], 3, 3, padding=1)
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.stages = nn.ModuleList(nn.Sequential(Frames(a, b), Frames(b, b)) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(x)
        for i, stage in enumerate(self.stages):
            if i:
                h = F.interpolate(h, scale_factor=(2.0 if i < 3 else 1.0, 2.0, 2.0), mode="nearest")
            h = stage(h)
        return self.out(F.silu(h))


class ImageVae(nn.Module):
    """Eight times smaller and back, 16 numbers a place."""

    def __init__(self, widths: tuple[int, ...] = (96, 192, 384, 384)) -> None:
        super().__init__()
        down: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1)]
        up: list[nn.Module] = [nn.Conv2d(16, widths[-1], 3, padding=1), Res(widths[-1], widths[-1])]
        for a, b in pairwise(widths):
            down += [Res(a, a), nn.Conv2d(a, b, 3, 2, 1)]
        for a, b in pairwise(widths[::-1]):
            up += [Res(a, a), nn.Upsample(scale_factor=2.0), nn.Conv2d(a, b, 3, padding=1)]
        down += [Res(widths[-1], widths[-1]), nn.GroupNorm(32, widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], 32, 1)]
        up += [Res(widths[0], widths[0]), nn.GroupNorm(32, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1)]
        self.encoder, self.decoder = nn.Sequential(*down), nn.Sequential(*up)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        mean, spread = self.encoder(x).chunk(2, 1)
        spread = spread.clamp(-20, 10)
        back = self.decoder(mean + torch.exp(spread / 2) * torch.randn_like(mean))
        narrow = (mean.float() ** 2 + spread.float().exp() - spread - 1).mean()
        return loss(F.l1_loss(back.float(), labels) + 1e-6 * narrow)


class VocosLayer(nn.Module):
    def __init__(self, width: int, up: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, up), nn.GELU(), nn.Linear(up, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.feed(self.norm(self.conv(x).transpose(1, 2)))
        return x + (self.scale * h).transpose(1, 2)


class Vocos(nn.Module):
    """Mel bands to sound through spectra: an inverse transform of every frame, the frames then laid over each other."""

    def __init__(self, width: int = 512, layers: int = 8, size: int = 1024, hop: int = 256) -> None:
        super().__init__()
        self.size, self.hop = size, hop
        self.into = nn.Conv1d(100, width, 7, padding=3)
        self.layers = nn.Sequential(*(VocosLayer(width, 3 * width) for _ in range(layers)))
        self.head = nn.Linear(width, size + 2)
        self.register_buffer("window", torch.hann_window(size))

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        size, phase = self.head(self.layers(self.into(mel)).transpose(1, 2)).transpose(1, 2).chunk(2, 1)
        size = size.exp().clamp(max=100.0)
        frames = torch.fft.irfft(torch.complex(size * phase.cos(), size * phase.sin()), dim=1) * self.window[:, None]
        n = (mel.shape[-1] - 1) * self.hop + self.size
        return F.fold(frames, (1, n), (1, self.size), stride=(1, self.hop)).flatten(1)


# -- pictures in, pictures or boxes out -------------------------------------------------------------------------


def conv_bn(cin: int, cout: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(cin, cout, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout), nn.SiLU(inplace=True))


class C2f(nn.Module):
    def __init__(self, cin: int, cout: int, depth: int, short: bool = False) -> None:
        super().__init__()
        half, self.short = cout // 2, short
        self.into, self.out = conv_bn(cin, cout), conv_bn((depth + 2) * half, cout)
        self.steps = nn.ModuleList(nn.Sequential(conv_bn(half, half, 3), conv_bn(half, half, 3)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.into(x).chunk(2, 1))
        for step in self.steps:
            y = step(parts[-1])
            parts.append(parts[-1] + y if self.short else y)
        return self.out(torch.cat(parts, 1))


class Yolo(nn.Module):
    """A detector of the size of YOLOv8m up to its raw scores and boxes."""

    def __init__(self, a: int = 192, b: int = 384, c: int = 576, classes: int = 80) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 48, 3, 2), conv_bn(48, 96, 3, 2), C2f(96, 96, 2, True))
        self.p3 = nn.Sequential(conv_bn(96, a, 3, 2), C2f(a, a, 4, True))
        self.p4 = nn.Sequential(conv_bn(a, b, 3, 2), C2f(b, b, 4, True))
        self.p5 = nn.Sequential(conv_bn(b, c, 3, 2), C2f(c, c, 2, True))
        self.narrow, self.widen = conv_bn(c, c // 2), conv_bn(2 * c, c)
        self.up4, self.up3 = C2f(b + c, b, 2), C2f(a + b, a, 2)
        self.down4, self.down5 = conv_bn(a, a, 3, 2), conv_bn(b, b, 3, 2)
        self.out4, self.out5 = C2f(a + b, b, 2), C2f(b + c, c, 2)
        self.boxes = nn.ModuleList(self.head(x, 64, 64) for x in (a, b, c))
        self.kinds = nn.ModuleList(self.head(x, a, classes) for x in (a, b, c))

    @staticmethod
    def head(cin: int, width: int, cout: int) -> nn.Module:
        return nn.Sequential(conv_bn(cin, width, 3), conv_bn(width, width, 3), nn.Conv2d(width, cout, 1))

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.narrow(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.widen(torch.cat(parts, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c3 = self.p3(self.stem(x))
        c4 = self.p4(c3)
        c5 = self.pooled(self.p5(c4))
        m4 = self.up4(torch.cat([F.interpolate(c5, scale_factor=2.0), c4], 1))
        m3 = self.up3(torch.cat([F.interpolate(m4, scale_factor=2.0), c3], 1))
        m4 = self.out4(torch.cat([self.down4(m3), m4], 1))
        m5 = self.out5(torch.cat([self.down5(m4), c5], 1))
        maps = zip(self.boxes, self.kinds, (m3, m4, m5), strict=True)
        return torch.cat([torch.cat([box(m), kind(m)], 1).flatten(2) for box, kind, m in maps], 2).transpose(1, 2)


class DeformableAttention(nn.Module):
    """Each query looks at four places of each of three maps."""

    def __init__(self, width: int = 256, heads: int = 8, levels: int = 3, points: int = 4) -> None:
        super().__init__()
        self.shape = (heads, levels, points)
        self.where, self.weigh = (nn.Linear(width, heads * levels * points * n) for n in (2, 1))
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, q: torch.Tensor, at: torch.Tensor, x: torch.Tensor, sides: list[int]) -> torch.Tensor:
        heads, levels, points = self.shape
        where = (at[:, :, None, None, None] + 0.05 * self.where(q).unflatten(-1, (heads, levels, points, 2))) * 2 - 1
        weigh = self.weigh(q).unflatten(-1, (heads, levels * points)).softmax(-1)
        maps = apart(self.value(x), heads).flatten(0, 1).split([s * s for s in sides], 1)
        found = [
            F.grid_sample(
                maps[i].transpose(1, 2).unflatten(2, (side, side)),
                where[:, :, :, i].transpose(1, 2).flatten(0, 1).to(x.dtype),
                align_corners=False,
            )
            for i, side in enumerate(sides)
        ]
        weigh = weigh.transpose(1, 2).flatten(0, 1)[:, None]
        out = (torch.cat(found, -1) * weigh).sum(-1)  # batch * heads, width of a head, queries
        return self.out(out.unflatten(0, (-1, heads)).flatten(1, 2).transpose(1, 2))


class DeformableLayer(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(width, 8, batch_first=True)
        self.across, self.feed = DeformableAttention(width), layers_of(width, 1024, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, q: torch.Tensor, at: torch.Tensor, x: torch.Tensor, sides: list[int]) -> torch.Tensor:
        q = self.norms[0](q + self.own(q, q, q, need_weights=False)[0])
        q = self.norms[1](q + self.across(q, at, x, sides))
        return self.norms[2](q + self.feed(q))


class DeformableDetr(nn.Module):
    """ResNet-50, then six layers in which 300 queries look at three maps: as in RT-DETR."""

    def __init__(self, width: int = 256, queries: int = 300, classes: int = 80) -> None:
        super().__init__()
        import torchvision

        whole_net = torchvision.models.resnet50(weights=None)
        self.stem = nn.Sequential(whole_net.conv1, whole_net.bn1, whole_net.relu, whole_net.maxpool, whole_net.layer1)
        self.stages = nn.ModuleList([whole_net.layer2, whole_net.layer3, whole_net.layer4])
        self.narrow = nn.ModuleList(nn.Conv2d(c, width, 1) for c in (512, 1024, 2048))
        self.top = nn.TransformerEncoderLayer(width, 8, 1024, 0.0, "gelu", batch_first=True)
        self.score, self.queries = nn.Linear(width, classes), queries
        self.at = layers_of(width, width, 2)
        self.layers = nn.ModuleList(DeformableLayer(width) for _ in range(6))
        self.kinds, self.boxes = nn.Linear(width, classes), layers_of(width, width, width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, maps = self.stem(x), []
        for stage, narrow in zip(self.stages, self.narrow, strict=True):
            x = stage(x)
            maps.append(narrow(x).flatten(2).transpose(1, 2))
        maps[-1] = self.top(maps[-1])
        sides, x = [round(m.shape[1] ** 0.5) for m in maps], torch.cat(maps, 1)
        best = self.score(x).amax(-1).topk(self.queries).indices
        q = x.gather(1, best[..., None].expand(-1, -1, x.shape[-1]))
        at = self.at(q).sigmoid()
        for layer in self.layers:
            q = layer(q, at, x, sides)
        return torch.cat([self.kinds(q), self.boxes(q)], -1)


class NafBlock(nn.Module):
    """Gates in place of activations."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.into, self.deep = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c)
        self.weigh, self.out = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1)
        self.feed, self.back = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, c, 1)
        self.s1, self.s2 = nn.Parameter(torch.zeros(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))

    @staticmethod
    def normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.deep(self.into(self.normed(self.n1, x))).chunk(2, 1)
        h = a * b
        x = x + self.s1 * self.out(h * self.weigh(h.mean((2, 3), keepdim=True)))
        a, b = self.feed(self.normed(self.n2, x)).chunk(2, 1)
        return x + self.s2 * self.back(a * b)


class NafNet(nn.Module):
    def __init__(self, c: int = 32, depths: tuple[int, ...] = (1, 1, 2, 8)) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        widths = [c << i for i in range(len(depths))]
        self.encoders = nn.ModuleList(
            nn.Sequential(*(NafBlock(w) for _ in range(n))) for w, n in zip(widths, depths, strict=True)
        )
        self.downs = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, 2) for w in widths)
        self.middle = nn.Sequential(*(NafBlock(2 * widths[-1]) for _ in range(4)))
        self.ups = nn.ModuleList(nn.Sequential(nn.Conv2d(2 * w, 4 * w, 1), nn.PixelShuffle(2)) for w in widths[::-1])
        self.decoders = nn.ModuleList(NafBlock(w) for w in widths[::-1])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        h, kept = self.into(x), []
        for encoder, down in zip(self.encoders, self.downs, strict=True):
            h = encoder(h)
            kept.append(h)
            h = down(h)
        h = self.middle(h)
        for up, decoder_, skip in zip(self.ups, self.decoders, kept[::-1], strict=True):
            h = decoder_(up(h) + skip)
        return loss(F.l1_loss((x + self.out(h)).float(), labels))


class Edsr(nn.Module):
    """Sixteen blocks of two convolutions, then four times as large."""

    def __init__(self, c: int = 64, depth: int = 16) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, c, 3, padding=1)
        steps = (
            nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1)) for _ in range(depth)
        )
        self.body = nn.Sequential(*(Residual(nn.Identity(), step) for step in steps))
        self.tail = nn.Sequential(nn.Conv2d(c, 48, 3, padding=1), nn.PixelShuffle(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(x)
        return self.tail(h + self.body(h))


# -- clicks, tables, series -------------------------------------------------------------------------------------


class HstuLayer(nn.Module):
    """Attention without softmax, gated: as in HSTU."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads, self.norm, self.after = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.apart = nn.Parameter(torch.zeros(longest, heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        u, q, k, v = F.silu(self.into(self.norm(x))).chunk(4, -1)
        at = torch.arange(n, device=x.device)
        bias = self.apart[(at[:, None] - at).clamp(min=0)].permute(2, 0, 1)
        score = F.silu(apart(q, self.heads) @ apart(k, self.heads).transpose(-1, -2) + bias) / n
        return x + self.out(u * self.after(together(score.tril() @ apart(v, self.heads))))


def hstu() -> nn.Module:
    width, items, longest = 256, 12_000, 400
    layers = (HstuLayer(width, 4, longest) for _ in range(6))
    return nn.Sequential(nn.Embedding(items, width), *layers, nn.LayerNorm(width), nn.Linear(width, items))


class Mmoe(nn.Module):
    """Bags of ids, experts shared by two tasks, a gate and a tower for each."""

    def __init__(self, bags: int = 20, rows: int = 100_000, width: int = 48, experts: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(bags))
        self.experts = nn.ModuleList(layers_of(bags * width, 768, 384) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(bags * width, experts) for _ in range(2))
        self.towers = nn.ModuleList(layers_of(384, 128, 2) for _ in range(2))

    def forward(self, clicked: torch.Tensor) -> torch.Tensor:
        x = torch.cat([table(clicked[:, i]) for i, table in enumerate(self.tables)], 1)
        known = torch.stack([F.relu(expert(x)) for expert in self.experts], 1)
        tasks = zip(self.gates, self.towers, strict=True)
        return torch.cat([tower((gate(x).softmax(-1)[..., None] * known).sum(1)) for gate, tower in tasks], 1)


class TableLayer(nn.Module):
    """Attention between the columns of a row, then between the rows of a column: as in TabPFN."""

    def __init__(self, width: int = 192, heads: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out, norm in zip(self.qkv, self.out, self.norms, strict=False):
            q, k, v = (apart(t, self.heads) for t in qkv(x).chunk(3, -1))
            x = norm(x + out(together(F.scaled_dot_product_attention(q, k, v)))).transpose(0, 1)
        return self.norms[2](x + self.feed(x))


class TablePfn(nn.Module):
    def __init__(self, width: int = 192, layers: int = 8) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(2, width), nn.Linear(width, 10)
        self.layers = nn.Sequential(*(TableLayer(width) for _ in range(layers)))

    def forward(self, cells: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.cell(cells))[:, -1])


class InvertedTransformer(nn.Module):
    """Each series is a token."""

    def __init__(self, seen: int = 96, ahead: int = 96, width: int = 512) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 512, 0.1, "gelu", batch_first=True)
        self.into, self.out = nn.Linear(seen, width), nn.Linear(width, ahead)
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(width))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        h = self.out(self.encoder(self.into(((x - mean) / std).transpose(1, 2))))
        return loss(F.mse_loss(h.transpose(1, 2) * std + mean, labels))


# -- graphs, points, fields, proteins ---------------------------------------------------------------------------


class MeshGraphNet(nn.Module):
    """Edges and nodes told of each other, layer after layer."""

    def __init__(self, width: int = 128, layers: int = 12) -> None:
        super().__init__()
        self.node, self.edge = layers_of(12, width, width), layers_of(4, width, width)
        self.edges = nn.ModuleList(self.told(3 * width, width) for _ in range(layers))
        self.nodes = nn.ModuleList(self.told(2 * width, width) for _ in range(layers))
        self.out = layers_of(width, width, 3)

    @staticmethod
    def told(cin: int, width: int) -> nn.Module:
        return nn.Sequential(*layers_of(cin, width, width), nn.LayerNorm(width))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, ends: torch.Tensor, labels: torch.Tensor) -> Any:
        x, e, (a, b) = self.node(nodes), self.edge(edges), ends
        for edge, node in zip(self.edges, self.nodes, strict=True):
            e = e + edge(torch.cat([e, x[a], x[b]], 1))
            x = x + node(torch.cat([x, torch.zeros_like(x).index_add(0, b, e)], 1))
        return loss(F.mse_loss(self.out(x), labels))


def mesh(nodes: int, edges: int) -> Maker:
    parts = beside(numbers((nodes, 12), (edges, 4)), whole(nodes, 2, edges), numbers((nodes, 3)))
    return named("nodes edges ends labels", parts)


class Gin(nn.Module):
    """A batch of small graphs as one, each summed up at its end."""

    def __init__(self, width: int = 256, layers: int = 5, each: int = 25) -> None:
        super().__init__()
        self.each, self.kinds = each, nn.Embedding(120, width)
        self.layers = nn.ModuleList(layers_of(width, 2 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))
        self.out = nn.Linear(width, 128)

    def forward(self, atoms: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        x = self.kinds(atoms)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x.index_add(0, ends[1], x[ends[0]]))))
        return self.out(x.unflatten(0, (-1, self.each)).sum(1))


class EdgeConv(nn.Module):
    """The greatest over the 20 nearest points, nearest by features."""

    def __init__(self, cin: int, cout: int, near: int = 20) -> None:
        super().__init__()
        self.near, self.conv = near, nn.Sequential(nn.Conv2d(2 * cin, cout, 1), nn.BatchNorm2d(cout), nn.LeakyReLU(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, n = x.shape
        with torch.no_grad():
            long = (x * x).sum(1)
            nearest = (2 * x.transpose(1, 2) @ x - long[:, None] - long[:, :, None]).topk(self.near).indices
        there = x.gather(2, nearest.flatten(1)[:, None].expand(-1, c, -1)).view(b, c, n, self.near)
        here = x[..., None].expand_as(there)
        return self.conv(torch.cat([there - here, here], 1)).amax(-1)


class Dgcnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(EdgeConv(a, b) for a, b in ((3, 64), (64, 64), (64, 128), (128, 256)))
        self.join = nn.Sequential(nn.Conv1d(512, 1024, 1), nn.BatchNorm1d(1024), nn.LeakyReLU(0.2))
        self.head = layers_of(2048, 512, 256, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for conv in self.convs:
            x = conv(x)
            parts.append(x)
        x = self.join(torch.cat(parts, 1))
        return self.head(torch.cat([x.amax(-1), x.mean(-1)], 1))


class HashGrid(nn.Module):
    """A point's features from hashed corners on sixteen grids, then two small networks: as in Instant-NGP."""

    def __init__(self, levels: int = 16, rows: int = 1 << 18) -> None:
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(levels * rows, 2)
        self.density, self.colour = layers_of(2 * levels, 64, 16), layers_of(16 + 3, 64, 64, 3)
        self.register_buffer("sides", (16 * 1.4 ** torch.arange(levels)).floor())
        corners = torch.tensor([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)])
        self.register_buffer("corners", corners, persistent=False)

    def features(self, places: torch.Tensor) -> torch.Tensor:
        scaled = places.sigmoid() * self.sides[:, None, None]  # levels, points, 3
        low = scaled.floor()
        part = (scaled - low)[:, :, None]
        x, y, z = (low.long()[:, :, None] + self.corners).unbind(-1)
        which = (x ^ (y * 2654435761) ^ (z * 805459861)) & (self.rows - 1)
        which = which + self.rows * torch.arange(len(self.sides), device=x.device)[:, None, None]
        weight = torch.where(self.corners == 1, part, 1 - part).prod(-1)
        return (self.table(which) * weight[..., None]).sum(2).transpose(0, 1).flatten(1)

    def forward(self, places: torch.Tensor, ways: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        h = self.density(self.features(places))
        colour = self.colour(torch.cat([h, ways], -1)).sigmoid() * h[:, :1].sigmoid()
        return loss(F.mse_loss(colour, labels))


class Sine(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(30 * super().forward(x))


class Siren(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        hidden = (Sine(width, width) for _ in range(4))
        self.steps = nn.Sequential(Sine(3, width), *hidden, nn.Linear(width, 4))

    def forward(self, places: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return loss(F.mse_loss(self.steps(places), labels))


class Spectral(nn.Module):
    """The lowest waves of a map, each with a product of its own."""

    def __init__(self, width: int, waves_kept: int = 24) -> None:
        super().__init__()
        self.kept = waves_kept
        self.weight = nn.Parameter(torch.randn(2, width, width, waves_kept, waves_kept, 2) / width)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, freq = self.kept, torch.fft.rfft2(x)
        out = torch.zeros_like(freq)
        weight = torch.view_as_complex(self.weight)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", freq[:, :, :m, :m], weight[0])
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", freq[:, :, -m:, :m], weight[1])
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.local(x))


class Fno(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, width, 1), nn.Conv2d(width, 1, 1)
        self.layers = nn.Sequential(*(Spectral(width) for _ in range(4)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return loss(F.mse_loss(self.out(self.layers(self.into(x))), labels))


class TriangleProduct(nn.Module):
    def __init__(self, width: int, outgoing: bool) -> None:
        super().__init__()
        self.way = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.into, self.after = nn.Linear(width, 4 * width, bias=False), nn.LayerNorm(width)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        a, b, gate_a, gate_b = self.into(z).chunk(4, -1)
        met = torch.einsum(self.way, a * gate_a.sigmoid(), b * gate_b.sigmoid())
        return self.gate(z).sigmoid() * self.out(self.after(met))


class TriangleAttention(nn.Module):
    def __init__(self, width: int, heads: int, ending: bool) -> None:
        super().__init__()
        self.heads, self.ending = heads, ending
        self.qkv, self.bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, heads, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        z = z.transpose(1, 2) if self.ending else z
        b, n = z.shape[:2]
        q, k, v = (apart(t.flatten(0, 1), self.heads) for t in self.qkv(z).chunk(3, -1))
        bias = self.bias(z).permute(0, 3, 1, 2).contiguous()[:, None].expand(-1, n, -1, -1, -1).flatten(0, 1)
        seen = together(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)).unflatten(0, (b, n))
        out = self.out(self.gate(z).sigmoid() * seen)
        return out.transpose(1, 2) if self.ending else out


def pairformer(layers: int, width: int = 128) -> nn.Module:
    """The pair track of AlphaFold 3 alone."""
    steps: list[nn.Module] = [nn.Linear(64, width)]
    for _ in range(layers):
        parts = [TriangleProduct(width, True), TriangleProduct(width, False)]
        parts += [TriangleAttention(width, 4, False), TriangleAttention(width, 4, True), Gated(width, 4 * width)]
        steps += [Residual(nn.LayerNorm(width), part) for part in parts]
    return nn.Sequential(*steps, nn.LayerNorm(width), nn.Linear(width, 64), nn.Flatten(1, 2))


# -- agents -----------------------------------------------------------------------------------------------------


class ManyCritics(nn.Module):
    """Ten networks at once that judge an action, all but the newest by the ones before: as in REDQ."""

    def __init__(self, state: int = 45, action: int = 17, width: int = 256, many: int = 10) -> None:
        super().__init__()
        widths = (state + action, width, width, 1)
        for kind in ("now", "before"):
            made = [torch.randn(many, a, b) * a**-0.5 for a, b in pairwise(widths)]
            setattr(self, kind, nn.ParameterList(nn.Parameter(w, requires_grad=kind == "now") for w in made))
        self.actor = layers_of(state, width, width, action)

    @staticmethod
    def judged(weights: nn.ParameterList, x: torch.Tensor) -> torch.Tensor:
        h = x.expand(weights[0].shape[0], -1, -1)
        for w in list(weights)[:-1]:
            h = F.relu(torch.bmm(h, w))
        return torch.bmm(h, weights[-1]).squeeze(-1)

    def forward(self, s: torch.Tensor, a: torch.Tensor, later: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        with torch.no_grad():
            act = torch.tanh(self.actor(later) + 0.1 * torch.randn_like(a))
            aim = labels + 0.99 * self.judged(self.before, torch.cat([later, act], 1)).amin(0)
            for new, old in zip(self.now, self.before, strict=True):
                old.lerp_(new, 0.005)
        right = F.mse_loss(self.judged(self.now, torch.cat([s, a], 1)), aim.expand(len(self.now[0]), -1))
        return loss(right - self.judged(self.now, torch.cat([s, torch.tanh(self.actor(s))], 1)).mean())


class WorldModel(nn.Module):
    """Frames to features, a recurrent state with 32 choices of 32, and frames again: as in Dreamer."""

    def __init__(self, state: int = 512, action: int = 6) -> None:
        super().__init__()
        widths = (3, 48, 96, 192, 384)
        pairs = list(pairwise(widths))
        steps = [nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.SiLU()) for a, b in pairs]
        back = [nn.Sequential(nn.SiLU(), nn.ConvTranspose2d(b, a, 4, 2, 1)) for a, b in pairs[::-1]]
        self.eye, self.paint = nn.Sequential(*steps, nn.Flatten()), nn.Sequential(*back)
        self.into, self.cell = nn.Linear(1024 + action, state), nn.GRUCell(state, state)
        self.guess, self.see = layers_of(state, state, 1024), layers_of(state + 384 * 16, state, 1024)
        self.seed = nn.Linear(state + 1024, 384 * 16)

    def forward(self, frames: torch.Tensor, actions: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        b, n = frames.shape[:2]
        seen = self.eye(frames.flatten(0, 1)).unflatten(0, (b, n))
        h, z = frames.new_zeros(b, self.cell.hidden_size), frames.new_zeros(b, 1024)
        kept, guesses, choices = [], [], []
        for t in range(n):
            h = self.cell(F.silu(self.into(torch.cat([z, actions[:, t]], 1))), h)
            logits = self.see(torch.cat([h, seen[:, t]], 1)).unflatten(-1, (32, 32))
            z = F.gumbel_softmax(logits, hard=True).flatten(1)
            kept.append(torch.cat([h, z], 1))
            guesses.append(self.guess(h).unflatten(-1, (32, 32)))
            choices.append(logits)
        back = self.paint(self.seed(torch.stack(kept, 1).flatten(0, 1)).unflatten(-1, (384, 4, 4)))
        p, q = torch.stack(choices).log_softmax(-1), torch.stack(guesses).log_softmax(-1)
        return loss(F.mse_loss(back, labels) + (p.exp() * (p - q)).sum((-1, -2)).mean())


MLA_CACHE = beside(numbers((8, 64, 4000, 576)), whole(102400, 64, 1))
FLUX = numbers((1, 4096, 64), (1, 512, 4096), (1,))
VIDEO = named("x text t labels", numbers((1, 16, 9, 60, 52), (1, 512, 4096), (1,), (1, 7020, 64)))
PLAYED = named("s a later labels", numbers((256, 45), (256, 17), (256, 45), (256,)))
DREAMT = named("frames actions labels", numbers((16, 32, 3, 64, 64), (16, 32, 6), (512, 3, 64, 64)))
RAYS = named("places ways labels", numbers((131072, 3), (131072, 3), (131072, 3)))
BLURRED = named("x labels", numbers((8, 3, 256, 256), (8, 3, 256, 256)))
PICTURES = named("x labels", numbers((6, 3, 256, 256), (6, 3, 256, 256)))
SERIES = named("x labels", numbers((32, 96, 862), (32, 96, 862)))
FLOWS = named("x labels", numbers((24, 3, 128, 128), (24, 1, 128, 128)))
VOLUME = named("places labels", numbers((200_000, 3), (200_000, 4)))


CASES = [
    # every kind once, then more of each, in case the time runs out
    case("qwen3_8b_9layers_b1_s6000", qwen3_8b(1, 6000, 9), 1, "bf16"),
    case("mla_8layers_decode_b64_past4000", by_hand(LatentDecoder, MLA_CACHE), 64, "bf16"),
    case("flux_single_8layers_b1_s4608", by_hand(FluxSingle, FLUX), 1, "bf16"),
    case("dinov3_vit_l_b12_s448", dinov3_vit_l(12, 448), 12, "bf16"),
    case(
        "yolo_m_autocast_train_b16_s640_cl",
        autocast(by_hand(Yolo, numbers((16, 3, 640, 640)))),
        16,
        **TRAIN_SGD,
        **LAST,
    ),
    case("mamba2_10layers_autocast_train_b4_s2048", autocast(by_hand(mamba2, whole(50288, 4, 2048))), 4, **TRAIN_ADAMW),
    case("ernie_moe_4layers_train_b2_s1024", ernie_moe(2, 1024, 4), 2, "bf16", **TRAIN_ADAMW),
    case("pairformer_4layers_b1_n320", by_hand(partial(pairformer, 4), numbers((1, 320, 320, 64))), 1, "bf16"),
    case("dac_16k_b6_s20480", field("audio_values", dac_16k(6, 20480)), 6),
    case("parakeet_06b_12layers_b8_f1200", parakeet_06b(8, 1200, 12), 8, "bf16"),
    case("mesh_graph_train_n30k_e180k", by_hand(MeshGraphNet, mesh(30_000, 180_000)), 1, "fp32", **TRAIN_ADAMW),
    case("mmoe_bags_train_b16384", by_hand(Mmoe, whole(100_000, 16384, 20, 8)), 16384, "fp32", **TRAIN_SGD),
    case("hash_grid_train_p131072", by_hand(HashGrid, RAYS), 131072, "fp32", **TRAIN_ADAMW),
    case("world_model_train_b16_t32", by_hand(WorldModel, DREAMT), 16, "fp32", **TRAIN_ADAMW),
    case("table_pfn_rows2000_columns20", by_hand(TablePfn, numbers((2000, 21, 2))), 1, "fp16"),
    case("inverted_transformer_train_b32_n862", by_hand(InvertedTransformer, SERIES), 32, "fp32", **TRAIN_ADAMW),
    case("dgcnn_train_b24_n1024", by_hand(Dgcnn, numbers((24, 3, 1024))), 24, "fp32", **TRAIN_SGD),
    case("nafnet_autocast_train_b8_s256", autocast(by_hand(NafNet, BLURRED)), 8, **TRAIN_ADAMW),
    case("glm4_9b_5layers_dora_train_b2_s700", wrapped(with_dora, glm4_9b(2, 700, 5)), 2, "bf16", **TRAIN_ADAMW),
    case(
        "qwen3_06b_10layers_contrast_train_b128_s96",
        wrapped(Contrast, qwen3_06b(tokens(128, 96, 151936), 10)),
        128,
        "bf16",
        **TRAIN_ADAMW,
    ),
    case("rt_detr_like_b8_s640_cl", by_hand(DeformableDetr, numbers((8, 3, 640, 640))), 8, "fp16", **LAST),
    case("qwen3_8b_9layers_decode_b24_past5000", decode(qwen3_8b(24, 1, 9), 24, 5000), 24, "bf16"),
    case("video_vae_decoder_b1_f5_s32", by_hand(VideoVaeDecoder, numbers((1, 16, 5, 32, 32))), 1, "bf16"),
    case("hiera_base_train_b40", hiera_base(40), 40, "bf16", **TRAIN_ADAMW),
    case("regnet_x_32gf_train_b32_cl", vision("regnet_x_32gf", 32), 32, "bf16", **TRAIN_SGD, **LAST),
    case("gpt_oss_20b_4layers_b2_s1500", gpt_oss_20b(2, 1500, 4), 2, "bf16"),
    case("lfm2_12layers_b4_s1024", lfm2(4, 1024), 4, "bf16"),
    case("moonshine_tiny_b1_4s", moonshine_tiny(1, 4, 12), 1),
    case("upernet_convnext_tiny_train_b6_s384", upernet_convnext_tiny(6, 384), 6, "fp32", **TRAIN_ADAMW),
    case("hstu_autocast_train_b32_s400", autocast(by_hand(hstu, whole(12_000, 32, 400))), 32, **TRAIN_ADAMW),
    case("fno2d_train_b24_s128", by_hand(Fno, FLOWS), 24, "fp32", **TRAIN_ADAMW),
    case("redq_critics_train_b256", by_hand(ManyCritics, PLAYED), 256, "fp32", **TRAIN_ADAMW),
    case("granite_moe_3b_16layers_decode_b48_past900", decode(granite_moe_3b(48, 1, 16), 48, 900), 48, "bf16"),
    case("video_dit_8layers_autocast_train_b1_s7020", autocast(by_hand(VideoDit, VIDEO)), 1, **TRAIN_ADAMW),
    case("image_vae_autocast_train_b6_s256", autocast(by_hand(ImageVae, PICTURES)), 6, **TRAIN_ADAMW),
    case("distil_whisper_medium_autocast_train_b4", autocast(distil_whisper_medium(4, 100)), 4, **TRAIN_ADAMW),
    case("qwen3_next_4layers_b1_s1024", qwen3_next(1, 1024, 4), 1, "bf16"),
    case("edsr_x4_b1_s270x480_cl", by_hand(Edsr, numbers((1, 3, 270, 480))), 1, "fp16", **LAST),
    case("siren_tf32_train_p200k", tf32(by_hand(Siren, VOLUME)), 200_000, "fp32", **TRAIN_ADAMW),
    case("vocos_b16_f1000", by_hand(Vocos, numbers((16, 100, 1000))), 16),
    case("s3d_train_b6_f16", clips("s3d", 6, 3, 16, 224, 224), 6, "fp32", **TRAIN_SGD),
    case("eurobert_210m_autocast_train_b12_s400", autocast(eurobert_210m(12, 400)), 12, **TRAIN_ADAMW),
    case("pvt_v2_b2_train_b64", pvt_v2_b2(64), 64, "fp32", **TRAIN_ADAMW),
    case("efficientnet_b5_b24_s456_cl", vision("efficientnet_b5", 24, 456), 24, "fp16", **LAST),
    case("mobilevit_v2_b1_s256", mobilevit_v2(1), 1, "fp16"),
    case("yolo_m_b1_s640", by_hand(Yolo, numbers((1, 3, 640, 640))), 1, "fp16"),
    case("gin_b512", by_hand(Gin, beside(whole(120, 12_800), whole(12_800, 2, 27_000))), 512),
    case(
        "pairformer_2layers_train_b1_n192",
        by_hand(partial(pairformer, 2), numbers((1, 192, 192, 64))),
        1,
        **TRAIN_ADAMW,
    ),
]
