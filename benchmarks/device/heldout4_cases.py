"""A fourth set the predictor is judged on: chosen by somebody who has not seen how it predicts, none in the other sets.

    python benchmarks/device/record_models.py benchmarks/device/heldout4_cases.py OUT_PREFIX --quick

The form is that of heldout3_cases.py. Models of torch, torchvision and transformers only, with random weights.
"""

from __future__ import annotations

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
    layers_of,
    loss,
    named,
    numbers,
    tokens,
    vision,
    waves,
    whole,
    wrapped,
)

# -- torchvision beyond its classifiers -------------------------------------------------------------------------


def vision_task(task: str, name: str, inputs: Maker, **options: Any) -> Factory:
    """A model of torchvision.models.TASK: segmentation, video, optical_flow."""

    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import torchvision

        with built_on(device):
            model = getattr(getattr(torchvision.models, task), name)(weights=None, **options)
        return model.to(device, dtype), inputs(device, dtype)

    return build


class LastFlow(Wrapper):
    """RAFT answers with the flow after every update; the last one counts."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.model(first, second, num_flow_updates=12)[-1]


class RetinaFeatures(nn.Module):
    """RetinaNet up to its raw scores and boxes, without anchors and non-maximum suppression."""

    def __init__(self, classes: int = 91) -> None:
        super().__init__()
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
        from torchvision.models.detection.retinanet import RetinaNetHead
        from torchvision.ops.feature_pyramid_network import LastLevelP6P7

        more = {"returned_layers": [2, 3, 4], "extra_blocks": LastLevelP6P7(256, 256)}
        self.backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, **more)
        self.head = RetinaNetHead(256, 9, classes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(list(self.backbone(x).values()))
        return out["cls_logits"], out["bbox_regression"]


# -- transformers -----------------------------------------------------------------------------------------------


def olmo2_1b(batch: int, seq: int, layers: int) -> Factory:
    return decoder("Olmo2", tokens(batch, seq, 100352, labels=True), 2048, 8192, layers, (16, 16), 100352)


def granite_2b(batch: int, seq: int, layers: int) -> Factory:
    return decoder("Granite", tokens(batch, seq, 49155), 2048, 8192, layers, (32, 8), 49155, tie_word_embeddings=True)


def starcoder2_3b(batch: int, seq: int, layers: int) -> Factory:
    """Twenty-four heads on two; no window, so that the cache is a plain one."""
    return decoder("Starcoder2", tokens(batch, seq, 49152), 3072, 12288, layers, (24, 2), 49152, sliding_window=None)


def mt5_small(batch: int, seq: int, target: int) -> Factory:
    return hf(
        "MT5ForConditionalGeneration",
        "MT5Config",
        named("input_ids labels", beside(whole(250_000, batch, seq), whole(250_000, batch, target))),
        vocab_size=250112,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        tie_word_embeddings=False,
        use_cache=False,
    )


def fnet_base(batch: int, seq: int) -> Factory:
    """Fourier transforms in place of attention."""
    return hf("FNetModel", "FNetConfig", tokens(batch, seq, 32000))


def mobilebert(batch: int, seq: int) -> Factory:
    return hf("MobileBertForSequenceClassification", "MobileBertConfig", tokens(batch, seq, 30522))


def hubert_base(batch: int, seconds: int) -> Factory:
    return hf("HubertModel", "HubertConfig", named("input_values", numbers((batch, 16000 * seconds))))


def ast(batch: int) -> Factory:
    """Which of 527 sounds a spectrogram of ten seconds holds."""
    sounds = named("input_values labels", beside(numbers((batch, 1024, 128)), whole(527, batch)))
    return hf("ASTForAudioClassification", "ASTConfig", sounds, max_length=1024, num_labels=527)


def videomae_base(batch: int) -> Factory:
    frames = named("pixel_values", numbers((batch, 16, 3, 224, 224)))
    return hf("VideoMAEForVideoClassification", "VideoMAEConfig", frames, num_labels=400)


def poolformer_s24(batch: int) -> Factory:
    """Pooling in place of attention."""
    seen = named("pixel_values labels", beside(numbers((batch, 3, 224, 224)), whole(1000, batch)))
    widths = {"depths": [4, 4, 12, 4], "hidden_sizes": [64, 128, 320, 512]}
    return hf("PoolFormerForImageClassification", "PoolFormerConfig", seen, num_labels=1000, **widths)


class Sharper(Wrapper):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values).reconstruction


def swin2sr(batch: int, size: int) -> Factory:
    """Pictures twice as wide and high."""
    small = named("pixel_values", numbers((batch, 3, size, size)))
    return wrapped(Sharper, hf("Swin2SRForImageSuperResolution", "Swin2SRConfig", small, image_size=size, upscale=2))


class SeriesLoss(Wrapper):
    def forward(self, past_values: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return loss(self.model(past_values=past_values, future_values=labels).loss)


def patchtsmixer(batch: int) -> Factory:
    series = hf(
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        named("past_values labels", numbers((batch, 512, 7), (batch, 96, 7))),
        context_length=512,
        patch_length=16,
        patch_stride=8,
        num_input_channels=7,
        prediction_length=96,
        d_model=48,
        num_layers=8,
        mode="mix_channel",
    )
    return wrapped(SeriesLoss, series)


# -- sequences by hand ------------------------------------------------------------------------------------------


class S4dLayer(nn.Module):
    """A diagonal state space run as one long convolution, by FFT."""

    def __init__(self, width: int, states: int = 32) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(width) * 4.6 - 6.9)
        self.log_decay = nn.Parameter(torch.full((width, states), -0.69))
        self.turn = nn.Parameter(torch.pi * torch.arange(float(states)).repeat(width, 1))
        self.c = nn.Parameter(torch.randn(width, states, 2) * 0.5)
        self.skip, self.norm = nn.Parameter(torch.ones(width)), nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, 2 * width, 1)

    def kernel(self, n: int) -> torch.Tensor:
        a = torch.complex(-self.log_decay.exp(), self.turn)
        step = a * self.log_step.exp()[:, None]
        c = torch.view_as_complex(self.c) * (step.exp() - 1) / a
        powers = torch.exp(step[..., None] * torch.arange(n, device=step.device))
        return 2 * torch.einsum("hn,hnl->hl", c, powers).real

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, n = self.norm(x).transpose(1, 2), x.shape[1]
        spectrum = torch.fft.rfft(u, n=2 * n) * torch.fft.rfft(self.kernel(n), n=2 * n)
        y = F.gelu(torch.fft.irfft(spectrum, n=2 * n)[..., :n] + u * self.skip[:, None])
        return x + F.glu(self.mix(y), 1).transpose(1, 2)


class S4d(nn.Module):
    """Which of ten things a sequence is."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3, width), nn.Linear(width, 10)
        self.layers = nn.Sequential(*[S4dLayer(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.enter(x)).mean(1))


class Retention(nn.Module):
    """Attention that fades with distance: within chunks at once, from chunk to chunk by a state."""

    def __init__(self, width: int, heads: int, chunk: int = 256) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkvg, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm = nn.GroupNorm(heads, width)
        fade = torch.log(1 - 2.0 ** (-5 - torch.arange(float(heads))))
        away = torch.arange(chunk)[:, None] - torch.arange(chunk)
        within = torch.exp(fade[:, None, None] * away.clamp(min=0)) * (away >= 0)
        self.register_buffer("within", within)
        self.register_buffer("before", torch.exp(fade[:, None] * torch.arange(1, chunk + 1))[..., None])
        self.register_buffer("after", torch.exp(fade[:, None] * torch.arange(chunk - 1, -1, -1))[..., None])
        self.register_buffer("over", torch.exp(fade * chunk)[:, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *qkv, gate = self.qkvg(x).chunk(4, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv)
        chunks = ((q * q.shape[-1] ** -0.5).split(self.chunk, 2), k.split(self.chunk, 2), v.split(self.chunk, 2))
        state, seen = 0.0, []
        for a, b, c in zip(*chunks, strict=True):
            y = (a @ b.transpose(-1, -2) * self.within) @ c
            seen.append(y if not seen else y + (a @ state) * self.before)
            state = state * self.over + (b * self.after).transpose(-1, -2) @ c
        y = torch.cat(seen, 2).transpose(1, 2).flatten(2)
        return self.out(self.norm(y.flatten(0, 1)).view_as(y) * F.silu(gate))


class ExpertChoice(nn.Module):
    """Each expert takes the tokens it likes best."""

    def __init__(self, width: int, experts: int = 8, room: int = 2) -> None:
        super().__init__()
        self.room, self.router = room, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        share = torch.softmax(self.router(flat).float(), -1)
        best, which = share.t().topk(self.room * flat.shape[0] // self.up.shape[0], -1)
        y = torch.bmm(F.gelu(torch.bmm(flat[which], self.up)), self.down) * best[..., None]
        return torch.zeros_like(flat).index_add(0, which.flatten(), y.flatten(0, 1).to(flat.dtype)).view_as(x)


class HandHeads(nn.Module):
    """Plain self-attention."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """One layer: what mixes the tokens, then what changes each of them."""

    def __init__(self, width: int, across: nn.Module, along: nn.Module) -> None:
        super().__init__()
        self.n1, self.n2, self.across, self.along = nn.LayerNorm(width), nn.LayerNorm(width), across, along

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(self.n1(x))
        return x + self.along(self.n2(x))


def gelu_mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def language(width: int, vocab: int, layers: list[Mixed]) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab, width), *layers, nn.LayerNorm(width), nn.Linear(width, vocab, bias=False))


def retnet() -> nn.Module:
    return language(1024, 32000, [Mixed(1024, Retention(1024, 8), gelu_mlp(1024)) for _ in range(12)])


def expert_choice_lm() -> nn.Module:
    return language(768, 32000, [Mixed(768, HandHeads(768, 12, causal=True), ExpertChoice(768)) for _ in range(6)])


class Translator(nn.Module):
    """nn.Transformer in the size of its paper; words of both languages are shared."""

    def __init__(self, width: int = 512, vocab: int = 37000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(256, width)
        self.body = nn.Transformer(width, 8, 6, 6, 2048, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        a, b = (self.words(x) + self.places(torch.arange(x.shape[1], device=x.device)) for x in (source, target))
        hidden = torch.ones(b.shape[1], b.shape[1], dtype=torch.bool, device=b.device).triu(1)
        y = F.linear(self.body(a, b, tgt_mask=hidden, tgt_is_causal=True), self.words.weight)
        return loss(F.cross_entropy(y.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1))


# -- pictures and fields by hand --------------------------------------------------------------------------------


class UVit(nn.Module):
    """A transformer with long skips that removes noise from latents, told the time and the class."""

    def __init__(self, width: int = 768, half: int = 6) -> None:
        super().__init__()
        self.width, self.cut, self.paste = width, nn.Conv2d(4, width, 2, stride=2), nn.Linear(width, 16)
        self.kinds, self.places = nn.Embedding(1001, width), nn.Parameter(torch.randn(1, 258, width) * 0.02)
        layers = [Mixed(width, HandHeads(width, 12), gelu_mlp(width)) for _ in range(2 * half + 1)]
        self.down, self.middle, self.up = nn.ModuleList(layers[:half]), layers[half], nn.ModuleList(layers[half + 1 :])
        self.skips = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(half))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, t: torch.Tensor, kind: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        body = self.cut(x).flatten(2).transpose(1, 2)
        when = waves(t, self.width).to(body.dtype)[:, None]
        y, kept = torch.cat([when, self.kinds(kind)[:, None].to(body.dtype), body], 1) + self.places, []
        for layer in self.down:
            y = layer(y)
            kept.append(y)
        y = self.middle(y)
        for layer, skip in zip(self.up, self.skips, strict=True):
            y = layer(skip(torch.cat([y, kept.pop()], -1)))
        y = F.pixel_shuffle(self.paste(self.norm(y))[:, 2:].transpose(1, 2).unflatten(2, (16, 16)), 2)
        return y if labels is None else loss(F.mse_loss(y.float(), labels))


class LooksAcross(nn.Module):
    """Attention between the places of a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.GroupNorm(32, width), HandHeads(width, width // 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attend(self.norm(x).flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


class PixelUNet(nn.Module):
    """Noise out of pictures of 64 x 64; attention at 16 and 8."""

    def __init__(self, widths: tuple[int, ...] = (192, 384, 576, 768)) -> None:
        super().__init__()
        first, self.time = widths[0], nn.Sequential(nn.Linear(widths[0], 768), nn.SiLU(), nn.Linear(768, 768))
        self.enter, self.leave = nn.Conv2d(3, first, 3, padding=1), nn.Conv2d(first, 3, 3, padding=1)
        before, above = (first, *widths[:-1]), (first, *widths[:-1])
        self.down = nn.ModuleList(Res(i, o, 768) for i, o in zip(before, widths, strict=True))
        self.up = nn.ModuleList(Res(2 * i, o, 768) for i, o in zip(widths, above, strict=True))
        self.far = nn.ModuleList(LooksAcross(w) if w > 384 else nn.Identity() for w in widths)
        self.middle = nn.ModuleList([Res(widths[-1], widths[-1], 768), Res(widths[-1], widths[-1], 768)])

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y, kept = self.enter(x), []
        when = self.time(waves(t, self.enter.out_channels).to(x.dtype))
        for i, (res, far) in enumerate(zip(self.down, self.far, strict=True)):
            y = far(res(F.avg_pool2d(y, 2) if i else y, when))
            kept.append(y)
        for res in self.middle:
            y = res(y, when)
        for i in reversed(range(len(kept))):
            y = self.up[i](torch.cat([y, kept[i]], 1), when)
            y = F.interpolate(y, scale_factor=2.0) if i else y
        y = self.leave(y)
        return y if labels is None else loss(F.mse_loss(y.float(), labels))


# -- sound and time series by hand ------------------------------------------------------------------------------


class SpeakingDecoder(nn.Module):
    """Tacotron 2's decoder: a frame of sound after the other, looking at the text each time."""

    def __init__(self, text: int = 512, width: int = 1024, frames: int = 60) -> None:
        super().__init__()
        self.frames, self.width = frames, width
        self.prenet = nn.Sequential(layers_of(80, 256, 256), nn.ReLU())
        self.attend, self.speak = nn.LSTMCell(256 + text, width), nn.LSTMCell(width + text, width)
        self.query, self.key = nn.Linear(width, 128, bias=False), nn.Linear(text, 128, bias=False)
        self.place, self.where = nn.Conv1d(2, 32, 31, padding=15, bias=False), nn.Linear(32, 128, bias=False)
        self.score, self.frame = nn.Linear(128, 1, bias=False), nn.Linear(width + text, 80)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        b, n, width = text.shape
        keys, said, out = self.key(text), text.new_zeros(b, 80), []
        h1 = c1 = h2 = c2 = text.new_zeros(b, self.width)
        seen, share, total = text.new_zeros(b, width), text.new_zeros(b, n), text.new_zeros(b, n)
        for _ in range(self.frames):
            h1, c1 = self.attend(torch.cat([self.prenet(said), seen], -1), (h1, c1))
            where = self.where(self.place(torch.stack([share, total], 1)).transpose(1, 2))
            share = torch.softmax(self.score(torch.tanh(self.query(h1)[:, None] + where + keys))[..., 0], -1)
            total, seen = total + share, torch.bmm(share[:, None], text)[:, 0]
            h2, c2 = self.speak(torch.cat([h1, seen], -1), (h2, c2))
            said = self.frame(torch.cat([h2, seen], -1))
            out.append(said)
        return torch.stack(out, 1)


# -- graphs, clicks, tables and games by hand -------------------------------------------------------------------


class GatLayer(nn.Module):
    """Attention along the edges: a softmax over those that point to a node."""

    def __init__(self, cin: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.lin = heads, nn.Linear(cin, heads * width, bias=False)
        self.ends = nn.Parameter(torch.randn(2, heads, width) * width**-0.5)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.lin(x).unflatten(-1, (self.heads, -1))
        a, b = (y * self.ends[0]).sum(-1), (y * self.ends[1]).sum(-1)
        score = F.leaky_relu(a[source] + b[target], 0.2)
        where = target[:, None].expand_as(score)
        most = torch.zeros_like(a).scatter_reduce(0, where, score.detach(), "amax", include_self=False)
        part = torch.exp(score - most[target])
        total = torch.zeros_like(a).scatter_add(0, where, part)
        share = part / total[target].clamp(min=1e-9)
        return torch.zeros_like(y).index_add(0, target, y[source] * share[..., None]).flatten(1)


class Gat(nn.Module):
    def __init__(self, cin: int = 500, classes: int = 41) -> None:
        super().__init__()
        self.one, self.two, self.head = GatLayer(cin, 8, 32), GatLayer(256, 8, 32), GatLayer(256, 1, classes)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.elu(self.one(x, source, target))
        return self.head(F.elu(self.two(x, source, target)), source, target)


class SchNet(nn.Module):
    """The energies of molecules, per atom; each atom hears the others through a filter made from the distance."""

    def __init__(self, width: int = 128, layers: int = 6, waves: int = 50) -> None:
        super().__init__()
        self.atoms = nn.Embedding(100, width)
        self.enter = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(waves, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.update = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.head = nn.Sequential(nn.Linear(width, 64), nn.Softplus(), nn.Linear(64, 1))
        self.register_buffer("centres", torch.linspace(0, 5, waves))

    def forward(
        self, atoms: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, labels: torch.Tensor
    ) -> SimpleNamespace:
        source, target = ends
        x = self.atoms(atoms.flatten())
        far = torch.linalg.vector_norm(places[source] - places[target] + 1e-6, dim=-1)
        near = torch.exp(-10 * (far[:, None] - self.centres).square())
        fade = 0.5 * (torch.cos(far.clamp(max=5) * (torch.pi / 5)) + 1)[:, None]
        for enter, filters, update in zip(self.enter, self.filters, self.update, strict=True):
            heard = enter(x)[source] * filters(near) * fade
            x = x + update(torch.zeros_like(x).index_add(0, target, heard))
        energy = self.head(x).view(atoms.shape).mean(1)
        return loss(F.mse_loss(energy, labels))


def molecules(batch: int, atoms: int = 24) -> Maker:
    """Every atom of a molecule is tied to every other."""

    def make(device: str, dtype: torch.dtype) -> Inputs:
        i, j = torch.triu_indices(atoms, atoms, 1)
        pair = torch.stack([torch.cat([i, j]), torch.cat([j, i])])
        ends = (pair[:, None] + atoms * torch.arange(batch)[:, None]).flatten(1).to(device)
        places = 2 * torch.randn(batch * atoms, 3, device=device, dtype=dtype)
        kinds = torch.randint(1, 10, (batch, atoms), device=device)
        return {"atoms": kinds, "places": places, "ends": ends, "labels": torch.randn(batch, device=device)}

    return make


def graph(nodes: int, edges: int, width: int) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        ends = torch.randint(0, nodes, (2, edges), device=device)
        return torch.randn(nodes, width, device=device, dtype=dtype), ends[0], ends[1]

    return make


class DeepFm(nn.Module):
    """Clicks: every pair of 26 fields by their dot product, and an MLP over all of them."""

    def __init__(self, fields: int = 26, rows: int = 50_000, width: int = 16) -> None:
        super().__init__()
        self.table, self.single = nn.Embedding(fields * rows, width), nn.Embedding(fields * rows, 1)
        self.register_buffer("first", torch.arange(fields) * rows)
        steps = [layers_of(fields * width, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Dropout(0.2)]
        self.deep = nn.Sequential(*steps, layers_of(400, 400, 400, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first
        y = self.table(x)
        pairs = 0.5 * (y.sum(1).square() - y.square().sum(1)).sum(-1, keepdim=True)
        score = self.single(x).sum(1) + pairs + self.deep(y.flatten(1))
        return torch.cat([torch.zeros_like(score), score], -1)


class FtTransformer(nn.Module):
    """Every number of a row becomes a token."""

    def __init__(self, features: int = 54, width: int = 192, classes: int = 7) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(features, width)), nn.Parameter(torch.randn(features, width))
        self.whole, self.head = nn.Parameter(torch.randn(1, 1, width)), nn.Linear(width, classes)
        layer = nn.TransformerEncoderLayer(width, 8, 256, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = x[..., None] * self.scale + self.shift
        return self.head(self.body(torch.cat([self.whole.expand(x.shape[0], -1, -1), each], 1))[:, 0])


def games(steps: int, batch: int) -> Maker:
    shape = (steps, batch, 3, 72, 96)
    return lambda device, dtype: (torch.randint(0, 256, shape, device=device, dtype=torch.uint8),)


class ImpalaBlock(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.enter, self.pool = nn.Conv2d(cin, cout, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(cout, cout, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.enter(x))
        for a, b in zip(self.convs[::2], self.convs[1::2], strict=True):
            x = x + b(F.relu(a(F.relu(x))))
        return x


class Impala(nn.Module):
    """Frames of many games, twenty of each in a row; which of 15 things to do."""

    def __init__(self, actions: int = 15) -> None:
        super().__init__()
        self.see = nn.Sequential(ImpalaBlock(3, 16), ImpalaBlock(16, 32), ImpalaBlock(32, 32), nn.ReLU(), nn.Flatten())
        self.think, self.recall = nn.Linear(32 * 9 * 12, 256), nn.LSTM(256, 256)
        self.act = nn.Linear(256, actions)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.think(self.see(frames.flatten(0, 1).to(self.act.weight.dtype) / 255)))
        return self.act(self.recall(x.unflatten(0, frames.shape[:2]))[0])


# -- the cases --------------------------------------------------------------------------------------------------

LATENT = beside(numbers((48, 4, 32, 32)), whole(1000, 48), whole(1000, 48), numbers((48, 4, 32, 32)))
NOISY_64 = named("x t labels", beside(numbers((24, 3, 64, 64)), whole(1000, 24), numbers((24, 3, 64, 64))))
LATENT_1 = beside(numbers((1, 4, 32, 32)), whole(1000, 1), whole(1000, 1))
SENTENCES = named("source target labels", beside(whole(37000, 32, 52), *[whole(37000, 32, 47)] * 2))
CLIPS = numbers((6, 3, 16, 224, 224))
FRAMES = numbers((1, 3, 256, 384), (1, 3, 256, 384))
FCN = vision_task("segmentation", "fcn_resnet101", numbers((6, 3, 400, 400)), weights_backbone=None)

CASES = [
    # every kind once, then more of each, in case the time runs out
    case("vgg19_bn_autocast_train_b64_cl", autocast(vision("vgg19_bn", 64)), 64, "fp32", **TRAIN_SGD, **LAST),
    case("olmo2_1b_6layers_train_b2_s1024", olmo2_1b(2, 1024, 6), 2, "bf16", **TRAIN_ADAMW),
    case("granite2b_12layers_decode_b1_past3000", decode(granite_2b(1, 1, 12), 1, 3000), 1, "bf16"),
    case("convnext_large_b40", vision("convnext_large", 40), 40, "bf16"),
    case("mobilebert_b1_s128", mobilebert(1, 128), 1, "fp16"),
    case("uvit_autocast_train_b48", autocast(by_hand(UVit, named("x t kind labels", LATENT))), 48, **TRAIN_ADAMW),
    case("gat_train_n60k_e900k", by_hand(Gat, graph(60_000, 900_000, 500)), 1, "fp32", **TRAIN_ADAMW),
    case("deepfm_train_b32768", by_hand(DeepFm, whole(50_000, 32768, 26)), 32768, "fp32", **TRAIN_ADAMW),
    case("s4d_train_b24_s4096", by_hand(S4d, numbers((24, 4096, 3))), 24, "fp32", **TRAIN_ADAMW),
    case(
        "expert_choice_autocast_train_b4_s1024",
        autocast(by_hand(expert_choice_lm, whole(32000, 4, 1024))),
        4,
        **TRAIN_ADAMW,
    ),
    case("ft_transformer_train_b2048", by_hand(FtTransformer, numbers((2048, 54))), 2048, "fp32", **TRAIN_ADAMW),
    case("pixel_unet_autocast_train_b24_s64", autocast(by_hand(PixelUNet, NOISY_64)), 24, **TRAIN_ADAMW),
    case("retinanet_r50_b6_s640_cl", by_hand(RetinaFeatures, numbers((6, 3, 640, 640))), 6, "bf16", **LAST),
    case("translator_autocast_train_b32_s52", autocast(by_hand(Translator, SENTENCES)), 32, **TRAIN_ADAMW),
    case("impala_lstm_train_t20_b48", by_hand(Impala, games(20, 48)), 48, "fp32", **TRAIN_SGD),
    case("tacotron2_decoder_b12_t60", by_hand(SpeakingDecoder, numbers((12, 110, 512))), 12),
    case("fcn_resnet101_autocast_train_b6_s400", autocast(FCN), 6, "fp32", **TRAIN_SGD),
    case("mvit_v2_s_b6_f16", vision_task("video", "mvit_v2_s", CLIPS), 6, "bf16"),
    case("raft_small_b1_s256x384", wrapped(LastFlow, vision_task("optical_flow", "raft_small", FRAMES)), 1),
    case("hubert_base_b8_8s", hubert_base(8, 8), 8, "fp16"),
    case("mt5_small_train_b16_s128_t40", mt5_small(16, 128, 40), 16, "fp32", **TRAIN_ADAMW),
    case("retnet_12layers_b4_s2048", by_hand(retnet, whole(32000, 4, 2048)), 4, "bf16"),
    case("swin2sr_x2_b1_s64", swin2sr(1, 64), 1, "fp16"),
    case("schnet_train_b512", by_hand(SchNet, molecules(512)), 512, "fp32", **TRAIN_ADAMW),
    case("vit_h_14_b20", vision("vit_h_14", 20), 20, "fp16"),
    case("mnasnet1_3_train_b160", vision("mnasnet1_3", 160), 160, "fp32", **TRAIN_SGD),
    case("fnet_base_b32_s384", fnet_base(32, 384), 32),
    case("ast_autocast_train_b12", autocast(ast(12)), 12, "fp32", **TRAIN_ADAMW),
    case("patchtsmixer_train_b32", patchtsmixer(32), 32, "fp32", **TRAIN_ADAMW),
    case("efficientnet_b2_b128_s260_cl", vision("efficientnet_b2", 128, 260), 128, "bf16", **LAST),
    case("starcoder2_3b_8layers_decode_b32_past1700", decode(starcoder2_3b(32, 1, 8), 32, 1700), 32, "bf16"),
    case("poolformer_s24_train_b64", poolformer_s24(64), 64, "fp32", **TRAIN_ADAMW),
    case("videomae_base_b8_f16", videomae_base(8), 8, "bf16"),
    case("densenet169_train_b16", vision("densenet169", 16), 16, "bf16", **TRAIN_SGD),
    # the same models, small where they were large
    case("swin_v2_s_b40_s256", vision("swin_v2_s", 40, 256), 40, "bf16"),
    case("swin_v2_s_b1_s256", vision("swin_v2_s", 1, 256), 1, "fp16"),
    case("alexnet_train_b768", vision("alexnet", 768), 768, "fp32", **TRAIN_SGD),
    case("alexnet_b1", vision("alexnet", 1), 1, "fp16"),
    case("regnet_y_3_2gf_autocast_train_b80_cl", autocast(vision("regnet_y_3_2gf", 80)), 80, **TRAIN_ADAMW, **LAST),
    case("regnet_y_3_2gf_b1", vision("regnet_y_3_2gf", 1), 1, "bf16"),
    case("wide_resnet101_2_b96", vision("wide_resnet101_2", 96), 96, "bf16"),
    case("shufflenet_v2_x2_0_b512", vision("shufflenet_v2_x2_0", 512), 512, "bf16"),
    case("granite2b_12layers_b2_s1300", granite_2b(2, 1300, 12), 2, "fp16"),
    case("mobilebert_b256_s96", mobilebert(256, 96), 256, "fp16"),
    case("mnasnet1_3_b1", vision("mnasnet1_3", 1), 1),
    case("uvit_b1", by_hand(UVit, LATENT_1), 1, "fp16"),
    case(
        "pixel_unet_b2_s64_cl", by_hand(PixelUNet, beside(numbers((2, 3, 64, 64)), whole(1000, 2))), 2, "fp16", **LAST
    ),
    case("schnet_train_b16", by_hand(SchNet, molecules(16)), 16, "fp32", **TRAIN_ADAMW),
    case("deepfm_b512", by_hand(DeepFm, whole(50_000, 512, 26)), 512),
    case("ft_transformer_b128", by_hand(FtTransformer, numbers((128, 54))), 128),
]
