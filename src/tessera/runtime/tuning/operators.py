"""What a plan says of each kind of operator: its predicted share, what bounds it, and the clock it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import TesseraError
from ...estimate.predict import predict
from ...hardware.index import lookup
from .plan import OpPlan, Setting

# An operator that spends this share of its joules on moving bytes loses little at a lower clock.
_MEMORY_SHARE = 2.0
_SHOWN = 12


def operators(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str | None, setting: Setting
) -> tuple[list[OpPlan], list[str]]:
    """The operators of one call by predicted joules, and why there are none where the function cannot be captured."""
    try:
        chip = lookup(device or "h200")
        report = predict(lambda *a: fn(*a, **dict(kwargs)), args, on=chip, check_memory=False)
    except TesseraError as exc:
        return [], [f"no operators in the plan: {exc.what.splitlines()[0]}"]
    except Exception as exc:  # noqa: BLE001  (a function of the user's, run on tensors without data, may do anything)
        return [], [f"no operators in the plan: it cannot be captured ({type(exc).__name__})"]
    total = sum(d.total_energy_j for d in report.descriptors) or 1.0
    by_kind: dict[str, list[Any]] = {}
    for d in report.descriptors:
        by_kind.setdefault(d.kind or d.subgraph_name, []).append(d)
    rows = [_row(kind, group, total, setting) for kind, group in by_kind.items()]
    rows.sort(key=lambda r: -r.share_pct)
    notes = [] if device else ["the operators' shares are predicted for an H200: this machine's chip is not catalogued"]
    return rows[:_SHOWN], notes


def _row(kind: str, group: list[Any], total: float, setting: Setting) -> OpPlan:
    moved, computed = (sum(getattr(d, f"{part}_energy_j") for d in group) for part in ("memory", "compute"))
    bound = moved > _MEMORY_SHARE * computed
    why = "moving bytes is most of it: a lower clock costs little time" if bound else "arithmetic: it needs the clock"
    return OpPlan(
        op=kind, calls=sum(d.calls for d in group), share_pct=100 * sum(d.total_energy_j for d in group) / total,
        clock="low" if bound else "high", why=why, stages=_int(setting.get("cp_async_depth")),
        precision=None if setting.get("precision") is None else str(setting["precision"]),
    )  # fmt: skip


def _int(value: Any) -> int | None:
    return None if value is None else int(value)
