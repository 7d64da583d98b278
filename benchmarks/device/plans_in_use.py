"""`optimize` and the tuner in real loops: joules and seconds after 50 calls, beside eager and torch.compile's modes.

    PYTHONPATH=src python benchmarks/device/plans_in_use.py RESULTS.json [--only moe decode] [--budget-s 230] [--quick]

Six programs with other data in every call: a mixture of experts in training (routing changes shapes inside), decoding
with a cache that grows, a convolutional network in training, and three that nobody tuned anything for. Each runs 50 calls
in its loop as it is, twice (what both differ by is noise), under each compile mode, and under `optimize` or the tuner.
Decoding then goes on through its lengths three times, and a plan until it has decided: a length costs most at first, by
which a way that ran earlier would seem faster (`new_lengths` measures what). Then all are measured in the same loop in
turns of short blocks, there and back, because the host's speed drifts: what one takes over another is the median of pairs
of blocks, of which all have as many. `--quick` runs the logic on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import tessera
from tessera import op
from tessera.graph.nested import map_tensors
from tessera.monitor import Monitor
from tessera.monitor.core import Window
from tessera.monitor.scope import synchronize
from tessera.rewrite import watch
from tessera.rewrite.call_clock import HostClock, StreamClock
from tessera.rewrite.optimize import Optimized
from tessera.runtime.options import ScheduleOptions
from tessera.runtime.tuning.plan import Plan, format_setting
from tessera.runtime.tuning.tuner import TunedFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

CALLS = 50
ROUNDS_OF_SHAPES = (
    3  # after the first calls: cuDNN plans for a length at its first call, reduce-overhead records at its second
)
MOST_CALLS = 2000  # in which a plan must have decided
BLOCK_S, EDGE_S = 0.25, 0.05  # of a block, and of the same work before and after it, for the sensor's lag and blur
MODES = ("default", "reduce-overhead")
GOAL = (
    "after 50 calls, or more where shapes change, at most 2% more joules than the best of eager and the compile modes"
)
Call = Callable[..., Any]


# -- the programs -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal and past is None)
        return self.out(out.transpose(1, 2).flatten(2)), torch.stack([k, v])


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two of the experts for each token, each of which gets as many tokens as the router sends."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(FeedForward(width, inner) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, place = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, place].unsqueeze(-1))
        return out.view_as(x)


class Decoder(nn.Module):
    def __init__(self, depth: int, width: int, vocabulary: int, experts: int = 0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.attention = nn.ModuleList(Attention(width, width // 64, causal=True) for _ in range(depth))
        inner = 4 * width
        self.mlp = nn.ModuleList(
            Experts(width, inner, experts) if experts else FeedForward(width, inner) for _ in range(depth)
        )

    def forward(self, ids: torch.Tensor, past: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> Any:
        x, cache = self.embed(ids), []
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            seen, now = attention(self.norms[2 * i](x), None if past is None else past[i])
            x = x + seen
            x = x + mlp(self.norms[2 * i + 1](x))
            cache.append(now)
        logits = self.head(self.norms[-1](x))
        if labels is not None:
            return {"loss": functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}
        return logits, torch.stack(cache)


class ConvBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norms[1](self.two(functional.relu(self.norms[0](self.one(x)))))
        return functional.relu(out + self.skip(x))


class Recommender(nn.Module):
    """Embeddings of categories, their products in pairs, and a tower: DLRM's form."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.tower = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        dense = self.dense(numbers)
        vectors = torch.stack([dense, *(t(categories[:, i]) for i, t in enumerate(self.tables))], 1)
        products = vectors @ vectors.mT
        row, column = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1, device=products.device).unbind()
        return self.tower(torch.cat([products[:, row, column], dense], -1)).squeeze(-1)


class Encoder(nn.Module):
    """Patches of an image, then blocks of attention."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(width), Attention(width, width // 64, causal=False), nn.LayerNorm(width),
                           nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))])
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).mT
        for before, attention, between, mlp in self.blocks:
            x = x + attention(before(x))[0]
            x = x + mlp(between(x))
        return x.mean(1)


class Denoiser(nn.Module):
    """A U of convolutions with group norms, as diffusion models have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 3, 2, 1) for i in range(2))
        self.up = nn.ModuleList(nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 3, padding=1) for i in reversed(range(2)))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width * k) for k in (2, 4, 2, 1))
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        kept = []
        for conv, norm in zip(self.down, self.norms[:2], strict=True):
            kept.append(x)
            x = functional.silu(norm(conv(x)))
        for conv, norm in zip(self.up, self.norms[2:], strict=True):
            x = functional.silu(norm(conv(functional.interpolate(x, scale_factor=2.0)))) + kept.pop()
        return self.last(x)


class Loop:
    """A program in its loop: `iterate(call)` runs `call` in the model's or the step's place on the next batch."""

    tuned = False
    mode = "infer"
    period = 1  # calls after which shapes come again

    def __init__(self, model: nn.Module, batches: list[Any]) -> None:
        self.model, self.batches = model, itertools.cycle(batches)
        self.inputs = batches[0]

    def iterate(self, call: Call) -> Any:
        with torch.no_grad():
            return call(*next(self.batches))


class TrainedModel(Loop):
    """The user's loop does the backward pass and the update."""

    mode = "train"

    def __init__(self, model: nn.Module, batches: list[Any]) -> None:
        super().__init__(model, batches)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def iterate(self, call: Call) -> Any:
        call(**next(self.batches))["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class TrainedStep(Loop):
    """A function that does a whole step; it is what the tuner tunes."""

    tuned = True

    def __init__(self, model: nn.Module, batches: list[tuple[Any, ...]], loss: Call) -> None:
        super().__init__(model, batches)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        self.compiled: Call | None = None  # what a compile mode runs in the model's place

        def step(*batch: Any) -> Any:
            run = model if self.compiled is None else self.compiled  # truth would ask for the length of a model
            value = loss(run(*batch[:-1]).float(), batch[-1])
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return value.detach()

        self.step = step

    def iterate(self, call: Call) -> Any:
        return call(*next(self.batches))


class Decoding(Loop):
    """Token by token; after 64 tokens another prompt."""

    period = 64

    def __init__(self, model: nn.Module, prompts: list[Any]) -> None:
        self.model, self.prompts = model, itertools.cycle(prompts)
        self.ids, self.past, self.at = None, None, 0
        with torch.no_grad():
            logits, past = model(prompts[0])
        self.inputs = (logits[:, -1:].argmax(-1), past)

    def iterate(self, call: Call) -> Any:
        with torch.no_grad():
            if self.at % self.period == 0:
                logits, self.past = self.model(next(self.prompts))
            else:
                logits, self.past = call(self.ids, self.past)
            self.ids, self.at = logits[:, -1:].argmax(-1), self.at + 1


def make_loop(name: str, quick: bool) -> Loop:
    """A fresh program with the same weights and data each time."""
    torch.manual_seed(0)
    place: dict[str, Any] = {"device": "cpu" if quick else "cuda", "dtype": torch.float32 if quick else torch.bfloat16}
    device, count = place["device"], 3 if quick else 16

    def ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
        return torch.randint(vocabulary, (rows, length), device=device)

    if name == "moe":
        model = Decoder(1 if quick else 2, 64 if quick else 1024, 512 if quick else 16384, experts=4)
        size = (2, 16, 512) if quick else (8, 1024, 16384)
        return TrainedModel(model.to(**place), [{"ids": ids(*size), "labels": ids(*size)} for _ in range(count)])
    if name == "decode":
        model = Decoder(2 if quick else 8, 64 if quick else 2048, 512 if quick else 32000)
        return Decoding(model.to(**place).eval(), [ids(2, 8, 512) if quick else ids(16, 256, 32000) for _ in range(4)])
    if name == "cnn":
        widths = (8, 16) if quick else (64, 128, 128, 256)
        blocks = [ConvBlock(b, a, 1 if a == b else 2) for b, a in itertools.pairwise((3, *widths))]
        cnn = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 100)).to(**place)
        side, rows = (16, 2) if quick else (64, 256)
        images = [
            (torch.randn(rows, 3, side, side, **place), torch.randint(100, (rows,), device=device))
            for _ in range(count)
        ]
        return TrainedStep(cnn, images, functional.cross_entropy)
    if name == "recommender":
        model = Recommender(4 if quick else 26, 100 if quick else 100_000, 16 if quick else 64).to(**place)
        rows = 8 if quick else 8192
        batches = [
            (torch.randn(rows, 13, **place), torch.randint(100, (rows, len(model.tables)), device=device),
             torch.rand(rows, device=device).round())
            for _ in range(count)
        ]  # fmt: skip
        return TrainedStep(model, batches, functional.binary_cross_entropy_with_logits)
    if name == "encoder":
        model = Encoder(1 if quick else 6, 64 if quick else 768).to(**place).eval()
        side, rows = (32, 2) if quick else (224, 32)
        return Loop(model, [(torch.randn(rows, 3, side, side, **place),) for _ in range(count)])
    model = Denoiser(8 if quick else 128).to(**place).eval()
    side, rows = (16, 2) if quick else (64, 16)
    return Loop(model, [(torch.randn(rows, 4, side, side, **place),) for _ in range(count)])


PROGRAMS = ("moe", "decode", "cnn", "encoder", "denoiser", "recommender")
# Of the time: decoding compiles once more for lengths that change, and goes through them several times.
SHARES = {"recommender": 1.2, "decode": 2.0}


# -- running them -----------------------------------------------------------------------------------------------------


def prepare(loop: Loop, way: str, budget_s: float) -> Call:
    """What is called in the loop, under a way of running it."""
    target = loop.step if isinstance(loop, TrainedStep) else loop.model
    if way.startswith("eager"):
        return target
    if way != "tessera":
        how = None if way == "default" else way
        compiled = torch.compile(loop.model, mode=how)
        if isinstance(loop, TrainedStep):
            loop.compiled = compiled
            return target
        if loop.mode == "infer" and way == "reduce-overhead":  # the next replay overwrites its results
            return lambda *args: map_tensors(torch.clone, compiled(*args))
        return compiled
    if loop.tuned:
        return TunedFunction(target, ScheduleOptions(policy="energy", budget_s=budget_s, cache=False))
    return tessera.optimize(target, loop.inputs, mode=loop.mode, budget_s=budget_s, explain=False)


def run_first_calls(loop: Loop, way: str, budget_s: float) -> tuple[Call, dict[str, Any]]:
    """The first 50 calls, and more where shapes change, unless a compile mode takes longer than the search may."""
    begun = time.monotonic()
    call = prepare(loop, way, budget_s)
    found: dict[str, Any] = {}
    least = (
        CALLS + 1 + (ROUNDS_OF_SHAPES * loop.period if loop.period > 1 else 0)
    )  # the tuner's first call is its search
    for at in itertools.count(1):
        mark_step(way)
        loop.iterate(call)
        if way in MODES and time.monotonic() - begun > budget_s:
            raise TimeoutError(f"more than {budget_s:.0f} s for its first {at} calls")
        if at == CALLS + 1:
            synchronize()
            found["first_calls_s"] = time.monotonic() - begun
        if at >= least and (at >= MOST_CALLS or not is_undecided(call)):
            break
    synchronize()
    found |= {"calls_before": at, "calls_before_s": time.monotonic() - begun}
    return call, found | (describe_plan(get_plan(call)) if way == "tessera" else {})


def get_plan(call: Call) -> Any:
    return call.plan() if isinstance(call, TunedFunction) else call


def is_undecided(call: Call) -> bool:
    """Whether a plan waits for shapes that come again."""
    report = get_plan(call).in_use if isinstance(call, TunedFunction | Optimized) else None
    return report is not None and bool(report.provisional)


def describe_plan(plan: Any) -> dict[str, Any]:
    """What was tried and chosen, what that took, and how it did in use."""
    print(plan, flush=True)
    tuned = isinstance(plan, Plan)
    tried = [
        {"variant": format_setting(t.setting) if tuned else t.name, "ms": None if t.time_s is None else 1e3 * t.time_s,
         "j": t.energy_j, "prepared_s": t.prepared_s if tuned else t.compile_s, "why": t.refused if tuned else t.why}
        for t in (plan.trials if tuned else plan.variants)
    ]  # fmt: skip
    return {
        "chosen": plan.setting if tuned else plan.chosen,
        "tried": tried,
        "in_use": msgspec.to_builtins(plan.in_use),
        "search_s": plan.spent_s,
        "search_j": plan.spent_j,
        "paid_after_calls": plan.paid_after_calls,
    }


def mark_step(way: str) -> None:
    if way == "reduce-overhead":
        torch.compiler.cudagraph_mark_step_begin()


def run_block(iterate: Call, seconds: float, monitor: Monitor, period: int) -> tuple[float, Window, int]:
    """Seconds of an iteration and the window over one block, with the same work before and after for the sensor's blur.

    A block has whole rounds of shapes: lengths, and prompts between them, take different times.
    """
    run_for(iterate, EDGE_S)
    synchronize()
    window, begun = monitor.open("block", nested=True), time.perf_counter()
    count = run_for(iterate, seconds, period)
    synchronize()
    took_s = (time.perf_counter() - begun) / count
    monitor.close(window)
    run_for(iterate, EDGE_S)
    return took_s, window, count


def run_for(iterate: Call, seconds: float, period: int = 1) -> int:
    begun, count = time.perf_counter(), 0
    while not count or count % period or time.perf_counter() - begun < seconds:
        iterate()
        count += 1
    return count


def measure_in_turns(ready: dict[str, tuple[Loop, Call]], seconds: float, rounds: int) -> dict[str, Blocks]:
    """Milliseconds and joules of an iteration in short blocks, there and back: a drift of the host hits all alike."""
    seen = {way: Blocks() for way in ready}
    monitor = tessera.monitor.default()
    for turn in range(rounds):
        for way in list(ready)[:: -1 if turn % 2 else 1]:
            loop, call = ready[way]

            def iterate(way: str = way, loop: Loop = loop, call: Call = call) -> None:
                mark_step(way)
                loop.iterate(call)

            took_s, window, count = run_block(iterate, seconds, monitor, loop.period)
            seen[way].ms.append(1e3 * took_s)
            seen[way].windows.append((window, count))
    for blocks in seen.values():
        for window, count in blocks.windows:
            monitor.read(window, 2.0)
            energy = monitor.total(window)
            if energy is not None and energy.basis == "measured":
                blocks.j.append(energy.joules / count)
    if len({len(blocks.j) for blocks in seen.values()}) > 1:  # some are not known: pairs would be of different rounds
        for blocks in seen.values():
            blocks.j.clear()
    return seen


@dataclass(slots=True)
class Blocks:
    """What the blocks of one way took, an iteration."""

    ms: list[float] = field(default_factory=list)
    j: list[float] = field(default_factory=list)
    windows: list[tuple[Window, int]] = field(default_factory=list)

    def median(self, what: str) -> float:
        return statistics.median(getattr(self, what))

    def compare(self, other: Blocks, what: str) -> tuple[float, float] | None:
        """By how much this is more than the other, by pairs of the same round, and the 90% half-width of that."""
        pairs = list(zip(getattr(self, what), getattr(other, what), strict=True))
        if not pairs:
            return None
        ratios = [mine / others for mine, others in pairs]
        error = 1.645 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        return statistics.median(ratios) - 1, error


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """What the compiler keeps of one program is not the next one's."""
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def try_program(name: str, quick: bool, budget_s: float, seconds: float) -> dict[str, Any]:
    """All ways of one program. One that fails says so, and the others go on."""
    begun = time.monotonic()
    ready: dict[str, tuple[Loop, Call]] = {}
    found: dict[str, Any] = {}
    ways = ("eager", "tessera", "eager again", *(MODES[:1] if quick else MODES))
    for way in ways:
        if time.monotonic() - begun > 0.9 * budget_s:
            found[way] = {"failed": "no time left"}
            continue
        try:
            loop = make_loop(name, quick)
            call, found[way] = run_first_calls(loop, way, 0.6 * budget_s)
            ready[way] = loop, call
        except Exception as exc:  # noqa: BLE001 - a mode that cannot run this loop is a finding, too
            traceback.print_exc(limit=-3)
            found[way] = {"failed": f"{type(exc).__name__}: {str(exc)[:200]}"}
    seen = measure_in_turns(ready, seconds, 2 if quick else 8)
    for way, blocks in seen.items():
        found[way] |= {
            "ms": blocks.median("ms"),
            "j": blocks.median("j") if blocks.j else None,
            "blocks": len(blocks.ms),
        }
    for _, call in ready.values():
        if isinstance(call, TunedFunction):
            call.close()
    theirs = [way for way in seen if way not in ("tessera", "eager again")]
    fastest = min(theirs, key=lambda way: found[way]["ms"])
    best = min(theirs, key=lambda way: found[way]["j"]) if found[fastest]["j"] is not None else fastest
    for name, (ours, other) in {
        "over_best": ("tessera", best),
        "over_fastest": ("tessera", fastest),
        "over_eager": ("tessera", "eager"),
        "eager_again_over_eager": ("eager again", "eager"),
    }.items():
        if ours in seen and other in seen:
            found[name] = compare_ways(seen[ours], seen[other])
    if "tessera" in seen and "eager" in seen:
        found["tessera"]["paid_by_blocks"] = count_calls_until_paid(
            found["tessera"], found["eager"], found["over_eager"]
        )
    return found | {"best": best, "fastest": fastest, "took_s": time.monotonic() - begun}


def count_calls_until_paid(
    ours: dict[str, Any], eager: dict[str, Any], over: dict[str, float]
) -> dict[str, int | None]:
    """After how many calls what came before the blocks has paid, by what the blocks took; None: they show no saving.

    In joules, where they are known, the search; in seconds all that the calls before took longer than eager ones.
    """
    spent = {"ms": 1e3 * ours["calls_before_s"] - ours["calls_before"] * eager["ms"]}
    if "j" in over and ours["search_j"] is not None:
        spent["j"] = ours["search_j"]
    as_it_is = ours["chosen"] in ("eager", {})
    return {
        what: None
        if as_it_is or over[what] + over[f"{what}_error"] >= 0
        else math.ceil(-much / over[what] / eager[what])
        for what, much in spent.items()
    }


def compare_ways(ours: Blocks, other: Blocks) -> dict[str, float]:
    """How much more a way takes, in seconds and joules: medians of pairs of blocks, and their 90% half-widths."""
    found = {}
    for what in ("ms", "j"):
        if (pair := ours.compare(other, what)) is not None:
            found[what], found[f"{what}_error"] = pair
    return found


def measure_watching() -> float:
    """Microseconds that watching adds to a call on the host, events in the stream included."""
    x = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")

    def nothing(x: torch.Tensor) -> None:
        pass

    times: dict[bool, list[float]] = {False: [], True: []}
    for watched in (False, True) * 50:
        call = nothing
        if watched:
            clock = StreamClock(2 * watch.MOST_CALLS) if x.is_cuda else HostClock()
            candidate = watch.WatchedVariant(name="nothing", enter=lambda: nothing)
            call = watch.WatchedCall([candidate], lambda _: 0, lambda _: None, clock=clock)
        begun = time.perf_counter()
        for _ in range(watch.CALLS):
            call(x)
        times[watched].append((time.perf_counter() - begun) / watch.CALLS)
    return 1e6 * (statistics.median(times[True]) - statistics.median(times[False]))


def measure_new_lengths(quick: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of attention at a key length that is new, and at the same again, by torch's choice and by flash's."""
    place: dict[str, Any] = {"device": "cpu"} if quick else {"device": "cuda", "dtype": torch.bfloat16}
    query, found = torch.randn(16, 32, 1, 64, **place), {}
    ways = {"as torch chooses": contextlib.nullcontext, "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)}
    for name, within in ways.items():
        times: dict[str, list[float]] = {"new": [], "again": []}
        for length in range(700, 712):  # of which no program has one
            key, value = (torch.randn(16, 32, length, 64, **place) for _ in range(2))
            for each in times.values():
                synchronize()
                begun = time.perf_counter()
                with within():
                    functional.scaled_dot_product_attention(query, key, value)
                synchronize()
                each.append(1e3 * (time.perf_counter() - begun))
        found[name] = {when: statistics.median(each) for when, each in times.items()}
    return found


def try_tiles(quick: bool, budget_s: float) -> dict[str, Any]:
    """Tiles for an operator without one, by two policies: what was tried, and whether one was kept."""
    device, dtype = ("cpu", torch.float32) if quick else ("cuda", torch.bfloat16)
    found = {}
    rows, inner, columns = (64, 64, 64) if quick else (512, 8192, 1024)
    x, w = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
    for policy in ("energy", "temperature"):
        fn = TunedFunction(
            op.matmul, ScheduleOptions(policy=policy, budget_s=budget_s, compile_modes=False, cache=False)
        )
        fn(x, w)
        plan = fn.plan()
        print(plan, flush=True)
        found[policy] = {
            "product": [rows, inner, columns],
            "kept": plan.setting,
            "trials": [
                {
                    "setting": t.setting,
                    "ms": 1e3 * (t.time_s or 0),
                    "j": t.energy_j,
                    "w": t.power_w,
                    "refused": t.refused,
                }
                for t in plan.trials
            ],
        }
        fn.close()
    return found


def show(name: str, found: dict[str, Any]) -> None:
    for way in ("eager", "eager again", *MODES, "tessera"):
        row = found.get(way, {})
        if "ms" in row:
            joules = "" if row["j"] is None else f"{row['j']:.4g} J"
            print(f"{name:12s} {way:16s} {row['ms']:.4g} ms  {joules}")
    for what in ("over_best", "over_fastest", "over_eager", "eager_again_over_eager"):
        print(f"{name:12s} {what}: " + ", ".join(f"{k} {100 * v:+.1f}%" for k, v in found.get(what, {}).items()))
    ours = found["tessera"]
    print(f"{name:12s} best {found['best']}, fastest {found['fastest']}, took {found['took_s']:.0f} s")
    for what, calls in ours.get("paid_by_blocks", {}).items():
        paid = "has not paid: calls save nothing" if calls is None else f"has paid after {calls:,} calls"
        print(f"{name:12s} by {what}, what came before {paid}")
    print(f"{name:12s} tessera {ours}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--budget-s", type=float, default=330.0)
    parser.add_argument("--tiles", action="store_true", help="also try tiles of op.matmul, by two policies: 12 s more")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not given.quick and not torch.cuda.is_available():
        sys.exit("no CUDA device: --quick runs the logic on the CPU")
    os.environ.setdefault("TESSERA_SENSORS", "modelled" if given.quick else "nvml")
    end = time.monotonic() + given.budget_s
    results: dict[str, Any] = {"goal": GOAL, "torch": torch.__version__, "programs": {}}
    results["watching_us"] = measure_watching()
    print(f"watching adds {results['watching_us']:.1f} us to a call, for {watch.CALLS + 2} to {watch.MOST_CALLS} calls")
    results["new_lengths"] = measure_new_lengths(given.quick)
    print(f"attention, ms: {results['new_lengths']}", flush=True)
    for at, name in enumerate(given.only):
        left = [SHARES.get(other, 1.0) for other in given.only[at:]]
        share_s = (end - time.monotonic()) * left[0] / sum(left)
        if share_s < 10:
            print(f"{name}: no time left")
            continue
        try:
            with fresh_compiler():
                results["programs"][name] = found = try_program(
                    name, given.quick, share_s, 0.05 if given.quick else BLOCK_S
                )
            show(name, found)
        except Exception:  # noqa: BLE001 - the next program may work
            traceback.print_exc()
        write_result(given.out, results)
    if given.tiles:
        results["tiles"] = try_tiles(given.quick, 6.0)
        write_result(given.out, results)


if __name__ == "__main__":
    main()
