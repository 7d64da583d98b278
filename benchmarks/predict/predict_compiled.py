"""Programs compiled by `torch.compile` (default mode) on the H200 beside `tessera.predict(launch="compile")`.

    python benchmarks/predict/predict_compiled.py

The measurements are those of benchmarks/device/optimize.py (results/optimize.json): a training step of GPT-2 small whose
model is compiled, a forward of BERT-base and of ResNet-50 (channels last), all bf16. Nothing was fitted on them but the
width of the host's interval. Prints both for eager and compiled, and writes results/predict_compiled.json. Needs torchvision and transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "device")]
import optimize
import tessera
import vision
from result_file import write_result

MODES = {"eager": "eager", "compile": "torch.compile default"}


def main() -> None:
    vision.importable()
    measured = json.loads((BENCHMARKS / "results/optimize.json").read_text())["models"]
    rows: list[dict[str, Any]] = []
    for name, build in optimize.LOADS.items():
        load = build(False, "meta", torch.bfloat16)
        step = load.iteration(load.model)
        for launch, column in MODES.items():
            found, truth = tessera.predict(step, (), launch=launch, name=name), measured[name][column]
            of = found.prediction
            assert of is not None
            row = {
                "program": name,
                "launch": launch,
                "kernels": len(found.descriptors),
                "ms": truth["ms"],
                "J": truth["j"],
            }
            row |= {"predicted_ms": found.total.time_s * 1e3, "error_ms": of.error_s * 1e3, "bound": of.bound}
            row |= {"predicted_J": found.total.energy_j, "error_J": found.total.error_j}
            row |= {"device_ms": of.device_s * 1e3, "host_ms": of.host_s * 1e3}
            row |= {"latency": row["predicted_ms"] / row["ms"] - 1, "energy": row["predicted_J"] / row["J"] - 1}
            rows.append(row)
            print(
                f"{name:9} {launch:8} {row['kernels']:5} kernels  {row['ms']:6.2f} ms  predicted {row['predicted_ms']:6.2f} "
                f"+- {row['error_ms']:5.2f} ({row['latency']:+.0%}, {of.bound})   {row['J']:6.2f} J  predicted "
                f"{row['predicted_J']:6.2f} ({row['energy']:+.0%})   device {row['device_ms']:.2f} host {row['host_ms']:.2f} ms"
            )
    write_result(BENCHMARKS / "results/predict_compiled.json", {"rows": rows})


if __name__ == "__main__":
    main()
