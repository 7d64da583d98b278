"""One goal of the proof page: what was asked, the figure reached, where and when, who stands beside it, the command."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
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
    """The content of a results file; None where it does not exist."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def load_device(name: str) -> Any:
    """The same of a script under benchmarks/device/: a rehearsal on a CPU (`--quick`) is no result."""
    found = load(name)
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
        f"| what | goal | reached | met | beside it |{last}",
        "|---|---|---|---|---|" + ("---|---|" if whole else ""),
    ]
    for g in goals:
        reached, met = (g.reached, VERDICT[g.met]) if g.reached else (g.open_text(), "open")
        cells = [g.what, g.goal, reached, met, g.beside] + ([g.where, f"`{g.command}`"] if whole else [])
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return lines


# -- where and when ----------------------------------------------------------------------------------------------


def where(name: str, recorded_on: str = "") -> str:
    """The machine and the day of a results file: what it says itself, else where this page first saw it.

    `recorded_on` is the board of recordings that a script without a GPU reads.
    """
    content = load(name)
    if content is None:
        return ""
    inside = content if isinstance(content, dict) else {}
    about = next((inside[k] for k in ("machine", "about") if isinstance(inside.get(k), dict)), inside)
    stamp = _stamp(name)
    board = next((str(about[k]) for k in BOARDS if about.get(k)), "")
    board = board if board and board not in ("cpu", "none (CPU)") else recorded_on or stamp["machine"]
    day = about.get("date") or inside.get("date") or stamp["date"]
    return f"{board}, {day}"


def _stamp(name: str) -> dict[str, str]:
    """Machine and day of a results file that does not say them: noted when its content was first seen."""
    path = RESULTS / "stamps.json"
    known: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    seen = hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()[:16]
    if known.get(name, {}).get("sha256") != seen:
        known[name] = {"sha256": seen, "date": str(date.today()), "machine": _machine()}
        path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return known[name]


def _machine() -> str:
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = re.sub(r"\(R\)|\(TM\)| Processor| CPU", "", cpu.group(1)).strip() if cpu else "CPU"
    return f"{name}, {os.cpu_count()} cores"


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
