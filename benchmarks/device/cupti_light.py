"""What the default session costs: every kernel by CUPTI, operators of three steps, on four programs.

    PYTHONPATH=src:.carry/site python benchmarks/device/cupti_light.py RESULTS.json [--programs ...] [--turns 16]

One process for each program. A shared host's speed drifts by 10 to 30% within seconds, so short blocks of steps take
turns, plain and traced, and each traced block is compared with the mean of the plain ones right before and after it:
`over_pct` is the median of those ratios, `over_low_pct` to `over_high_pct` its 90% interval by order statistics. `cpu_pct` is
the same of the CPU time of the thread that calls the steps, which other tenants disturb less; `process_cpu_pct` has all
threads in it, CUPTI's and ours. Starting and stopping lie outside the timed part.

"light" is a default session after its three steps with operators; its tracing of kernels is switched on and off, its power
sampler runs on (0.2% of a core, `tessera selftest`). "raw" is CUPTI alone, its buffers thrown away: the rest of "light" is
ours. "profiler" is torch.profiler, operators and shapes. `tied` is the share of the kernels in the operators' steps that have
one. Without a GPU small models try the script.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics as st
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity

from tessera import monitor, profile
from tessera.profile.cupti_collector import CuptiCollector
from tessera.profile.kernel_tracing import KernelTracing
from tessera.profile.light_tracing import LightTracing

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Step = Callable[[], None]
IS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = "cuda" if IS_GPU else "cpu", torch.bfloat16 if IS_GPU else torch.float32
BLOCK_S = 0.4
"""Of a timed part."""
LEAD_S = 0.45
"""Before it, while traced: a round of the session's thread, which comes every 0.4 s. So as many records are read in the
timed part as are made in it."""


class Block(nn.Module):
    """A pre-norm decoder block; with `experts`, a mixture of them (two of each token) in place of the MLP."""

    def __init__(self, width: int, heads: int, experts: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        make = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))  # noqa: E731
        self.mlp = None if experts else make()
        self.experts = nn.ModuleList(make() for _ in range(experts))
        self.router = nn.Linear(width, experts) if experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + (self.mlp(self.n2(x)) if self.mlp is not None else self.mix(self.n2(x)))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, which, None])
        return out.view_as(x)


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, length: int, moe_at: int = -1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, 8 if i == moe_at else 0) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_training(layers: int, width: int, heads: int, moe_at: int = -1) -> Step:
    layers, width, length, vocab = (layers, width, 1024, 50257) if IS_GPU else (2, 48, 32, 512)
    with torch.device(DEVICE):  # made on the host, a billion weights take ten seconds
        model = Decoder(layers, width, heads, vocab, length, min(moe_at, layers - 1)).to(DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (8, length + 1), device=DEVICE)

    def step() -> None:
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class DecodeStep(nn.Module):
    """One token of each of 16 sequences through 22 layers of width 2048 (1.1 billion parameters) and a KV cache."""

    def __init__(self, layers: int = 22, width: int = 2048, heads: int = 16, vocab: int = 32000) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.token, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, 5632, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 5632, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(5632, width, bias=False) for _ in range(layers))

    def forward(self, ids: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for i, qkv in enumerate(self.qkv):
            q, k, v = qkv(self.norms[2 * i](x)).view(-1, 1, 3, self.heads, self.width // self.heads).unbind(2)
            cache[i, 0].index_copy_(1, at, k)
            cache[i, 1].index_copy_(1, at, v)
            keys, values = (cache[i, j].transpose(1, 2) for j in (0, 1))
            y = functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values)
            x = x + self.out[i](y.transpose(1, 2).reshape(-1, self.width))
            z = self.norms[2 * i + 1](x)
            x = x + self.down[i](functional.silu(self.gate[i](z)) * self.up[i](z))
        return self.head(x).argmax(-1)


def make_decode(*, graph: bool) -> Step:
    with torch.device(DEVICE):
        model = DecodeStep().to(DTYPE).eval()
    ids = torch.zeros(16, dtype=torch.long, device=DEVICE)
    cache = torch.zeros(22, 2, 16, 512, 16, 128, device=DEVICE, dtype=DTYPE)
    at = torch.tensor([100], device=DEVICE)

    @torch.no_grad()
    def once() -> None:
        for _ in range(1 if graph else 5):
            ids.copy_(model(ids, cache, at))

    if not graph:
        return once
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            once()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        once()

    def replay() -> None:
        for _ in range(10):
            captured.replay()

    return replay


PROGRAMS: dict[str, tuple[Callable[[], Step], float]] = {
    "GPT-2 small training": (lambda: make_training(12, 768, 12), 0.4),
    "MoE decoder training": (lambda: make_training(12, 768, 12, moe_at=6), 1.0),
    "decode, 1.1B, batch 16, eager": (lambda: make_decode(graph=False), 1.0),
    "decode, 1.1B, batch 16, CUDA graph": (lambda: make_decode(graph=True), 0.4),
}
"""Each with its share of `--turns`: a program that waits for the GPU is disturbed less."""


def wait() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


class Cost(NamedTuple):
    """Milliseconds of a step: of the clock, of this thread's CPU, of the process's CPU."""

    ms: float
    cpu_ms: float
    process_cpu_ms: float


def timed(step: Step, steps: int, lead_s: float = 0.03) -> Cost:
    until_s = time.monotonic() + lead_s
    while True:
        step()
        if time.monotonic() >= until_s:
            break
    wait()
    before = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(steps):
        step()
    wait()
    after = time.perf_counter(), time.thread_time(), time.process_time()
    return Cost(*((b - a) / steps * 1e3 for a, b in zip(before, after, strict=True)))


@contextmanager
def raw() -> Iterator[None]:
    """CUPTI alone, its buffers thrown away: what is CUPTI's own of the cost."""
    collector = CuptiCollector()
    collector.start()
    yield
    collector.stop()
    collector.take()


@contextmanager
def resumed(kernels: KernelTracing) -> Iterator[None]:
    """Tracing of a session that is paused otherwise."""
    kernels.resume()
    yield
    kernels.pause()


@contextmanager
def profiler() -> Iterator[None]:
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * IS_GPU
    prof = torch.profiler.profile(activities=kinds, record_shapes=True)
    prof.start()
    yield
    prof.stop()


Traced = Callable[[], AbstractContextManager[None]]


def take_turns(step: Step, steps: int, traced: Traced, turns: int, lead_s: float = LEAD_S) -> dict[str, Any]:
    """Plain and traced blocks by turns; what the traced ones cost more."""
    plain, costs, stops_s = [timed(step, steps)], [], []
    for _ in range(turns):
        with traced():
            costs.append(timed(step, steps, lead_s))
            stop_s = time.perf_counter()
        stops_s.append(time.perf_counter() - stop_s)
        plain.append(timed(step, steps))
    over: dict[str, Any] = {}
    for field, name in (("ms", "over_"), ("cpu_ms", "cpu_"), ("process_cpu_ms", "process_cpu_")):
        value = [[getattr(block, field) for block in blocks] for blocks in zip(costs, plain, plain[1:], strict=False)]
        pct = sorted(100 * (with_it / ((before + after) / 2) - 1) for with_it, before, after in value)
        low = find_low_rank(len(pct))
        over |= {f"{name}pct": st.median(pct), f"{name}low_pct": pct[low], f"{name}high_pct": pct[-1 - low]}
        over |= {f"{name}each_pct": [round(p, 2) for p in pct]}
    return {
        "ms": st.median(c.ms for c in costs),
        "plain_ms": st.median(c.ms for c in plain),
        "cpu_ms": st.median(c.cpu_ms for c in costs),
        "plain_cpu_ms": st.median(c.cpu_ms for c in plain),
        "stop_s": st.median(stops_s),
        "turns": turns,
        "steps": steps,
        **over,
    }


def run_default(step: Step, steps: int, turns: int, folder: Path) -> dict[str, Any]:
    """A default session: three steps with operators first, then turns with its tracing of kernels and without it."""
    t0 = time.perf_counter()
    sess = profile.session(path=folder / "light.tessera").start()
    start_s = time.perf_counter() - t0
    ended_s = [time.perf_counter()]
    for _ in range(8):
        step()
        sess.step()
        ended_s.append(time.perf_counter())
    wait()
    time.sleep(1.0)  # the operators are read, which takes the interpreter for a while
    tracing = sess._tracing
    assert isinstance(tracing, LightTracing)
    if IS_GPU:
        tracing.kernels.pause()
        found = take_turns(step, steps, lambda: resumed(tracing.kernels), turns)
    else:
        found = take_turns(step, steps, nullcontext, turns)
    t0 = time.perf_counter()
    sess.stop()
    stop_s = time.perf_counter() - t0
    timeline, facts = sess.timeline(), sess.recording().facts
    kernels = timeline.rows("kernel", "memcpy", "memset")
    start_ns = timeline["start_ns"][kernels]
    begin_ns, end_ns = facts.operator_windows[0] if facts.operator_windows else (0, 0)
    inside = kernels[(start_ns >= begin_ns) & (start_ns < end_ns)]
    links = timeline.linked
    monitor.use(None)
    return {
        **found,
        "start_s": start_s,
        "each_step_s": [round(b - a, 4) for a, b in itertools.pairwise(ended_s)],
        "stop_s": stop_s,
        "kernels": len(kernels),
        "file_bytes": sess.path.stat().st_size,
        "in_window": len(inside),
        "window_ms": (end_ns - begin_ns) * 1e-6,
        "tied": float((links.op[inside] != -1).mean()) if len(inside) else None,
        "launched": float((links.launch[inside] != -1).mean()) if len(inside) else None,
        "in_module": float((links.module[inside] != -1).mean()) if len(inside) else None,
        "ops": len(timeline.rows("op")),
        "tracing_s": facts.tracing_s,
        "collectors": facts.collectors,
        "notes": sess.notes[:2],
    }


def find_low_rank(count: int) -> int:
    """The rank from both ends between which the median lies 90 times of 100; the extremes where there are too few."""
    below = 0.0
    for rank in range(count // 2):
        below += math.comb(count, rank) / 2**count
        if below > 0.05:
            return max(rank - 1, 0)
    return 0


def measure(program: str, turns: int) -> dict[str, Any]:
    make, share = PROGRAMS[program]
    turns = round(share * turns)
    step = make()
    for _ in range(10):
        step()
    wait()
    gc.collect()
    gc.freeze()
    gc.disable()
    steps = max(3, round(BLOCK_S * 1e3 / timed(step, 5).ms))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        found["light"] = run_default(step, steps, turns, Path(name))
    if IS_GPU:
        found["raw"] = take_turns(step, steps, raw, turns // 2, 0.03)
    found["profiler"] = take_turns(step, max(3, steps // 2), profiler, 3, 0.03)
    found["plain"] = {"ms": st.median(row["plain_ms"] for row in found.values()), "over_pct": 0.0}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=16, help="of a plain and a traced block, of a host-bound program")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--limit-s", type=float, default=90.0, help="of one program")
    parser.add_argument("--one", metavar="PROGRAM", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.turns)))
        return
    gpu = torch.cuda.get_device_name() if IS_GPU else "none"
    rows: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "programs": {}}
    if args.out.exists():  # of other programs
        rows["programs"] = json.loads(args.out.read_text())["programs"]
    for program in args.programs:
        call = [sys.executable, __file__, str(args.out), "--turns", str(args.turns), "--one", program]
        try:
            done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=args.limit_s)
        except subprocess.SubprocessError as exc:
            print(program, "failed:", exc, str(getattr(exc, "stderr", ""))[-3000:], flush=True)
            continue
        found = rows["programs"][program] = json.loads(done.stdout.strip().splitlines()[-1])
        for way, row in found.items():
            rest = {k: v for k, v in row.items() if k not in ("ms", "over_pct") and not k.endswith("each_pct")}
            print(f"{program:34} {way:10} {row['over_pct']:+6.1f}% {row['ms']:8.2f} ms  {json.dumps(rest)}", flush=True)
        print(done.stderr[-1500:], flush=True)
        write_result(args.out, rows)


if __name__ == "__main__":
    main()
