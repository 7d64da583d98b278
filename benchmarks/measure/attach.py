"""Seconds from typing `tessera-prof --pid PID --export trace.json` until it has ended with a complete trace.

    .venv/bin/python benchmarks/measure/attach.py                     CPU, into benchmarks/results/attach.json
    python benchmarks/device/attach.py RESULTS.json           the same on a GPU

The process was started before, without a daemon, and libkineto in it asks at moments of a 10.24 s cycle (its tries
after 0, 10, 30, 70 ms ... 5.11, 10.23 s), so each run begins at another moment of it (a pause of 0 to 10 s after the one before). "asking every second" is a
process with ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1 in its KINETO_CONFIG and a KINETO_IPC_SOCKET_DIR.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics as st
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

RESULTS = Path(__file__).parents[1] / "results" / "attach.json"
GOALS_S = {"plain": 8.0, "optimizer": 5.0}
CYCLE_S = 10.24
RUNS = 12

LOOP = """
import sys, torch
device, kind = sys.argv[1:]
size, batch = (1024, 512) if device == "cuda" else (512, 256)
model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(8))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(batch, size, device=device)
print("ready", flush=True)
while True:
    if kind == "plain":
        with torch.no_grad():
            model(x).sum().item()
    else:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
"""


@contextlib.contextmanager
def target(python: str, device: str, kind: str, env: dict[str, str], log: Path = Path(os.devnull)) -> Iterator[int]:
    child = subprocess.Popen(
        [python, "-c", LOOP, device, kind], env={**os.environ, "KINETO_USE_DAEMON": "1", "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def run(pid: int, folder: Path, *options: str) -> dict[str, Any]:
    """One command, timed from outside."""
    trace = folder / "trace.json"
    begun = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-m", "tessera.cli.prof", "--pid", str(pid), "--export", str(trace), "--json", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    if not out.stdout:
        raise SystemExit(out.stderr)
    answer = json.loads(out.stdout)
    if not answer["kineto"]["traced"]:
        raise SystemExit(f"no trace: {answer['kineto']}")
    json.loads(trace.read_bytes())  # complete and valid
    return {
        "seconds": seconds,
        "to_trace_s": answer["kineto"]["seconds_to_trace"],
        "answer": answer,
        "bytes": trace.stat().st_size,
    }


def case(python: str, device: str, kind: str, pauses_s: Sequence[float], *, fast: bool = False) -> dict[str, Any]:
    """The command at several moments of the process's cycle: so long after the one before it."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        folder, env = Path(name), {}
        if fast:
            (folder / "kineto.conf").write_text("ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n")
            env = {"KINETO_CONFIG": str(folder / "kineto.conf"), "KINETO_IPC_SOCKET_DIR": name}
        with target(python, device, kind, env) as pid:
            for pause_s in pauses_s:
                time.sleep(pause_s)
                rows.append(run(pid, folder))
    figures = rows[-1]["answer"]["kineto"]["figures"]
    return {
        "goal_s": GOALS_S[kind],
        "median_s": st.median(r["seconds"] for r in rows),
        "max_s": max(r["seconds"] for r in rows),
        "within_goal": sum(r["seconds"] <= GOALS_S[kind] for r in rows) / len(rows),
        "runs_s": [round(r["seconds"], 2) for r in rows],
        "to_trace_s": [round(r["to_trace_s"], 2) for r in rows],
        "events": figures["events"],
        "trace_seconds": figures["time_s"],
        "ops": figures["ops"],
        "ops_with_shapes": figures["ops_with_shapes"],
        "kernels": figures["kernels"],
        "kernels_with_shapes": figures["kernels_with_shapes"],
        "steps": figures["steps"],
        "launches": figures["launches"],
        "kernels_by_run": [r["answer"]["kineto"]["figures"]["kernels"] for r in rows],
        "trace_bytes": rows[-1]["bytes"],
        "metrics": sorted(m["metric"] for m in rows[-1]["answer"]["metrics"]),
        "notes": rows[-1]["answer"]["notes"],
    }


def show(name: str, c: dict[str, Any]) -> None:
    work = (
        f"{c['kernels']} kernels, {c['kernels_with_shapes']} with shapes"
        if c["kernels"]
        else f"{c['ops']} ops, {c['ops_with_shapes']} with shapes"
    )
    print(
        f"{name:<32} median {c['median_s']:.1f} s, at most {c['max_s']:.1f} s, {c['within_goal']:.0%} within {c['goal_s']:g} s"
    )
    print(f"{'':<32} {c['runs_s']}, of that to the trace {c['to_trace_s']}; {c['events']} events, {work}", flush=True)


def measure(python: str, device: str, pauses_s: Sequence[float], fast_s: Sequence[float] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"date": date.today().isoformat(), "cpus": os.cpu_count()}
    found["load_before"] = round(os.getloadavg()[0], 2)
    for kind in GOALS_S:
        found[kind] = case(python, device, kind, pauses_s)
        show(f"{device}, {kind} loop", found[kind])
    for kind in GOALS_S if fast_s else ():
        found[f"{kind}, asking every second"] = case(python, device, kind, fast_s, fast=True)
        show(f"{device}, {kind}, asking every 1 s", found[f"{kind}, asking every second"])
    return found


def write(path: Path, name: str, found: dict[str, Any]) -> None:
    """Keep what other machines have in the file."""
    all_found = json.loads(path.read_text()) if path.exists() else {}
    write_result(path, {**all_found, name: found})


def main() -> None:
    pauses_s = [(i + 0.5) / RUNS * CYCLE_S for i in range(RUNS)]
    write(RESULTS, "cpu", measure(sys.executable, "cpu", pauses_s, [0.3, 0.8, 1.3, 1.8]))


if __name__ == "__main__":
    main()
