"""A seventh set the predictor is judged on: chosen by somebody who had not seen how the predictor works.

    python benchmarks/device/record_models.py benchmarks/device/heldout7_cases.py OUT_PREFIX --quick

What an engineer of 2026 would try first: usual models of torchvision and transformers at usual sizes, and the small
modules people write by hand; few of another set, and those at another size. The form is that of heldout6_cases.py; the
weights are random.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.utils import parametrize

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


def swin3d_t(batch: int, frames: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        from torchvision.models import video

        with built_on(device):
            model = video.swin3d_t(weights=None)
        return model.to(device, dtype), numbers((batch, 3, frames, 224, 224))(device, dtype)

    return build


def mistral_7b(batch: int, past: int) -> Factory:
    of_8_layers = decoder("Mistral", tokens(batch, 1, 32768), 4096, 14336, 8, (32, 8), 32768, sliding_window=None)
    return decode(of_8_layers, batch, past)


def qwen25_14b(batch: int, past: int) -> Factory:
    return decode(decoder("Qwen2", tokens(batch, 1, 152064), 5120, 13824, 6, (40, 8), 152064), batch, past)


def llama8b_more(batch: int, new: int, past: int) -> Factory:
    """Some new tokens at once after those in the cache: a piece of a long prompt, or guesses to be verified."""
    return decode(decoder("Llama", tokens(batch, new, 128256), 4096, 14336, 6, (32, 8), 128256), batch, past)


def gpt2_large(batch: int, seq: int) -> Factory:
    return hf("GPT2LMHeadModel", "GPT2Config", tokens(batch, seq, 50257), n_embd=1280, n_layer=36, n_head=20)


def qwen15_moe(inputs: Maker) -> Factory:
    sizes = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    return decoder("Qwen2Moe", inputs, 2048, 5632, 6, (16, 16), 151936, num_experts=60, num_experts_per_tok=4, **sizes)


class LowRank(nn.Module):
    """A matrix plus a product of two narrow ones."""

    def __init__(self, like: torch.Tensor, rank: int) -> None:
        super().__init__()
        at = {"device": like.device, "dtype": like.dtype}
        self.down = nn.Parameter(torch.randn(rank, like.shape[1], **at) * 0.02)
        self.up = nn.Parameter(torch.zeros(like.shape[0], rank, **at))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 2 * self.up @ self.down


def low_rank(model: nn.Module) -> nn.Module:
    """LoRA by torch's parametrizations, which make the whole matrix anew in every step."""
    model.requires_grad_(False)
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and name.endswith(("q_proj", "v_proj", "fc1", "fc2")):
            parametrize.register_parametrization(part, "weight", LowRank(part.weight, 16))
    return model


class InPieces(Wrapper):
    """The gradients of four small batches to one step."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        pieces = list(zip(input_ids.chunk(4), labels.chunk(4), strict=True))
        for ids, next_ids in pieces[:-1]:
            (self.model(input_ids=ids, labels=next_ids).loss / 4).backward()
        ids, next_ids = pieces[-1]
        return loss(self.model(input_ids=ids, labels=next_ids).loss / 4)


class GroupPolicy(Wrapper):
    """A step of GRPO: answers of a group of eight, each weighed by how much better than the others it was."""

    def forward(self, input_ids: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.model(input_ids=input_ids).logits[:, :-1].float()
        likely = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        reward = labels.float().view(-1, 8)
        gain = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        ratio = (likely - likely.detach() + 0.05 * noise).exp()
        return loss(-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain).mean())


class Llava(nn.Module):
    """A picture before some text: CLIP's large model at 336 pixels, and four layers of a model of 7 B."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaModel

        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16}
        self.sight = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=336, patch_size=14))
        self.project = nn.Sequential(nn.Linear(1024, width), nn.GELU(), nn.Linear(width, width))
        self.reads = LlamaModel(LlamaConfig(hidden_size=width, intermediate_size=11008, num_hidden_layers=4))
        self.out = nn.Linear(width, 32000, bias=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen = self.project(self.sight(pixel_values=x).last_hidden_state[:, 1:])
        both = torch.cat([seen, self.reads.get_input_embeddings()(ids)], 1)
        return self.out(self.reads(inputs_embeds=both).last_hidden_state[:, -1])


class SmallerBert(nn.Module):
    """Six layers learn what twelve say of the hidden words."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.teacher = BertForMaskedLM(BertConfig()).requires_grad_(False)
        self.student = BertForMaskedLM(BertConfig(num_hidden_layers=6))

    def train(self, mode: bool = True) -> SmallerBert:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        with torch.no_grad():
            known = self.teacher(input_ids=input_ids).logits.flatten(0, 1)
        said = self.student(input_ids=input_ids).logits.flatten(0, 1)
        alike = F.kl_div(F.log_softmax(said / 2, -1), F.softmax(known / 2, -1), reduction="batchmean")
        return loss(4 * alike + F.cross_entropy(said, labels.flatten()))


# -- pictures ---------------------------------------------------------------------------------------------------


class Basic(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.c2, self.b2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        past = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))
        self.past = past if stride > 1 or cin != cout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + self.past(x))


class CifarResNet(nn.Module):
    """ResNet-18 as it is written for pictures of 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        widths = (64, 64, 128, 256, 512)
        blocks = ((Basic(a, b, 1 if a == b else 2), Basic(b, b, 1)) for a, b in pairwise(widths))
        self.blocks = nn.Sequential(*(block for two in blocks for block in two))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.avg_pool2d(self.blocks(self.first(x)), 4).flatten(1))


class UNetOnResNet(nn.Module):
    """A segmentation network whose way down is torchvision's ResNet-34; learns by Dice and cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision import models

        net = models.resnet34(weights=None)
        self.first, self.pool = nn.Sequential(net.conv1, net.bn1, net.relu), net.maxpool
        self.down = nn.ModuleList((net.layer1, net.layer2, net.layer3, net.layer4))
        ups = ((512 + 256, 256), (256 + 128, 128), (128 + 64, 64), (64 + 64, 32), (32, 16))
        self.up = nn.ModuleList(nn.Sequential(*self.both(a, b), *self.both(b, b)) for a, b in ups)
        self.out = nn.Conv2d(16, 1, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    @staticmethod
    def both(a: int, b: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        kept = [self.first(x.contiguous(memory_format=torch.channels_last))]
        h = self.pool(kept[0])
        for layer in self.down:
            h = layer(h)
            kept.append(h)
        kept.pop()
        for layer in self.up:
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = layer(torch.cat([h, kept.pop()], 1) if kept else h)
        said = self.out(h)
        if labels is None:
            return said
        mask, said = (labels > 0).float(), said.float()
        sure = said.sigmoid()
        dice = 1 - (2 * (sure * mask).sum((1, 2, 3)) + 1) / (sure.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        return loss(dice.mean() + F.binary_cross_entropy_with_logits(said, mask))


class MlpVae(nn.Module):
    """The variational autoencoder of PyTorch's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.sees, self.middle, self.spread = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.draws = layers_of(20, 400, 784)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        h = F.relu(self.sees(x))
        mu, log_var = self.middle(h), self.spread(h)
        drawn = torch.sigmoid(self.draws(mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)))
        lost = F.binary_cross_entropy(drawn, (labels > 0).float(), reduction="sum")
        return loss(lost - 0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp()))


class DcGan(nn.Module):
    """One step of both players of PyTorch's tutorial."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width * n for n in (8, 4, 2, 1)]
        maker: list[nn.Module] = [nn.ConvTranspose2d(100, sizes[0], 4, 1, 0, bias=False)]
        judge: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for a, b in pairwise(sizes):
            maker += [nn.BatchNorm2d(a), nn.ReLU(True), nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False)]
        for b, a in pairwise(sizes[::-1]):
            judge += [nn.Conv2d(b, a, 4, 2, 1, bias=False), nn.BatchNorm2d(a), nn.LeakyReLU(0.2, inplace=True)]
        last = (nn.BatchNorm2d(width), nn.ReLU(True), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
        self.maker = nn.Sequential(*maker, *last)
        self.judge = nn.Sequential(*judge, nn.Conv2d(sizes[0], 1, 4, 1, 0, bias=False), nn.Flatten(0))

    def forward(self, z: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        fake, ones = self.maker(z), torch.ones(len(z), device=z.device)
        told = F.binary_cross_entropy_with_logits(self.judge(labels), ones)
        told = told + F.binary_cross_entropy_with_logits(self.judge(fake.detach()), torch.zeros_like(ones))
        self.judge.requires_grad_(False)
        fooled = F.binary_cross_entropy_with_logits(self.judge(fake), ones)
        self.judge.requires_grad_(True)
        return loss(told + fooled)


class SimClr(nn.Module):
    """Two views of each picture, told from the views of the others."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision import models

        self.sees, self.project = models.resnet50(weights=None), layers_of(2048, 2048, 128)
        self.sees.fc = nn.Identity()
        self.sees.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        both = torch.cat([x, labels]).contiguous(memory_format=torch.channels_last)
        seen = F.normalize(self.project(self.sees(both)).float(), dim=1)
        alike = (seen @ seen.T) / 0.1
        alike = alike.masked_fill(torch.eye(len(both), dtype=torch.bool, device=x.device), -1e9)
        return loss(F.cross_entropy(alike, torch.arange(len(both), device=x.device).roll(len(x))))


class Told(nn.Module):
    """A transformer layer scaled and shifted by the time and the kind of picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.tell = width, nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = self.tell(F.silu(told))[:, None].chunk(6, -1)
        h = F.layer_norm(x, (self.width,)) * (1 + b) + a
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        x = x + c * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + f * self.feed(F.layer_norm(x, (self.width,)) * (1 + e) + d)


class Flow(nn.Module):
    """Flow matching in latents of 32 x 32; without labels, four steps of it with guidance."""

    def __init__(self, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.patch, self.out = nn.Conv2d(4, width, 2, 2), nn.Linear(width, 16)
        self.at, self.kinds = nn.Parameter(torch.randn(256, width) * 0.02), nn.Embedding(1001, width)
        self.time, self.layers = layers_of(256, width, width), nn.ModuleList(Told(width) for _ in range(layers))

    def speed(self, x: torch.Tensor, t: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        told = self.time(waves(1000 * t, 256).to(x.dtype)) + self.kinds(kind)
        h = self.patch(x).flatten(2).transpose(1, 2) + self.at
        for layer in self.layers:
            h = layer(h, told)
        return F.pixel_shuffle(self.out(h).transpose(1, 2).unflatten(2, (16, 16)), 2)

    def forward(self, x: torch.Tensor, kind: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if labels is not None:
            t = torch.rand(len(x), device=x.device)
            part = t[:, None, None, None]
            return loss(F.mse_loss(self.speed((1 - part) * x + part * labels, t, kind).float(), labels - x))
        kinds = torch.cat([kind, torch.full_like(kind, 1000)])
        for i in range(4):
            t = torch.full((len(kinds),), i / 4, device=x.device)
            with_kind, without = self.speed(torch.cat([x, x]), t, kinds).chunk(2)
            x = x + (without + 4 * (with_kind - without)) / 4
        return x


# -- sequences --------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """One head of attention, as in the lecture "Let's build GPT"."""

    def __init__(self, width: int, head: int, longest: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, head, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(longest, longest)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, k = x.shape[1], self.key(x)
        weigh = self.query(x) @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        weigh = weigh.masked_fill(self.tril[:n, :n] == 0, float("-inf"))
        return self.dropout(F.softmax(weigh, dim=-1)) @ self.value(x)


class FirstGpt(nn.Module):
    """A GPT of letters, its heads one after the other."""

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 6, longest: int = 256, vocab: int = 65) -> None:
        super().__init__()
        self.words, self.at = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        lists = ((Head(width, width // heads, longest) for _ in range(heads)) for _ in range(layers))
        self.heads = nn.ModuleList(nn.ModuleList(some) for some in lists)
        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2)) for _ in range(layers))
        feeds = (nn.Sequential(layers_of(width, 4 * width, width), nn.Dropout(0.2)) for _ in range(layers))
        self.feed, self.norms = nn.ModuleList(feeds), nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.at(torch.arange(ids.shape[1], device=ids.device))
        for i, (heads, mix, feed) in enumerate(zip(self.heads, self.mix, self.feed, strict=True)):
            h = self.norms[2 * i](x)
            x = x + mix(torch.cat([head(h) for head in heads], -1))
            x = x + feed(self.norms[2 * i + 1](x))
        return self.out(x)


class LstmCells(nn.Module):
    """A language model of letters that goes through time in Python."""

    def __init__(self, width: int = 512, vocab: int = 96) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, states, said = self.words(ids), [None] * len(self.cells), []
        for t in range(ids.shape[1]):
            h = x[:, t]
            for i, cell in enumerate(self.cells):
                states[i] = cell(h, states[i])
                h = states[i][0]
            said.append(self.out(h))
        return torch.stack(said, 1)


class SeriesTransformer(nn.Module):
    """A week of hours to the next day: nn.Transformer with its masks."""

    def __init__(self, width: int = 256, channels: int = 8) -> None:
        super().__init__()
        self.into, self.aim = nn.Linear(channels, width), nn.Linear(channels, width)
        self.body = nn.Transformer(width, 8, 4, 4, 1024, 0.1, batch_first=True)
        self.out = nn.Linear(width, channels)

    def told(self, x: torch.Tensor) -> torch.Tensor:
        return x + waves(torch.arange(x.shape[1], device=x.device), x.shape[2]).to(x.dtype)

    def forward(self, x: torch.Tensor, before: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        later = nn.Transformer.generate_square_subsequent_mask(before.shape[1], device=x.device, dtype=x.dtype)
        h = self.body(self.told(self.into(x)), self.told(self.aim(before)), tgt_mask=later, tgt_is_causal=True)
        return loss(F.smooth_l1_loss(self.out(h), labels))


class NextToken(nn.Module):
    """The end of a step of generation: the likeliest words that make up 0.9, and one of them by chance."""

    def __init__(self, width: int = 2048, vocab: int = 151_936) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.out(x).float() / 0.7
        sorted_, order = logits.sort(dim=-1, descending=True)
        p = sorted_.softmax(-1)
        sorted_ = sorted_.masked_fill(p.cumsum(-1) - p > 0.9, float("-inf"))
        p = torch.full_like(logits, float("-inf")).scatter_(1, order, sorted_).softmax(-1)
        return (p / torch.empty_like(p).exponential_(1)).argmax(-1, keepdim=True)


# -- graphs, clicks, control ------------------------------------------------------------------------------------


class Gcn(nn.Module):
    """Kipf and Welling's graph convolutions over the whole graph."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        a, b = edges
        ones = torch.ones(len(b), device=x.device, dtype=x.dtype)
        scale = (torch.ones(len(x), device=x.device, dtype=x.dtype).index_add_(0, b, ones)).rsqrt()
        weigh = (scale[a] * scale[b])[:, None]
        for i, layer in enumerate(self.layers):
            h = layer(F.dropout(x, 0.5, self.training))
            x = (h * scale.square()[:, None]).index_add(0, b, h[a] * weigh)
            x = F.relu(x) if i + 1 < len(self.layers) else x
        return x


class NeuMf(nn.Module):
    """Neural collaborative filtering: a product and a network of the vectors of who and what."""

    def __init__(self, users: int = 138_000, things: int = 27_000, width: int = 64) -> None:
        super().__init__()
        self.u1, self.u2, self.t1, self.t2 = (nn.Embedding(n, width) for n in (users, users, things, things))
        self.net, self.out = layers_of(2 * width, 256, 128, 64), nn.Linear(width + 64, 1)

    def forward(self, user: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        deep = self.net(torch.cat([self.u2(user), self.t2(thing)], -1))
        said = self.out(torch.cat([self.u1(user) * self.t1(thing), deep], -1))[:, 0]
        return loss(F.binary_cross_entropy_with_logits(said, (labels > 0.5).float()))


class Sac(nn.Module):
    """A step of soft actor and critic, with the slow copies of the critics and the temperature."""

    def __init__(self, seen: int = 17, actions: int = 6, width: int = 256) -> None:
        super().__init__()
        self.actor = layers_of(seen, width, width, 2 * actions)
        self.critics = nn.ModuleList(layers_of(seen + actions, width, width, 1) for _ in range(2))
        self.slow = copy.deepcopy(self.critics).requires_grad_(False)
        self.heat, self.actions = nn.Parameter(torch.zeros(())), actions

    def act(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mu, log_std = self.actor(s).chunk(2, -1)
        policy = torch.distributions.Normal(mu, log_std.clamp(-5, 2).exp(), validate_args=False)
        raw = policy.rsample()
        a = raw.tanh()
        return a, (policy.log_prob(raw) - (1 - a.square() + 1e-6).log()).sum(-1, keepdim=True)

    @staticmethod
    def worth(critics: nn.ModuleList, s: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        return [critic(torch.cat([s, a], -1)) for critic in critics]

    def forward(self, s: torch.Tensor, a: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        heat = self.heat.exp().detach()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.slow.parameters()), list(self.critics.parameters()), 0.005)
            nexts, likely = self.act(after)
            aim = labels + 0.99 * (torch.minimum(*self.worth(self.slow, after, nexts)) - heat * likely)
        wrong = sum(F.mse_loss(q, aim) for q in self.worth(self.critics, s, a))
        mine, likely = self.act(s)
        self.critics.requires_grad_(False)
        poor = (heat * likely - torch.minimum(*self.worth(self.critics, s, mine))).mean()
        self.critics.requires_grad_(True)
        return loss(wrong + poor - (self.heat * (likely.detach() - self.actions)).mean())


# -- inputs and models of the table -----------------------------------------------------------------------------

DEBERTA_V3 = {"vocab_size": 128100, "type_vocab_size": 0, "relative_attention": True, "position_buckets": 256}
DEBERTA_V3 |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V3 |= {"position_biased_input": False, "max_relative_positions": -1, "num_labels": 3}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
RERANKER = LARGE | {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": 1}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 6, "feed_forward_proj": "gated-gelu"}
GEMMA3_SIZES = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1}
GEMMA3_SIZES |= {"num_hidden_layers": 10, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512}
ANSWERS = named("input_ids noise labels", beside(whole(151936, 8, 768), numbers((8, 767), (8,))))
VIEWS = named("x labels", numbers((96, 3, 224, 224), (96, 3, 224, 224)))
ORGANS = named("x labels", numbers((32, 3, 256, 256), (32, 1, 256, 256)))
LATENTS = named("x kind labels", beside(numbers((64, 4, 32, 32)), whole(1000, 64), numbers((64, 4, 32, 32))))
RATINGS = named("user thing labels", beside(whole(138_000, 65536), whole(27_000, 65536), numbers((65536,))))
MOVES = named("s a after labels", numbers((256, 17), (256, 6), (256, 17), (256, 1)))
HOURS = named("x before labels", numbers((192, 168, 8), (192, 24, 8), (192, 24, 8)))
PHI4 = decoder("Phi3", tokens(1, 8192, 100352), 5120, 17920, 5, (40, 10), 100352, max_position_embeddings=16384)
PHI2 = decoder("Phi", tokens(4, 1024, 51200, labels=True), 2560, 10240, 6, (32, 32), 51200)
PHI2_STEP = decoder("Phi", tokens(8, 1, 51200), 2560, 10240, 6, (32, 32), 51200)
SMOLLM2 = decoder("Llama", tokens(8, 1024, 49152, labels=True), 2048, 8192, 4, (32, 32), 49152)
QWEN3 = decoder("Qwen3", ANSWERS, 2048, 6144, 6, (16, 8), 151936, head_dim=128)
GEMMA3 = hf("Gemma3ForCausalLM", "Gemma3TextConfig", tokens(4, 1024, 262144, labels=True), **GEMMA3_SIZES)
BERT = hf("BertForMaskedLM", "BertConfig", tokens(64, 128, 30522, labels=True))
BGE_RERANKER = hf("XLMRobertaForSequenceClassification", "XLMRobertaConfig", tokens(32, 512, 250002), **RERANKER)
SIGLIP = hf("SiglipVisionModel", "SiglipVisionConfig", images(16, 384), image_size=384, patch_size=14, **SO400M)
T5_ENCODER = hf("T5EncoderModel", "T5Config", tokens(4, 512, 32128), vocab_size=32128, **T5_XXL)
SMALLER_BERT = by_hand(SmallerBert, tokens(96, 128, 30522, labels=True))
EFFICIENTNET_B1 = autocast(vision("efficientnet_b1", 96, 240))
FACES = named("z labels", numbers((256, 100, 1, 1), (256, 3, 64, 64)))
MNIST = named("x labels", numbers((128, 784), (128, 784)))


def deberta(batch: int, seq: int) -> Factory:
    def inputs(device: str, dtype: torch.dtype) -> Inputs:
        return tokens(batch, seq, 128100)(device, dtype) | {"attention_mask": torch.ones(batch, seq, device=device)}

    return hf("DebertaV2ForSequenceClassification", "DebertaV2Config", inputs, **DEBERTA_V3)


def mpnet(batch: int, seq: int) -> Factory:
    return hf("MPNetModel", "MPNetConfig", tokens(batch, seq, 30527))


def cifar(batch: int) -> Factory:
    return by_hand(CifarResNet, numbers((batch, 3, 32, 32)))


def gcn(nodes: int, edges: int, *widths: int) -> Factory:
    return by_hand(partial(Gcn, *widths), beside(numbers((nodes, widths[0])), whole(nodes, 2, edges)))


CASES = [
    # every kind once, then more of some, in case the time runs out
    case("mistral_7b_8layers_decode_b32_past4000", mistral_7b(32, 4000), 32, "bf16"),
    case("cifar_resnet18_train_b128", cifar(128), 128, "fp32", **TRAIN_SGD),
    case("resnet50_b256_cl", vision("resnet50", 256), 256, "fp16", **LAST),
    case("phi4_5layers_b1_s8192", PHI4, 1, "bf16"),
    case("bert_base_mlm_autocast_train_b64_s128", autocast(BERT), 64, **TRAIN_ADAMW),
    case("first_gpt_train_b64_s256", by_hand(FirstGpt, whole(65, 64, 256)), 64, "fp32", **TRAIN_ADAMW),
    case("gpt2_large_b8_s512", gpt2_large(8, 512), 8, "fp16"),
    case("simclr_resnet50_autocast_train_b96", autocast(by_hand(SimClr, VIEWS)), 96, **TRAIN_SGD),
    case("phi2_6layers_low_rank_train_b4_s1024", wrapped(low_rank, PHI2), 4, "bf16", **TRAIN_ADAMW),
    case("llama8b_6layers_b4_s256_past4000", llama8b_more(4, 256, 4000), 4, "bf16"),
    case("unet_resnet34_autocast_train_b32_s256", autocast(by_hand(UNetOnResNet, ORGANS)), 32, **TRAIN_ADAMW),
    case("flow_dit_b_autocast_train_b64", autocast(by_hand(Flow, LATENTS)), 64, **TRAIN_ADAMW),
    case("mpnet_base_b128_s256", mpnet(128, 256), 128, "fp16"),
    case("qwen3_1_7b_6layers_grpo_train_b8_s768", wrapped(GroupPolicy, QWEN3), 8, "bf16", **TRAIN_ADAMW),
    case("qwen15_moe_6layers_b4_s512", qwen15_moe(tokens(4, 512, 151936)), 4, "bf16"),
    case("gcn_train_n200k_e3m", gcn(200_000, 3_000_000, 100, 128, 128, 47), 1, "fp32", **TRAIN_ADAMW),
    case("vit_l_16_autocast_train_b32", autocast(vision("vit_l_16", 32)), 32, **TRAIN_ADAMW),
    case("llava_7b_4layers_b4", by_hand(Llava, beside(numbers((4, 3, 336, 336)), whole(32000, 4, 64))), 4, "fp16"),
    case("smollm2_1_7b_4layers_pieces_autocast_train_b8", autocast(wrapped(InPieces, SMOLLM2)), 8, **TRAIN_ADAMW),
    case("dcgan_train_b256_s64", by_hand(DcGan, FACES), 256, "fp32", **TRAIN_ADAMW),
    case("qwen25_14b_6layers_decode_b16_past16000", qwen25_14b(16, 16000), 16, "bf16"),
    case("bge_reranker_large_b32_s512", BGE_RERANKER, 32, "bf16"),
    case("series_transformer_train_b192", by_hand(SeriesTransformer, HOURS), 192, "fp32", **TRAIN_ADAMW),
    case("lstm_cells_train_b64_s64", by_hand(LstmCells, whole(96, 64, 64)), 64, "fp32", **TRAIN_ADAMW),
    case("distilled_bert_autocast_train_b96_s128", autocast(SMALLER_BERT), 96, **TRAIN_ADAMW),
    case("mobilenet_v2_b1", vision("mobilenet_v2", 1), 1, "fp16"),
    case("siglip_so400m_b16_s384", SIGLIP, 16, "bf16"),
    case("sac_train_b256", by_hand(Sac, MOVES), 256, "fp32", **TRAIN_ADAMW),
    case("deberta_v3_base_autocast_train_b24_s256", autocast(deberta(24, 256)), 24, **TRAIN_ADAMW),
    case("inception_v3_train_b64_s299", vision("inception_v3", 64, 299), 64, "fp32", **TRAIN_SGD),
    case("neumf_train_b65536", by_hand(NeuMf, RATINGS), 65536, "fp32", **TRAIN_ADAMW),
    case("gemma3_1b_10layers_train_b4_s1024", GEMMA3, 4, "bf16", **TRAIN_ADAMW),
    case("swin_v2_b_autocast_train_b24_s256", autocast(vision("swin_v2_b", 24, 256)), 24, **TRAIN_ADAMW),
    case("t5_xxl_encoder_6layers_b4_s512", T5_ENCODER, 4, "bf16"),
    case("shufflenet_v2_x1_0_train_b64", vision("shufflenet_v2_x1_0", 64), 64, "fp32", **TRAIN_SGD),
    case("efficientnet_b1_autocast_train_b96_cl", EFFICIENTNET_B1, 96, **TRAIN_SGD, **LAST),
    case("convnext_base_autocast_train_b32", autocast(vision("convnext_base", 32)), 32, **TRAIN_ADAMW),
    case("swin3d_t_b8_f16", swin3d_t(8, 16), 8, "bf16"),
    case("mlp_vae_train_b128", by_hand(MlpVae, MNIST), 128, "fp32", **TRAIN_ADAMW),
    case("next_token_b64", by_hand(NextToken, numbers((64, 2048))), 64, "bf16"),
    # the same at other sizes or in another use
    case("mistral_7b_8layers_decode_b1_past1000", mistral_7b(1, 1000), 1, "fp16"),
    case("cifar_resnet18_autocast_train_b512_cl", autocast(cifar(512)), 512, **TRAIN_SGD, **LAST),
    case("resnet50_b8", vision("resnet50", 8), 8),
    case("flow_dit_b_4steps_b8", by_hand(Flow, beside(numbers((8, 4, 32, 32)), whole(1000, 8))), 8, "bf16"),
    case("gpt2_large_b1_s64", gpt2_large(1, 64), 1, "bf16"),
    case("qwen15_moe_6layers_decode_b16_past1000", decode(qwen15_moe(tokens(16, 1, 151936)), 16, 1000), 16, "bf16"),
    case("first_gpt_b1_s256", by_hand(FirstGpt, whole(65, 1, 256)), 1),
    case("gcn_cora_train", gcn(2708, 10556, 1433, 64, 7), 1, "fp32", **TRAIN_ADAMW),
    case("llama8b_6layers_b8_s5_past2000", llama8b_more(8, 5, 2000), 8, "fp16"),
    case("mpnet_base_b1_s32", mpnet(1, 32), 1),
    case("vit_l_16_tf32_b64", tf32(vision("vit_l_16", 64)), 64),
    case("qwen25_14b_6layers_decode_b64_past2000", qwen25_14b(64, 2000), 64, "fp16"),
    case("unet_resnet34_b1_s512", by_hand(UNetOnResNet, numbers((1, 3, 512, 512))), 1, "fp16"),
    case("mobilenet_v2_b512_cl", vision("mobilenet_v2", 512), 512, "bf16", **LAST),
    case("swin_v2_b_b8_s256", vision("swin_v2_b", 8, 256), 8, "bf16"),
    case("phi2_6layers_decode_b8_past1000", decode(PHI2_STEP, 8, 1000), 8, "fp16"),
    case("efficientnet_b1_b64_cl", vision("efficientnet_b1", 64, 240), 64, "fp16", **LAST),
    case("lstm_cells_b8_s64", by_hand(LstmCells, whole(96, 8, 64)), 8),
    case("resnet50_b64", vision("resnet50", 64), 64, "bf16"),
]
