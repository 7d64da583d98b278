"""What the default session costs: every kernel by CUPTI, operators of three steps, on four programs.

    PYTHONPATH=src:.carry/site python benchmarks/device/cupti_light.py RESULTS.json [--programs ...] [--rounds 3]

One process for each program, about 25 s. In it blocks of steps take turns: plain, "kernels" (a session without operators),
"calls" (CUPTI with the host's calls), "light" (the default: three steps with operators, then the block that is timed),
"profiler" (torch.profiler, operators and shapes). After each of the last three comes a plain block again: what a
collector leaves behind when it has ended. `tied` is the share of the kernels in the operators' steps that have one.
Without a GPU small models try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics as st
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity

from tessera import monitor, profile
from tessera.profile.cupti_collector import CuptiCollector
from tessera.profile.cupti_library import CALLS

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Step = Callable[[], None]
IS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = "cuda" if IS_GPU else "cpu", torch.bfloat16 if IS_GPU else torch.float32


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
    model = Decoder(layers, width, heads, vocab, length, min(moe_at, layers - 1)).to(DEVICE, DTYPE)
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
    model = DecodeStep().to(DEVICE, DTYPE).eval()
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


PROGRAMS: dict[str, tuple[Callable[[], Step], int]] = {
    "GPT-2 small training": (lambda: make_training(12, 768, 12), 30),
    "MoE decoder training": (lambda: make_training(12, 768, 12, moe_at=6), 30),
    "decode, 1.1B, batch 16, eager": (lambda: make_decode(graph=False), 20),
    "decode, 1.1B, batch 16, CUDA graph": (lambda: make_decode(graph=True), 30),
}


def wait() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def timed(step: Step, steps: int) -> float:
    for _ in range(3):
        step()
    wait()
    t0 = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - t0) / steps * 1e3


def start_session(folder: Path, **options: Any) -> profile.Session:
    return profile.session(path=folder / f"{time.time_ns()}.tessera", **options).start()


def run_kernels(step: Step, steps: int, folder: Path) -> dict[str, Any]:
    """A session of kernels only: milliseconds a step, and what stopping took."""
    sess = start_session(folder, operator_steps=0)
    ms = timed(step, steps)
    t0 = time.perf_counter()
    sess.stop()
    stop_s = time.perf_counter() - t0
    rows = len(sess.timeline().rows("kernel"))
    monitor.use(None)
    return {"ms": ms, "stop_s": stop_s, "kernels": rows, "file_bytes": sess.path.stat().st_size, "notes": sess.notes}


def run_calls(step: Step, steps: int) -> dict[str, Any]:
    """CUPTI with the host's calls, as during the steps with operators; without Kineto, session and file."""
    collector = CuptiCollector()
    collector.start(calls=True)
    ms = timed(step, steps)
    collector.stop()
    taken = collector.take()
    assert taken is not None
    threads = {int(t) for kind, records in taken.split().items() if kind in CALLS for t in set(records["thread"])}
    own = threading.get_native_id() in threads
    return {"ms": ms, "own_thread_seen": own, "threads": len(threads), "calls": sorted(taken.calls.values())}


def run_light(step: Step, steps: int, folder: Path) -> dict[str, Any]:
    """The default: three steps with operators first, then the steps that are timed."""
    t0 = time.perf_counter()
    sess = start_session(folder)
    for _ in range(8):
        step()
        sess.step()
    wait()
    first_s = time.perf_counter() - t0
    ms = timed(step, steps)
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
        "ms": ms,
        "first_8_s": first_s,
        "stop_s": stop_s,
        "kernels": len(timeline.rows("kernel")),
        "in_window": len(inside),
        "window_ms": (end_ns - begin_ns) * 1e-6,
        "tied": float((links.op[inside] != -1).mean()) if len(inside) else None,
        "launched": float((links.launch[inside] != -1).mean()) if len(inside) else None,
        "in_module": float((links.module[inside] != -1).mean()) if len(inside) else None,
        "ops": len(timeline.rows("op")),
        "collectors": facts.collectors,
        "times_off_s": float(abs(start_ns.max() * 1e-9 - sess.recording().span_ns[1] * 1e-9)) if len(kernels) else None,
        "energy_j": sess.power().energy_j if sess.recording().power else None,
        "notes": sess.notes,
    }


def run_profiler(step: Step, steps: int) -> dict[str, Any]:
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * IS_GPU
    prof = torch.profiler.profile(activities=kinds, record_shapes=True)
    prof.start()
    ms = timed(step, steps)
    t0 = time.perf_counter()
    prof.stop()
    return {"ms": ms, "stop_s": time.perf_counter() - t0}


def measure(program: str, rounds: int) -> dict[str, Any]:
    make, steps = PROGRAMS[program]
    step = make()
    for _ in range(10):
        step()
    wait()
    gc.collect()
    gc.freeze()
    gc.disable()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = [timed(step, steps)]
        ratios: list[float] = []
        for _ in range(rounds):
            found["kernels"] = run_kernels(step, steps, folder)
            plain.append(timed(step, steps))
            ratios.append(found["kernels"]["ms"] / st.mean(plain[-2:]))
        base = st.median(plain)
        found["plain"] = {"ms": base, "each_ms": plain}
        found["kernels"] |= {"over_pct": 100 * (st.median(ratios) - 1), "each_pct": [100 * (r - 1) for r in ratios]}
        if IS_GPU:
            found["calls"] = run_calls(step, steps)
            found["after calls"] = {"ms": timed(step, steps)}
        found["light"] = run_light(step, steps, folder)
        found["after light"] = {"ms": timed(step, steps)}
        found["profiler"] = run_profiler(step, steps)
        found["after profiler"] = {"ms": timed(step, steps)}
    for row in found.values():
        row.setdefault("over_pct", 100 * (row["ms"] / base - 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--limit-s", type=float, default=60.0, help="of one program")
    parser.add_argument("--one", metavar="PROGRAM", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.rounds)))
        return
    gpu = torch.cuda.get_device_name() if IS_GPU else "none"
    rows: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "programs": {}}
    if args.out.exists():  # of other programs
        rows["programs"] = json.loads(args.out.read_text())["programs"]
    for program in args.programs:
        call = [sys.executable, __file__, str(args.out), "--rounds", str(args.rounds), "--one", program]
        try:
            done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=args.limit_s)
        except subprocess.SubprocessError as exc:
            print(program, "failed:", exc, str(getattr(exc, "stderr", ""))[-3000:], flush=True)
            continue
        found = rows["programs"][program] = json.loads(done.stdout.strip().splitlines()[-1])
        for way, row in found.items():
            rest = {k: v for k, v in row.items() if k not in ("ms", "over_pct", "each_ms", "calls")}
            print(f"{program:34} {way:15} {row['over_pct']:+6.1f}% {row['ms']:8.2f} ms  {json.dumps(rest)}", flush=True)
        print(done.stderr[-1500:], flush=True)
        write_result(args.out, rows)


if __name__ == "__main__":
    main()
