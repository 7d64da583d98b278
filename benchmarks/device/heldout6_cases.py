"""A sixth set the predictor is judged on: chosen by somebody who has not seen how it predicts, none in the other sets.

    python benchmarks/device/record_models.py benchmarks/device/heldout6_cases.py OUT_PREFIX --quick

The form is that of heldout5_cases.py. Models of torch, torchvision and transformers only, with random weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

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
    Wrapper,
    autocast,
    beside,
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


def smollm3_3b(batch: int, past: int) -> Factory:
    return decode(decoder("SmolLM3", tokens(batch, 1, 128256), 2048, 11008, 12, (16, 4), 128256), batch, past)


class FourBits(nn.Module):
    """A frozen matrix of 4-bit codes, 64 to a scale, made whole for every product; two narrow ones are trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        at = {"device": base.weight.device, "dtype": base.weight.dtype}
        n, self.shape, self.bias = base.weight.numel(), base.weight.shape, base.bias
        self.register_buffer("codes", torch.randint(0, 256, (n // 2,), dtype=torch.uint8, device=at["device"]))
        self.register_buffer("scales", torch.full((n // 64, 1), 0.04, **at))
        self.register_buffer("levels", torch.linspace(-1, 1, 16, **at))
        self.down, self.up = (
            nn.Linear(a, b, bias=False, **at) for a, b in ((self.shape[1], rank), (rank, self.shape[0]))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1).int()
        weight = (self.levels[codes].view(-1, 64) * self.scales).view(self.shape)
        return F.linear(x, weight, self.bias) + self.up(self.down(x))


def four_bits(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in layer.self_attn, layer.mlp:
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, FourBits(child, 16))
    return model


class Preference(Wrapper):
    """A step of DPO: the better half of the batch against the worse, beside the same model as it was."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.reference = copy.deepcopy(model).requires_grad_(False)

    @staticmethod
    def likelihood(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        with torch.no_grad():
            before = self.likelihood(self.reference, input_ids)
        better, worse = (self.likelihood(self.model, input_ids) - before).chunk(2)
        return loss(-F.logsigmoid(0.1 * (better - worse)).mean())


def big_bird(batch: int, seq: int) -> Factory:
    def inputs(device: str, dtype: torch.dtype) -> Inputs:
        return tokens(batch, seq, 50358)(device, dtype) | {
            "attention_mask": torch.ones(batch, seq, device=device, dtype=dtype)
        }

    return hf("BigBirdForMaskedLM", "BigBirdConfig", inputs)


def vjepa2_l(batch: int, frames: int) -> Factory:
    def inputs(device: str, dtype: torch.dtype) -> Inputs:
        video = torch.randn(batch, frames, 3, 256, 256, device=device, dtype=dtype)
        return {"pixel_values_videos": video, "skip_predictor": True}

    return hf("VJEPA2Model", "VJEPA2Config", inputs, frames_per_clip=frames)


def depth_anything_small(batch: int, size: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        from transformers import Dinov2Config

        stages = {"out_indices": [3, 6, 9, 12], "apply_layernorm": True, "reshape_hidden_states": False}
        narrow = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14, **stages)
        make = hf("DepthAnythingForDepthEstimation", "DepthAnythingConfig", images(batch, size), backbone_config=narrow)
        model, inputs = make(device, dtype)
        return model, inputs | {"return_dict": False}

    return build


def mask2former_swin_t(batch: int, size: int) -> Factory:
    def inputs(device: str, dtype: torch.dtype) -> Inputs:
        return images(batch, size)(device, dtype) | {"return_dict": False}

    return hf("Mask2FormerModel", "Mask2FormerConfig", inputs)


def timesfm(batch: int, length: int) -> Factory:
    def inputs(device: str, dtype: torch.dtype) -> Inputs:
        series = list(torch.randn(batch, length, device=device, dtype=dtype))
        return {"past_values": series, "freq": [0] * batch}

    return hf("TimesFmModelForPrediction", "TimesFmConfig", inputs, num_hidden_layers=20)


# -- pictures, sound, video -------------------------------------------------------------------------------------


class Residual(nn.Module):
    """x + what the steps make of x."""

    def __init__(self, *steps: nn.Module) -> None:
        super().__init__()
        self.steps = nn.Sequential(*steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.steps(x)


class Modulated(nn.Module):
    """A convolution with weights of their own for every picture, as in StyleGAN2."""

    def __init__(self, cin: int, cout: int, style: int, up: bool) -> None:
        super().__init__()
        self.weight, self.up = nn.Parameter(torch.randn(cout, cin, 3, 3) * (9 * cin) ** -0.5), up
        self.tell, self.bias = nn.Linear(style, cin), nn.Parameter(torch.zeros(cout))

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        weight = self.weight * (1 + self.tell(style))[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear") if self.up else x
        y = F.conv2d(x.flatten(0, 1)[None], weight.flatten(0, 1), padding=1, groups=len(x))
        return F.leaky_relu(y[0].unflatten(0, (len(x), -1)) + self.bias[:, None, None], 0.2)


class StyleGan(nn.Module):
    """One step of both players, with the slope of the judge on real pictures held down (a second backward pass)."""

    def __init__(self, widths: tuple[int, ...] = (512, 512, 256, 128, 64), style: int = 512) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        self.style = layers_of(style, style, style, style)
        self.maker = nn.ModuleList(
            Modulated(a, b, style, up) for p, q in pairwise(widths) for a, b, up in ((p, q, True), (q, q, False))
        )
        self.colours = nn.Conv2d(widths[-1], 3, 1)
        steps: list[nn.Module] = [nn.Conv2d(3, widths[-1], 1), nn.LeakyReLU(0.2)]
        for a, b in pairwise(widths[::-1]):
            steps += [nn.Conv2d(a, a, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(a, b, 3, 2, 1), nn.LeakyReLU(0.2)]
        self.judge = nn.Sequential(*steps, nn.Flatten(), nn.Linear(16 * widths[0], 1))

    def forward(self, z: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        real, style = labels.detach().requires_grad_(), self.style(z)
        h = self.start.expand(len(z), -1, -1, -1)
        for conv in self.maker:
            h = conv(h, style)
        fake, scores = self.colours(h), self.judge(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        self.judge.requires_grad_(False)
        fooled = F.softplus(-self.judge(fake)).mean()
        self.judge.requires_grad_(True)
        told = F.softplus(self.judge(fake.detach())).mean() + F.softplus(-scores).mean()
        return loss(fooled + told + 5 * slope.square().sum((1, 2, 3)).mean())


class LinearDit(nn.Module):
    """Attention without softmax over the picture, softmax attention to the text, convolutions in between: as Sana."""

    def __init__(self, width: int, head: int = 32) -> None:
        super().__init__()
        self.width, self.head = width, head
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q, self.kv, self.back = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.up, self.down = nn.Conv2d(width, 5 * width, 1), nn.Conv2d(5 * width // 2, width, 1, bias=False)
        self.deep = nn.Conv2d(5 * width, 5 * width, 3, padding=1, groups=5 * width)
        self.told = nn.Parameter(torch.randn(6, width) * width**-0.5)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k, v = F.relu(q), F.relu(k), F.pad(v, (0, 1), value=1.0)
        seen = q.float() @ (k.transpose(-1, -2).float() @ v.float())
        return self.out((seen[..., :-1] / (seen[..., -1:] + 1e-6)).to(x.dtype).transpose(1, 2).flatten(2))

    def across(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 112)).transpose(1, 2) for t in (self.q(x), *self.kv(text).chunk(2, -1)))
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        side = round(x.shape[1] ** 0.5)
        h = F.silu(self.up(x.transpose(1, 2).unflatten(2, (side, side))))
        value, gate = self.deep(h).chunk(2, 1)
        return self.down(value * F.silu(gate)).flatten(2).transpose(1, 2)

    def forward(self, x: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = (self.told + time).chunk(6, 1)
        x = x + c * self.linear(F.layer_norm(x, (self.width,)) * (1 + b) + a)
        x = x + self.across(x, text)
        return x + f * self.mixed(F.layer_norm(x, (self.width,)) * (1 + e) + d)


class Sana(nn.Module):
    def __init__(self, width: int = 2240, layers: int = 6) -> None:
        super().__init__()
        self.patch, self.text, self.out = nn.Conv2d(32, width, 1), nn.Linear(2304, width), nn.Linear(width, 32)
        self.time = layers_of(256, width, 6 * width)
        self.blocks = nn.ModuleList(LinearDit(width) for _ in range(layers))

    def forward(self, x: torch.Tensor, text: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        time, text = self.time(waves(t, 256).to(x.dtype)).unflatten(-1, (6, -1)), self.text(text)
        h = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h, text, time)
        return self.out(h)


class Accumulated(nn.Module):
    """The gradients of four small batches to one step."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision import models

        self.model = models.vgg13_bn(weights=None)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        losses: list[torch.Tensor] = []
        for some, kinds in zip(x.chunk(4), labels.chunk(4), strict=True):
            for last in losses[-1:]:
                last.backward()
            losses.append(F.cross_entropy(self.model(some).float(), kinds) / 4)
        return loss(losses[-1])


class Distilled(nn.Module):
    """A small network learns what a large one, which stays, says of the same pictures."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision import models

        self.teacher = models.resnext101_32x8d(weights=None).requires_grad_(False)
        self.student = models.shufflenet_v2_x1_5(weights=None)
        self.to(memory_format=torch.channels_last)

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            known = self.teacher(x).float()
        said = self.student(x).float()
        alike = F.kl_div((said / 4).log_softmax(-1), (known / 4).softmax(-1), reduction="batchmean")
        return loss(16 * alike + F.cross_entropy(said, labels))


class ClipPair(nn.Module):
    """Pictures and their captions, each told from the others of the batch."""

    def __init__(
        self, width: int = 768, text: int = 512, layers: int = 8, vocab: int = 49408, length: int = 77
    ) -> None:
        super().__init__()

        def tower(w: int) -> nn.Module:
            layer = nn.TransformerEncoderLayer(w, w // 64, 4 * w, 0.0, "gelu", batch_first=True, norm_first=True)
            return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        self.patch, self.words = nn.Conv2d(3, width, 16, 16), nn.Embedding(vocab, text)
        self.at, self.place = nn.Parameter(torch.zeros(196, width)), nn.Parameter(torch.zeros(length, text))
        self.sees, self.reads = tower(width), tower(text)
        self.from_sight, self.from_text = nn.Linear(width, 512), nn.Linear(text, 512)
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        seen = self.sees(self.patch(x).flatten(2).transpose(1, 2) + self.at).mean(1)
        later = torch.ones(labels.shape[1], labels.shape[1], dtype=torch.bool, device=x.device).triu(1)
        read = self.reads(self.words(labels) + self.place, mask=later, is_causal=True)
        read = read[torch.arange(len(x), device=x.device), labels.argmax(1)]
        a, b = F.normalize(self.from_sight(seen).float(), dim=-1), F.normalize(self.from_text(read).float(), dim=-1)
        scores, own = self.scale.exp() * a @ b.T, torch.arange(len(x), device=x.device)
        return loss((F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2)


class TasNet(nn.Module):
    """Two voices out of one recording: Conv-TasNet."""

    def __init__(self, width: int = 512, narrow: int = 128, blocks: int = 8, repeats: int = 3) -> None:
        super().__init__()

        def block(gap: int) -> nn.Module:
            deep = nn.Conv1d(width, width, 3, padding=gap, dilation=gap, groups=width)
            one = (nn.Conv1d(narrow, width, 1), nn.PReLU(), nn.GroupNorm(1, width))
            return Residual(*one, deep, nn.PReLU(), nn.GroupNorm(1, width), nn.Conv1d(width, narrow, 1))

        self.into, self.back = nn.Conv1d(1, width, 16, 8), nn.ConvTranspose1d(width, 1, 16, 8)
        steps = (block(1 << i) for _ in range(repeats) for i in range(blocks))
        ends = (nn.PReLU(), nn.Conv1d(narrow, 2 * width, 1), nn.Sigmoid())
        self.mask = nn.Sequential(nn.GroupNorm(1, width), nn.Conv1d(width, narrow, 1), *steps, *ends)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        h = F.relu(self.into(x))
        parts = (self.mask(h).unflatten(1, (2, -1)) * h[:, None]).flatten(0, 1)
        said = self.back(parts).view_as(labels)
        aim = (said * labels).sum(-1, keepdim=True) / (labels.square().sum(-1, keepdim=True) + 1e-8) * labels
        kept, lost = aim.square().sum(-1) + 1e-8, (said - aim).square().sum(-1) + 1e-8
        return loss(-10 * (kept / lost).log10().mean())


# -- sequences and decoding -------------------------------------------------------------------------------------


class MinGru(nn.Module):
    """A gated recurrence over all steps at once, in logarithms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.feed = Residual(nn.RMSNorm(width), layers_of(width, 3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.into(self.norm(x)).float().chunk(2, -1)
        fade = -F.softplus(gate).cumsum(1)
        value = torch.where(value >= 0, (F.relu(value) + 0.5).log(), -F.softplus(-value)) - F.softplus(-gate)
        state = (fade + torch.logcumsumexp(value - fade, 1)).exp()
        return self.feed(x + self.out(state.to(x.dtype)))


class Hyena(nn.Module):
    """Gates and a convolution as long as the sequence, its filter made by a small network of the place."""

    def __init__(self, width: int, inner: int = 64) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.f1, self.f2, self.f3 = nn.Linear(32, inner), nn.Linear(inner, inner), nn.Linear(inner, width)
        self.feed = Residual(nn.LayerNorm(width), layers_of(width, 4 * width, width))

    def filter(self, n: int, like: torch.Tensor) -> torch.Tensor:
        t = torch.arange(n, device=like.device)
        h = self.f3((10 * self.f2((10 * self.f1(waves(t, 32).to(like.dtype))).sin())).sin())
        return h.T.float() * torch.exp(-3 * t / n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        a, b, v = self.short(self.into(self.norm(x)).transpose(1, 2))[..., :n].chunk(3, 1)
        long = torch.fft.rfft((v * b).float(), 2 * n) * torch.fft.rfft(self.filter(n, x), 2 * n) / n
        y = torch.fft.irfft(long, 2 * n)[..., :n].to(x.dtype) * a
        return self.feed(x + self.out(y.transpose(1, 2)))


def language(layer: Callable[[int], nn.Module], width: int, layers: int, vocab: int) -> nn.Module:
    steps = (layer(width) for _ in range(layers))
    return nn.Sequential(nn.Embedding(vocab, width), *steps, nn.RMSNorm(width), nn.Linear(width, vocab))


class FixedCache(nn.Module):
    """One token through layers as wide as those of a model of 70 B, its keys and values put into a fixed cache."""

    def __init__(self, width: int = 8192, up: int = 28672, kv: int = 8, head: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.kv, self.head = kv, head
        parts = {"q": (width, width), "k": (width, kv * head), "v": (width, kv * head), "o": (width, width)}
        parts |= {"gate": (width, up), "up": (width, up), "down": (up, width)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in parts.items()}) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.embed, self.head_out = nn.Embedding(128256, width), nn.Linear(width, 128256, bias=False)

    def forward(self, cache: torch.Tensor, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, past = self.embed(token), torch.arange(cache.shape[4], device=at.device) <= at
        for i, m in enumerate(self.layers):
            h = self.norms[2 * i](x)
            for j, name in enumerate(("k", "v")):
                cache[i, j].index_copy_(2, at, m[name](h).view(len(h), self.kv, 1, self.head))
            q = m["q"](h).view(len(h), self.kv, -1, self.head)  # the queries of a key in place of tokens
            seen = F.scaled_dot_product_attention(q, cache[i, 0], cache[i, 1], attn_mask=past[None])
            x = x + m["o"](seen.reshape(len(h), 1, -1))
            h = self.norms[2 * i + 1](x)
            x = x + m["down"](F.silu(m["gate"](h)) * m["up"](h))
        return self.head_out(x)


# -- physics, points, graphs, clicks, control -------------------------------------------------------------------


class Pinn(nn.Module):
    """Flow in a plane: how far a network of place and time is from Navier and Stokes' equations."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        steps = (m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh()))
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), *steps, nn.Linear(width, 3))

    def forward(self, at: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        at = at.detach().requires_grad_()

        def slope(f: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(f.sum(), at, create_graph=True)[0]

        out = self.net(at)
        u, v, p = out.unbind(-1)
        du, dv, dp = slope(u), slope(v), slope(p)
        wrong = (du[:, 0] + dv[:, 1]).square().mean() + F.mse_loss(out[:4096], labels)
        for d, axis in (du, 0), (dv, 1):
            bend = slope(d[:, 0])[:, 0] + slope(d[:, 1])[:, 1]
            wrong = wrong + (d[:, 2] + u * d[:, 0] + v * d[:, 1] + dp[:, axis] - 0.01 * bend).square().mean()
        return loss(wrong)


class Slices(nn.Module):
    """Points sorted softly into a few slices, which attend to each other: a layer of Transolver."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.x, self.f, self.out = (nn.Linear(width, width) for _ in range(3))
        self.slice = nn.Linear(width // heads, slices)
        self.qkv = nn.Linear(width // heads, 3 * width // heads, bias=False)
        self.feed = Residual(nn.LayerNorm(width), layers_of(width, 2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        a, b = (m(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.x, self.f))
        weigh = (self.slice(a) / 0.5).softmax(-1)
        tokens_ = weigh.transpose(-1, -2) @ b / (weigh.sum(2)[..., None] + 1e-5)
        q, k, v = self.qkv(tokens_).chunk(3, -1)
        seen = weigh @ F.scaled_dot_product_attention(q, k, v)
        return self.feed(x + self.out(seen.transpose(1, 2).flatten(2)))


class Transolver(nn.Module):
    def __init__(self, width: int = 256, layers: int = 8, heads: int = 8, slices: int = 64) -> None:
        super().__init__()
        layers_ = (Slices(width, heads, slices) for _ in range(layers))
        self.body = nn.Sequential(layers_of(7, 2 * width, width), *layers_, nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return loss(F.mse_loss(self.body(x), labels))


class NearPoints(nn.Module):
    """Attention of a point to its 16 nearest, with a weight for every channel."""

    def __init__(self, cin: int, width: int, near: int = 16) -> None:
        super().__init__()
        self.near, self.into, self.out = near, nn.Linear(cin, width), nn.Linear(width, width)
        self.qkv, self.place, self.weigh = (
            nn.Linear(width, 3 * width),
            layers_of(3, width, width),
            layers_of(width, width, width),
        )

    def forward(self, at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        with torch.no_grad():
            nearest = torch.cdist(at, at).topk(self.near, largest=False).indices
        rows = torch.arange(len(x), device=x.device)[:, None, None]
        q, k, v = self.qkv(x).chunk(3, -1)
        place = self.place(at[:, :, None] - at[rows, nearest])
        weigh = self.weigh(q[:, :, None] - k[rows, nearest] + place).softmax(2)
        return x + self.out((weigh * (v[rows, nearest] + place)).sum(2))


class PointTransformer(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (48, 96, 192, 384)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NearPoints(a, b) for a, b in pairwise((3, *widths)))
        self.head = layers_of(widths[-1], 256, 40)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        x = at
        for i, layer in enumerate(self.layers):
            at, x = (at[:, ::4], x[:, ::4]) if i else (at, x)
            x = layer(at, x)
        return self.head(x.amax(1))


class Equivariant(nn.Module):
    """Messages of distances, which move the nodes too: EGNN."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, width), nn.Linear(width, 1)
        self.says = nn.ModuleList(
            nn.Sequential(layers_of(2 * width + 1, width, width), nn.SiLU()) for _ in range(layers)
        )
        self.moves = nn.ModuleList(layers_of(width, width, 1) for _ in range(layers))
        self.hears = nn.ModuleList(layers_of(2 * width, width, width) for _ in range(layers))

    def forward(self, h: torch.Tensor, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        h, (a, b) = self.into(h), edges
        for say, move, hear in zip(self.says, self.moves, self.hears, strict=True):
            apart = x[a] - x[b]
            far = apart.square().sum(-1, keepdim=True)
            said = say(torch.cat([h[a], h[b], far], -1))
            x = x + torch.zeros_like(x).index_add_(0, a, apart / (far + 1) * move(said).tanh()) / 10
            h = h + hear(torch.cat([h, torch.zeros_like(h).index_add_(0, a, said)], -1))
        return loss(F.mse_loss(self.out(h)[:, 0], labels) + F.mse_loss(x, x.detach().roll(1, 0)))


class LightGcn(nn.Module):
    """Users and things they took: vectors spread along the graph, then one thing taken against one not."""

    def __init__(self, nodes: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.table, self.layers = nn.Parameter(torch.randn(nodes, width) * 0.1), layers

    def forward(self, edges: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        a, b = edges
        ones = torch.ones(edges.shape[1], device=a.device)
        seldom = (torch.zeros(len(self.table), device=a.device).index_add_(0, a, ones) + 1).rsqrt()
        weigh, h, total = (seldom[a] * seldom[b])[:, None], self.table, self.table
        for _ in range(self.layers):
            h = torch.zeros_like(h).index_add_(0, a, h[b] * weigh)
            total = total + h
        user, took, left = (total / (self.layers + 1))[labels].unbind()
        return loss(-F.logsigmoid((user * (took - left)).sum(-1)).mean() + 1e-4 * self.table[labels].square().mean())


class Ppo(nn.Module):
    """A clipped step of a policy on what many simulated robots did."""

    def __init__(self, seen: int = 48, actions: int = 12) -> None:
        super().__init__()
        self.actor, self.critic = layers_of(seen, 512, 256, 128, actions), layers_of(seen, 512, 256, 128, 1)
        self.spread = nn.Parameter(torch.zeros(actions))

    def forward(self, s: torch.Tensor, a: torch.Tensor, old: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        policy, value = (
            torch.distributions.Normal(self.actor(s), self.spread.exp(), validate_args=False),
            self.critic(s),
        )
        gain, worth = labels.unbind(-1)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        ratio = (policy.log_prob(a).sum(-1) - old).clamp(-5, 5).exp()
        clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return loss(F.mse_loss(value[:, 0], worth) - clipped - 0.01 * policy.entropy().sum(-1).mean())


def at_token(n: int) -> Maker:
    return lambda device, dtype: (torch.full((1,), n, device=device),)


E2B = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 12, "num_key_value_heads": 1}
BASE = {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
FRAMES = named("pixel_values", numbers((12, 8, 3, 224, 224)))
STATES = {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 128}
EXPERTS = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None}
FOCAL = {"focal_levels": [3, 3, 3, 3], "focal_windows": [3, 3, 3, 3], "depths": [2, 2, 18, 2], "drop_path_rate": 0.0}
SMALLER = {"down_ops": [["Subsample", 32, 8, 4, 2, 2], ["Subsample", 32, 12, 4, 2, 2]], "key_dim": [32, 32, 32]}
LEVIT_256 = {"hidden_sizes": [256, 384, 512], "num_attention_heads": [4, 6, 8], "num_labels": 1000} | SMALLER
SWIFT_L1 = {"depths": [4, 3, 10, 5], "embed_dims": [48, 96, 192, 384], "num_labels": 1000}
STEADY = {"apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 12}
FALCON = decoder("FalconH1", tokens(1, 1024, 32784, labels=True), 1024, 2048, 4, (8, 2), 32784, head_dim=64, **STATES)
MOONLIGHT = decoder("DeepseekV3", tokens(4, 1024, 163840), 2048, 11264, 5, (16, 16), 163840, **EXPERTS, **ONE_GROUP)
GLM = {"head_dim": 128, "n_routed_experts": 48, "first_k_dense_replace": 1}
GLM4_MOE = decoder("Glm4Moe", tokens(2, 768, 151552, labels=True), 4096, 10944, 3, (96, 8), 151552, **GLM)
FOCALNET = hf(
    "FocalNetForImageClassification", "FocalNetConfig", images(32, 224), embed_dim=128, num_labels=1000, **FOCAL
)
LEVIT = hf("LevitForImageClassification", "LevitConfig", images(1, 224), **LEVIT_256)
SWIFTFORMER = hf("SwiftFormerForImageClassification", "SwiftFormerConfig", images(96, 224), **SWIFT_L1)
SOUND = named("input_values", numbers((8, 96000)))
WAVLM = hf("WavLMForSequenceClassification", "WavLMConfig", SOUND, **STEADY)
MIN_GRU = by_hand(partial(language, MinGru, 768, 6, 256), whole(256, 8, 2048))
HYENA = by_hand(partial(language, Hyena, 256, 6, 16), whole(16, 8, 16384))
GEMMA2 = decoder("Gemma2", tokens(2, 2048, 256000), 2304, 9216, 9, (8, 4), 256000)
GEMMA4 = hf("Gemma4ForCausalLM", "Gemma4TextConfig", tokens(1, 3000, 262144), **E2B)
NANOCHAT = decoder("NanoChat", tokens(8, 1024, 65536, labels=True), 768, 3072, 12, (6, 6), 65536)
OLMO3 = decoder("Olmo3", tokens(1, 8192, 100278), 4096, 11008, 4, (32, 32), 100278, max_position_embeddings=65536)
XLNET = hf("XLNetLMHeadModel", "XLNetConfig", tokens(8, 384, 32000, labels=True), **BASE)
MUSICGEN = hf("MusicgenForCausalLM", "MusicgenDecoderConfig", tokens(16, 1500, 2048))
MINIMAX = decoder("MiniMax", tokens(2, 1024, 200064), 3072, 5120, 4, (24, 8), 200064, head_dim=128)
APERTUS = decode(decoder("Apertus", tokens(1, 1, 131072), 4096, 21504, 8, (32, 8), 131072), 1, 2500)
TIMESFORMER = hf("TimesformerForVideoClassification", "TimesformerConfig", FRAMES, num_labels=400)
STABLELM = decoder("StableLm", tokens(4, 512, 100352, labels=True), 2048, 5632, 10, (32, 32), 100352, use_qkv_bias=True)
ARCEE = decoder("Arcee", tokens(4, 512, 128004, labels=True), 2560, 18432, 5, (20, 4), 128004, head_dim=128)
PLAYED = named("z labels", numbers((32, 512), (32, 3, 64, 64)))
SEEN = named("x labels", beside(numbers((128, 3, 224, 224)), whole(1000, 128)))
CAPTIONED = named("x labels", beside(numbers((320, 3, 224, 224)), whole(49408, 320, 77)))
VOICES = named("x labels", numbers((6, 1, 32000), (6, 2, 32000)))
FLOW = named("at labels", numbers((40_000, 3), (4096, 3)))
AIR = named("x labels", numbers((1, 32768, 7), (1, 32768, 4)))
ATOMS = beside(numbers((20_000, 16), (20_000, 3)), whole(20_000, 2, 240_000), numbers((20_000,)))
BOUGHT = named("edges labels", beside(whole(250_000, 2, 2_000_000), whole(250_000, 3, 8192)))
ROBOTS = named("s a old labels", numbers((24576, 48), (24576, 12), (24576,), (24576, 2)))


def sana(batch: int, side: int, layers: int) -> Factory:
    return by_hand(partial(Sana, layers=layers), numbers((batch, 32, side, side), (batch, 300, 2304), (batch,)))


def fixed_cache(batch: int, longest: int, at: int) -> Factory:
    cache = numbers((3, 2, batch, 8, longest, 128))
    return by_hand(FixedCache, beside(cache, whole(128256, batch, 1), at_token(at)))


CASES = [
    # every kind once, then more of some, in case the time runs out
    case("gemma2_2b_9layers_b2_s2048", GEMMA2, 2, "bf16"),
    case("smollm3_3b_12layers_decode_b64_past1800", smollm3_3b(64, 1800), 64, "bf16"),
    case("fixed_cache_3layers_decode_b16_past6000", fixed_cache(16, 6144, 6000), 16, "bf16"),
    case("stylegan2_r1_train_b32_s64", by_hand(StyleGan, PLAYED), 32, "fp32", **TRAIN_ADAMW),
    case("nanochat_d12_autocast_train_b8_s1024", autocast(NANOCHAT), 8, **TRAIN_ADAMW),
    case("moonlight_5layers_b4_s1024", MOONLIGHT, 4, "bf16"),
    case("stablelm_10layers_four_bits_train_b4_s512", wrapped(four_bits, STABLELM), 4, "bf16", **TRAIN_ADAMW),
    case("sana_6layers_b2_s64", sana(2, 64, 6), 2, "bf16"),
    case("efficientnet_v2_l_b16_s480_cl", vision("efficientnet_v2_l", 16, 480), 16, "fp16", **LAST),
    case("pinn_train_p40k", by_hand(Pinn, FLOW), 40_000, "fp32", **TRAIN_ADAMW),
    case("vjepa2_l_b3_f16", vjepa2_l(3, 16), 3, "fp16"),
    case("arcee_5layers_preference_train_b4_s512", wrapped(Preference, ARCEE), 4, "bf16", **TRAIN_ADAMW),
    case("hyena_6layers_b8_s16384", HYENA, 8),
    case("light_gcn_train_e2m", by_hand(partial(LightGcn, 250_000), BOUGHT), 8192, "fp32", **TRAIN_ADAMW),
    case("wavlm_base_autocast_train_b8_6s", autocast(WAVLM), 8, **TRAIN_ADAMW),
    case("sam2_hiera_t_b2_s1024", hf("Sam2VisionModel", "Sam2VisionConfig", images(2, 1024)), 2, "bf16"),
    case("clip_pairs_autocast_train_b320", autocast(by_hand(ClipPair, CAPTIONED)), 320, **TRAIN_ADAMW),
    case("olmo3_7b_4layers_b1_s8192", OLMO3, 1, "bf16"),
    case("distilled_shufflenet_autocast_train_b128", autocast(by_hand(Distilled, SEEN)), 128, **TRAIN_SGD),
    case("timesfm_20layers_b64_l512", timesfm(64, 512), 64),
    case("point_transformer_train_b8_n4096", by_hand(PointTransformer, numbers((8, 4096, 3))), 8, "fp32", **TRAIN_SGD),
    case("glm4_moe_3layers_train_b2_s768", GLM4_MOE, 2, "bf16", **TRAIN_SGD),
    case("min_gru_6layers_autocast_train_b8_s2048", autocast(MIN_GRU), 8, **TRAIN_ADAMW),
    case("gemma4_e2b_12layers_b1_s3000", GEMMA4, 1, "bf16"),
    case("vgg13_bn_accumulated_autocast_train_b128", autocast(by_hand(Accumulated, SEEN)), 128, **TRAIN_SGD),
    case("depth_anything_small_b8_s518", depth_anything_small(8, 518), 8, "fp16"),
    case("egnn_train_n20k_e240k", by_hand(Equivariant, named("h x edges labels", ATOMS)), 1, "fp32", **TRAIN_ADAMW),
    case("musicgen_small_b4_s1500", MUSICGEN, 4, "fp16"),
    case("focalnet_base_autocast_train_b32", autocast(FOCALNET), 32, **TRAIN_ADAMW),
    case("nomic_bert_b96_s512", hf("NomicBertModel", "NomicBertConfig", tokens(96, 512, 30528)), 96, "fp16"),
    case("conv_tasnet_train_b6_2s", by_hand(TasNet, VOICES), 6, "fp32", **TRAIN_ADAMW),
    case("transolver_tf32_train_n32768", tf32(by_hand(Transolver, AIR)), 1, "fp32", **TRAIN_ADAMW),
    case("big_bird_b2_s4096", big_bird(2, 4096), 2, "bf16"),
    case("minimax_4layers_b2_s1024", MINIMAX, 2, "bf16"),
    case("xlnet_base_tf32_train_b8_s384", tf32(XLNET), 8, **TRAIN_SGD),
    case("falcon_h1_4layers_train_b1_s1024", FALCON, 1, "bf16", **TRAIN_ADAMW),
    case("swiftformer_l1_train_b96", SWIFTFORMER, 96, "fp32", **TRAIN_ADAMW),
    case("mask2former_swin_t_b4_s512", mask2former_swin_t(4, 512), 4),
    case("timesformer_base_b12", TIMESFORMER, 12, "fp16"),
    case("ppo_train_b24576", by_hand(Ppo, ROBOTS), 24576, "fp32", **TRAIN_ADAMW),
    case("apertus_8b_8layers_decode_b1_past2500", APERTUS, 1, "fp16"),
    case("levit_256_b1", LEVIT, 1, "fp16"),
    case("smollm3_3b_12layers_decode_b4_past7000", smollm3_3b(4, 7000), 4, "fp16"),
    case("fixed_cache_3layers_decode_b1_past500", fixed_cache(1, 1024, 500), 1, "fp16"),
    case("sana_6layers_b1_s32", sana(1, 32, 6), 1, "fp16"),
    case("efficientnet_v2_l_b1_s384", vision("efficientnet_v2_l", 1, 384), 1),
    case("point_transformer_b1_n1024", by_hand(PointTransformer, numbers((1, 1024, 3))), 1),
]
