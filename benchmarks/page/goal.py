"""One goal of the proof page: what was asked, the figure reached, where and when, another tool for comparison, the command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS))
from result_file import read_result

RESULTS = BENCHMARKS / "results"
DEVICE = "benchmarks/device"  # on the GPU, with PYTHONPATH=src:.carry/site python
H200 = "NVIDIA H200"
OPEN = "not yet measured on a GPU"
BOARDS = ("gpu", "board", "device")  # what scripts call the board in the files they write
VERDICT = {True: "yes", False: "**no**", None: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A row. Without `reached` it is open; `met` is None where there is nothing to hold the figure against."""

    what: str
    command: str
    goal: str = ""
    reached: str = ""
    met: bool | None = None
    beside: str = ""
    where: str = ""

    def open_text(self) -> str:
        """What stands in place of a figure."""
        return f"{OPEN}: `{self.command}`" if DEVICE in self.command else f"not yet measured: `{self.command}`"


def load(name: str) -> Any:
    """The content of a result file without its stamp."""
    return read_result(RESULTS / f"{name}.json")


def load_if_measured(name: str) -> Any:
    """The same; None where the script needs what not every machine has, and did not run yet."""
    return load(name) if (RESULTS / f"{name}.json").exists() else None


def load_device(name: str) -> Any:
    """The same of a script under benchmarks/device/: a rehearsal on a CPU (`--quick`) is no result."""
    found = load_if_measured(name)
    if found is None:
        return None
    parts = [found, *(found.get(k) or {} for k in ("machine", "about", "arguments"))]
    quick = any(p.get("quick") or str(p.get("torch", "")).endswith("+cpu") for p in parts)
    if quick or not any(p.get(k) for p in parts for k in (*BOARDS, "torch")):
        raise SystemExit(f"results/{name}.json is of a rehearsal without a GPU: it has no figures; remove it")
    return found


def table(goals: Iterable[Goal], *, whole: bool) -> list[str]:
    """Markdown; the short form (README) leaves out where, when and the command, which the page has."""
    last = " where, when | command |" if whole else ""
    lines = [
        f"| what | goal | reached | met | for comparison |{last}",
        "|---|---|---|---|---|" + ("---|---|" if whole else ""),
    ]
    for g in goals:
        reached, met = (g.reached, VERDICT[g.met]) if g.reached else (g.open_text(), "open")
        cells = [g.what, g.goal, reached, met, g.beside] + ([g.where, f"`{g.command}`"] if whole else [])
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return lines


# -- where and when ----------------------------------------------------------------------------------------------


def where(name: str, recorded_on: str = "") -> str:
    """The machine and the day of a result file, from its stamp.

    `recorded_on` is the board of recordings that a script without a GPU reads.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return ""
    stamp = json.loads(path.read_text())["stamp"]
    return f"{recorded_on or stamp['machine']}, {stamp['date']}"


# -- figures -----------------------------------------------------------------------------------------------------


def short(value: float) -> str:
    """Two figures, or whole numbers from ten on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def pair(row: dict[str, float]) -> str:
    """Median (max)."""
    return f"{short(row['median'])} ({short(row['max'])})"


def within(row: dict[str, float], median: float, largest: float) -> bool:
    """Whether median and max are within their limits."""
    return row["median"] <= median and row["max"] <= largest


def pct(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f}"


def geometric(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))
