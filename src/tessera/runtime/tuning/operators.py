"""The operators of a plan: each kind's predicted share of one call's joules, and whether it needs a high clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import ArgumentError, TesseraError
from ...estimate.predict import predict
from ...hardware import identify_board, lookup
from .parts import TILE_KNOBS, Call
from .plan import OpPlan, Setting

# An operator that spends at least this many times more joules on moving bytes than on arithmetic loses little at a
# lower clock.
_MEMORY_SHARE = 2.0
_OPERATORS = 12
# The knobs that set the tile of an operator, by the kind of operator in a capture.
_TILE_KNOBS = {
    "gemm": [knob for knob, op in TILE_KNOBS.items() if op != "conv2d"],
    "conv": [knob for knob, op in TILE_KNOBS.items() if op == "conv2d"],
}


def _find_chip(board: str) -> str | None:
    """Return the catalogue's name of the device; None where it has none."""
    try:
        return None if board == "cpu" else identify_board(board).id
    except ArgumentError:
        return None


def plan_operators(
    fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], board: str
) -> tuple[list[OpPlan], list[str]]:
    """Return the operators of one call by predicted joules, with notes such as why there are none."""
    chip = _find_chip(board)
    try:
        report = predict(lambda *a: fn(*a, **dict(kwargs)), args, on=lookup(chip or "h200"), check_memory=False)
    except TesseraError as exc:
        return [], [f"no operators in the plan: {exc.what.splitlines()[0]}"]
    except Exception as exc:  # noqa: BLE001  (the user's function, run on tensors without data, may fail in any way)
        return [], [f"no operators in the plan: it cannot be captured ({type(exc).__name__})"]
    total = sum(d.total_energy_j for d in report.descriptors) or 1.0
    by_kind: dict[str, list[Any]] = {}
    for d in report.descriptors:
        by_kind.setdefault(d.kind or d.subgraph_name, []).append(d)
    rows = [_plan_operator(kind, group, total, hints=board != "cpu") for kind, group in by_kind.items()]
    rows.sort(key=lambda r: -r.share_pct)
    notes = [] if chip else ["the operators' shares are predicted for an H200: this machine's chip is not catalogued"]
    return rows[:_OPERATORS], notes


def _plan_operator(kind: str, group: Sequence[Any], total: float, *, hints: bool) -> OpPlan:
    """Return a row of the plan; on a GPU, with a hint for the clock."""
    share_pct = 100 * sum(d.total_energy_j for d in group) / total
    row = OpPlan(op=kind, calls=sum(d.calls for d in group), share_pct=share_pct)
    if not hints:
        return row
    if sum(d.memory_energy_j for d in group) > _MEMORY_SHARE * sum(d.compute_energy_j for d in group):
        return msgspec.structs.replace(row, clock="low", why="it mostly moves bytes: a lower clock costs little time")
    return msgspec.structs.replace(row, clock="high", why="it computes: it needs the clock")


def follow_setting(ops: Sequence[OpPlan], setting: Setting) -> list[OpPlan]:
    """Return the operators with the precision and the tiles of a setting."""
    precision = setting.get("precision")
    return [
        msgspec.structs.replace(
            op,
            precision=None if precision is None else str(precision),
            tile=next((str(setting[k]) for k in _TILE_KNOBS.get(op.op, ()) if setting.get(k)), None),
        )
        for op in ops
    ]
