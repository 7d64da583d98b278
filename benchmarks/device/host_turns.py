"""What the networks of a calibration tell of a host, in turns with whole models that wait for it.

    PYTHONPATH=src:.carry/site python benchmarks/device/host_turns.py CASES.py RESULTS.json [--only NAME ...] [--rounds 6]

Every program runs 0.35 s, one after another, round by round: hosts drift by a third within a minute, and all programs of
a round see about the same host. Prints for each program its time as a share of what the shipped model of hosts says, and
for each network of `tessera calibrate` that share over the models' geometric mean: its `host_reference`
(`estimate/calibration_kernels.py`). No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import vision
from calibrated_models import predict_report
from record_models import load_cases, prepare
from tessera.estimate import predict
from tessera.estimate.calibration_kernels import host_points
from tessera.hardware import lookup

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

EACH_S = 0.35


def time_program(call: Callable[[], Any]) -> float:
    """Seconds of one call, none of them waited for."""
    begun, calls = time.perf_counter(), 0
    while time.perf_counter() - begun < 0.1 * EACH_S or calls < 3:
        call()
        calls += 1
    torch.cuda.synchronize()
    count = max(3, round(EACH_S * calls / (time.perf_counter() - begun)))
    begun = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def make_networks() -> dict[str, tuple[Callable[[], Any], float]]:
    """The networks of a calibration: how to call them, and their predicted host seconds."""
    found = {}
    for point in host_points(lookup("h200")):
        net, inputs = point.make("cuda")
        model, shapes = point.make("meta")
        report = predict(model, shapes, on="h200", launch="eager", calibration=None)
        assert report.prediction is not None

        def call(net: Any = net, inputs: Any = inputs) -> Any:
            with torch.no_grad():
                return net(*inputs)

        found[point.name] = call, report.prediction.host_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    vision.importable()
    networks, models = make_networks(), {}
    for case in load_cases(given.cases):
        if not given.only or case.name in given.only:
            models[case.name] = prepare(case, "cuda")[1], predict_report(case, None).prediction.host_s
    programs = networks | models
    shares: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(given.rounds):
        for name, (call, host_s) in programs.items():
            shares[name].append(time_program(call) / host_s)
    of_models = [geometric_mean(shares[name][i] for name in models) for i in range(given.rounds)]
    for name, found in shares.items():
        print(f"{name:44}", " ".join(f"{share:5.2f}" for share in found))
    print(f"{'models':44}", " ".join(f"{share:5.2f}" for share in of_models))
    references = {
        name: geometric_mean(own / all_ for own, all_ in zip(shares[name], of_models, strict=True)) for name in networks
    }
    print({name: round(reference, 3) for name, reference in references.items()})
    write_result(given.out, {"references": references, "models": of_models, "shares": shares})


if __name__ == "__main__":
    main()
