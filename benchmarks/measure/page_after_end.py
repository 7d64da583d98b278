"""From the end of a program to its page: what `tessera run` does with the file of a minute's training.

    python benchmarks/measure/page_after_end.py [--seconds 60] [--kernels-per-s 30000] [--out FILE.json] [--keep FILE]

The recorded steps of GPT-2's training follow each other (light_joules.py), squeezed so that 30,000 kernels a second come:
1.8 million of them, operators and modules of three steps, steps and a region as regions, power samples of a made board.
They are written as a session writes them, in pieces of 0.8 s. Then a fresh process does what `tessera run` does
when its program has ended: imports, reads, links, attributes, writes page and screen. Printed: seconds and CPU
seconds of each part, without the imports, which `tessera run` makes while the program's process closes the file.
`--keep` keeps the run file; where it is there already, it is read and not made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from light_joules import RING, draw_power, extend_run
from operator_alignment import RECORDING, make_light
from result_file import write_result
from tessera.profile.runfile import RunWriter
from tessera.record import CODE
from tessera.schema import Telemetry
from tessera.timeline import Timeline, kineto
from tessera.timeline.columns import NONE

PIECE_NS = 800_000_000
OPS_PER_MODULE = 8
OPTIMIZER_SHARE = 0.15  # of a step's end: the region of its optimizer


def add_modules(timeline: Timeline) -> Timeline:
    """The traced steps with a module around every few outermost operators of the thread that launches most."""
    ops = timeline.rows("op")
    threads, counts = np.unique(timeline["thread"][ops], return_counts=True)
    own = ops[timeline["thread"][ops] == threads[counts.argmax()]]
    own = own[np.argsort(timeline["start_ns"][own], kind="stable")]
    reach = np.maximum.accumulate(timeline["end_ns"][own])
    outermost = own[np.r_[True, timeline["start_ns"][own][1:] >= reach[:-1]]]
    first, last = outermost[::OPS_PER_MODULE], outermost[OPS_PER_MODULE - 1 :: OPS_PER_MODULE]
    first = first[: len(last)]
    made = {name: np.full(len(first), NONE, values.dtype) for name, values in timeline.columns.items()}
    made["kind"][:], made["thread"][:] = CODE["op"], timeline["thread"][own[0]]
    per_step = max(len(first) // 3, 1)
    made["name"] = len(timeline.names) + np.arange(len(first)) % per_step
    made["start_ns"], made["end_ns"] = timeline["start_ns"][first] - 1, timeline["end_ns"][last] + 1
    columns = {name: np.concatenate([values, made[name]]) for name, values in timeline.columns.items()}
    names = [*timeline.names, *(f"Block.{i}" for i in range(per_step))]
    meta = {**timeline.meta, "modules": list(range(len(timeline.names), len(names)))}
    return Timeline(columns, names, timeline.launches, meta=meta)


def make_file(path: Path, seconds: float, kernels_per_s: float) -> None:
    """The run file of such a training, as a session leaves it."""
    rng = np.random.default_rng(0)
    made = make_light(kineto.read(RECORDING))
    assert made is not None
    steps = len(made[0].linked.steps)
    step_s = len(made[0].device_rows) / steps / kernels_per_s
    run = extend_run(made[0], seconds, step_s, rng)
    _, board = draw_power(run, seconds, rng)
    rows = run.device_rows
    step_rows = [s.row for s in run.linked.steps]
    traced = np.setdiff1d(np.arange(len(run)), np.concatenate([rows, step_rows]))
    start_ns, end_ns = run.start_ns, run.end_ns

    def pick(of: Timeline, which: Any) -> Timeline:
        return Timeline({c: v[which] for c, v in of.columns.items()}, of.names, of.launches, meta=of.meta)

    host = add_modules(pick(run, traced))
    with RunWriter(path, meta={"mode": "light", "command": ["python", "train.py"], "device": "NVIDIA H200"}) as writer:
        writer.set("start_ns", start_ns)
        writer.add_timeline(host)
        piece = (run["start_ns"][rows] - start_ns) // PIECE_NS
        bare = Timeline(run.columns, run.names, run.launches)
        for number in range(int(piece.max()) + 1):
            writer.add_timeline(pick(bare, rows[piece == number]), may_shrink=True)
            writer.flush()
        for number, row in enumerate(step_rows):
            begin, end = int(run["start_ns"][row]), int(run["end_ns"][row])
            optimizer_ns = end - round(OPTIMIZER_SHARE * (end - begin))
            writer.add_row("region", "AdamW.step", optimizer_ns, end - 1000, thread=1)
            writer.add_row("region", f"step_{number}", begin, end, thread=1)
        writer.add_samples(RING, board.times_ns, board.samples_w)
        writer.add_anchors(RING.name, board.ticks_ns, board.ticks_j)
        clocks = [
            Telemetry(time_ns=t, domain="gpu0", temperature_c=55.0, clocks_mhz={"sm": 1900.0}, power_limit_w=700.0)
            for t in range(start_ns, end_ns, 100_000_000)
        ]
        writer.add_telemetry(clocks, 0)
        begin, end = int(host["start_ns"].min()), int(host["end_ns"].max())
        for key, value in {
            "windows": [(start_ns, end_ns)], "operator_windows": [(begin, end)], "end_ns": end_ns, "tracing_s": 1.0,
            "collectors": {"kernels": "cupti", "operators": "kineto", "why": None}, "mode": "light", "returncode": 0,
        }.items():  # fmt: skip
            writer.set(key, value)


class Parts:
    """Wall and CPU seconds of each part."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.found[name] = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def answer_run(path: Path) -> dict[str, Any]:
    """What `tessera run` does from the end of its program on, part by part."""
    from tessera.analyze.answer import answer
    from tessera.analyze.run_list import remember_joules
    from tessera.cli.report import print_answer, write_page
    from tessera.cli.run import _import_early
    from tessera.profile.open_recording import open_recording

    parts = Parts()
    _import_early()
    with parts.part("in all"):
        with parts.part("read"):
            recording = open_recording(path)
            timeline = recording.timeline
        with parts.part("link"):
            links = timeline.linked
        with parts.part("attribute"):
            table = recording.energy()
        with parts.part("answer"):
            found = answer(recording)
            remember_joules(recording, found)
        with parts.part("page"):
            page = write_page(path.with_suffix(".html"), recording, found)
        with parts.part("screen"):
            print_answer(recording, found, page, stderr=True)
    del links
    return {
        "rows": len(timeline), "kernels": len(timeline.device_rows), "file_bytes": path.stat().st_size,
        "page_bytes": page.stat().st_size if page else None, "energy_j": table.energy_j, "parts": parts.found,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kernels-per-s", type=float, default=30_000.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        print(json.dumps(answer_run(args.answer)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "run.tessera"
        if not path.exists():
            make_file(path, args.seconds, args.kernels_per_s)
        command = [sys.executable, __file__, "--answer", str(path)]
        environment = {**os.environ, "XDG_CACHE_HOME": folder}  # what it remembers of this run is of no use later
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, check=True)
    found = json.loads(done.stdout)
    for name, part in found["parts"].items():
        print(f"{name:10} {part['s']:6.2f} s {part['cpu_s']:6.2f} s of CPU")
    print(json.dumps({k: v for k, v in found.items() if k != "parts"}))
    if args.out:
        write_result(args.out, found)


if __name__ == "__main__":
    main()
