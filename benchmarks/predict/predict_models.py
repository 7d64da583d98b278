"""Whole models on the H200: what `tessera.predict` says beside what was measured there. Needs torch and the model zoos.

    python benchmarks/predict/predict_models.py public [--shared ../shared]     models_public.jsonl: the first check
    python benchmarks/predict/predict_models.py dev                             the models whose kernels were fitted on
    python benchmarks/predict/predict_models.py heldout                         looked at once, after the fits; repair_json since
    python benchmarks/predict/predict_models.py heldout2                        a second set, recorded after those repairs
    python benchmarks/predict/predict_models.py heldout3                        a third: the choices between fits are made by it
    python benchmarks/predict/predict_models.py heldout4                        a fourth
    python benchmarks/predict/predict_models.py heldout5                        a fifth
    python benchmarks/predict/predict_models.py heldout6                        a sixth, in no fit
    python benchmarks/predict/predict_models.py heldout7                        a seventh, in no fit

The sets were recorded with transformers 5.17, which gives encoders a mask while a graph is captured; later ones do not, and
are then another program (T5 takes half of the time). Run it with that version; the result names the one it was run with.

Prints every case, the mean absolute errors of latency and energy in all and by what bounds the case (graph replay, or a
GPU that is busy 80% of the time: device-bound, otherwise host-bound; see `is_bound_by_device`), the share within 10%, the
worst, and how many fell into the stated 90% interval; beside it the datasheet roofline's error on the same cases, and for
host-bound ones the error of the host's own time, measured again within the same minute: what a perfect model of the host
would score. Writes benchmarks/results/predict_SET.json, or predict_OUT.json with --out: predict_heldout2.json is the one
look before the set was used, and stays as it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS))
import tessera
from device import vision
from fit import align
from result_file import write_result
from tessera.graph.capture import capture

RECORDED_WITH = "5.17."  # transformers
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Row:
    name: str
    kind: str
    ms: float
    j: float
    predicted_ms: float
    predicted_j: float
    ms_error: float
    j_error: float
    roofline_ms: float
    peak_bytes: int | None
    predicted_peak_bytes: int
    bound: str
    seconds: float
    host_ms: float | None = None

    @property
    def latency(self) -> float:
        return self.predicted_ms / self.ms - 1

    @property
    def energy(self) -> float:
        return self.predicted_j / self.j - 1


# ---------------------------------------------------------------- the cases
def public_case(r: dict[str, Any]) -> tuple[Any, Any]:
    """Model and inputs of a row of models_public.jsonl, on the meta device."""
    dtype = DTYPES[r["dtype"]]
    with torch.device("meta"):
        if "class" not in r:
            import torchvision

            model = getattr(torchvision.models, r["model"])()
            inputs: Any = (torch.empty(r["batch"], 3, r["res"], r["res"], dtype=dtype),)
        else:
            import transformers

            model = getattr(transformers, r["class"])(getattr(transformers, r["config"])(**r["kwargs"]))
            ids = torch.empty(r["batch"], r["seq"], dtype=torch.int64)
            inputs = (
                {"input_ids": ids, "labels": ids}
                if r["mode"] == "train" and "LMHead" in r["class"]
                else {"input_ids": ids}
            )
    return model.to(dtype), inputs


def recorded_case(case: Any) -> tuple[Any, Any]:
    model, inputs = case.factory("meta", DTYPES[case.dtype])
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
    return model, inputs


def public(shared: Path) -> list[tuple[dict[str, Any], Any]]:
    rows = [json.loads(line) for line in (shared / "h200/models_public.jsonl").read_text().splitlines()]
    for r in rows:
        size = f"s{r['seq']}" if "seq" in r else f"{r['res']}px"
        r["name"] = f"{r['model']} b{r['batch']} {size} {r['dtype']} {r['mode']}"
        r["optimizer"] = "adamw" if r["model"] == "gpt2" else "sgd"
    return [(r, lambda r=r: public_case(r)) for r in rows]


def recorded(which: str) -> list[tuple[dict[str, Any], Any]]:
    cases = align.load_cases(BENCHMARKS / f"device/{which}_cases.py")
    busy = {
        t["name"]: t["gpu_us"] for t in align.read(BENCHMARKS / f"data/h200_{which}_traces.jsonl.gz") if "gpu_us" in t
    }
    all_rows = [r for r in align.read(BENCHMARKS / f"data/h200_{which}_models.jsonl.gz") if "ms" in r]
    replayed = {r["name"]: 1e3 * r["ms"] for r in all_rows if r.get("graph_replay")}
    rows = []
    for r in all_rows:
        if r.get("after_profiler") and not r.get("graph_replay"):
            continue
        r["gpu_us"] = busy.get(r["name"], replayed.get(r["name"]))
        rows.append((r, lambda r=r: recorded_case(cases[r["name"]])))
    return rows


# ---------------------------------------------------------------- predicting
def reported(r: dict[str, Any], build: Any) -> tuple[Any, Any, float]:
    """The captured graph of a case, its prediction, and the seconds they took."""
    replay = bool(r.get("graph_replay"))
    model, inputs = build()
    begin = time.perf_counter()
    # A recorder may hide its capture from transformers; then the program is the eager one, replayed.
    hidden = replay and r.get("capture_differs") is False
    graph = capture(
        model,
        inputs,
        mode=r["mode"],
        optimizer=r.get("optimizer") or "sgd",
        name=r["name"],
        launch="graph" if replay and not hidden else "eager",
    )
    launch = "graph" if replay else "eager"
    report = tessera.predict(graph, on="h200", launch=launch, check_memory=False, calibration=None)
    return graph, report, time.perf_counter() - begin


def predicted(r: dict[str, Any], build: Any) -> Row:
    return row_of(r, *reported(r, build))


def row_of(r: dict[str, Any], graph: Any, report: Any, took: float) -> Row:
    replay, p = bool(r.get("graph_replay")), report.prediction
    assert p is not None
    kind = "device" if replay or is_bound_by_device(r, p) else "host"
    return Row(
        r["name"] + (" graph" if replay else ""), kind, r["ms"], r["J"], report.total.time_s * 1e3, report.total.energy_j,
        p.error_s * 1e3, report.total.error_j, roofline_ms(graph), r.get("peak_bytes"), p.peak_memory_bytes or 0, p.bound, took, r.get("host_ms"),
    )  # fmt: skip


def is_bound_by_device(r: dict[str, Any], p: Any) -> bool:
    """Whether a GPU that is busy at least 80% of the time bounds the program, by the measurement where it says so.

    The busy time is that of the traced kernels, or of the replayed graph. Without both, a host that launches an iteration
    into an empty queue in less than 90% of its time waits for the device. The public set has none of the three: there the
    prediction decides.
    """
    if r.get("gpu_us"):
        return bool(r["gpu_us"] >= 0.8e3 * r["ms"])
    return bool(r["host_ms"] < 0.9 * r["ms"] if "host_ms" in r else p.device_s > p.host_s)


def roofline_ms(graph: Any) -> float:
    """FLOPs over the peak or bytes over the bandwidth, whichever is longer: the datasheet alone."""
    device = tessera.hardware.lookup("h200")
    total = 0.0
    for op in graph.kernels:
        peak = device.peak(op.precision) if op.flops else None
        total += max(op.flops / peak.value if peak else 0.0, (op.bytes_in + op.bytes_out) / 4.8e12)
    return total * 1e3


def mean(values: list[float]) -> float:
    return sum(abs(v) for v in values) / len(values) if values else float("nan")


def summary(rows: list[Row]) -> dict[str, Any]:
    out: dict[str, Any] = {"cases": len(rows)}
    for name, kind in (("all", None), ("device-bound", "device"), ("host-bound", "host")):
        some = [r for r in rows if kind is None or r.kind == kind]
        if some:
            out[name] = {
                "cases": len(some), "latency": mean([r.latency for r in some]), "energy": mean([r.energy for r in some]),
                "latency_within_10": sum(abs(r.latency) <= 0.1 for r in some) / len(some),
                "energy_within_10": sum(abs(r.energy) <= 0.1 for r in some) / len(some),
                "worst": max(some, key=lambda r: abs(r.latency)).name, "worst_latency": max((r.latency for r in some), key=abs),
                "inside_latency": sum(abs(r.predicted_ms - r.ms) <= r.ms_error for r in some) / len(some),
                "inside_energy": sum(abs(r.predicted_j - r.j) <= r.j_error for r in some) / len(some),
                "roofline_latency": mean([r.roofline_ms / r.ms - 1 for r in some]),
            }  # fmt: skip
    if again := [r.host_ms / r.ms - 1 for r in rows if r.kind == "host" and r.host_ms]:
        out["host-bound"]["measured_again"] = mean(again)
    peaks = [r.predicted_peak_bytes / r.peak_bytes - 1 for r in rows if r.peak_bytes]
    out["memory"] = {"cases": len(peaks), "error": mean(peaks), "worst": max(peaks, key=abs, default=None)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "which",
        choices=["public", "dev", "heldout", "heldout2", "heldout3", "heldout4", "heldout5", "heldout6", "heldout7"],
    )
    parser.add_argument("--shared", type=Path, default=BENCHMARKS.parent.parent / "shared")
    parser.add_argument("--out", help="the name of the result, where it is not that of the set: a later look at it")
    parser.add_argument("--quiet", action="store_true", help="only the summary")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    vision.importable()
    import transformers

    if not transformers.__version__.startswith(RECORDED_WITH):
        print(
            f"transformers {transformers.__version__}, recorded with {RECORDED_WITH}x: some programs are not the same"
        )
    rows, failed = [], []
    for r, build in public(given.shared) if given.which == "public" else recorded(given.which):
        try:
            rows.append(predicted(r, build))
        except tessera.TesseraError as e:
            failed.append((r["name"], str(e).splitlines()[0]))
    if not given.quiet:
        for r in rows:
            print(f"{r.name[:44]:44s} {r.kind:6s} {r.ms:9.3f} ms {r.predicted_ms:9.3f} ±{r.ms_error:7.3f} {r.latency:+7.1%} | "
                  f"{r.j:9.4f} J {r.predicted_j:9.4f} {r.energy:+7.1%} | roofline {r.roofline_ms / r.ms:5.2f}x | {r.bound}")  # fmt: skip
    found = summary(rows)
    print(json.dumps(found, indent=1))
    for name, why in failed:
        print("failed:", name, why)
    found["rows"] = [{**r.__dict__, "latency": r.latency, "energy": r.energy} for r in rows]
    found["failed"] = failed
    found["with"] = {"transformers": transformers.__version__}
    write_result(BENCHMARKS / f"results/predict_{given.out or given.which}.json", found)


if __name__ == "__main__":
    main()
