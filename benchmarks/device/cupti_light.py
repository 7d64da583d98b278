"""What keeping every kernel costs: CUPTI's raw buffers beside torch.profiler, on four programs, on the GPU at hand.

    PYTHONPATH=src:.carry/site python benchmarks/device/cupti_light.py RESULTS.json [--budget-s 200] [--buffer-kib 1024]

Ways: "plain"; "cupti" (profile.cupti_collector, a thread that flushes, takes, compresses and writes four times a
second, as a session does); "kernels" (torch.profiler, CUDA only); "operators" (torch.profiler, CPU and CUDA, shapes).
Blocks of each way take turns with plain ones, the order turned round; the median of the ratios stands. Kernels that
CUPTI kept are compared with those that torch.profiler saw in the same number of steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics as st
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity

from tessera.profile.cupti_collector import BUFFER_BYTES, CuptiCollector
from tessera.profile.cupti_library import CONCURRENT_KERNEL

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Step = Callable[[], None]
DEVICE, DTYPE = "cuda", torch.bfloat16


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


class Keeper:
    """A collector and the thread that takes its records to a file, as a session would."""

    def __init__(self, folder: Path, buffer_bytes: int) -> None:
        self.collector = CuptiCollector(buffer_bytes=buffer_bytes)
        self.raw = self.stored = self.kernels = self.buffers = 0
        self.names: set[str] = set()
        self.pieces: list[Any] = []
        self._file = (folder / "records.bin").open("wb")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.thread_cpu_s = 0.0

    def start(self) -> None:
        self.collector.start()
        self._thread.start()

    def _loop(self) -> None:
        while not self._done.wait(0.25):
            self.collector.flush()
            self._store()
        self.thread_cpu_s = time.thread_time()

    def _store(self) -> None:
        for piece in self.collector.take():
            small = zlib.compress(piece.data, 1)
            self._file.write(small)
            self.raw, self.stored = self.raw + len(piece.data), self.stored + len(small)
            self.buffers += 1
            self.pieces.append(piece)
            self.names.update(piece.names.values())

    def stop(self) -> float:
        """Seconds of the program's thread."""
        t0 = time.perf_counter()
        self.collector.stop()
        took = time.perf_counter() - t0
        self._done.set()
        self._thread.join()
        self._store()
        self._file.close()
        self.kernels = sum(len(p.split().get(CONCURRENT_KERNEL, ())) for p in self.pieces)
        return took


def timed(step: Step, steps: int) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - t0) / steps * 1e3


def run_block(way: str, step: Step, steps: int, folder: Path, buffer_bytes: int) -> dict[str, float]:
    """Milliseconds a step, and what stopping took."""
    if way == "plain":
        return {"ms": timed(step, steps)}
    if way == "cupti":
        keeper = Keeper(folder, buffer_bytes)
        keeper.start()
        ms = timed(step, steps)
        stop_s = keeper.stop()
        return {
            "ms": ms,
            "stop_s": stop_s,
            "kernels": keeper.kernels,
            "buffers": keeper.buffers,
            "names": len(keeper.names),
            "dropped": keeper.collector.dropped,
            "raw_bytes": keeper.raw,
            "stored_bytes": keeper.stored,
            "thread_cpu_s": keeper.thread_cpu_s,
            "clock_offset_ns": keeper.collector.clock_offset_ns,
        }
    kinds = [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * (way == "operators")
    prof = torch.profiler.profile(activities=kinds, record_shapes=way == "operators")
    prof.start()
    ms = timed(step, steps)
    t0 = time.perf_counter()
    prof.stop()
    stop_s = time.perf_counter() - t0
    events = prof.profiler.kineto_results.events()
    kernels = sum(1 for e in events if str(e.device_type()).endswith("CUDA") and not e.name().startswith("Mem"))
    return {"ms": ms, "stop_s": stop_s, "kernels": kernels}


def measure(name: str, budget_s: float, folder: Path, buffer_bytes: int) -> dict[str, Any]:
    make, steps = PROGRAMS[name]
    step = make()
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    blocks: dict[str, list[dict[str, float]]] = {}
    ratios: dict[str, list[float]] = {}
    until, turn = time.perf_counter() + budget_s, 0
    ways = ["cupti", "cupti", "kernels", "cupti", "operators"]
    while time.perf_counter() < until or turn < len(ways):
        way = ways[turn % len(ways)]
        pair = ("plain", way) if turn % 2 else (way, "plain")
        found = {}
        for each in pair:
            found[each] = run_block(each, step, steps, folder, buffer_bytes)
            gc.collect()
            blocks.setdefault(each, []).append(found[each])
        ratios.setdefault(way, []).append(found[way]["ms"] / found["plain"]["ms"])
        turn += 1
    row: dict[str, Any] = {"plain_ms": st.median(b["ms"] for b in blocks["plain"]), "steps": steps}
    for way, many in ratios.items():
        keys = [k for k in blocks[way][0] if k != "ms"]
        row[way] = {
            "over_pct": 100 * (st.median(many) - 1),
            "each_pct": [round(100 * (r - 1), 2) for r in many],
            **{k: st.median(b[k] for b in blocks[way]) for k in keys},
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--buffer-kib", type=int, default=BUFFER_BYTES >> 10)
    args = parser.parse_args()
    rows: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "programs": {}}
    with tempfile.TemporaryDirectory() as name:
        for program in PROGRAMS:
            row = measure(program, args.budget_s / len(PROGRAMS), Path(name), args.buffer_kib << 10)
            rows["programs"][program] = row
            write_result(args.out, rows)
            print(f"{program}: plain {row['plain_ms']:.2f} ms")
            for way in ("cupti", "kernels", "operators"):
                r = row[way]
                print(
                    f"  {way:10} {r['over_pct']:+6.1f}%  stop {r['stop_s']:.3f} s  {r['kernels']:.0f} kernels  {r['each_pct']}"
                )
            print("  ", {k: v for k, v in row["cupti"].items() if k not in ("each_pct",)}, flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
