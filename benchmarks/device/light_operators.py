"""Operators and joules of light runs on a GPU: what has an operator, whether it is right, and how sure the joules are.

    PYTHONPATH=src python benchmarks/device/light_operators.py RESULTS.json [--seconds 60] [--keep RUN.tessera]
                                                               [--programs eager compiled reduce-overhead graph]

GPT-2 small is trained in a default session, then some steps of it in one that traces every operator; "graph" is a decode
step that is captured as a CUDA graph within the session, and run without it in the second. `with_operator` is the share of
the kernels' joules that have an operator. `agreement` is the share of the kernels' time whose kernel has the same operator
in both sessions: of each kernel name, what its operators have in common (of "reduce-overhead", whose graphs show a tracer
no operators, with those of "compiled"). `half_width` are those of the ten kernels with the most joules, of their joules.
Without a GPU a small model tries the script, and "graph" is left out.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from cupti_light import DEVICE, DTYPE, IS_GPU, Decoder, make_decode, wait
from result_file import write_result
from tessera import monitor, profile
from tessera.analyze.answer import answer
from tessera.timeline import Timeline
from tessera.timeline.columns import NONE

TRACED_STEPS = 10
PROGRAMS = ("eager", "moe", "compiled", "reduce-overhead", "graph")
Step = Callable[[], None]
_traced: dict[str, dict[tuple[str, str | None], float]] = {}  # by program: what a tracer of all operators saw
COMPILED = {"compiled": "default", "reduce-overhead": "reduce-overhead"}


def make_training(program: str, layers: int) -> Step:
    """A training step of GPT-2 small with so many layers; "moe" with a mixture of experts in one block."""
    layers, width, length, vocab = (layers, 768, 1024, 50257) if IS_GPU else (2, 48, 32, 512)
    model = Decoder(layers, width, 12, vocab, length, layers // 2 if program == "moe" else -1).to(DEVICE, DTYPE)
    run = torch.compile(model, mode=COMPILED[program]) if program in COMPILED else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (8, length + 1), device=DEVICE)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = functional.cross_entropy(run(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_step(program: str, layers: int, *, traced: bool) -> Step:
    """What runs in a session; `traced`: in the one that traces every operator, which sees none in a graph."""
    return make_decode(graph=not traced) if program == "graph" else make_training(program, layers)


def record(make: Callable[[], Step], seconds: float, folder: Path, **options: Any) -> profile.Session:
    """A session of so many seconds; of `TRACED_STEPS` steps where that is 0. Graphs are captured within it."""
    sess = profile.session(path=folder / f"{time.time_ns()}.tessera", **options)
    with sess:
        step = make()
        for _ in range(5):  # compiles, captures
            step()
        wait()
        until_s, steps = time.monotonic() + seconds, 0
        while time.monotonic() < until_s or steps < TRACED_STEPS:
            step()
            sess.step()
            steps += 1
    monitor.use(None)
    return sess


def share_by_operator(timeline: Timeline) -> dict[tuple[str, str | None], float]:
    """The share of the kernels' time of each kernel and operator."""
    rows, op = timeline.rows("kernel"), timeline.linked.op
    names = timeline["name"]
    by = np.where(op[rows] == NONE, NONE, names[op[rows]])
    pairs, where = np.unique(np.column_stack([names[rows], by]), axis=0, return_inverse=True)
    spent = np.bincount(where.reshape(-1), (timeline["end_ns"] - timeline["start_ns"])[rows], len(pairs))
    seconds = {
        (timeline.names[kernel], None if name == NONE else timeline.names[name]): float(s)
        for (kernel, name), s in zip(pairs.tolist(), spent, strict=True)
    }
    whole = sum(seconds.values()) or 1.0
    return {key: value / whole for key, value in seconds.items()}


def measure(program: str, layers: int, seconds: float, folder: Path, keep: Path | None) -> dict[str, Any]:
    light = record(lambda: make_step(program, layers, traced=False), seconds, folder)
    if keep is not None:
        shutil.copyfile(light.path, keep)
    if program != "reduce-overhead":
        whole = record(lambda: make_step(program, layers, traced=True), 0.0, folder, mode="operators")
        _traced[program] = share_by_operator(whole.timeline())
    begun_s = time.process_time()
    recording = light.recording()
    table = recording.energy()
    solved_s = time.process_time() - begun_s
    result = answer(recording)
    ours = share_by_operator(recording.timeline)
    theirs = _traced.get("compiled" if program == "reduce-overhead" else program, {})
    top = table.top(10)
    wrong = sorted(((v - theirs.get(k, 0.0), k) for k, v in ours.items()), key=lambda pair: -abs(pair[0]))[:6]
    return {
        "kernels": len(recording.timeline.device_rows),
        "with_operator": _share_with_operator(recording.timeline),
        "operators": table.operators.to_dict() if table.operators is not None else None,
        "captured": int((recording.timeline["captured"] != NONE).sum()),
        "replayed": int((recording.timeline["graph_node"] != NONE).sum()),
        "tracing_s": recording.facts.tracing_s,
        "agreement": sum(min(share, theirs.get(key, 0.0)) for key, share in ours.items()),
        "agreement_possible": sum(min(share, sum(s for k, s in theirs.items() if k[0] == name))
                                  for name, share in _by_kernel(ours).items()),
        "differs": [(round(by, 4), kernel[:60], op) for by, (kernel, op) in wrong],
        "half_width": [round(row.error_j / row.energy_j, 4) for row in top],
        "top": [(row.name[:60], round(row.energy_j, 2), row.calls) for row in top],
        "energy_j": table.energy_j,
        "time_s": table.time_s,
        "covers": table.covers,
        "untraced_j": table.untraced_j,
        "link_and_solve_cpu_s": solved_s,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "steps": len(table.steps),
        "tracing": result.tracing.text if result.tracing is not None else None,
        "per_work": [(p.unit, p.energy_j, p.error_j, p.rate_per_s) for p in result.per_work],
        "gaps": [(gap.during, gap.count, round(gap.time_s, 4), round(gap.energy_j, 2)) for gap in result.gaps[:5]],
        "advice": [(a.kind, a.evidence) for a in result.advice],
        "file_mib": light.path.stat().st_size / 2**20,
        "notes": [str(note) for note in result.notes],
    }  # fmt: skip


def _share_with_operator(timeline: Timeline) -> float | None:
    """The share of the joules of everything on the device that has an operator."""
    rows = timeline.device_rows
    if timeline.energy_j is None or not len(rows):
        return None
    joules = timeline.energy_j[rows]
    return float(joules[timeline.linked.op[rows] != NONE].sum() / joules.sum())


def _by_kernel(shares: dict[tuple[str, str | None], float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for (name, _), share in shares.items():
        found[name] = found.get(name, 0.0) + share
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--programs", nargs="+", default=["eager", "compiled"], choices=PROGRAMS)
    parser.add_argument("--compiled-layers", type=int, default=12, help="fewer take less time to compile")
    parser.add_argument("--keep", type=Path, help="where the run file of the first program goes")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for number, program in enumerate(args.programs):
        layers = args.compiled_layers if program in COMPILED else 12
        if program == "graph" and not IS_GPU:
            continue
        with tempfile.TemporaryDirectory() as folder:
            keep = args.keep if number == 0 else None
            seconds = args.seconds if number == 0 else args.seconds / 4
            results[program] = {"layers": layers, **measure(program, layers, seconds, Path(folder), keep)}
        print(program, json.dumps(results[program]), flush=True)
        write_result(args.out, results)


if __name__ == "__main__":
    main()
