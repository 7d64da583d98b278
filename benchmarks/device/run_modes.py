"""`tessera run` in every mode on a GPT-2 training script that knows nothing of us, and a session in the program itself.

    PYTHONPATH=src:.carry/site python benchmarks/device/run_modes.py RESULTS.json [--seconds 6] [--quick]

Each way: exit code, seconds, joules of the run, kernels seen, how far the parts' sum is from the total, the notes it
gave, and the screen of the first. `--quick` runs a tiny model wherever it is. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

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
WAYS: dict[str, tuple[str, ...]] = {
    "timeline": (),
    "steps": ("--steps", "5:15"),
    "modules and memory": ("--modules", "--memory", "--limit", "1"),
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
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    device, seconds = ("cpu", 1.0) if given.quick else ("cuda", given.seconds)
    found: dict[str, Any] = {"device": device, "ways": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "gpt2_train.py"
        script.write_text(SCRIPT)
        for way in [w for w in WAYS if w in given.only]:
            found["ways"][way] = row = ran(script, folder, WAYS[way], device, seconds)
            if way == "timeline" and "error" not in row:
                row["screen"] = screen(folder / "0.tessera")
                for kept in (folder / "0.tessera", folder / "0.html"):  # a real page, to be looked at
                    if kept.exists():
                        shutil.copy(kept, given.out.parent / f"gpt2_train{kept.suffix}")
                print("\n".join(row["screen"]))
            print(way, json.dumps({k: v for k, v in row.items() if k not in ("top", "screen")})[:900], flush=True)
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
