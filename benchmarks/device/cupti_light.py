"""What keeping every kernel costs: `profile.session(mode="kernels")` beside torch.profiler, on four programs.

    PYTHONPATH=src:.carry/site python benchmarks/device/cupti_light.py RESULTS.json [--budget-s 240]

Ways: "session" (mode="kernels": CUPTI's raw buffers, power samples, the run file); "kernels" (torch.profiler, CUDA only);
"operators" (torch.profiler, CPU and CUDA, shapes). Each program and way has a process of its own, since Kineto leaves
the host slower and noisier than it was; in it blocks of the way take turns with plain ones, the order turned round, and
the median of the ratios stands. Kernels that CUPTI kept are counted beside those that torch.profiler saw.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics as st
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity

from tessera import monitor, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Step = Callable[[], None]
DEVICE, DTYPE = "cuda", torch.bfloat16
WAYS = {"session": 2, "kernels": 1, "operators": 1}  # and the share of the time that each gets


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
    model = Decoder(layers, width, heads, 50257, 1024, moe_at).to(DEVICE, DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 50257, (8, 1025), device=DEVICE)

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
    "decode, 1.1B, batch 16, eager": (lambda: make_decode(graph=False), 30),
    "decode, 1.1B, batch 16, CUDA graph": (lambda: make_decode(graph=True), 30),
}


def timed(step: Step, steps: int) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - t0) / steps * 1e3


def run_block(way: str, step: Step, steps: int, folder: Path) -> dict[str, Any]:
    """Milliseconds a step, and what starting and stopping took."""
    if way == "plain":
        return {"ms": timed(step, steps)}
    t0 = time.perf_counter()
    if way == "session":
        sess = profile.session(mode="kernels", path=folder / f"{time.time_ns()}.tessera").start()
    else:
        kinds = [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * (way == "operators")
        prof = torch.profiler.profile(activities=kinds, record_shapes=way == "operators")
        prof.start()
    t1 = time.perf_counter()
    ms = timed(step, steps)
    t2 = time.perf_counter()
    if way == "session":
        sess.stop()
        t3 = time.perf_counter()
        rows = len(sess.timeline().rows("kernel"))
        more = {"file_bytes": sess.path.stat().st_size, "energy_j": sess.power().energy_j, "notes": sess.notes}
        monitor.use(None)
        return {"ms": ms, "start_s": t1 - t0, "stop_s": t3 - t2, "kernels": rows, **more}
    prof.stop()
    t3 = time.perf_counter()
    events = prof.profiler.kineto_results.events()
    kernels = sum(1 for e in events if str(e.device_type()).endswith("CUDA") and not e.name().startswith("Mem"))
    return {"ms": ms, "start_s": t1 - t0, "stop_s": t3 - t2, "kernels": kernels}


def measure(program: str, way: str, budget_s: float) -> dict[str, Any]:
    make, steps = PROGRAMS[program]
    step = make()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    gc.collect()
    gc.freeze()
    gc.disable()
    ratios: list[float] = []
    plain: list[float] = []
    blocks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        until = time.perf_counter() + budget_s
        while time.perf_counter() < until or len(ratios) < 2:
            before = run_block("plain", step, steps, Path(name))["ms"]
            blocks.append(run_block(way, step, steps, Path(name)))
            if len(ratios) % 4 == 3:
                gc.collect()
            after = run_block("plain", step, steps, Path(name))["ms"]
            plain += [before, after]
            ratios.append(blocks[-1]["ms"] / st.mean([before, after]))
    middle = {k: st.median(b[k] for b in blocks) for k, v in blocks[0].items() if isinstance(v, (int, float))}
    return {
        "over_pct": 100 * (st.median(ratios) - 1),
        "each_pct": [round(100 * (r - 1), 2) for r in ratios],
        "plain_ms": st.median(plain),
        **middle,
        "notes": blocks[0].get("notes", []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.budget_s)))
        return
    rows: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "programs": {}}
    if args.out.exists():  # of other programs
        rows["programs"] = json.loads(args.out.read_text())["programs"]
    share_s = args.budget_s / (len(args.programs) * sum(WAYS.values()))
    for program in args.programs:
        found = rows["programs"][program] = {}
        for way, weight in WAYS.items():
            budget = str(max(weight * share_s - 7.0, 4.0))  # a process needs about seven seconds to begin
            call = [sys.executable, __file__, str(args.out), "--budget-s", budget, "--one", program, way]
            try:
                done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=weight * share_s + 40)
            except subprocess.SubprocessError as exc:
                print(program, way, "failed:", exc, str(getattr(exc, "stderr", ""))[-2000:])
                continue
            row = found[way] = json.loads(done.stdout.strip().splitlines()[-1])
            print(
                f"{program:36} {way:10} {row['over_pct']:+6.1f}% of {row['plain_ms']:.2f} ms  stop {row['stop_s']:.3f} s  "
                f"{row['kernels']:.0f} kernels  {row['each_pct']} {row['notes']}",
                flush=True,
            )
        write_result(args.out, rows)


if __name__ == "__main__":
    main()
