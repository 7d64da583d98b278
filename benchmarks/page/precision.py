"""The precisions of the operators' part of benchmarks/README.md: bounds that held, what was chosen, joules saved."""

from __future__ import annotations

from collections import Counter
from typing import Any

from goal import DEVICE, Goal, where

PRECISION = f"{DEVICE}/ops_precision.py benchmarks/results/ops_precision.json"


def tolerance(e: dict[str, Any], p: dict[str, Any] | None) -> list[Goal]:
    return [*bounds_here(e), *bounds_there(p), layer_joules(p), *fp8_goals(p)]


def bounds_here(e: dict[str, Any]) -> list[Goal]:
    what, goal = "error_tolerance, random cases emulated on a CPU: bound violated", "never, 1,000 cases"
    command = "python benchmarks/measure/error_bounds.py benchmarks/results/error_bounds.json"
    here = {"where": where("error_bounds"), "command": command}
    return [
        Goal(what=what, goal=goal, reached=f"{e['violations']} of {e['cases']:,}; {e['refused']} refused",
             met=e["violations"] == 0 and e["cases"] >= 1000, **here),
        Goal(what="the same: the cheapest precision that holds was chosen, %; joules above choosing by hindsight, %",
             reached=f"{e['cheapest_chosen_pct']:.1f}; {e['joules_over_cheapest_pct']:.1f} (modelled joules)", **here),
    ]  # fmt: skip


def bounds_there(p: dict[str, Any] | None) -> list[Goal]:
    rows = []
    for part, title, least in (
        ("random", "random cases", ", 1,000 cases"),
        ("layer", "layers of GPT-2, BERT and a Llama", ""),
    ):
        what, goal = f"error_tolerance on the GPU, {title}: bound violated, chosen", f"never{least}"
        s = (p or {}).get("summary", {})
        if not s.get(f"{part}_cases"):
            rows.append(Goal(what=what, goal=goal, command=PRECISION))
            continue
        picked: Counter[str] = Counter()
        for t in ("0.05", "0.01", "0.001"):
            picked.update(s.get(f"{part}_chosen_{t}", {}))
        named = ", ".join(f"{k} {n}" for k, n in picked.most_common())
        rows.append(
            Goal(what=what, goal=goal, reached=f"{s[f'{part}_violations']} of {s[f'{part}_cases']} ({named})",
                 met=s[f"{part}_violations"] == 0 and (not least or s[f"{part}_cases"] >= 1000), where=where("ops_precision"), command=PRECISION)
        )  # fmt: skip
    return rows


def layer_joules(p: dict[str, Any] | None) -> Goal:
    what = "the same layers: joules of the chosen precisions against bf16 / fp32, % fewer, by tolerance"
    rows = (p or {}).get("rows", [])
    joules = {
        (tuple(r["shape"]), r["precision"]): r["J"] for r in rows if r.get("part") == "layer joules" and r.get("J")
    }
    said = []
    for tolerance in (5e-2, 1e-2, 1e-3):
        cases = [
            (tuple(r["shape"]), r["chosen"]) for r in rows if r.get("part") == "layer" and r["tolerance"] == tolerance
        ]
        known = [(s, c) for s, c in cases if all((s, k) in joules for k in (c, "bf16", "fp32"))]
        spent = {k: sum(joules[s, k or c] for s, c in known) for k in ("", "bf16", "fp32")}
        if known:
            said.append(
                f"{tolerance:g}: " + " / ".join(f"{100 * (1 - spent[''] / spent[k]):.0f}" for k in ("bf16", "fp32"))
            )
    return Goal(what=what, reached="; ".join(said), where=where("ops_precision") if said else "", command=PRECISION)


def fp8_goals(p: dict[str, Any] | None) -> list[Goal]:
    """fp8 in all its kinds, by what is cast at the call: activations alone, or the weight too."""
    rows = [r for r in (p or {}).get("rows", []) if r.get("part") == "joules" and r.get("J") and r["n"] >= 4096]
    joules = {(r["n"], r["precision"], r["counted"]): r["J"] for r in rows}
    return [_fp8_goal(joules, counted) for counted in ("weight prepared", "both cast")]


def _fp8_goal(joules: dict[tuple[int, str, str], float], counted: str) -> Goal:
    what, goal = f"fp8 against bf16, products of 4096 and above, {counted}: joules saved, %", ">= 35"
    found = {
        (n, precision): 100 * (1 - j / joules[n, "bf16", "bf16 operands"])
        for (n, precision, how), j in joules.items()
        if precision.startswith("fp8") and how == f"bf16 operands, {counted}" and (n, "bf16", "bf16 operands") in joules
    }
    if not found:
        return Goal(what=what, goal=goal, command=PRECISION)
    best = [max(v for (m, _), v in found.items() if m == n) for n in {n for n, _ in found}]
    said = "; ".join(f"{n}, {precision}: {v:.1f}" for (n, precision), v in sorted(found.items()))
    return Goal(
        what=what, goal=goal, reached=said, met=min(best) >= 35, where=where("ops_precision"), command=PRECISION
    )
