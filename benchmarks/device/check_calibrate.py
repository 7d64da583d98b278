"""Does a calibration help on what it has not seen? To be run on a GPU; `--again` redoes the sums without one.

    PYTHONPATH=src python benchmarks/device/check_calibrate.py [--seconds 60] [--device 0] [--force] [--json OUT.json]
    PYTHONPATH=src python benchmarks/device/check_calibrate.py --again IN.json [--models public heldout] [--json OUT.json]

Calibrates the GPU at hand, then measures kernels that are not among the calibration points and two small models (eager
and as a CUDA graph), each once, and lays three predictions beside it, without and with the calibration:

* shipped: the device as the catalogue has it (the H200's figures were fitted on measurements),
* datasheet: the same chip as if only its datasheet were known, so that nothing fitted on it is used,
* a third over, a third under: that chip with 4/3 and 3/4 of the bandwidth and FLOP/s it has. The shares of their peaks
  that kernels reach were fitted on the H200, so 'datasheet' knows more of an H200 than of other chips.

`--models` (needs the model zoos, no GPU) lays the same views beside the recorded models of predict_models.py that the
device bounds: what a kernel takes in a model is what is predicted, and over and over, alone, it takes less.

The JSON holds every point as measured. Nothing is written to the user's config folder; no clock, limit or mode is
changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import vision
from tessera.device import Device, Figure
from tessera.estimate import calibrate
from tessera.estimate.calibrate import CalibrationResult, Measurements
from tessera.estimate.calibration import Calibration, Watts
from tessera.estimate.calibration_bench import CudaBench, Machine, Sample
from tessera.estimate.calibration_fit import MeasuredPoint, calibrated_outcome, case_of
from tessera.estimate.calibration_kernels import (
    CalibrationPoint,
    half_of,
    host_points,
    kernel_points,
    limit_point,
    repeat,
)
from tessera.estimate.kernel_time import KernelTime, chip
from tessera.estimate.predict import Launch, predict
from tessera.graph.capture import capture
from tessera.hardware import identify_board

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

Call = tuple[Callable[..., Any], tuple[Any, ...]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECK_S = 1.5
SHARED = Path(__file__).parent.parent.parent.parent / "shared"
# What a datasheet may be off by; carried over to an A100, kernels are off by 15-21% in the mean.
MISJUDGED = {"a third over": 4 / 3, "a third under": 3 / 4}


@dataclass(frozen=True)
class Guess:
    """A prediction of one program, per call, without and with the calibration.

    The errors are the relative 90% half-widths its kernels' times are predicted within.
    """

    before_s: float
    after_s: float
    before_j: float
    after_j: float
    before_error: float
    after_error: float


@dataclass(frozen=True)
class Check:
    """One program as measured, per call, and as predicted by each view of the chip; joules None where unmeasured."""

    name: str
    launch: Launch
    copies: int
    measured_s: float
    measured_j: float | None
    clock_hz: float | None
    capped: bool | None
    guesses: Mapping[str, Guess]


# -- what calibration has not seen ------------------------------------------------------------------------------------


def on(fn: Callable[..., Any], dtype: str, *shapes: tuple[int, ...]) -> Callable[[str], Call]:
    return lambda device: (fn, tuple(torch.randn(s, device=device, dtype=DTYPES[dtype]) for s in shapes))


def embedding(device: str) -> Call:
    table = torch.randn(50000, 1024, device=device)
    rows = torch.randint(0, 50000, (8192,), device=device)
    return F.embedding, (rows, table)


def conv(half: str) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        shapes = (32, 256, 28, 28), (256, 256, 3, 3)
        given = [torch.randn(s, device=device, dtype=DTYPES[half]) for s in shapes]
        return lambda x, w: F.conv2d(x, w, padding=1), tuple(t.to(memory_format=torch.channels_last) for t in given)

    return make


def first_kernels(half: str) -> dict[str, Callable[[str], Call]]:
    """Shapes and operators the calibration does not measure: those of the first run on an H200."""
    return {
        "linear 4096x1024x1024": on(F.linear, half, (4096, 1024), (1024, 1024)),
        "linear 1024x8192x2048": on(F.linear, half, (1024, 2048), (8192, 2048)),
        "bmm 96x512x512x64": on(torch.bmm, half, (96, 512, 64), (96, 64, 512)),
        "attention causal 8x16x1024x64": on(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), half, *[(8, 16, 1024, 64)] * 3
        ),
        "tanh 2^26": on(torch.tanh, half, (1 << 26,)),
        "softmax 16384x2048": on(lambda x: x.softmax(-1), half, (16384, 2048)),
        "transpose 8192x8192": on(lambda x: x.t().contiguous(), half, (8192, 8192)),
        "embedding 8192 rows": embedding,
    }


def more_kernels(half: str) -> dict[str, Callable[[str], Call]]:
    """Eight more, of the groups that the first do not touch."""
    return {
        "linear 1576x2304x768 fp16": on(F.linear, "fp16", (1576, 768), (2304, 768)),
        "linear 1024x1024x1024 fp32": on(F.linear, "fp32", (1024, 1024), (1024, 1024)),
        "layer_norm 12608x768": on(lambda x: F.layer_norm(x, (768,)), half, (12608, 768)),
        "sum 12288x3072": on(lambda x: x.sum(-1), half, (12288, 3072)),
        "heads 16x1024x16x64": on(lambda x: x.transpose(1, 2).contiguous(), half, (16, 1024, 16, 64)),
        "bias 16384x3072": on(torch.add, half, (16384, 3072), (3072,)),
        "conv 3x3 256->256 32x28x28": conv(half),
        "conv 3x3 64->128 32x56x56 fp32": on(
            lambda x, w: F.conv2d(x, w, padding=1, stride=2), "fp32", (32, 64, 56, 56), (128, 64, 3, 3)
        ),
    }


class Mlp(nn.Module):
    def __init__(self, width: int = 2048, depth: int = 6) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(depth):
            parts += [nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()]
        self.body = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Pyramid(nn.Module):
    """Convolutions of growing width with pooling between, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            parts += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(256, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def model(kind: Callable[[], nn.Module], shape: tuple[int, ...], dtype: str) -> Callable[[str], Call]:
    def make(device: str) -> Call:
        with torch.device(device):
            net = kind().to(DTYPES[dtype]).eval()
        return net, (torch.randn(shape, device=device, dtype=DTYPES[dtype]),)

    return make


def programs(device: Device) -> list[tuple[CalibrationPoint, Launch]]:
    """Everything that is checked: a point's group says what part of the table it is in."""
    half = half_of(device)
    found: list[tuple[CalibrationPoint, Launch]] = []
    for part, kernels in (("first", first_kernels(half)), ("more", more_kernels(half))):
        found += [(CalibrationPoint(name=name, group=part, make=make), "graph") for name, make in kernels.items()]
    models = {"mlp": model(Mlp, (64, 2048), half), "pyramid": model(Pyramid, (16, 3, 128, 128), "fp32")}
    launches: tuple[Launch, ...] = ("graph", "eager")
    for name, make in models.items():
        found += [(CalibrationPoint(name=name, group="model", make=make), launch) for launch in launches]
    return found


# -- one chip, as it may be known -------------------------------------------------------------------------------------


def views(device: Device) -> dict[str, Device]:
    """The chip as shipped, as its datasheet has it, and as one that promises too much or too little would."""
    # The datasheet's cache is 50 MB where the driver reports 60, and it says nothing of the idle power.
    unfitted = replace(device, caches=replace(device.caches, l2_bytes=_times(device.caches.l2_bytes, 0.8)), idle_w=None)
    found = {"shipped": device, "datasheet": unfitted}
    for name, factor in MISJUDGED.items():
        bandwidth = _times(device.memory.bandwidth_bytes_per_s, factor)
        found[name] = replace(
            unfitted, memory=replace(device.memory, bandwidth_bytes_per_s=bandwidth),
            vector=_all_times(device.vector, factor), matrix=_all_times(device.matrix, factor),
        )  # fmt: skip
    assert not any(chip(device).calibrated for name, device in found.items() if name != "shipped")
    return found


def _all_times(peaks: Mapping[str, Figure], factor: float) -> dict[str, Figure]:
    return {name: replace(figure, value=figure.value * factor) for name, figure in peaks.items()}


def _times(figure: Figure | None, factor: float) -> Figure | None:
    return None if figure is None else replace(figure, value=figure.value * factor)


def guess(m: MeasuredPoint, device: Device, found: CalibrationResult) -> Guess:
    case = case_of(device, m.case.graph, m.case.launch, m.point)
    then, each = calibrated_outcome(case, found.calibration), 1.0 / m.copies
    kernels = case.estimate.kernels
    scaled = [found.calibration.scale_kernel(k, *work) for k, work in zip(kernels, case.work, strict=True)]
    return Guess(
        before_s=case.estimate.solved.seconds * each, after_s=then.seconds * each, before_j=case.joules * each,
        after_j=then.joules * each, before_error=_error(kernels), after_error=_error(scaled),
    )  # fmt: skip


def _error(kernels: Sequence[KernelTime]) -> float:
    """Of all kernels together, as if all were off the same way."""
    return sum(k.relative_error * k.seconds for k in kernels) / sum(k.seconds for k in kernels)


def check(m: MeasuredPoint, chips: Mapping[str, Device], found: Mapping[str, CalibrationResult]) -> Check:
    s, each = m.sample, 1.0 / m.copies
    return Check(
        name=m.point.name, launch=m.case.launch, copies=m.copies, measured_s=s.seconds * each,
        measured_j=None if s.joules is None else s.joules * each, clock_hz=s.clock_hz, capped=s.capped,
        guesses={view: guess(m, device, found[view]) for view, device in chips.items()},
    )  # fmt: skip


# -- measuring, now or as written down --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """What a run measured: the calibration's points, what it has not seen, and its host networks once more at the end.

    The last tell how far the host itself has changed meanwhile.
    """

    date: str
    points: Measurements
    unseen: list[MeasuredPoint]
    host_again: list[MeasuredPoint]


def hosts(device: Device) -> list[tuple[CalibrationPoint, Launch]]:
    return [(point, "eager") for point in host_points(device)]


def run_all(bench: CudaBench, device: Device, wanted: Iterable[tuple[CalibrationPoint, Launch]]) -> list[MeasuredPoint]:
    found = []
    for point, launch in wanted:
        case, copies = calibrate.predict_point(device, point, launch)
        fn, inputs = point.make(bench.where)
        sample = bench.run(repeat(fn, copies), inputs, launch=launch, seconds=CHECK_S)
        found.append(MeasuredPoint(point=point, case=case, copies=copies, sample=sample))
    return found


def recalled(
    device: Device, wanted: Iterable[tuple[CalibrationPoint, Launch]], rows: list[dict[str, Any]]
) -> list[MeasuredPoint]:
    """The rows of a file that are still points, predicted anew."""
    known = {(point.name, launch): point for point, launch in wanted}
    found = []
    for row in rows:
        point = known.get((row["name"], row["launch"]))
        if point is None:
            continue
        case, copies = calibrate.predict_point(device, point, row["launch"], row["copies"])
        joules = None if row["measured_j"] is None else row["measured_j"] * copies
        sample = Sample(
            seconds=row["measured_s"] * copies, joules=joules, clock_hz=row["clock_hz"], capped=row["capped"]
        )
        found.append(MeasuredPoint(point=point, case=case, copies=copies, sample=sample))
    return found


def read(path: Path) -> Recorded:
    """What an earlier run measured."""
    data = json.loads(path.read_text())
    machine = Machine(**data["machine"])
    device = identify_board(machine.board)
    rows = data["points"]
    held = recalled(device, [(limit_point(device), "graph")], rows)
    idle = {name: msgspec.convert(data[name], Watts) for name in ("idle_w", "idle_context_w")}
    points = Measurements(
        device=device, machine=machine, kernels=tuple(recalled(device, graphs(device), rows)),
        nets=tuple(recalled(device, hosts(device), rows)), limit=held[0] if held else None,
        notes=tuple(data["not_measured"]), seconds=data["seconds"], **idle,
    )  # fmt: skip
    again = recalled(device, hosts(device), data.get("host_again", []))
    return Recorded(data["date"], points, recalled(device, programs(device), data["checks"]), again)


def graphs(device: Device) -> list[tuple[CalibrationPoint, Launch]]:
    return [(point, "graph") for point in kernel_points(device)]


def recorded_models(which: str, chips: Mapping[str, Device], found: Mapping[str, CalibrationResult]) -> list[Check]:
    """Device-bound models as recorded on an H200 earlier. Their host was another: its factor is left out."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from predict import predict_models

    vision.importable()
    rows = predict_models.public(SHARED) if which == "public" else predict_models.recorded(which)
    calibrations = {view: msgspec.structs.replace(c.calibration, host_scale=None) for view, c in found.items()}
    checks = []
    for row, build in rows:
        try:
            one = _recorded_model(row, build, chips, calibrations)
        except ModuleNotFoundError as exc:
            print(f"{row['name']}: {exc}", file=sys.stderr)
            continue
        checks += [one] if one is not None else []
    return checks


def _recorded_model(
    row: dict[str, Any], build: Callable[[], Any], chips: Mapping[str, Device], calibrations: Mapping[str, Calibration]
) -> Check | None:
    """One recorded model under each view of the chip; None where the host bounded it (as predict_models.py has it)."""
    replay, busy_us = bool(row.get("graph_replay")), row.get("gpu_us")
    if not replay and busy_us and busy_us < 0.8e3 * row["ms"]:
        return None
    launch: Launch = "graph" if replay else "eager"
    model, inputs = build()
    hidden = replay and row.get("capture_differs") is False
    graph = capture(
        model, inputs, mode=row["mode"], optimizer=row.get("optimizer") or "sgd", launch="graph" if replay and not hidden else "eager"
    )  # fmt: skip
    guesses = {}
    for view, device in chips.items():
        before, then = (
            predict(graph, on=device, launch=launch, check_memory=False, calibration=c)
            for c in (None, calibrations[view])
        )
        p, q = before.prediction, then.prediction
        assert p is not None and q is not None
        if view == "shipped" and not replay and not busy_us and p.device_s <= p.host_s:
            return None
        guesses[view] = Guess(
            before_s=before.total.time_s, after_s=then.total.time_s, before_j=before.total.energy_j,
            after_j=then.total.energy_j, before_error=p.error_s / before.total.time_s,
            after_error=q.error_s / then.total.time_s,
        )  # fmt: skip
    return Check(
        name=row["name"], launch=launch, copies=1, measured_s=row["ms"] * 1e-3, measured_j=row["J"], clock_hz=None,
        capped=None, guesses=guesses,
    )  # fmt: skip


def write(
    path: Path, found: Mapping[str, CalibrationResult], recorded: Recorded, parts: Mapping[str, list[Check]]
) -> None:
    points = recorded.points
    data = {
        "machine": asdict(points.machine),
        "date": recorded.date,
        "seconds": points.seconds,
        "summary": summary(parts),
        "idle_w": points.idle_w,
        "idle_context_w": points.idle_context_w,
        "not_measured": points.notes,
        "overlays": {view: c.calibration for view, c in found.items()},
        "points": [asdict(row) for row in found["shipped"].rows],
        "points_datasheet": [asdict(row) for row in found["datasheet"].rows],
        "host_again": [asdict(check(m, {}, {})) for m in recorded.host_again],
        "checks": [asdict(c) for c in parts["kernels"] + parts["models, graph"] + parts["models, eager"]],
    }
    write_result(path, msgspec.to_builtins(data))


# -- what came out ----------------------------------------------------------------------------------------------------


def off(pairs: Iterable[tuple[float, float | None]]) -> float | None:
    """Mean absolute error of (predicted, measured), as a share."""
    known = [abs(p / m - 1) for p, m in pairs if m]
    return sum(known) / len(known) if known else None


def divided(checks: list[Check]) -> dict[str, list[Check]]:
    """The checks by part of the table."""
    kernels = [c for c in checks if c.name not in ("mlp", "pyramid")]
    models = [c for c in checks if c not in kernels]
    return {
        "kernels": kernels,
        "kernels of the first run": kernels[:8],
        "models, graph": [c for c in models if c.launch == "graph"],
        "models, eager": [c for c in models if c.launch == "eager"],
    }


def summary(parts: Mapping[str, list[Check]]) -> dict[str, Any]:
    """Mean errors by part of the table and view of the chip."""
    found: dict[str, Any] = {}
    for part, some in parts.items():
        found[part] = {"programs": len(some)}
        for view in some[0].guesses if some else ():
            # What the host bounds has an interval of its own.
            inside = _inside(some, view) if part != "models, eager" else {}
            found[part][view] = _errors(some, view) | inside
    return found


def _errors(checks: list[Check], view: str) -> dict[str, Any]:
    return {
        f"{what}_{when}": off((getattr(c.guesses[view], f"{when}_{unit}"), getattr(c, f"measured_{unit}")) for c in checks)
        for what, unit in (("latency", "s"), ("energy", "j"))
        for when in ("before", "after")
    }  # fmt: skip


def _inside(checks: list[Check], view: str) -> dict[str, float]:
    """The share of programs whose time lies within the interval of the kernels' times."""

    def holds(c: Check, when: str) -> bool:
        g = c.guesses[view]
        predicted_s, error = (g.before_s, g.before_error) if when == "before" else (g.after_s, g.after_error)
        return abs(c.measured_s / predicted_s - 1) <= error

    return {f"inside_{when}": sum(holds(c, when) for c in checks) / len(checks) for when in ("before", "after")}


def show(found: Mapping[str, CalibrationResult], parts: Mapping[str, list[Check]]) -> None:
    for view, calibration in found.items():
        _show_scales(view, calibration)
    print("\npoints: predicted and measured us a call, measured / predicted as shipped and after, energy likewise")
    for row in found["shipped"].rows:
        _show_row(row)
    print("\npredicted / measured, before -> after: seconds, then joules")
    print(f"{'program':<32}{'launch':<7}{'us':>8}" + "".join(f"{view:>30}" for view in found))
    for c in parts["kernels"] + parts["models, graph"] + parts["models, eager"]:
        cells = "".join(f"{_cell(c, c.guesses[view]):>30}" for view in found)
        print(f"{c.name:<32}{c.launch:<7}{c.measured_s * 1e6:>8.1f}{cells}")
    for part, by_view in summary(parts).items():
        for view in found:
            e = by_view[view]
            times = f"time off by {e['latency_before']:.1%} -> {e['latency_after']:.1%}"
            joules = (
                "" if e["energy_before"] is None else f", energy {e['energy_before']:.1%} -> {e['energy_after']:.1%}"
            )
            inside = ""
            if "inside_before" in e:
                inside = f", inside the interval {e['inside_before']:.0%} -> {e['inside_after']:.0%}"
            print(f"{part} ({by_view['programs']}), {view}: {times}{joules}{inside}")
    for note in found["shipped"].calibration.notes:
        print("note:", note)


def _show_scales(view: str, found: CalibrationResult) -> None:
    calibration = found.calibration
    watts = ", ".join(f"{n} {w.value:.1f} W" for n in ("idle_w", "idle_context_w", "static_w", "limit_w")
                      if (w := getattr(calibration, n)).value is not None)  # fmt: skip
    print(f"\n{view}: {watts}")
    scales = {f"time {g}": s for g, s in sorted(calibration.time_scale.items())}
    scales |= {f"energy {g}": s for g, s in sorted(calibration.energy_scale.items())}
    if calibration.host_scale is not None:
        scales["host"] = calibration.host_scale
    for name, s in scales.items():
        interval = "as predicted" if s.spread is None else f"{s.spread:.0%}"
        print(f"  {name:<20} mean {s.mean or 1:.3f}, used {s.factor:.3f}, interval {interval}, {s.points} points")


def _show_row(row: calibrate.CalibrationRow) -> None:
    energy = (
        ""
        if row.measured_j is None
        else f"  J {row.measured_j / row.predicted_j:.3f} {row.measured_j / row.after_j:.3f}"
    )
    state = f"  {(row.clock_hz or 0) / 1e6:.0f} MHz{' capped' if row.capped else ''}"
    print(
        f"{row.name:<44}{row.copies:>3} {row.predicted_s * 1e6:>9.2f} {row.measured_s * 1e6:>9.2f}"
        f"  {row.ratio:.3f} {row.ratio_after:.3f}{energy}{state}"
    )


def _cell(c: Check, g: Guess) -> str:
    seconds = f"{g.before_s / c.measured_s:.2f} -> {g.after_s / c.measured_s:.2f}"
    return (
        seconds if not c.measured_j else f"{seconds}, {g.before_j / c.measured_j:.2f} -> {g.after_j / c.measured_j:.2f}"
    )


def show_host(recorded: Recorded) -> None:
    """Each look at the host: what is left between them no factor can take away."""
    for name in dict.fromkeys(m.point.name for m in recorded.points.nets):
        looks, again = (
            " ".join(f"{m.sample.seconds * 1e6:.0f}" for m in some if m.point.name == name)
            for some in (recorded.points.nets, recorded.host_again)
        )
        print(f"{name}: {looks} us while calibrating, {again or '-'} us after the checks")


def measure(args: argparse.Namespace) -> Recorded:
    with CudaBench(args.device) as bench:
        points = calibrate.measure(
            bench, seconds=args.seconds, force=args.force,
            progress=lambda done, steps, name: print(f"[{done + 1}/{steps}] {name}", file=sys.stderr, flush=True),
        )  # fmt: skip
        device = points.device
        unseen, again = (run_all(bench, device, some(device)) for some in (programs, hosts))
        return Recorded(date.today().isoformat(), points, unseen, again)


def as_on(found: Measurements, device: Device) -> Measurements:
    """The same measurements beside the predictions for another device, as if the chip were that one."""

    def again(m: MeasuredPoint) -> MeasuredPoint:
        return replace(m, case=case_of(device, m.case.graph, m.case.launch, m.point))

    kernels, nets = (tuple(map(again, points)) for points in (found.kernels, found.nets))
    limit = again(found.limit) if found.limit is not None else None
    return replace(found, device=device, kernels=kernels, nets=nets, limit=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--again", type=Path, help="take what this file measured")
    parser.add_argument("--models", nargs="*", default=[], choices=["public", "dev", "heldout"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    recorded = read(args.again) if args.again else measure(args)
    points = recorded.points
    chips = views(points.device)
    found = {view: calibrate.fit_measurements(as_on(points, device)) for view, device in chips.items()}
    parts = divided([check(m, chips, found) for m in recorded.unseen])
    for which in args.models:
        parts[f"recorded models, {which}"] = recorded_models(which, chips, found)
    if args.json:  # before it is shown: what was measured is kept whatever becomes of the table
        write(args.json, found, recorded, parts)
    print(f"{points.machine.board}: calibrated in {points.seconds:.0f} s")
    show(found, parts)
    show_host(recorded)


if __name__ == "__main__":
    main()
