"""Collectives of `tessera.dist` over NCCL on the GPU at hand: every variant against sums of the CPU, and its time.

    PYTHONPATH=src python benchmarks/device/dist_nccl.py OUT.json [--ranks 1 2 4] [--budget-s 55] [--quick]

NCCL allows one rank a GPU, and knows a GPU by its host and its bus. Here every rank claims a host of its own
(NCCL_HOSTID), so that several ranks share one GPU and talk through sockets: the code and the results are those of a
cluster, the times are not. Where NCCL refuses that, its error is kept. With one rank the variants are called below the
shortcut that returns the tensor itself. Sections: variants, other collectives, streams, CUDA graphs, wrong device, and
a killed rank. `--quick` rehearses on the CPU with Gloo.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

from tessera import dist, op, stream
from tessera.dist import collectives

HERE = Path(__file__).resolve()
TIMED = 1 << 22  # floats: 16 MiB
REPEATS = 5
LOST_AFTER_S = 6.0  # the timeout of the group where a rank is killed
Row = dict[str, Any]
VARIANTS: dict[str, Row] = {
    "flat": {},
    "two_step": {"algorithm": "two_step"},
    "rank_order": {"deterministic": True},
    "hierarchical": {"algorithm": "hierarchical"},
    "hierarchical in rank order": {"algorithm": "hierarchical", "deterministic": True},
    "fp16": {"compress": "fp16"},
    "bf16": {"compress": "bf16"},
    "bf16-stochastic": {"compress": "bf16-stochastic"},
    "fp8": {"compress": "fp8"},
    "sparse": {"sparse": True},
    "three chunks": {"chunks": 3, "gap_ms": 1.0, "jitter_ms": 1.0},
    "phase": {"phase": "group_offset(node, 1ms)"},
}


class Rank:
    """One rank: its sections, each with what it found or the error that ended it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.ranks = c10d.get_rank(), c10d.get_world_size()
        self.rows: list[Row] = []

    def make(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10
        return x.to(dtype)

    def reduce(self, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        with dist.record_collectives() as records:
            out = collectives.all_reduce(x, node_size=2, **options)
        return out, records[-1]

    def note(self, section: str, name: str, **found: Any) -> None:
        self.rows.append({"section": section, "name": name, **found})

    def section(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as exc:  # noqa: BLE001
            self.note(name, "error", error=f"{type(exc).__name__}: {exc}", trace=traceback.format_exc()[-1500:])

    def check_variants(self) -> None:
        kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
        for name, options in VARIANTS.items():
            worst = 0.0
            for dtype in kinds:
                if "compress" in options and not dtype.is_floating_point:
                    continue
                for shape in ((257,), (5, 3), (0,)):
                    worst = max(worst, self.check(shape, dtype, options))
            seconds = self.time(lambda options=options: self.reduce(self.big, **options))
            self.note("variants", name, over_bound=worst, ok=worst <= 1.0, seconds_16_mib=seconds)

    def check(self, shape: tuple[int, ...], dtype: torch.dtype, options: Row) -> float:
        """The largest error as a multiple of what is allowed."""
        out, record = self.reduce(self.make(self.rank, shape, dtype).to(self.device), **options)
        parts = [self.make(r, shape, dtype).double() for r in range(self.ranks)]
        truth, scale = sum(parts), sum(p.abs() for p in parts)
        epsilon = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        allowed = scale * epsilon * 2 * self.ranks + record.error_bound * (1 + 1e-5) + 1e-30
        error = (out.cpu().double() - truth).abs() / allowed
        return float(error.max()) if error.numel() else 0.0

    def time(self, call: Callable[[], Any]) -> float:
        call()
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(REPEATS):
            call()
        self.synchronize()
        return (time.perf_counter() - begun) / REPEATS

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def check_others(self) -> None:
        mine = torch.full((self.rank + 1, 2), float(self.rank), device=self.device)
        whole = dist.all_gather(mine).cpu()
        truth = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(self.ranks)])
        self.note("others", "all_gather", ok=torch.equal(whole, truth))
        x = torch.arange(7.0, device=self.device).repeat(2, 1).T * (self.rank + 1)
        for in_order in (False, True):
            part = dist.reduce_scatter(x, deterministic=in_order)
            whole = dist.all_gather(part).cpu()
            truth = torch.arange(7.0).repeat(2, 1).T * sum(range(1, self.ranks + 1))
            self.note("others", f"reduce_scatter deterministic={in_order}", ok=torch.equal(whole, truth))
        counts = [(self.rank + r) % 3 for r in range(self.ranks)]
        rows = torch.cat([torch.full((n, 2), 10.0 * self.rank + r) for r, n in enumerate(counts)])
        arrived, came = dist.all_to_all(rows.to(self.device), counts)
        truth = torch.cat([torch.full((n, 2), 10.0 * r + self.rank) for r, n in enumerate(came)])
        self.note("others", "all_to_all", ok=torch.equal(arrived.cpu(), truth))
        x = torch.full((3,), float(self.rank), device=self.device)
        same = bool((dist.broadcast(x, self.ranks - 1) == self.ranks - 1).all())
        self.note("others", "broadcast", ok=same)

    def check_fft(self) -> None:
        whole = torch.randn(2, 5 * self.ranks**2, generator=torch.Generator().manual_seed(0))
        part = whole.chunk(self.ranks, -1)[self.rank].to(self.device)
        y = dist.fft(part)
        truth = torch.fft.fft(whole).chunk(self.ranks, -1)[self.rank]
        self.note("fft", "fft", ok=bool(torch.allclose(y.cpu(), truth, atol=1e-3)))
        self.note("fft", "ifft", ok=bool(torch.allclose(dist.ifft(y).real, part, atol=1e-4)))

    def check_streams(self) -> None:
        s = stream.create("comm", device=self.device)
        mesh = dist.Mesh(["tp", "dp"], self.ranks, (1, self.ranks))
        total = float(sum(range(1, self.ranks + 1)))
        for name, options in {
            "plain": {},
            "the seeds' call": {"deterministic": True, "phase": "group_offset(tp)", "mesh": mesh},
            "fp8": {"compress": "fp8"},
        }.items():
            x = torch.full((1 << 20,), self.rank + 1.0, device=self.device)
            y = op.all_reduce(x, op="sum", stream=s, **options)
            stream.current(self.device).wait(s)
            self.note("streams", name, ok=bool((y == total).all()))
        pending = op.all_reduce(torch.full((9,), self.rank + 1.0, device=self.device), async_op=True)
        self.note("streams", "async_op", ok=bool((pending.wait() == total).all()))

    def check_graphs(self) -> None:
        """Captured and replayed, or refused: each rank captures the same."""
        if self.device.type != "cuda":
            return
        for name in ("flat", "two_step", "rank_order", "hierarchical", "bf16", "fp8", "sparse"):
            x = torch.zeros(1 << 12, device=self.device)
            self.reduce(x, **VARIANTS[name])  # communicators are made outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.reduce(x, **VARIANTS[name])
                x.fill_(self.rank + 1.0)
                graph.replay()
                torch.cuda.synchronize()
                found = "right" if bool((x == sum(range(1, self.ranks + 1))).all()) else f"wrong: {x[:3].tolist()}"
            except Exception as exc:  # noqa: BLE001
                found = f"refused: {type(exc).__name__}: {str(exc).splitlines()[0][:160]}"
            self.note("graphs", name, found=found, ok=not found.startswith("wrong"))

    def check_wrong_device(self) -> None:
        if self.device.type != "cuda" or self.ranks == 1:
            return
        for name, call in {
            "all_reduce": lambda: collectives.all_reduce(torch.ones(3)),
            "all_gather": lambda: dist.all_gather(torch.ones(3)),
            "broadcast": lambda: dist.broadcast(torch.ones(3)),
        }.items():
            try:
                call()
                self.note("wrong device", name, ok=False, found="no error")
            except Exception as exc:  # noqa: BLE001
                self.note("wrong device", name, ok=True, found=f"{type(exc).__name__}: {str(exc).splitlines()[0]}")

    def run(self, out: Path, budget_s: float) -> None:
        self.big = torch.ones(TIMED if self.device.type == "cuda" else 1 << 12, device=self.device)
        begun = time.monotonic()
        for name, body in {
            "variants": self.check_variants,
            "others": self.check_others,
            "fft": self.check_fft,
            "streams": self.check_streams,
            "wrong device": self.check_wrong_device,
            "graphs": self.check_graphs,
        }.items():
            late = torch.tensor([time.monotonic() - begun > budget_s], dtype=torch.int32, device=self.device)
            c10d.all_reduce(late)  # all ranks skip the same sections
            if int(late):
                self.note(name, "skipped", found="no time left")
            else:
                self.section(name, body)
            out.write_text(json.dumps(self.rows))  # a section that hangs loses no other


def lose_a_rank(rank: int, device: torch.device) -> Row:
    """Rank 1 is killed in the middle of its sums; what the others are told, and after how long."""
    x = torch.ones(1000, device=device)
    collectives.all_reduce(x)
    begun = time.monotonic()
    try:
        for i in range(10**6):
            if rank == 1 and i == 20:
                os.kill(os.getpid(), 9)
            collectives.all_reduce(x, deterministic=bool(i % 2))
            if device.type == "cuda":
                torch.cuda.synchronize()
    except dist.CollectiveError as exc:
        return {"section": "killed rank", "name": "blocking wait", "ok": exc.missing == (1,), "found": str(exc),
                "seconds": time.monotonic() - begun}  # fmt: skip
    return {"section": "killed rank", "name": "blocking wait", "ok": False, "found": "no error"}


def serve(args: argparse.Namespace) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu" if args.quick else "cuda:0")
    timeout = datetime.timedelta(seconds=LOST_AFTER_S if args.lose else 30)
    c10d.init_process_group("gloo" if args.quick else "nccl", timeout=timeout)
    if ranks == 1:  # the variants themselves, below the shortcut of a single rank
        collectives.count_ranks = lambda group=None: 2 if sys._getframe(1).f_code.co_name == "all_reduce" else 1
    out = Path(args.out)
    if args.lose:
        out.write_text(json.dumps([lose_a_rank(rank, device)]))
    else:
        Rank(device).run(out, args.budget_s)
    os._exit(0)  # after a lost rank NCCL's own end would wait for it


def start(ranks: int, folder: Path, limit_s: float, args: argparse.Namespace, *, lose: bool = False) -> Row:
    """Run some ranks as processes within a limit; rank 0's rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, logs = [], []
    for rank in range(ranks):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_HOSTID": f"tessera-{rank}",
            "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if lose:
            env["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        command = [sys.executable, str(HERE), str(folder / f"{ranks}-{lose}-{rank}.json"), "--serve",
                   "--budget-s", str(limit_s * 0.6), *["--quick"] * args.quick, *["--lose"] * lose]  # fmt: skip
        logs.append(folder / f"{ranks}-{lose}-{rank}.log")
        with logs[-1].open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    until, codes = time.monotonic() + limit_s, []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append("killed at the limit")
    rows = folder / f"{ranks}-{lose}-0.json"
    done = json.loads(rows.read_text()) if rows.exists() else []
    whole = bool(done) and all(code == 0 for code in codes)
    tails = {} if whole or lose else {i: log.read_text(errors="replace")[-1500:] for i, log in enumerate(logs)}
    return {"ranks": ranks, "codes": codes, "rows": done, "logs": tails}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 2])
    parser.add_argument("--budget-s", type=float, default=55.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lose", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
    until = time.monotonic() + args.budget_s
    version = None if args.quick else ".".join(map(str, torch.cuda.nccl.version()))
    gpu = "none (CPU)" if args.quick else torch.cuda.get_device_name()
    about = {"gpu": gpu, "torch": torch.__version__, "nccl": version, "quick": args.quick}
    result: Row = {"about": about, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, lose in [*[(n, False) for n in args.ranks], (2, True)]:
            left = until - time.monotonic()
            if left < 8:
                result["runs"].append({"ranks": ranks, "killed_rank": lose, "skipped": "no time left"})
                continue
            run = start(ranks, Path(folder), min(left, 25.0), args, lose=lose)
            result["runs"].append({"killed_rank": lose, **run})
            show(run)
            Path(args.out).write_text(json.dumps(result, indent=1))


def show(run: Row) -> None:
    print(f"\n{run['ranks']} ranks, exit codes {run['codes']}")
    for row in run["rows"]:
        took = f"{row['seconds_16_mib'] * 1e3:9.2f} ms" if "seconds_16_mib" in row else ""
        found = row.get("found") or row.get("error") or ""
        print(f"  {row['section']:14} {row['name']:32} {'ok' if row.get('ok') else 'NOT OK':7}{took} {found}")
        if "trace" in row:
            print(row["trace"])
    for rank, text in run["logs"].items():
        print(f"  log of rank {rank}:\n{text}")


if __name__ == "__main__":
    main()
