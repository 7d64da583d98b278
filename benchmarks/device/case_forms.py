"""How a case of record_models.py is written: what the sets of cases share. It makes all their models: only add to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

Inputs = tuple[Any, ...] | dict[str, Any]
Factory = Callable[[str, torch.dtype], tuple[nn.Module, Inputs]]
Maker = Callable[[str, torch.dtype], Inputs]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    factory: Factory
    batch: int
    dtype: str = "fp32"  # fp32, bf16, fp16: the model is cast with .to(dtype)
    mode: str = "infer"  # infer, train
    optimizer: str = "sgd"  # sgd (momentum 0.9), adamw; both otherwise default
    channels_last: bool = False


def case(name: str, factory: Factory, batch: int, dtype: str = "fp32", **more: Any) -> Case:
    return Case(name=name, factory=factory, batch=batch, dtype=dtype, **more)


TRAIN_SGD = {"mode": "train", "optimizer": "sgd"}
TRAIN_ADAMW = {"mode": "train", "optimizer": "adamw"}
LAST = {"channels_last": True}


# -- inputs -------------------------------------------------------------------------------------------------------


def ids(device: str, batch: int, seq: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, seq), device=device)


def tokens(batch: int, seq: int, vocab: int, labels: bool = False) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        x = ids(device, batch, seq, vocab)
        return {"input_ids": x, "labels": x} if labels else {"input_ids": x}

    return make


def images(batch: int, size: int) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, size, size, device=device, dtype=dtype)}

    return make


def numbers(*shapes: tuple[int, ...]) -> Maker:
    return lambda device, dtype: tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def whole(below: int, *shape: int) -> Maker:
    """Whole numbers from 0."""
    return lambda device, dtype: (torch.randint(0, below, shape, device=device),)


def beside(*makers: Maker) -> Maker:
    return lambda device, dtype: tuple(x for make in makers for x in make(device, dtype))


def named(names: str, make: Maker) -> Maker:
    """The inputs of `make` under these names; those with "labels" make a model that answers with its loss."""
    return lambda device, dtype: dict(zip(names.split(), make(device, dtype), strict=True))


# -- where models come from ---------------------------------------------------------------------------------------


def built_on(device: str) -> torch.device:
    """Some compute widths or drop-path rates with tensors, which "meta" cannot answer."""
    return torch.device("cpu" if device == "meta" else device)


def vision(name: str, batch: int, size: int = 224) -> Factory:
    """A classifier, or a segmentation model where the name is one of torchvision.models.segmentation."""

    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import torchvision

        segments = name.startswith("deeplabv3")
        known = torchvision.models.segmentation if segments else torchvision.models
        with built_on(device):
            model = getattr(known, name)(weights=None, **({"weights_backbone": None} if segments else {}))
        return model.to(device, dtype), (torch.randn(batch, 3, size, size, device=device, dtype=dtype),)

    return build


def hf(cls: str, config: str, inputs: Maker, **kwargs: Any) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        import transformers

        with torch.device(device):
            model = getattr(transformers, cls)(getattr(transformers, config)(**kwargs))
        return model.to(device, dtype), inputs(device, dtype)

    return build


def decoder(
    kind: str, inputs: Maker, width: int, up: int, layers: int, heads: tuple[int, int], vocab: int, **more: Any
) -> Factory:
    """A language model of transformers: "Llama", "Qwen2" ... `heads` are those of the queries and those of the keys."""
    return hf(
        f"{kind}ForCausalLM",
        f"{kind}Config",
        inputs,
        hidden_size=width,
        intermediate_size=up,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=vocab,
        **more,
    )


def by_hand(make: Callable[[], nn.Module], inputs: Maker) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        with torch.device(device):
            model = make()
        return model.to(device, dtype), inputs(device, dtype)

    return build


# -- how a model is run -------------------------------------------------------------------------------------------


def wrapped(wrap: Callable[[nn.Module], nn.Module], factory: Factory) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        model, inputs = factory(device, dtype)
        return wrap(model), inputs

    return build


def loss(value: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(loss=value)


class Wrapper(nn.Module):
    """Runs a model in a way of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Autocast(Wrapper):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.model(*args, **kwargs)


class Tf32(Wrapper):
    """TF32 in the matrix products of the forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kept = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return self.model(*args, **kwargs)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = kept


def autocast(factory: Factory) -> Factory:
    return wrapped(Autocast, factory)


def tf32(factory: Factory) -> Factory:
    return wrapped(Tf32, factory)


class Decode(nn.Module):
    """One token against a cache of `past` tokens, which is put back to that length before every call."""

    def __init__(self, model: nn.Module, batch: int, past: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers import DynamicCache

        self.model, self.cache = model, DynamicCache(config=model.config)
        c = model.config
        shape = (batch, c.num_key_value_heads, past, c.hidden_size // c.num_attention_heads)
        self.past = [
            (torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype))
            for _ in range(c.num_hidden_layers)
        ]
        for i, (k, v) in enumerate(self.past):
            self.cache.update(k, v, i)

    def forward(self, input_ids: torch.Tensor) -> Any:
        for layer, (k, v) in zip(self.cache.layers, self.past, strict=True):
            layer.keys, layer.values = k, v
        return self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True)


def decode(factory: Factory, batch: int, past: int) -> Factory:
    def build(device: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        model, inputs = factory(device, dtype)
        return Decode(model, batch, past, device, dtype), inputs

    return build


# -- pieces of models ---------------------------------------------------------------------------------------------


def layers_of(*widths: int) -> nn.Sequential:
    steps: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        steps += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*steps[:-1])


def waves(t: torch.Tensor, width: int) -> torch.Tensor:
    rates = torch.exp(torch.arange(width // 2, device=t.device) * (-math.log(10000) / (width // 2)))
    angles = t[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class Res(nn.Module):
    """Two convolutions after GroupNorm and SiLU; told the time where there is one."""

    def __init__(self, cin: int, cout: int, time: int = 0, drop: float = 0.0) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, cin, eps=1e-6), nn.Conv2d(cin, cout, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(32, cout, eps=1e-6), nn.Conv2d(cout, cout, 3, padding=1)
        self.time = nn.Linear(time, cout) if time else None
        self.drop = nn.Dropout(drop)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: torch.Tensor, t: torch.Tensor | None = None) -> torch.Tensor:
        h = self.c1(F.silu(self.n1(x)))
        if self.time is not None and t is not None:
            h = h + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.c2(self.drop(F.silu(self.n2(h))))
