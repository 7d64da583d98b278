"""The part of benchmarks/README.md about shaping power: the shaper on real processes, floor and ramp."""

from __future__ import annotations

from typing import Any

from goal import DEVICE, Goal, load, load_device, where

RANKS = "PYTHONPATH=src nice python benchmarks/measure/shaper_ranks.py benchmarks/results/shaper_ranks.json"
PLANT = "PYTHONPATH=src python benchmarks/measure/ballast_plant.py benchmarks/results/ballast_plant.json"
BOARD = f"{DEVICE}/shape_power.py benchmarks/results/shape_power.json"
NOTES = [
    "Power of the eight processes is their CPU time in windows of 20 ms, summed by their clocks; the simulator has the same "
    "waves on eight GPUs, so ratios are compared, not watts. The synchronous job is there to fail: its replicas wait for "
    "each other, so its swing stays. A small shift only spreads the spike with which real processes begin a step.",
]


def goals() -> list[Goal]:
    return [
        *rank_goals(load("shaper_ranks")),
        *plant_goals(load("ballast_plant")),
        *board_goals(load_device("shape_power")),
    ]


def rank_goals(r: dict[str, Any]) -> list[Goal]:
    what = "the shaper on 8 real CPU processes, {}: peak and crest factor with it over without it; throughput lost, %"
    rows = []
    for name, title in (("independent", "independent replicas"), ("synchronous", "one synchronous job")):
        m, s = r[name]["measured"], r[name]["simulated"]
        lost = 100 * m["throughput_lost"]
        rows.append(
            Goal(what=what.format(title), goal="< 1; < 1; <= 5" if name == "independent" else "printed",
                 reached=f"{m['peak_ratio']:.2f}; {m['crest_ratio']:.2f}; {lost:.1f}",
                 met=(m["peak_ratio"] < 1 and m["crest_ratio"] < 1 and lost <= 5) if name == "independent" else None,
                 beside=f"the simulator: {s['peak_ratio']:.2f}; {s['crest_ratio']:.2f}",
                 where=where("shaper_ranks"), command=RANKS)
        )  # fmt: skip
    return rows


def plant_goals(p: dict[str, Any]) -> list[Goal]:
    what = "power_floor half-way, on a simulated H200 (700/125 W, 75% of 2 s): swing left; joules added, %"
    found = {k: row for k, row in p["rows"].items() if k.startswith("floor") and ", 2 s" in k}
    worst = max(row["swing_left"] for row in found.values())
    usual = next(row for k, row in found.items() if k.endswith("x 1"))
    return [
        Goal(what=what, goal="<= 0.55; printed", reached=f"{usual['swing_left']:.2f} (worst of five {worst:.2f}); {100 * usual['joules_added']:.1f}",
             met=worst <= 0.55, where=f"simulated; {where('ballast_plant')}", command=PLANT)
    ]  # fmt: skip


def describe_wave(row: dict[str, Any]) -> str:
    """What is left of the swing, and what that cost."""
    return f"{row['swing_left']:.2f}; {100 * row['joules']:.1f}; {100 * row['slower']:.1f}"


def board_goals(b: dict[str, Any] | None) -> list[Goal]:
    floor, training = (
        "power_floor and max_ramp on the H200: swing left; joules added, %; time added, %",
        "the shaper on a real training: throughput lost, %",
    )
    if b is None:
        return [
            Goal(what=floor, goal="<= 0.5; printed", command=BOARD),
            Goal(what=training, goal="<= 5", command=BOARD),
        ]
    said = {name: describe_wave(row) for name, row in b["waves"].items() if "swing_left" in row}
    both, lost = b["waves"]["floor and ramp"], 100 * b["training"]["lost"]
    return [
        Goal(what=floor, goal="<= 0.5; printed", reached=said.pop("floor and ramp"), met=both["swing_left"] <= 0.5,
             beside="; ".join(f"{name} alone: {wave}" for name, wave in said.items()), where=where("shape_power"), command=BOARD),
        Goal(what=training, goal="<= 5", reached=f"{lost:.1f}", met=lost <= 5, where=where("shape_power"), command=BOARD),
    ]  # fmt: skip
