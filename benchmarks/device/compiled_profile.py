"""Where the joules of a compiled training step go: GPT-2 small as torch.compile makes it, and as the tuner may change it.

    PYTHONPATH=src:.carry/site python benchmarks/device/compiled_profile.py RESULTS.json [--budget-s 150] [--quick]

Each setting: milliseconds and joules a step, then a session over some steps with the kernels that take the most. What a
graph capture of the compiled step fails on, if it does. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import tune
from tessera import profile
from tessera.rewrite.state import State
from tessera.runtime.tuning.changes import apply_setting
from tessera.runtime.tuning.parts import FunctionParts, find_parts
from tessera.runtime.tuning.trial import TrialBench

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

SETTINGS: dict[str, dict[str, Any]] = {
    "compiled": {"compile": "default"},
    "compiled, padded": {"compile": "default", "padding": True},
    "compiled, padded, fused update": {"compile": "default", "padding": True, "optimizer": "fused"},
    "compiled, padded, fused update, one graph": {
        "compile": "default", "padding": True, "optimizer": "fused", "graph": True,
    },
    "padded, fused update, one graph": {"padding": True, "optimizer": "fused", "graph": True},
}  # fmt: skip
TOP = 14


def profiled(
    step: tune.Step, found: FunctionParts, setting: dict[str, Any], folder: Path, steps: int
) -> dict[str, Any]:
    """The kernels of a setting's step, the costliest first."""
    with apply_setting(step, found, setting, {}) as call:
        for _ in range(3):
            call()
        with profile.session(mode="operators", path=folder / f"{time.time_ns()}.tessera") as sess:
            for _ in range(steps):
                call()
    table = sess.energy()
    rows = [
        {"kernel": r.name[:110], "calls": r.calls / steps, "ms": 1e3 * r.time_s / steps, "J": r.energy_j / steps}
        for r in sorted(table.kernels, key=lambda r: -(r.energy_j or 0.0))[:TOP]
        if r.energy_j is not None
    ]
    whole = {"busy_ms": 1e3 * table.busy_s / steps, "idle_J": None if table.idle_j is None else table.idle_j / steps}
    return {**whole, "top": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + given.budget_s
    tune.vision.importable()
    step = tune.gpt2(given.quick)
    found = find_parts(step)
    bench = TrialBench(
        fn=step, args=(), kwargs={}, parts=found, state=State(found), own={}, trial_s=0.3 if given.quick else 1.5
    )
    rows: dict[str, Any] = {"torch": torch.__version__, "quick": given.quick, "settings": {}}
    if torch.cuda.is_available():
        rows["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as name:
        for what, setting in SETTINGS.items():
            if time.monotonic() > end:
                print(f"{what}: no time left")
                continue
            row = tune.row(bench(setting))
            if not row["refused"]:
                try:
                    row |= profiled(step, found, setting, Path(name), 4 if given.quick else 15)
                except Exception as exc:  # noqa: BLE001  (one setting must not cost the others)
                    traceback.print_exc()
                    row["error"] = f"{type(exc).__name__}: {exc}"
                bench.state.restore()  # the next one is checked against the model as it was
            rows["settings"][what] = row
            write_result(given.out, rows)
            print(
                f"{what}: {row['refused'] or f'''{1e3 * row['time_s']:.2f} ms  {row['energy_j']:.3f} J'''}", flush=True
            )
            for r in row.get("top", []):
                print(f"    {r['J']:7.3f} J {r['ms']:7.3f} ms {r['calls']:6.1f}x  {r['kernel']}")


if __name__ == "__main__":
    main()
