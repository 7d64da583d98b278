"""A rank is killed, stopped or late at a random moment: the others are told which one in time, and end.

    python benchmarks/measure/dist_kill.py [TRIALS] [--seed 0]        (50 by default, about five minutes)

Each trial starts 2 to 4 Gloo ranks that do collectives of all kinds and ways, in one random order. The store is in a
process of its own, as torchrun has it. At a random moment one rank gets SIGKILL, SIGSTOP, or a signal after which it
sleeps before its next collective for longer than the timeout. Every other rank must raise an error that names this rank
and no other, within the timeout of the group (and two seconds, for what a loaded machine adds); it leaves with that
error like any program, and nothing of the trial may run afterwards.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

from tessera import dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

OUT = Path(__file__).parents[1] / "results" / "dist_kill.json"
TIMEOUT_S = 4.0
BUSY_S = 2.0
"""Beyond the timeout: other work on a loaded machine."""
END_S = 60.0
"""For the end of a process after its error: unloading torch takes seconds of CPU time."""
WAYS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "late": signal.SIGUSR1}
CALLS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "flat": lambda x, n: dist.all_reduce(x),
    "two_step": lambda x, n: dist.all_reduce(x, algorithm="two_step"),
    "rank_order": lambda x, n: dist.all_reduce(x, deterministic=True),
    "hierarchical": lambda x, n: dist.all_reduce(x, algorithm="hierarchical", node_size=2),
    "fp16": lambda x, n: dist.all_reduce(x, compress="fp16"),
    "bf16": lambda x, n: dist.all_reduce(x, compress="bf16-stochastic"),
    "fp8": lambda x, n: dist.all_reduce(x, compress="fp8"),
    "sparse": lambda x, n: dist.all_reduce(x, sparse=True),
    "chunks": lambda x, n: dist.all_reduce(x, chunks=3, gap_ms=1, jitter_ms=1),
    "all_gather": lambda x, n: dist.all_gather(x),
    "reduce_scatter": lambda x, n: dist.reduce_scatter(x),
    "all_to_all": lambda x, n: dist.all_to_all(x, [len(x) - n + 1, *[1] * (n - 1)]),
    "broadcast": lambda x, n: dist.broadcast(x, n - 1),
}


def work(rank: int, count: int, port: int, seed: int, write: int) -> None:
    """Collectives without end; the error that ends them is told to the parent, and leaves."""
    late = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: late.set())
    store = c10d.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=30))
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    c10d.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    dist.all_reduce(torch.ones(1))
    os.write(write, b'{"ready": true}\n')
    choose, name = random.Random(seed), ""
    try:
        while True:
            if late.is_set():
                time.sleep(10 * TIMEOUT_S)
            name = choose.choice(list(CALLS))
            CALLS[name](torch.ones(choose.choice([8, 1000, 30_000])), count)
    except dist.CollectiveError as exc:
        told = {"at": time.monotonic(), "call": name, "missing": exc.missing, "late": exc.late, "text": str(exc)}
        os.write(write, json.dumps(told).encode() + b"\n")
        raise


def start_store() -> tuple[int, int]:
    """The store in a process of its own, which has threads: ranks are forked from one that has none."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, f"{store.port}\n".encode())
        signal.pause()
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return pid, int(pipe.readline())


def run_trial(number: int, seed: int, folder: Path) -> dict[str, Any]:
    choose = random.Random(seed)
    count, way = choose.randint(2, 4), list(WAYS)[number % len(WAYS)]
    victim = choose.randrange(count)
    store_pid, port = start_store()
    pids, pipes = [], []
    for rank in range(count):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            work(rank, count, port, seed, write)
        os.close(write)
        pids.append(pid)
        pipes.append(os.fdopen(read, "rb"))
    for pipe in pipes:
        pipe.readline()
    time.sleep(choose.uniform(0.0, 0.6))
    struck = time.monotonic()
    os.kill(pids[victim], WAYS[way])
    limit_s = TIMEOUT_S + BUSY_S
    others = [rank for rank in range(count) if rank != victim]
    ended = wait_for_end([pids[rank] for rank in others], struck + limit_s + END_S)
    told = [json.loads(line) if (pids[r] in ended and (line := pipes[r].readline())) else None for r in others]
    for pid in [*pids, store_pid]:  # the victim, the store; and what hangs, which is a fault that the row shows
        if pid not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    named = "late" if way == "late" else "missing"
    right = [t is not None and t[named] == [victim] for t in told]
    seconds = [t["at"] - struck for t in told if t]
    return {
        "way": way, "ranks": count, "victim": victim, "named": all(right), "hung": len(others) - len(ended & {*pids}),
        "seconds": max(seconds, default=None), "in_time": len(seconds) == len(others) and max(seconds) <= limit_s,
        "calls": sorted({t["call"] for t in told if t}), "left_running": count_children(),
        "texts": [
            t["text"] if t else (folder / str(rank)).read_text()[-600:]
            for rank, t, is_right in zip(others, told, right, strict=True)
            if not is_right
        ],
    }  # fmt: skip


def wait_for_end(pids: list[int], until: float) -> set[int]:
    """Those that ended by themselves before a moment."""
    ended: set[int] = set()
    while len(ended) < len(pids) and time.monotonic() < until:
        ended |= {pid for pid in pids if pid not in ended and os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.02)
    return ended


def count_children() -> int:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return len(children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    _ = dist.all_reduce  # imported here, not by every rank
    rows, folder = [], Path(tempfile.mkdtemp())
    for number in range(args.trials):
        rows.append(row := run_trial(number, args.seed * 1000 + number, folder))
        good = row["named"] and row["in_time"] and not row["hung"] and not row["left_running"]
        print(f"{number:3} {'ok' if good else 'NOT OK':7}{row['way']:8} {row['ranks']} ranks, "
              f"{row['seconds'] or 0:.1f} s, {', '.join(row['calls'])} {row['texts'] or ''}", flush=True)  # fmt: skip
    by_way = {way: [r for r in rows if r["way"] == way] for way in WAYS}
    result = {
        "trials": len(rows),
        "named": sum(r["named"] for r in rows),
        "in_time": sum(r["in_time"] for r in rows),
        "hung": sum(r["hung"] for r in rows),
        "left_running": sum(r["left_running"] for r in rows),
        "timeout_s": TIMEOUT_S,
        "ways": {
            way: {"trials": len(found), "slowest_s": round(max(r["seconds"] or 0 for r in found), 2)}
            for way, found in by_way.items()
            if found
        },
        "calls": dict(Counter(call for r in rows for call in r["calls"])),
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))
    write_result(args.out, result)


if __name__ == "__main__":
    main()
