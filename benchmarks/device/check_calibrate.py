"""Does a calibration help on what it has not seen? To be run on a GPU; it has not been run yet.

    PYTHONPATH=src python benchmarks/device/check_calibrate.py [--seconds 60] [--device 0] [--force] [--json OUT.json]

Calibrates the GPU at hand, then measures eight kernels that are not among the calibration points and two small models
(eager and as a CUDA graph), and prints time and energy predicted / measured before and after, with the mean absolute
error of each. Nothing is written to the user's config folder; no clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tessera.device import Device
from tessera.estimate import calibrate
from tessera.estimate.bench import Bench, CudaBench
from tessera.estimate.factors import after, case_of
from tessera.estimate.overlay import Overlay
from tessera.estimate.points import copies_to_fill, half_of, repeated
from tessera.estimate.predict import Launch
from tessera.graph.capture import capture

Call = tuple[Callable[..., Any], tuple[Any, ...]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Check:
    """One program: predicted without and with the calibration, and measured; joules None where nothing measures."""

    name: str
    launch: str
    predicted_s: float
    after_s: float
    measured_s: float
    predicted_j: float
    after_j: float
    measured_j: float | None


def on(fn: Callable[..., Any], dtype: str, *shapes: tuple[int, ...]) -> Callable[[str], Call]:
    return lambda device: (fn, tuple(torch.randn(s, device=device, dtype=DTYPES[dtype]) for s in shapes))


def embedding(device: str) -> Call:
    table = torch.randn(50000, 1024, device=device)
    rows = torch.randint(0, 50000, (8192,), device=device)
    return F.embedding, (rows, table)


def kernels(half: str) -> dict[str, Callable[[str], Call]]:
    """Shapes and operators the calibration does not measure."""
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


def check(
    bench: Bench, device: Device, overlay: Overlay, name: str, make: Callable[[str], Call], launch: Launch
) -> Check:
    fn, inputs = make("meta")
    copies, replay = 1, launch == "graph"
    if replay:
        once = case_of(device, capture(fn, inputs, replay=True), launch)
        copies = copies_to_fill(once.found.solved.seconds)
    case = case_of(device, capture(repeated(fn, copies), inputs, replay=replay), launch)
    then = after(case, overlay)
    fn, inputs = make(bench.where)
    sample = bench.run(repeated(fn, copies), inputs, launch=launch, seconds=1.5)
    return Check(
        name=name, launch=launch, predicted_s=case.found.solved.seconds / copies, after_s=then.seconds / copies,
        measured_s=sample.seconds / copies, predicted_j=case.joules / copies, after_j=then.joules / copies,
        measured_j=None if sample.joules is None else sample.joules / copies,
    )  # fmt: skip


def checks(bench: Bench, device: Device, overlay: Overlay) -> list[Check]:
    half = half_of(device)
    found = [check(bench, device, overlay, name, make, "graph") for name, make in kernels(half).items()]
    models = {"mlp": model(Mlp, (64, 2048), half), "pyramid": model(Pyramid, (16, 3, 128, 128), "fp32")}
    for name, make in models.items():
        found += [check(bench, device, overlay, name, make, launch) for launch in ("graph", "eager")]
    return found


def off(pairs: list[tuple[float, float | None]]) -> float:
    """Mean absolute error of (predicted, measured), as a share."""
    known = [abs(p / m - 1) for p, m in pairs if m]
    return sum(known) / len(known) if known else float("nan")


def show(rows: list[Check]) -> None:
    print(f"{'program':<32}{'launch':<8}{'measured us':>12}{'time before':>12}{'after':>8}{'J before':>10}{'after':>8}")
    for r in rows:
        joules = [f"{p / r.measured_j:.3f}" if r.measured_j else "-" for p in (r.predicted_j, r.after_j)]
        times = [f"{p / r.measured_s:.3f}" for p in (r.predicted_s, r.after_s)]
        print(
            f"{r.name:<32}{r.launch:<8}{r.measured_s * 1e6:>12.1f}{times[0]:>12}{times[1]:>8}{joules[0]:>10}{joules[1]:>8}"
        )
    for what, pick in (("kernels", slice(0, 8)), ("models", slice(8, None))):
        part = rows[pick]
        before, then = (off([(getattr(r, n), r.measured_s) for r in part]) for n in ("predicted_s", "after_s"))
        joules_before, joules_then = (
            off([(getattr(r, n), r.measured_j) for r in part]) for n in ("predicted_j", "after_j")
        )
        print(
            f"{what}: time off by {before:.1%} before, {then:.1%} after; energy {joules_before:.1%}, {joules_then:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with CudaBench(args.device) as bench:
        found = calibrate.run(
            bench, seconds=args.seconds, force=args.force,
            progress=lambda done, steps, name: print(f"[{done + 1}/{steps}] {name}", file=sys.stderr, flush=True),
        )  # fmt: skip
        device = calibrate.identify(found.overlay.board)
        print(f"{found.overlay.board}: calibrated in {found.seconds:.0f} s")
        for group, scale in sorted(found.overlay.time_scale.items()):
            print(f"  {group:<12} time x {scale.factor:.3f}, spread {scale.spread or 0:.0%}, {scale.points} points")
        rows = checks(bench, device, found.overlay)
    show(rows)
    for note in found.overlay.notes:
        print("note:", note)
    if args.json:
        import msgspec

        data = {"overlay": msgspec.to_builtins(found.overlay), "checks": [asdict(r) for r in rows]}
        args.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
