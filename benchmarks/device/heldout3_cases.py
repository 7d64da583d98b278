"""A third set the predictor is judged on: chosen by somebody who has not seen how it predicts, none in the other sets.

    python benchmarks/device/record_models.py benchmarks/device/heldout3_cases.py OUT_PREFIX --quick

The form is that of heldout2_cases.py. Models of torch, torchvision and transformers only, with random weights.
"""

from __future__ import annotations

import functools
import itertools
import sys
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

# -- language models --------------------------------------------------------------------------------------------


llama = functools.partial(decoder, "Llama", max_position_embeddings=8192)


def llama_3b(batch: int, seq: int, layers: int) -> Factory:
    return llama(tokens(batch, seq, 128256), 3072, 8192, layers, (24, 8), 128256, tie_word_embeddings=True)


def smollm2_360m(batch: int, seq: int) -> Factory:
    """Fifteen heads on five."""
    return llama(tokens(batch, seq, 49152), 960, 2560, 32, (15, 5), 49152, tie_word_embeddings=True)


def tinyllama(batch: int, seq: int, layers: int) -> Factory:
    return llama(tokens(batch, seq, 32000, labels=True), 2048, 5632, layers, (32, 4), 32000)


class Lora(nn.Module):
    """A frozen layer with a narrow one beside it, which learns."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.05)
        like = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        self.a = nn.Linear(layer.in_features, rank, **like)
        self.b = nn.Linear(rank, layer.out_features, **like)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2.0 * self.b(self.a(self.drop(x)))


def with_lora(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name), 16))
    return model


def deepseek_v2_lite(batch: int, seq: int, layers: int) -> Factory:
    """Keys and values come from 512 numbers a token; 64 experts, 6 of them for a token, and two for all."""
    return decoder(
        "DeepseekV2",
        tokens(batch, seq, 102400),
        2048,
        10944,
        layers,
        (16, 16),
        102400,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )


def flan_t5_base(batch: int, seq: int, target: int) -> Factory:
    return hf(
        "T5ForConditionalGeneration",
        "T5Config",
        named("input_ids decoder_input_ids", beside(whole(32128, batch, seq), whole(32128, batch, target))),
        d_model=768,
        d_kv=64,
        d_ff=2048,
        num_layers=12,
        num_heads=12,
        vocab_size=32128,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        use_cache=False,
    )


def marian(batch: int, seq: int, target: int) -> Factory:
    return hf(
        "MarianMTModel",
        "MarianConfig",
        named("input_ids labels", beside(whole(58100, batch, seq), whole(58100, batch, target))),
        vocab_size=58101,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=58100,
        decoder_start_token_id=58100,
        eos_token_id=0,
        attn_implementation="eager",
        use_cache=False,
    )


def bert_large_tags(batch: int, seq: int) -> Factory:
    """Names found in sentences: one of nine tags a token."""
    return hf(
        "BertForTokenClassification",
        "BertConfig",
        named("input_ids labels", beside(whole(30522, batch, seq), whole(9, batch, seq))),
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=9,
    )


class Sentence(Wrapper):
    """One vector of length 1 for a sentence."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.model(input_ids=input_ids).last_hidden_state.mean(1), dim=-1)


def minilm(batch: int, seq: int) -> Factory:
    bert = hf(
        "BertModel",
        "BertConfig",
        tokens(batch, seq, 30522),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    return wrapped(Sentence, bert)


class SwitchLayer(nn.Module):
    """Each token to one expert, each expert a fixed number of tokens; the rest pass by."""

    def __init__(self, width: int, experts: int, room: float = 1.25) -> None:
        super().__init__()
        self.router, self.room = nn.Linear(width, experts, bias=False), room
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        tokens, experts = flat.shape[0], self.up.shape[0]
        places = torch.arange(int(self.room * tokens / experts), device=x.device)
        share = torch.softmax(self.router(flat).float(), -1)
        best, which = share.max(-1)
        mine = which[:, None] == torch.arange(experts, device=x.device)
        turn = mine.cumsum(0) - 1
        sent = (mine[..., None] & (turn[..., None] == places)).to(flat.dtype)
        y = torch.einsum("tec,td->ecd", sent, flat)
        y = torch.bmm(F.relu(torch.bmm(y, self.up)), self.down)
        back = sent * best[:, None, None].to(flat.dtype)
        return torch.einsum("tec,ecd->td", back, y).view_as(x)


class Attend(nn.Module):
    """Attention of several heads; to a context where one is given."""

    def __init__(self, width: int, heads: int, context: int = 0, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(context or width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class SwitchModel(nn.Module):
    def __init__(self, width: int = 640, heads: int = 10, layers: int = 4, vocab: int = 32000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.attend = nn.ModuleList(Attend(width, heads, causal=True) for _ in range(layers))
        self.experts = nn.ModuleList(SwitchLayer(width, 16) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for i, (attend, experts) in enumerate(zip(self.attend, self.experts, strict=True)):
            x = x + attend(self.norms[2 * i](x))
            x = x + experts(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class MambaBlock(nn.Module):
    """A selective state space, one step of the sequence after the other."""

    def __init__(self, width: int, states: int = 16) -> None:
        super().__init__()
        inner, self.rank, self.states = 2 * width, width // 16, states
        self.norm, self.enter = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.select = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.rate = nn.Linear(self.rank, inner)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(inner, 1))
        self.skip, self.leave = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width, bias=False)

    def scan(self, x: torch.Tensor) -> torch.Tensor:
        rate, b, c = self.select(x).split([self.rank, self.states, self.states], -1)
        rate = F.softplus(self.rate(rate)).unsqueeze(-1)
        kept = torch.exp(-rate * self.decay.exp())
        new = rate * b[:, :, None] * x.unsqueeze(-1)
        state, seen = torch.zeros_like(new[:, 0]), []
        for t in range(x.shape[1]):
            state = kept[:, t] * state + new[:, t]
            seen.append((state @ c[:, t, :, None]).squeeze(-1))
        return torch.stack(seen, 1) + x * self.skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, gate = self.enter(self.norm(x)).chunk(2, -1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return x + self.leave(self.scan(y) * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self, width: int = 768, layers: int = 4, vocab: int = 50280) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*[MambaBlock(width) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.words(x))))


# -- pictures are seen ------------------------------------------------------------------------------------------


def video(name: str, batch: int, frames: int, size: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import torchvision

        with built_on(device):
            model = getattr(torchvision.models.video, name)(weights=None)
        return model.to(device, dtype), (torch.randn(batch, 3, frames, size, size, device=device, dtype=dtype),)

    return build


class Pairs(Wrapper):
    """Which picture goes with which text: +1 where they do, -1 elsewhere."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.model(input_ids=input_ids, pixel_values=pixel_values).logits_per_text
        return loss(-F.logsigmoid(labels * logits.float()).sum(-1).mean())


def siglip_base(batch: int) -> Factory:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        signs = 2 * torch.eye(batch, device=device) - 1
        return {"input_ids": ids(device, batch, 64, 32000), **images(batch, 224)(device, dtype), "labels": signs}

    return wrapped(Pairs, hf("SiglipModel", "SiglipConfig", make))


class OwnLoss(Wrapper):
    """A model that makes its own target of the pictures, which also stand for the labels."""

    def forward(self, labels: torch.Tensor) -> SimpleNamespace:
        return loss(self.model(pixel_values=labels).loss)


def mae_base(batch: int) -> Factory:
    """Three quarters of the patches are hidden, and painted again."""
    return wrapped(OwnLoss, hf("ViTMAEForPreTraining", "ViTMAEConfig", named("labels", numbers((batch, 3, 224, 224)))))


def deit_base(batch: int, size: int) -> Factory:
    return hf("DeiTForImageClassification", "DeiTConfig", images(batch, size), image_size=size, num_labels=1000)


class Encoded(Wrapper):
    """What the model needs on the way is made where the pictures are, not on the CPU and copied."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        with pixel_values.device:
            return self.model(pixel_values=pixel_values).last_hidden_state


def sam_encoder(batch: int) -> Factory:
    """Segment Anything's ViT-B: windows of 14 x 14 patches, four layers over all 64 x 64."""
    return wrapped(Encoded, hf("SamVisionModel", "SamVisionConfig", images(batch, 1024)))


class Detr(nn.Module):
    """Things and their boxes: ResNet-50, then a transformer that is asked 100 questions."""

    def __init__(self, width: int = 256, things: int = 92) -> None:
        super().__init__()
        import torchvision

        self.trunk = nn.Sequential(*list(torchvision.models.resnet50(weights=None).children())[:-2])
        self.narrow = nn.Conv2d(2048, width, 1)
        self.transformer = nn.Transformer(width, 8, 6, 6, batch_first=True)
        self.rows, self.columns = nn.Embedding(50, width // 2), nn.Embedding(50, width // 2)
        self.questions = nn.Embedding(100, width)
        self.thing, self.box = nn.Linear(width, things), layers_of(width, width, width, 4)

    def places(self, high: int, wide: int) -> torch.Tensor:
        rows = self.rows.weight[:high, None].expand(-1, wide, -1)
        columns = self.columns.weight[None, :wide].expand(high, -1, -1)
        return torch.cat([rows, columns], -1).flatten(0, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.narrow(self.trunk(x))
        seen = x.flatten(2).transpose(1, 2) + self.places(*x.shape[2:])
        y = self.transformer(seen, self.questions.weight.expand(x.shape[0], -1, -1))
        return self.thing(y), self.box(y).sigmoid()


# -- pictures are made ------------------------------------------------------------------------------------------


class TextLayer(nn.Module):
    """Pixels attend to each other, then to the text; then a gated MLP."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attend(width, width // 64), Attend(width, width // 64, text)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = x + self.own(self.n1(x))
        x = x + self.cross(self.n2(x), text)
        y, gate = self.up(self.n3(x)).chunk(2, -1)
        return x + self.down(y * F.gelu(gate))


class Stage(nn.Module):
    """A residual block, and transformer layers over its pixels where there are any."""

    def __init__(self, cin: int, cout: int, depth: int, text: int = 2048, time: int = 1280) -> None:
        super().__init__()
        self.res, self.norm = Res(cin, cout, time), nn.GroupNorm(32, cout)
        self.enter, self.leave = nn.Linear(cout, cout), nn.Linear(cout, cout)
        self.layers = nn.ModuleList(TextLayer(cout, text) for _ in range(depth))

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.res(x, time)
        if not self.layers:
            return x
        y = self.enter(self.norm(x).permute(0, 2, 3, 1).flatten(1, 2))
        for layer in self.layers:
            y = layer(y, text)
        return x + self.leave(y).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)


class Resize(nn.Module):
    def __init__(self, width: int, up: bool) -> None:
        super().__init__()
        self.up, self.conv = up, nn.Conv2d(width, width, 3, stride=1 if up else 2, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0) if self.up else x)


class SdxlUNet(nn.Module):
    """Stable Diffusion XL's U-Net with four of the ten layers at its smallest size."""

    def __init__(self, widths: tuple[int, ...] = (320, 640, 1280), depths: tuple[int, ...] = (0, 2, 4)) -> None:
        super().__init__()
        w, kept, levels = widths[0], [widths[0]], list(zip(widths, depths, strict=True))
        self.time = nn.Sequential(nn.Linear(w, 1280), nn.SiLU(), nn.Linear(1280, 1280))
        self.first = nn.Conv2d(4, w, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for i, (out, depth) in enumerate(levels):
            self.down.extend([Stage(w, out, depth), Stage(out, out, depth)])
            kept += [out, out]
            w = out
            if i < len(levels) - 1:
                self.down.append(Resize(out, up=False))
                kept.append(out)
        self.middle = nn.ModuleList([Stage(w, w, depths[-1]), Stage(w, w, 0)])
        for i, (out, depth) in reversed(list(enumerate(levels))):
            for _ in range(3):
                self.up.append(Stage(w + kept.pop(), out, depth))
                w = out
            if i:
                self.up.append(Resize(out, up=True))
        self.norm, self.last = nn.GroupNorm(32, w), nn.Conv2d(w, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        time = self.time(waves(t, 320).to(x.dtype))
        x = self.first(x)
        kept = [x]
        for step in self.down:
            x = step(x, time, text)
            kept.append(x)
        for step in self.middle:
            x = step(x, time, text)
        for step in self.up:
            x = step(x if isinstance(step, Resize) else torch.cat([x, kept.pop()], 1), time, text)
        return self.last(F.silu(self.norm(x)))


class Stream(nn.Module):
    """What pixels, or words, have of their own in a joint block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.nq, self.nk = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))
        self.scales, self.qkv, self.out = (nn.Linear(width, n * width) for n in (6, 3, 1))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def heads_of(self, x: torch.Tensor, m: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        y = self.qkv(self.n1(x) * (1 + m[1]) + m[0]).unflatten(-1, (3, self.heads, -1))
        q, k, v = y.permute(2, 0, 3, 1, 4)
        return self.nq(q), self.nk(k), v

    def finish(self, x: torch.Tensor, y: torch.Tensor, m: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = x + m[2] * self.out(y)
        y = self.n2(x) * (1 + m[4]) + m[3]
        return x + m[5] * self.down(F.gelu(self.up(y), approximate="tanh"))


class JointBlock(nn.Module):
    """Pixels and words attend to each other, each with weights of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.streams = nn.ModuleList(Stream(width, heads) for _ in range(2))

    def forward(self, parts: list[torch.Tensor], told: torch.Tensor) -> list[torch.Tensor]:
        scales = [s.scales(F.silu(told))[:, None].chunk(6, -1) for s in self.streams]
        heads = [s.heads_of(x, m) for s, x, m in zip(self.streams, parts, scales, strict=True)]
        q, k, v = (torch.cat(both, 2) for both in zip(*heads, strict=True))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        ys = y.split([x.shape[1] for x in parts], 1)
        return [s.finish(x, y, m) for s, x, y, m in zip(self.streams, parts, ys, scales, strict=True)]


class MmDit(nn.Module):
    """Stable Diffusion 3.5 medium's transformer, cut."""

    def __init__(self, width: int = 1536, heads: int = 24, layers: int = 8, size: int = 64) -> None:
        super().__init__()
        self.patch, self.words = nn.Conv2d(16, width, 2, stride=2), nn.Linear(4096, width)
        self.places = nn.Parameter(torch.randn(1, (size // 2) ** 2, width) * 0.02)
        self.time, self.pooled = layers_of(256, width, width), layers_of(2048, width, width)
        self.blocks = nn.ModuleList(JointBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 2 * 2 * 16)

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        told = self.time(waves(t, 256).to(x.dtype)) + self.pooled(pooled)
        parts = [self.patch(x).flatten(2).transpose(1, 2) + self.places, self.words(text)]
        for block in self.blocks:
            parts = block(parts, told)
        y = self.head(self.norm(parts[0])).transpose(1, 2)
        return F.fold(y, x.shape[2:], 2, stride=2)


class Dense(nn.Module):
    """Five convolutions, each of which sees what all before it said."""

    def __init__(self, width: int = 64, grow: int = 32) -> None:
        super().__init__()
        outs = [grow] * 4 + [width]
        self.convs = nn.ModuleList(nn.Conv2d(width + i * grow, out, 3, padding=1) for i, out in enumerate(outs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said = [x]
        for conv in self.convs[:-1]:
            said.append(F.leaky_relu(conv(torch.cat(said, 1)), 0.2, inplace=True))
        return x + 0.2 * self.convs[-1](torch.cat(said, 1))


class Esrgan(nn.Module):
    """A picture four times as large (the generator of ESRGAN), with 8 of its 23 blocks."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.first, self.trunk, self.up1, self.up2, self.fine = (
            nn.Conv2d(cin, width, 3, padding=1) for cin in (3, width, width, width, width)
        )
        self.blocks = nn.ModuleList(nn.Sequential(Dense(), Dense(), Dense()) for _ in range(blocks))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = x
        for block in self.blocks:
            y = y + 0.2 * block(y)
        x = x + self.trunk(y)
        for up in (self.up1, self.up2):
            x = F.leaky_relu(up(F.interpolate(x, scale_factor=2.0)), 0.2, inplace=True)
        return self.last(F.leaky_relu(self.fine(x), 0.2, inplace=True))


class Mirrored(nn.Module):
    """A residual block with mirrored edges and InstanceNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width), nn.ReLU(inplace=True)]
        again = [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width)]
        self.steps = nn.Sequential(*half, *again)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.steps(x)


def cyclegan() -> nn.Module:
    """Horses into zebras: the generator with nine blocks."""

    def then(conv: nn.Module, width: int) -> list[nn.Module]:
        return [conv, nn.InstanceNorm2d(width), nn.ReLU(inplace=True)]

    steps = [nn.ReflectionPad2d(3), *then(nn.Conv2d(3, 64, 7), 64)]
    for w in (64, 128):
        steps += then(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), 2 * w)
    steps += [Mirrored(256) for _ in range(9)]
    for w in (256, 128):
        steps += then(nn.ConvTranspose2d(w, w // 2, 3, stride=2, padding=1, output_padding=1), w // 2)
    return nn.Sequential(*steps, nn.ReflectionPad2d(3), nn.Conv2d(64, 3, 7), nn.Tanh())


# -- sound and time series --------------------------------------------------------------------------------------


class WaveLayer(nn.Module):
    def __init__(self, width: int, skip: int, dilation: int) -> None:
        super().__init__()
        self.dilation, self.conv = dilation, nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.out, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, skip, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        y = torch.tanh(a) * torch.sigmoid(b)
        return x + self.out(y), self.skip(y)


class WaveNet(nn.Module):
    """The next of 256 loudnesses, from 3 x 1023 samples before it."""

    def __init__(self, width: int = 64, skip: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(256, width)
        self.layers = nn.ModuleList(WaveLayer(width, skip, 2**i) for _ in range(3) for i in range(10))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, 256, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x, total = self.words(x).transpose(1, 2), 0.0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return loss(F.cross_entropy(self.head(total), labels))


class DeepSpeech(nn.Module):
    """Letters from a spectrogram: two convolutions, three GRUs both ways."""

    def __init__(self, width: int = 640, letters: int = 29) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
        )
        self.gru = nn.GRU(32 * 41, width, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.convs(x).flatten(1, 2).transpose(1, 2))[0])


def w2v_bert(batch: int, frames: int, layers: int) -> Factory:
    """Conformer layers: attention between two MLPs, a gated convolution after it."""
    sound = named("input_features", numbers((batch, frames, 160)))
    return hf("Wav2Vec2BertModel", "Wav2Vec2BertConfig", sound, num_hidden_layers=layers)


class Forecaster(Wrapper):
    def forward(self, past_values: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return loss(self.model(past_values=past_values, future_values=labels).loss)


def patch_tst(batch: int) -> Factory:
    """Four days ahead from three weeks of hours, seven readings each."""
    series = hf(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        named("past_values labels", numbers((batch, 512, 7), (batch, 96, 7))),
        num_input_channels=7,
        context_length=512,
        patch_length=16,
        patch_stride=8,
        prediction_length=96,
        d_model=128,
        num_attention_heads=16,
        ffn_dim=256,
        num_hidden_layers=3,
        attention_dropout=0.2,
        ff_dropout=0.2,
        loss="mse",
        scaling="std",
    )
    return wrapped(Forecaster, series)


# -- graphs, points, clicks and games ---------------------------------------------------------------------------


class SageLayer(nn.Module):
    """A node and the mean of those that point to it."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(cin, cout), nn.Linear(cin, cout, bias=False)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x).index_add(0, target, x.index_select(0, source))
        count = x.new_zeros(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0]))
        return self.own(x) + self.near(total / count.clamp(min=1)[:, None])


class Sage(nn.Module):
    """Subjects of papers that cite each other, the whole graph at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SageLayer(a, b) for a, b in ((128, 256), (256, 256), (256, 40)))
        self.norms = nn.ModuleList(nn.BatchNorm1d(256) for _ in range(2))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = F.dropout(F.relu(norm(layer(x, source, target))), 0.5, self.training)
        return self.layers[-1](x, source, target)


def citations(nodes: int, edges: int) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        ends = torch.randint(0, nodes, (2, edges), device=device)
        return torch.randn(nodes, 128, device=device, dtype=dtype), ends[0], ends[1]

    return make


def points_through(*widths: int) -> nn.Sequential:
    steps: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        steps += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*steps)


class PointNet(nn.Module):
    """Which of 40 things a cloud of points is; it is turned first."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.turn = points_through(3, 64, 128, 1024), layers_of(1024, 512, 256, 9)
        self.points = points_through(3, 64, 64, 64, 128, 1024)
        self.head = nn.Sequential(layers_of(1024, 512, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.turn(self.look(x).amax(-1)).unflatten(-1, (3, 3)) + torch.eye(3, device=x.device, dtype=x.dtype)
        return self.head(self.points(turn @ x).amax(-1))


class BagRanker(nn.Module):
    """Sums of a dozen lists of things, each dotted with each, then an MLP."""

    def __init__(self, tables: int = 12, rows: int = 250_000, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = layers_of(13, 512, 256, width)
        self.top = layers_of(width + (tables + 1) * tables // 2, 1024, 512, 1)
        i, j = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pair", i * (tables + 1) + j, persistent=False)

    def forward(self, dense: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        x = self.dense(dense)
        each = torch.stack([x, *(bag(ids) for bag, ids in zip(self.bags, lists.unbind(1), strict=True))], 1)
        dots = torch.bmm(each, each.transpose(1, 2)).flatten(1).index_select(1, self.pair)
        return torch.sigmoid(self.top(torch.cat([x, dots], 1)))


class SasLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width, eps=1e-8), nn.LayerNorm(width, eps=1e-8)
        self.attend = nn.MultiheadAttention(width, 1, dropout=0.2, batch_first=True)
        self.c1, self.c2 = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        y = self.n1(x)
        x = y + self.attend(y, x, x, attn_mask=hidden, need_weights=False)[0]
        y = self.n2(x)
        z = self.c2(F.relu(self.drop(self.c1(y.transpose(1, 2)))))
        return y + self.drop(z).transpose(1, 2)


class SasRec(nn.Module):
    """What somebody takes next, against one thing not taken; 50 numbers a thing."""

    def __init__(self, things: int = 54_000, width: int = 50, length: int = 200) -> None:
        super().__init__()
        self.things, self.places = nn.Embedding(things, width, padding_idx=0), nn.Embedding(length, width)
        self.layers, self.norm = nn.ModuleList(SasLayer(width) for _ in range(2)), nn.LayerNorm(width, eps=1e-8)

    def forward(self, seen: torch.Tensor, labels: torch.Tensor, other: torch.Tensor) -> SimpleNamespace:
        n = seen.shape[1]
        hidden = torch.ones(n, n, dtype=torch.bool, device=seen.device).triu(1)
        x = self.things(seen) * 50**0.5 + self.places(torch.arange(n, device=seen.device))
        for layer in self.layers:
            x = layer(x, hidden)
        x = self.norm(x)
        taken, left = ((x * self.things(y)).sum(-1) for y in (labels, other))
        return loss(F.softplus(-taken).mean() + F.softplus(left).mean())


class AtariPolicy(nn.Module):
    """Four frames of a game; the loss of an actor and a critic."""

    def __init__(self, actions: int = 6) -> None:
        super().__init__()
        convs = [nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
        self.see = nn.Sequential(*(step for conv in convs for step in (conv, nn.ReLU())), nn.Flatten())
        self.think = nn.Linear(64 * 7 * 7, 512)
        self.actor, self.critic = nn.Linear(512, actions), nn.Linear(512, 1)

    def forward(self, frames: torch.Tensor, labels: torch.Tensor, won: torch.Tensor) -> SimpleNamespace:
        x = F.relu(self.think(self.see(frames.float() / 255)))
        logs, value = F.log_softmax(self.actor(x), -1), self.critic(x)[:, 0]
        chosen = logs.gather(1, labels[:, None])[:, 0]
        unsure = -(logs.exp() * logs).sum(-1).mean()
        return loss(0.5 * F.mse_loss(value, won) - (chosen * (won - value.detach())).mean() - 0.01 * unsure)


def played(batch: int) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        frames = torch.randint(0, 256, (batch, 4, 84, 84), device=device, dtype=torch.uint8)
        taken, won = torch.randint(0, 6, (batch,), device=device), torch.randn(batch, device=device, dtype=dtype)
        return {"frames": frames, "labels": taken, "won": won}

    return make


# -- the cases --------------------------------------------------------------------------------------------------

SDXL = beside(numbers((2, 4, 64, 64)), whole(1000, 2), numbers((2, 77, 2048)))
SD3 = beside(numbers((2, 16, 64, 64)), whole(1000, 2), numbers((2, 154, 4096), (2, 2048)))
SAMPLES = named("x labels", beside(whole(256, 4, 8000), whole(256, 4, 8000)))
TAKEN = named("seen labels other", beside(*[whole(54_000, 128, 200)] * 3))

CASES = [
    # every kind once, then more of each, in case the time runs out
    case("sdxl_unet_4of10_b2_s64_cl", by_hand(SdxlUNet, SDXL), 2, "fp16", **LAST),
    case("llama3b_7layers_b3_s777", llama_3b(3, 777, 7), 3, "bf16"),
    case("smollm2_360m_decode_b6_past611", decode(smollm2_360m(6, 1), 6, 611), 6, "bf16"),
    case("tinyllama_10layers_lora_train_b4_s640", wrapped(with_lora, tinyllama(4, 640, 10)), 4, "bf16", **TRAIN_ADAMW),
    case("swin_s_autocast_train_b24", autocast(vision("swin_s", 24)), 24, "fp32", **TRAIN_ADAMW),
    case("resnext101_64x4d_b40_cl", vision("resnext101_64x4d", 40), 40, "bf16", **LAST),
    case("wavenet_train_b4_t8000", by_hand(WaveNet, SAMPLES), 4, "fp32", **TRAIN_ADAMW),
    case("sage_arxiv_train", by_hand(Sage, citations(169_343, 1_166_243)), 1, "fp32", **TRAIN_ADAMW),
    case("r2plus1d_18_autocast_train_b6_f16", autocast(video("r2plus1d_18", 6, 16, 112)), 6, "fp32", **TRAIN_SGD),
    case("deepspeech_gru_b16_f300", by_hand(DeepSpeech, numbers((16, 1, 161, 300))), 16),
    case("mamba_4layers_scan_b8_s64", by_hand(Mamba, whole(50280, 8, 64)), 8, "bf16"),
    case(
        "switch_moe_autocast_train_b6_s350",
        autocast(by_hand(SwitchModel, whole(32000, 6, 350))),
        6,
        **TRAIN_ADAMW,
    ),
    case("siglip_base_autocast_train_b48", autocast(siglip_base(48)), 48, "fp32", **TRAIN_ADAMW),
    case("flan_t5_base_tf32_b12_s200_t40", tf32(flan_t5_base(12, 200, 40)), 12),
    case("esrgan_8of23_b1_s192", by_hand(Esrgan, numbers((1, 3, 192, 192))), 1, "fp16"),
    case("bag_ranker_b6000", by_hand(BagRanker, beside(numbers((6000, 13)), whole(250_000, 6000, 12, 10))), 6000),
    case("densenet161_b1", vision("densenet161", 1), 1, "fp16"),
    case("mobilenet_v2_autocast_train_b96_cl", autocast(vision("mobilenet_v2", 96)), 96, "fp32", **TRAIN_SGD, **LAST),
    case("detr_r50_tf32_b2_s640", tf32(by_hand(Detr, numbers((2, 3, 640, 640)))), 2),
    case("deepseek_v2_lite_3layers_b2_s600", deepseek_v2_lite(2, 600, 3), 2, "bf16"),
    case("sam_vit_b_encoder_b1_s1024", sam_encoder(1), 1, "bf16"),
    case("patchtst_train_b32", patch_tst(32), 32, "fp32", **TRAIN_ADAMW),
    case("convnext_base_b24_s288", vision("convnext_base", 24, 288), 24, "fp16"),
    case("bert_large_tags_autocast_train_b12_s160", autocast(bert_large_tags(12, 160)), 12, "fp32", **TRAIN_ADAMW),
    case("sd35_mmdit_8layers_b2_s64", by_hand(MmDit, SD3), 2, "bf16"),
    case("sasrec_train_b128_s200", by_hand(SasRec, TAKEN), 128, "fp32", **TRAIN_ADAMW),
    case("efficientnet_v2_m_b10_s384_cl", vision("efficientnet_v2_m", 10, 384), 10, "bf16", **LAST),
    case("w2v_bert_8layers_b6_f333", w2v_bert(6, 333, 8), 6, "fp16"),
    case("marian_train_b24_s48", marian(24, 48, 53), 24, "fp32", **TRAIN_ADAMW),
    case("minilm_b200_s48", minilm(200, 48), 200, "fp16"),
    case("atari_policy_train_b256", by_hand(AtariPolicy, played(256)), 256, "fp32", **TRAIN_ADAMW),
    case("pointnet_train_b32_n1024", by_hand(PointNet, numbers((32, 3, 1024))), 32, "fp32", **TRAIN_SGD),
    case("cyclegan_b3_s256", by_hand(cyclegan, numbers((3, 3, 256, 256))), 3),
    case("mae_base_autocast_train_b64", autocast(mae_base(64)), 64, "fp32", **TRAIN_ADAMW),
    case("deit_base_b12_s384", deit_base(12, 384), 12, "fp16"),
]
