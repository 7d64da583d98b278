"""What known GPUs draw and do, idle to full: the table of README.md, from the catalogue and `tessera.predict`.

    python examples/exercises/reference.py            # print it
    python examples/exercises/reference.py --write    # and put it into README.md

Nothing is copied from a datasheet into the table: idle and TDP are the catalogue's figures (`tessera hardware show
a100` gives their sources), the loads are predicted. Predictions were fitted on an H200 only.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

import tessera
from tessera.hardware import lookup

CHIPS = ("a100", "h100", "h200", "l4", "jetson-orin")
# One square product, launched again and again: its size decides how much of the chip has work.
LOADS = {"light": 256, "medium": 1024, "heavy": 8192}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BEGIN, END = "<!-- table from reference.py -->", "<!-- end -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One load on one chip, in one number format."""

    power_w: float
    power_error_w: float
    tflops: float
    tflops_error: float

    @property
    def tflops_per_w(self) -> float:
        """10^12 operations per joule."""
        return self.tflops / self.power_w


def predicted(chip: str, size: int, dtype: torch.dtype) -> Row:
    """A product of that size on that chip; a calibration of this machine is left out, so that all get one table."""
    a = torch.empty(size, size, dtype=dtype, device="meta")
    report = tessera.predict(torch.mm, (a, a), on=chip, calibration=None)
    assert report.prediction is not None and report.average_power_w is not None
    tflops = 2.0 * size**3 / report.total_latency_s * 1e-12
    return Row(
        power_w=report.average_power_w,
        power_error_w=report.total.error_j / report.total_latency_s,
        tflops=tflops,
        tflops_error=tflops * report.prediction.error_s / report.total_latency_s,
    )


def figure(value: float, error: float, most: float | None = None) -> str:
    """Three digits, and the half-width to the same place; an interval that would pass `most` ends there."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2
    if most is not None and value + error > most:
        return f"{value:.{places}f} ({value - error:.{places}f} to {most:g})"
    return f"{value:.{places}f} ± {error:.{places}f}"


def table() -> str:
    """The whole table, in Markdown."""
    lines = [
        "| chip | load | fp32 W | fp32 TFLOPS | fp32 TFLOPS/W | bf16 W | bf16 TFLOPS | bf16 TFLOPS/W |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for chip in CHIPS:
        device = lookup(chip)
        assert device.idle_w is not None and device.tdp_w is not None
        assumed = ", assumed" if device.idle_w.assumed else ""
        known = figure(device.idle_w.value, device.idle_w.error) if device.idle_w.error else f"{device.idle_w.value:g}"
        lines.append(f"| {device.name} | idle | {known}{assumed} | 0 | 0 | the same | 0 | 0 |")
        for load, size in LOADS.items():
            rows = [predicted(chip, size, dtype) for dtype in FORMATS.values()]
            cells = [
                cell
                for r in rows
                for cell in (
                    figure(r.power_w, r.power_error_w, device.tdp_w.value),
                    figure(r.tflops, r.tflops_error),
                    f"{r.tflops_per_w:.3f}",
                )
            ]
            lines.append(f"| | {load}, {size}³ | {' | '.join(cells)} |")
        lines.append(f"| | TDP | {device.tdp_w.value:g} | | | {device.tdp_w.value:g} | | |")
    return "\n".join(lines)


def with_table(text: str, made: str) -> str:
    """A page with the table between its two marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{made}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    args = parser.parse_args()
    made = table()
    print(made)
    if args.write:
        page = Path(__file__).parent / "README.md"
        page.write_text(with_table(page.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
