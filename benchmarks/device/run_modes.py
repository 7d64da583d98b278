"""`tessera run` in every mode on a GPT-2 training script that knows nothing of us, and a session in the program itself.

    PYTHONPATH=src:.carry/site python benchmarks/device/run_modes.py RESULTS.json [--seconds 6] [--quick]
    PYTHONPATH=src:.carry/site python benchmarks/device/run_modes.py RESULTS.json --only wall --seconds 60
    PYTHONPATH=src:.carry/site python benchmarks/device/run_modes.py RESULTS.json --only killed --kills 20

Each way: exit code, seconds, joules of the run, kernels seen, how far the parts' sum is from the total, the notes it
gave, and the screen of the first. "wall": the same number of steps plain and under `tessera run`, start to exit; how much
later the script's process ended than the script, and when the page was there. "killed": SIGKILL at random moments, how
much of the kernels is missing, and whether the file can be read. `--quick` runs a tiny model wherever it is. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera.profile.runfile import RunFile

os.environ["TESSERA_CONTROL"] = "0"

SCRIPT = """
import sys, time
import torch
device, seconds = sys.argv[1], float(sys.argv[2])
if torch.version.cuda is None:  # torchvision's wheel, which transformers imports, is built for CUDA
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config() if device == "cuda" else GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=509)
batch, length = (8, 1024) if device == "cuda" else (2, 32)
model = GPT2LMHeadModel(config).to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(0, config.vocab_size, (batch, length))
end = time.monotonic() + seconds
steps = 0
while time.monotonic() < end:
    given = ids.to(device, non_blocking=True)
    loss = model(input_ids=given, labels=given).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if steps % 20 == 0:
        print("loss", loss.item(), file=sys.stderr)
"""
# For "wall" and "killed", which start it often: the decoder of cupti_light.py needs no transformers (18 s to import).
QUICK_SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cupti_light
device, seconds = sys.argv[1], float(sys.argv[2])
wanted = int(sys.argv[3]) if len(sys.argv) > 3 else 1 << 60
step = cupti_light.make_training(12, 768, 12)
end = time.monotonic() + seconds
steps, times = 0, []
while time.monotonic() < end and steps < wanted:
    step()
    steps += 1
    if steps % 5 == 0:
        cupti_light.wait()
        times.append(time.perf_counter())
        print("loss", steps, file=sys.stderr, flush=True)
cupti_light.wait()
half = times[len(times) // 2 :]
step_ms = (half[-1] - half[0]) / max(5 * (len(half) - 1), 1) * 1e3
print(f"RAN {{steps}} {{step_ms:.4f}} {{time.time():.3f}}", file=sys.stderr, flush=True)
"""
WAYS: dict[str, tuple[str, ...]] = {
    "light": (),
    "operators": ("--mode", "operators"),
    "steps": ("--steps", "5:15"),
    "memory": ("--memory", "--limit", "1"),
    "sampling": ("--mode", "sampling"),
    "summary": ("--mode", "summary"),
    "counters": ("--counters", "--limit", "0.5"),
}


def ran(script: Path, folder: Path, options: tuple[str, ...], device: str, seconds: float) -> dict[str, Any]:
    """One `tessera run`, and what its JSON says."""
    out = folder / f"{len(list(folder.glob('*.tessera')))}.tessera"
    command = [sys.executable, "-m", "tessera", "run", "--json", "--out", str(out), *options, str(script)]
    begun = time.monotonic()
    done = subprocess.run([*command, device, str(seconds)], capture_output=True, text=True, timeout=120, check=False)
    found: dict[str, Any] = {"returncode": done.returncode, "wall_s": time.monotonic() - begun}
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return found | {"error": (done.stderr or done.stdout)[-2000:]}
    found |= {k: answer.get(k) for k in ("run", "energy_j", "error_j", "idle_j", "time_s", "busy_s", "basis", "notes")}
    kernels = answer.get("kernels") or []
    parts = sum(k["energy_j"] or 0.0 for k in kernels) + (answer.get("idle_j") or 0.0)
    found |= {
        "kernels": len(kernels),
        "launches": sum(k["calls"] for k in kernels),
        "ops": len(answer.get("ops") or []),
    }
    found["top"] = [
        {k: row[k] for k in ("kernel_name", "calls", "time_s", "energy_j", "error_j")} for row in kernels[:5]
    ]
    if kernels and answer.get("energy_j"):
        found["parts_over_total"] = parts / answer["energy_j"]
    found["bytes"] = out.stat().st_size if out.exists() else None
    return found


def last_line(text: str) -> list[float]:
    """Steps, milliseconds a step of the second half, and the epoch seconds at which the script ended."""
    return [float(word) for word in text.rpartition("RAN ")[2].split()[:3]]


def wall(script: Path, folder: Path, device: str, seconds: float) -> dict[str, Any]:
    """The same steps plain and under `tessera run`: seconds from start to exit, of a step, and of the end."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}

    def run(*command: str, steps: int | None = None) -> tuple[float, list[float], str, int]:
        begun = time.monotonic()
        argv = [sys.executable, *command, str(script), device, str(seconds if steps is None else 10 * seconds)]
        argv += [] if steps is None else [str(steps)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)
        return time.monotonic() - begun, last_line(done.stderr), done.stderr, done.returncode

    plain_s, (steps, plain_ms, _), _, _ = run()
    out = folder / "wall.tessera"
    run_s, (_, step_ms, ended_s), said, code = run("-m", "tessera", "run", "--out", str(out), steps=int(steps))
    exited_s = time.time()
    with RunFile(out) as run_file:
        closed_s = int(run_file.about["closed_epoch_ns"]) * 1e-9
        recording, rows = run_file.recording(), run_file.rows
        facts, table = recording.facts, recording.energy()
    page = out.with_suffix(".html")
    return {
        "half_width": [round(row.error_j / row.energy_j, 4) for row in table.top(10)],
        "top": [(row.name[:60], round(row.energy_j, 2), row.calls) for row in table.top(10)],
        "operators": table.operators.to_dict() if table.operators is not None else None, "energy_j": table.energy_j,
        "returncode": code, "steps": steps, "plain_s": plain_s, "plain_ms": plain_ms, "run_s": run_s, "step_ms": step_ms,
        "step_over_pct": 100 * (step_ms / plain_ms - 1), "end_delayed_s": closed_s - ended_s,
        "answer_after_s": exited_s - ended_s, "page_after_s": page.stat().st_mtime - ended_s if page.exists() else None,
        "script_over_pct": 100 * ((closed_s - (exited_s - run_s)) / plain_s - 1), "rows": rows,
        "file_bytes": out.stat().st_size, "collectors": facts.collectors,
        "operators_s": sum(b - a for a, b in facts.operator_windows) * 1e-9, "tracing_s": facts.tracing_s,
        "notes": list(facts.notes), "screen": said.splitlines()[-60:],
    }  # fmt: skip


def kill_one(script: Path, out: Path, device: str, after_s: float) -> dict[str, Any]:
    """SIGKILL the script's process so many seconds after its first steps: how much of its kernels is missing."""
    command = [sys.executable, "-m", "tessera", "run", "--out", str(out), str(script), device, "60"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for line in running.stderr:  # the first steps have been made
        if line.startswith("loss"):
            break
    time.sleep(after_s)
    (child,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    killed_ns = time.time_ns()
    os.kill(int(child), signal.SIGKILL)
    running.communicate()
    with RunFile(out) as run_file:
        timeline = run_file.timeline()
        device_rows = timeline.device_rows if device == "cuda" else timeline.rows("region")
        missing_s = (killed_ns - int(timeline["end_ns"][device_rows].max())) * 1e-9 if len(device_rows) else None
        row = {"after_s": after_s, "missing_s": missing_s, "rows": len(timeline), "crashed": run_file.crashed}
    print("killed", row, flush=True)
    return row


def killed(script: Path, folder: Path, device: str, kills: int, at_once: int) -> dict[str, Any]:
    """SIGKILL at random moments. Some run at once, since starting takes most of the time; each has its own run file."""
    rng = random.Random(0)
    after_s = [rng.uniform(0.5, 4.0) for _ in range(kills)]
    outs = [folder / f"killed{number}.tessera" for number in range(kills)]
    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(lambda out, seconds: kill_one(script, out, device, seconds), outs, after_s))
    missing = [r["missing_s"] for r in rows if r["missing_s"] is not None]
    return {"kills": len(rows), "readable": len(missing), "most_missing_s": max(missing, default=None), "each": rows}


def screen(path: Path) -> list[str]:
    """What `tessera report` prints of the first run."""
    command = [sys.executable, "-m", "tessera", "report", str(path), "--html", str(path.with_suffix(".html"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout + done.stderr).splitlines()


def session(folder: Path, seconds: float, quick: bool) -> dict[str, Any]:
    """`profile.session` in the program, with exporters: what the trace holds and what the joules sum to."""
    import torch

    from tessera import profile

    if quick:
        model: Any = torch.nn.Linear(64, 64)
        x = torch.randn(8, 64)
    else:
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).to("cuda", torch.bfloat16)
        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    trace, csv = folder / "trace.json", folder / "summary.csv"
    with profile.session(
        activities=["gpu", "memcpy", "collective", "power"], record_shapes=True, path=folder / "session.tessera",
        exporters=[profile.chrome(str(trace)), profile.summary(str(csv))],
    ) as sess:  # fmt: skip
        end = time.monotonic() + (0.5 if quick else seconds)
        while time.monotonic() < end:
            with profile.region("forward"):
                loss = model(x).float().square().mean()
            with profile.region("backward"):
                loss.backward()
        sess.mark("done")
    table = sess.energy()
    events = json.loads(trace.read_text())["traceEvents"]
    kinds = sorted({str(e.get("cat")) for e in events})
    return {"events": len(events), "kinds": kinds, "csv_lines": len(csv.read_text().splitlines()), "table": str(table).splitlines()[:25],
            "records": sum(1 for _ in sess.records())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", nargs="*", default=[*WAYS, "session"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4, help="programs that run beside each other, to be killed")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    device, seconds = ("cpu", 1.0) if given.quick else ("cuda", given.seconds)
    found: dict[str, Any] = {"device": device, "ways": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "gpt2_train.py"
        script.write_text(SCRIPT)
        quick = folder / "train.py"
        quick.write_text(QUICK_SCRIPT)
        for way in [w for w in WAYS if w in given.only]:
            found["ways"][way] = row = ran(script, folder, WAYS[way], device, seconds)
            if way == "light" and "error" not in row:
                row["screen"] = screen(folder / "0.tessera")
                for kept in (folder / "0.tessera", folder / "0.html"):  # a real page, to be looked at
                    if kept.exists():
                        shutil.copy(kept, given.out.parent / f"gpt2_train{kept.suffix}")
                print("\n".join(row["screen"]))
            print(way, json.dumps({k: v for k, v in row.items() if k not in ("top", "screen")})[:900], flush=True)
            write_result(given.out, found)
        if "wall" in given.only:
            found["wall"] = wall(quick, folder, device, seconds)
            print("wall", json.dumps({k: v for k, v in found["wall"].items() if k != "screen"}), flush=True)
            print("\n".join(found["wall"]["screen"]), flush=True)
            shutil.copy(folder / "wall.tessera", given.out.with_suffix(".tessera"))  # for attribution, looked at later
            write_result(given.out, found)
        if "killed" in given.only:
            found["killed"] = killed(quick, folder, device, given.kills, given.at_once)
            print("killed", json.dumps(found["killed"]), flush=True)
            write_result(given.out, found)
        if "session" in given.only:
            try:
                found["session"] = session(folder, seconds / 2, given.quick)
            except Exception as exc:  # noqa: BLE001  (the ways before it are worth keeping)
                found["session"] = {"error": f"{type(exc).__name__}: {exc}"}
            print("session", json.dumps(found["session"], indent=1)[:3000])
    write_result(given.out, found)


if __name__ == "__main__":
    main()
