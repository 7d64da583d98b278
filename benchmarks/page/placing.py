"""The part of benchmarks/README.md about placing and moving jobs: goals, figures reached."""

from __future__ import annotations

from typing import Any

from goal import Goal, load, where


def migration(m: dict[str, Any]) -> list[Goal]:
    here = {"command": "python benchmarks/measure/migration.py --write", "where": where("migration")}
    what = (
        "a 4-rank training job moved to other processes while it runs (FSDP2): its losses against an uninterrupted run"
    )
    same = {
        kind: [r for r in m["rows"] if r["kind"] == kind and r["ranks"][1] == 4]
        for kind in ("fsdp", "ddp-fixed", "ddp")
    }
    fixed = all(r["identical"] for r in same["ddp-fixed"])
    apart = max(r["largest_difference"] for r in same["ddp"])
    others = (
        f"DDP without bucket rebuilding {'identical' if fixed else 'not identical'}, DDP as it is within {apart:.0e}"
    )
    load = f" (the machine's load average was {m['load_average']:.0f})" if "load_average" in m else ""
    mesh = m.get("another_mesh")
    return [
        Goal(what=what, goal="identical", reached=f"{sum(r['identical'] for r in same['fsdp'])} of {len(same['fsdp'])} identical to the last bit; {others}",
             met=all(r["identical"] for r in same["fsdp"]), **here),
        Goal(what=f"the same, going on with 2 ranks: largest relative difference of a loss over {m['steps']} steps", goal="rounding (<= 1e-5)",
             reached=f"{m['resharded']:.1e}; a run of 2 ranks that never moved: {m['two_ranks_never_moved']:.1e}", met=m["resharded"] <= 1e-5, **here),
        Goal(what="the same, from a mesh of 2 data x 2 tensor parallel ranks to one of 4 x 1", goal="rounding (<= 1e-5)",
             reached="" if mesh is None else f"{mesh:.1e}", met=None if mesh is None else mesh <= 1e-5, **here),
        Goal(what="seconds lost by a move: median; of these saving, loading (the rest starts 4 processes with torch)", goal="printed",
             reached=f"{m['lost_s']:.1f}; {m['save_s']:.2f}, {m['load_s']:.2f}{load}", **here),
        Goal(what="what a step pays for being movable (a vote of all ranks, beside the work), ms", goal="printed",
             reached=f"{1e3 * m['between_steps_s']:.2f}", **here),
    ]  # fmt: skip


def packing(p: dict[str, Any]) -> list[Goal]:
    here = {"command": "python benchmarks/measure/packing.py --write", "where": where("packing")}
    rows = {(r["case"], r["load"]): r for r in p["rows"]}
    loads = sorted({r["load"] for r in p["rows"]})
    return [
        Goal(what=f"modelled, {p['nodes']} DGX H200: joules saved by packing moderate jobs against spreading, %, at {', '.join(f'{x:.0%}' for x in loads)} of the GPUs; {case}",
             goal="printed", reached=", ".join(f"{100 * rows[case, x]['saved_share']:.1f}" for x in loads), **here)
        for case in dict.fromkeys(r["case"] for r in p["rows"])
    ]  # fmt: skip


def goals() -> list[Goal]:
    return [*migration(load("migration")), *packing(load("packing"))]


NOTES = [
    "Packing is a model with the catalogue's watts, a published fit of cooling (COP) and assumed watts of sleep and fans; cooling"
    " saves the same share as the nodes, since it is in proportion to their heat. The migration was measured on a busy machine"
    " of 2 cores: its seconds are mostly those of starting Python and torch four times.",
]
