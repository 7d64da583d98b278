"""Programs compiled by `torch.compile` (default mode) on the H200 beside `tessera.predict(launch="compile")`.

    python benchmarks/predict/predict_compiled.py

The measurements are those of benchmarks/device/optimize.py and tune.py (results/optimize.json, tune.json, two sessions):
a training step of GPT-2 small whose model is compiled, a forward of BERT-base and of ResNet-50 (channels last), all bf16. Nothing was fitted on them but the width of the host's interval. Prints both for eager and compiled, and
writes results/predict_compiled.json. Needs torchvision and the transformers that was recorded, 5.17: later ones build no
mask for BERT while they are compiled, and its attention then takes a third of the time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "device")]
import optimize
import tessera
import vision
from result_file import write_result

RECORDED_WITH = "5.17."  # transformers


def read_measured() -> Iterator[tuple[str, str, str, float, float]]:
    """(result file, program, launch, ms, J) of every recorded run."""
    results = BENCHMARKS / "results"
    for name, columns in json.loads((results / "optimize.json").read_text())["models"].items():
        for launch, column in (("eager", "eager"), ("compile", "torch.compile default")):
            yield "optimize", name, launch, columns[column]["ms"], columns[column]["j"]
    for model in json.loads((results / "tune.json").read_text())["models"]:
        if model["model"] not in optimize.LOADS:
            continue  # its ResNet-50 is not channels last
        for launch, setting in (("eager", {}), ("compile", {"compile": "default"})):
            (trial,) = [t for t in model["trials"] if t["setting"] == setting]
            yield "tune", model["model"], launch, 1e3 * trial["time_s"], trial["energy_j"]


def main() -> None:
    vision.importable()
    import transformers

    if not transformers.__version__.startswith(RECORDED_WITH):
        sys.exit(f"transformers {transformers.__version__}: the recorded programs are those of {RECORDED_WITH}x")
    rows: list[dict[str, Any]] = []
    for file, name, launch, ms, joules in read_measured():
        load = optimize.LOADS[name](False, "meta", torch.bfloat16)
        found = tessera.predict(load.iteration(load.model), (), launch=launch, name=name)
        of = found.prediction
        assert of is not None
        row = {
            "program": name,
            "recorded": file,
            "launch": launch,
            "kernels": len(found.descriptors),
            "ms": ms,
            "J": joules,
        }
        row |= {"predicted_ms": found.total.time_s * 1e3, "error_ms": of.error_s * 1e3, "bound": of.bound}
        row |= {"predicted_J": found.total.energy_j, "error_J": found.total.error_j}
        row |= {"device_ms": of.device_s * 1e3, "host_ms": of.host_s * 1e3}
        row |= {"latency": row["predicted_ms"] / ms - 1, "energy": row["predicted_J"] / joules - 1}
        rows.append(row)
        print(
            f"{name:9} {file:9} {launch:8} {row['kernels']:5} kernels  {ms:6.2f} ms  predicted {row['predicted_ms']:6.2f} "
            f"+- {row['error_ms']:5.2f} ({row['latency']:+.0%}, {of.bound})   {joules:6.2f} J  predicted "
            f"{row['predicted_J']:6.2f} ({row['energy']:+.0%})   device {row['device_ms']:.2f} host {row['host_ms']:.2f} ms",
            flush=True,
        )
    found_with = {"transformers": transformers.__version__}
    write_result(BENCHMARKS / "results/predict_compiled.json", {"rows": rows, "with": found_with})


if __name__ == "__main__":
    main()
