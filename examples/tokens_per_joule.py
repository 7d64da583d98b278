"""Tokens per joule of text generation, by the number of concurrent requests: a serving loop like vLLM's.

    python examples/tokens_per_joule.py
    python examples/tokens_per_joule.py --slots 1,8,64 --requests 256 --width 1024 --layers 12     # on a GPU

A small decoder with random weights answers requests of different lengths. Each step gives every running request one
token; a request that is done leaves its slot to the next. Prefill (the prompt) and decode (the answer) are measured
apart, because they cost differently. Without a sensor the joules are modelled from the CPU's utilisation, and say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tessera import monitor
from tessera.schema import Energy

WORDS = 1000


@dataclass(kw_only=True)
class Request:
    """A prompt, the length of its answer, and the answer so far."""

    prompt: torch.Tensor
    wanted: int
    answer: list[int] = field(default_factory=list)


class Decoder:
    """A transformer with a cache of keys and values, one row of it for each slot."""

    def __init__(self, slots: int, *, layers: int, width: int, longest: int, device: str) -> None:
        torch.manual_seed(0)
        self.heads, self.device = width // 64, device
        self.embed = nn.Embedding(WORDS, width, device=device)
        self.layers = [
            {name: nn.Linear(i, o, bias=False, device=device) for name, i, o in
             (("qkv", width, 3 * width), ("out", width, width), ("up", width, 4 * width), ("down", 4 * width, width))}
            for _ in range(layers)
        ]  # fmt: skip
        self.cache = torch.zeros(layers, 2, slots, self.heads, longest, 64, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)

    def __call__(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Append `tokens` (one row per slot) to the slots; return the likeliest next token of each."""
        rows, count = tokens.shape
        start = self.lengths[slots]
        places = start[:, None] + torch.arange(count, device=self.device)
        longest = int(places.max()) + 1
        seen = torch.arange(longest, device=self.device) <= places[..., None]  # causal, and no further than each row
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            q, k, v = layer["qkv"](_norm(x)).view(rows, count, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
            keys, values = self.cache[number]
            keys[slots[:, None], :, places] = k.transpose(1, 2)
            values[slots[:, None], :, places] = v.transpose(1, 2)
            y = F.scaled_dot_product_attention(
                q, keys[slots, :, :longest], values[slots, :, :longest], attn_mask=seen[:, None]
            )
            x = x + layer["out"](y.transpose(1, 2).reshape(rows, count, -1))
            x = x + layer["down"](F.gelu(layer["up"](_norm(x))))
        self.lengths[slots] += count
        return (_norm(x[:, -1]) @ self.embed.weight.T).argmax(-1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


@dataclass(kw_only=True)
class Served:
    """The result of one setting; its energy is in the monitor's regions, by the names of its scopes."""

    slots: int
    prompt_tokens: int = 0
    answer_tokens: int = 0
    steps: int = 0


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def serve(requests: Sequence[Request], slots: int, *, layers: int, width: int, device: str) -> Served:
    """Answer all requests, a number of them at once."""
    longest = max(len(r.prompt) + r.wanted for r in requests)
    model = Decoder(slots, layers=layers, width=width, longest=longest, device=device)
    waiting, running, done = list(requests), dict[int, Request](), Served(slots=slots)
    while waiting or running:
        with monitor.energy_scope(f"prefill {slots}"):
            for slot in sorted(set(range(slots)) - set(running))[: len(waiting)]:
                request = running[slot] = waiting.pop(0)
                model.lengths[slot] = 0
                first = model(request.prompt[None].to(device), torch.tensor([slot], device=device))
                request.answer.append(int(first))
                done.prompt_tokens += len(request.prompt)
        with monitor.energy_scope(f"decode {slots}"):
            while not any(_done(r) for r in running.values()):
                order = torch.tensor(sorted(running), device=device)
                last = torch.tensor([[running[int(s)].answer[-1]] for s in order], device=device)
                for slot, token in zip(order.tolist(), model(last, order).tolist(), strict=True):
                    running[slot].answer.append(token)
                done.steps += 1
        for slot in [s for s, r in running.items() if _done(r)]:
            done.answer_tokens += len(running.pop(slot).answer)
    return done


def _done(request: Request) -> bool:
    return len(request.answer) >= request.wanted


def per_joule(tokens: int, spent: Energy) -> str:
    """Tokens per joule with its 90% half-width."""
    value = tokens / spent.energy_j
    return f"{value:8.1f} ± {value * spent.error_j / spent.energy_j:<6.1f}"


def requests_of(count: int, seed: int = 1) -> list[Request]:
    """Prompts of 16 to 64 tokens and answers of 8 to 48, the same ones for every setting."""
    numbers = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 1 << 20, (count, 2), generator=numbers).tolist()
    return [
        Request(prompt=torch.randint(0, WORDS, (16 + a % 49,), generator=numbers), wanted=8 + b % 41) for a, b in sizes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slots", default="1,4,16", help="how many requests run at once, one row each")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    settings = [int(slots) for slots in args.slots.split(",")]
    served = []
    for slots in settings:
        work = requests_of(args.requests)
        with monitor.energy_scope(f"all {slots}"):
            served.append(serve(work, slots, layers=args.layers, width=args.width, device=args.device))
        assert all(len(r.answer) == r.wanted for r in work)

    monitor.default().settle_all()  # the last scopes wait for the sensor
    spent = {region.name: region.energy for region in monitor.default().regions()}
    print("tokens of the answers per joule, all joules counted; prefill and decode alone; ± is a 90% half-width")
    print("slots  steps           answer/J          decode/J         prompt/J  seconds  basis")
    for row in served:
        whole = spent[f"all {row.slots}"]
        print(
            f"{row.slots:5}  {row.steps:5}  {per_joule(row.answer_tokens, whole)}  "
            # The prefill produces the first token of each answer.
            f"{per_joule(row.answer_tokens - args.requests, spent[f'decode {row.slots}'])}  "
            f"{per_joule(row.prompt_tokens, spent[f'prefill {row.slots}'])}  {whole.time_s:6.2f}  {whole.basis}"
        )


if __name__ == "__main__":
    main()
