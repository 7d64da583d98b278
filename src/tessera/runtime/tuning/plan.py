"""`Plan`: a schedule as data. What was chosen, what was tried, and why; it saves, loads and differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import RecordingError

SCHEMA = 1
"""Version of the file; a newer one is refused."""

Value = str | int | float | bool | None
Setting = dict[str, Value]
"""What each knob is set to; a knob that is not there stands as the program has it."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One setting, measured. Figures are per call; errors are half-widths of 90% intervals; None: `refused` says why.

    `deviation` is the relative Frobenius distance of its result from the untouched function's.
    """

    setting: Setting
    seconds: float | None = None
    seconds_error: float | None = None
    energy_j: float | None = None
    energy_error_j: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    deviation: float | None = None
    prepared_s: float = 0.0
    basis: str = ""
    refused: str = ""


class OpPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the plan says of one kind of operator. `clock` is a hint for `dvfs="auto"`: "low" or "high"."""

    op: str
    calls: int
    share_pct: float
    tile: tuple[int, ...] | None = None
    stages: int | None = None
    warps: int | None = None
    precision: str | None = None
    clock: str | None = None
    why: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The schedule of one function for one machine and one kind of input.

    `key` is what it holds for: device, driver, versions of libraries, the function and the shapes of its inputs.
    """

    function: str
    policy: str
    setting: Setting
    why: dict[str, str]
    trials: list[Trial]
    ops: list[OpPlan] = []
    device: str = ""
    key: dict[str, str] = {}
    notes: list[str] = []
    spent_s: float = 0.0
    made: str = ""
    schema: int = SCHEMA

    @property
    def baseline(self) -> Trial:
        """The function as it was given."""
        return self.trials[0]

    @property
    def best(self) -> Trial:
        """What was measured of the chosen setting."""
        return next((t for t in reversed(self.trials) if t.setting == self.setting and not t.refused), self.trials[0])

    @property
    def saved_pct(self) -> float | None:
        """Joules a call saved against the function as it was; None where no joules are known."""
        a, b = self.baseline.energy_j, self.best.energy_j
        return None if not a or b is None else 100.0 * (1.0 - b / a)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        return target

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote."""
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as exc:
            raise RecordingError(
                f"cannot read the plan {path}", why=str(exc), fix="plan.save(path) writes one"
            ) from exc
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise RecordingError(f"{path} is no plan", why=str(exc), fix="plan.save(path) writes one") from exc
        if found.schema > SCHEMA:
            raise RecordingError(
                f"{path} is of a newer Tessera",
                why=f"version {found.schema}, known {SCHEMA}",
                fix="upgrade, or tune again",
            )
        return found

    def diff(self, other: Plan) -> list[str]:
        """What differs from another plan, in words; empty where nothing does."""
        return list(_differences(self, other))

    def __str__(self) -> str:
        from ...report.plan import text

        return text(self)


def _differences(a: Plan, b: Plan) -> Iterator[str]:
    for name in ("function", "policy", "device"):
        if getattr(a, name) != getattr(b, name):
            yield f"{name}: {getattr(a, name)} -> {getattr(b, name)}"
    for knob in sorted(a.setting.keys() | b.setting.keys()):
        if a.setting.get(knob) != b.setting.get(knob):
            yield f"{knob}: {shown(a.setting.get(knob))} -> {shown(b.setting.get(knob))}"
    mine, theirs = ({o.op: o for o in plan.ops} for plan in (a, b))
    for op in sorted(mine.keys() | theirs.keys()):
        before, after = mine.get(op), theirs.get(op)
        if before is None or after is None:
            yield f"{op}: {'gone' if after is None else 'new'}"
            continue
        for name in ("tile", "stages", "warps", "precision", "clock"):
            if getattr(before, name) != getattr(after, name):
                yield f"{op}.{name}: {shown(getattr(before, name))} -> {shown(getattr(after, name))}"
    for name, unit in (("seconds", "s"), ("energy_j", "J")):
        x, y = getattr(a.best, name), getattr(b.best, name)
        if x and y and abs(y / x - 1) > 0.005:
            yield f"a call: {x:.4g} {unit} -> {y:.4g} {unit} ({100 * (y / x - 1):+.1f}%)"


def shown(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "as it is"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def same(a: Mapping[str, Value], b: Mapping[str, Value]) -> bool:
    """Whether two settings do the same."""
    return {k: v for k, v in a.items() if v is not None} == {k: v for k, v in b.items() if v is not None}
