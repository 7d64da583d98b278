"""Traces that others published, through every analysis and command: no traceback, sound JSON, and the right sums.

    git clone https://github.com/facebookresearch/HolisticTraceAnalysis   # tests/data
    git clone https://github.com/AMD-AGI/TraceLens                        # tests, evals
    git clone https://github.com/pytorch/kineto                           # tb_plugin/samples
    python benchmarks/measure/public_traces.py FOLDER

FOLDER is searched for .json and .json.gz files; those that are no traces are counted and left out. Compute,
communication, copies, idle and what is exposed are compared, to the nanosecond, with a union of intervals made here from
the JSON alone, without any of Tessera's code. AMD's traces are also timed beside `json.load`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

RESULT = Path(__file__).resolve().parents[1] / "results" / "public_traces.json"
GOAL_AMD = 0.5
LEAST_BYTES = 1_000_000
"""Of JSON: the time of a smaller trace is that of starting."""
ROUNDS = 2
COLLECTIVE = ("nccl", "mscclKernel", "rccl", "hccl")
KINDS = {"kernel": "compute", "concurrent_kernel": "compute", "gpu_memcpy": "copies", "gpu_memset": "copies",
         "memcpy": "copies", "memset": "copies"}  # fmt: skip
Interval = tuple[int, int]


# -- the independent union ------------------------------------------------------------------------------------------


def _ns(microseconds: Any) -> int:
    return round(Decimal(str(microseconds)) * 1000)


def read_intervals(data: Any) -> dict[Any, dict[str, list[Interval]]]:
    """By device: when something computed, communicated or copied there."""
    events = data.get("traceEvents", []) if isinstance(data, dict) else data
    found: dict[Any, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("ts"), (int, Decimal)):
            continue
        category, name, args = str(event.get("cat", "")), str(event.get("name", "")), event.get("args") or {}
        kind = KINDS.get(category.lower())
        if category == "mtia_ccp_events" and name not in ("event_wait", "event_record"):
            kind = "copies" if args.get("direction") else "compute"
        if kind is None:
            continue
        is_collective = name.removeprefix("void ").startswith(COLLECTIVE) or args.get("Collective name") is not None
        if kind == "compute" and is_collective:
            kind = "communication"
        device = args.get("device", event.get("pid"))
        start = _ns(event["ts"])
        found[device][kind].append((start, start + max(0, _ns(event.get("dur") or 0))))
    return found


def union_length(*groups: list[Interval]) -> int:
    """How long at least one interval was open."""
    length, reached = 0, None
    for start, end in sorted(i for group in groups for i in group):
        if reached is None or start > reached:
            length += end - start
            reached = end
        elif end > reached:
            length += end - reached
            reached = end
    return length


def expect(devices: dict[Any, dict[str, list[Interval]]]) -> dict[str, int]:
    """What the breakdown must say, in nanoseconds, summed over devices."""
    sums = dict.fromkeys(("span", "compute", "communication", "copies", "exposed_communication", "idle"), 0)
    for parts in devices.values():
        all_of_it = [i for group in parts.values() for i in group]
        compute, communication, copies = (parts.get(k, []) for k in ("compute", "communication", "copies"))
        span = max(e for _, e in all_of_it) - min(s for s, _ in all_of_it)
        sums["span"] += span
        sums["compute"] += union_length(compute)
        sums["communication"] += union_length(communication)
        sums["copies"] += union_length(copies)
        sums["exposed_communication"] += union_length(compute, communication) - union_length(compute)
        sums["idle"] += span - union_length(all_of_it)
    return sums


# -- Tessera --------------------------------------------------------------------------------------------------------


def run_all(path: Path, folder: Path) -> tuple[int, list[str], dict[str, Any]]:
    """Every analysis and command on a trace: how many ran, what went wrong, the facts of the breakdown."""
    from click.testing import CliRunner

    from tessera import analyze
    from tessera.cli.main import cli
    from tessera.errors import TesseraError
    from tessera.profile.open_recording import open_recording
    from tessera.report.analysis import text

    wrong, facts, count = [], {}, 0
    recording = open_recording(path)
    for kind in analyze.KINDS:  # as `tessera analyze KIND` and its --json do, but reading the trace once
        count += 2
        try:
            result = getattr(analyze, kind)(recording)
            data = json.loads(result.to_json())
            text(result)
        except TesseraError:
            continue
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what this script looks for)
            wrong.append(f"analyze {kind}: {error!r}")
            continue
        if kind == "breakdown":
            facts = data.get("facts", data)
    commands = [["report", str(path), "--html", str(folder / "page.html"), *more] for more in ((), ("--json",))]
    commands += [["export", str(path), "--chrome", str(folder / "t.json.gz"), "--csv", str(folder / "t.csv"), "--json"]]
    commands += [["diff", str(path), str(path), "--json"]]
    for words in commands:
        count += 1
        result = CliRunner().invoke(cli, words, standalone_mode=False)
        if result.exception is not None and not isinstance(result.exception, (TesseraError, SystemExit)):
            wrong.append(f"{words[0]}: {result.exception!r}")
        elif "--json" in words and result.exception is None:
            try:
                json.loads(result.stdout)
            except ValueError as error:
                wrong.append(f"{words[0]} --json: {error}")
    return count, wrong, facts


def compare(facts: dict[str, Any], wanted: dict[str, int]) -> list[str]:
    """The figures that are not those of the union."""
    found = {key: round((facts.get(f"{key}_s") or 0.0) * 1e9) for key in wanted}
    # A sum of seconds as a float may be off by a few nanoseconds.
    return [f"{k}: {found[k]} ns, {wanted[k]} by the union" for k in wanted if abs(found[k] - wanted[k]) > 8]


def time_reading(path: Path) -> tuple[float, float]:
    """CPU seconds of `json.load` and of Tessera's reader, the least of a few rounds each."""
    from tessera.timeline import kineto

    def load() -> None:
        with gzip.open(path) if path.name.endswith("gz") else path.open("rb") as file:
            json.load(file)

    least = []
    for read in (load, lambda: kineto.read(path)):
        times = []
        for _ in range(ROUNDS):
            begun = time.process_time()
            read()
            times.append(time.process_time() - begun)
        least.append(min(times))
    return least[0], least[1]


def _load(path: Path) -> Any:
    """Of a trace with absolute times a float does not hold the nanoseconds."""
    with gzip.open(path) if path.name.endswith("gz") else path.open("rb") as file:
        return json.load(file, parse_float=Decimal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    files = sorted(p for p in arguments.folder.rglob("*") if p.name.endswith((".json", ".json.gz")))
    commands, traces, no_trace, wrong, differ, amd = 0, 0, 0, [], [], []
    with tempfile.TemporaryDirectory() as name:
        for path in files:
            try:
                data = _load(path)
            except (ValueError, OSError):
                no_trace += 1
                continue
            is_trace = isinstance(data, list) or (isinstance(data, dict) and "traceEvents" in data)
            if not is_trace:
                no_trace += 1
                continue
            traces += 1
            count, bad, facts = run_all(path, Path(name))
            commands += count
            wrong += [f"{path.name}: {line}" for line in bad]
            devices = read_intervals(data)
            differ += [f"{path.name}: {line}" for line in (compare(facts, expect(devices)) if devices else [])]
            properties = data.get("deviceProperties") if isinstance(data, dict) else None
            is_amd = isinstance(data, dict) and ("roctracer_version" in data or "hip" in str(data)[:200_000])
            size = len(json.dumps(data, default=str)) if is_amd and properties is not None else 0
            del data
            if size >= LEAST_BYTES:
                theirs, ours = time_reading(path)
                amd.append({"trace": path.name[-60:], "json_load_s": theirs, "tessera_s": ours})
            print(f"{path.name[-70:]}: {len(bad)} wrong", file=sys.stderr)
    ratio = sum(a["tessera_s"] for a in amd) / sum(a["json_load_s"] for a in amd) if amd else None
    result = {
        "traces": traces, "not_traces": no_trace, "commands": commands, "tracebacks_or_bad_json": len(wrong),
        "figures_that_differ": len(differ), "wrong": wrong[:20], "differ": differ[:20],
        "amd": {"traces": len(amd), "ratio": ratio, "goal": GOAL_AMD,
                "worst": max((a["tessera_s"] / a["json_load_s"] for a in amd), default=None)},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    write_result(RESULT, result)
    return 1 if wrong or differ or (ratio is not None and ratio > GOAL_AMD) else 0


if __name__ == "__main__":
    sys.exit(main())
