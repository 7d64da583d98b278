"""Does `tessera calibrate` help where a program waits for its host? On a GPU, models that no calibration has seen.

    PYTHONPATH=src:.carry/site python benchmarks/device/calibrated_models.py CASES.py RESULTS.json
        [--only NAME ...] [--seconds 45] [--limit-s 240]

Calibrates as `tessera calibrate` does, without writing it to the user's folder. Then runs each case eagerly and lays two
predictions beside what it took: with the shipped figures, and with the calibration of this host and board. Models come
in the order of CASES.py until the limit; the stored result has those that waited for their host when the seventh set was
recorded, as many as there was time for. A case counts as host-bound if it waits for its launches
(`host_ms`, the time of launching an iteration into an empty queue, is over 0.9 of it). No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import vision
from record_models import DTYPES, load_cases, measure_eager, prepare
from tessera.errors import TesseraError
from tessera.estimate import predict
from tessera.estimate.calibrate import calibrate
from tessera.estimate.calibration import Calibration
from tessera.estimate.calibration_bench import CudaBench

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

HOST_SHARE = 0.9


def predict_report(case: Any, calibration: Calibration | None) -> Any:
    """The prediction of one eager iteration of a case."""
    model, inputs = case.factory("meta", DTYPES[case.dtype])
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = case.optimizer or "sgd"
    return predict(
        model, inputs, on="h200", mode=case.mode, optimizer=optimizer, launch="eager", calibration=calibration
    )


def predict_case(case: Any, calibration: Calibration | None) -> dict[str, float]:
    """Milliseconds and joules of one iteration, with the half-widths of their intervals."""
    report = predict_report(case, calibration)
    return {
        "ms": 1e3 * report.total_latency_s, "ms_error": 1e3 * report.prediction.error_s,
        "j": report.total.energy_j, "j_error": report.total.error_j,
    }  # fmt: skip


def measure_case(case: Any, calibration: Calibration) -> dict[str, Any]:
    """One row: measured, and both predictions."""
    model, step = prepare(case, "cuda")
    measured = measure_eager(step, quick=True)
    del model, step
    gc.collect()
    torch.cuda.empty_cache()
    row = {"name": case.name, "ms": measured["ms"], "j": measured["J"], "host_ms": measured["host_ms"]}
    return row | {"shipped": predict_case(case, None), "calibrated": predict_case(case, calibration)}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean errors and coverage of both predictions, host-bound rows apart."""
    found: dict[str, Any] = {}
    for bound in ("host", "device"):
        some = [r for r in rows if (r["host_ms"] > HOST_SHARE * r["ms"]) == (bound == "host")]
        found[bound] = {"cases": len(some)}
        for view in ("shipped", "calibrated") if some else ():
            found[bound][view] = {
                "latency": fmean(abs(r[view]["ms"] / r["ms"] - 1) for r in some),
                "energy": fmean(abs(r[view]["j"] / r["j"] - 1) for r in some),
                "inside_latency": fmean(abs(r[view]["ms"] - r["ms"]) <= r[view]["ms_error"] for r in some),
                "half_width": fmean(r[view]["ms_error"] / r[view]["ms"] for r in some),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=45.0, help="of the calibration")
    parser.add_argument("--limit-s", type=float, default=240.0)
    given = parser.parse_args()
    vision.importable()
    with CudaBench(0) as bench:
        calibration = calibrate(bench, seconds=given.seconds, force=True).calibration
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + given.limit_s
    for case in load_cases(given.cases):
        if time.monotonic() > end:
            break
        if given.only and case.name not in given.only:
            continue
        try:
            rows.append(measure_case(case, calibration))
        except (RuntimeError, TesseraError) as exc:
            print(f"{case.name}: {str(exc).splitlines()[0]}", flush=True)
            continue
        r = rows[-1]
        print(f"{r['name']:44} {r['ms']:8.2f} ms  host {r['host_ms']:8.2f}  shipped {r['shipped']['ms'] / r['ms'] - 1:+6.0%}"
              f"  calibrated {r['calibrated']['ms'] / r['ms'] - 1:+6.0%}", flush=True)  # fmt: skip
    found = summarise(rows)
    print(found)
    write_result(given.out, found | {"rows": rows})


if __name__ == "__main__":
    main()
