"""The modules of a model as a tree, with what each module and everything inside it launched; or two trees compared.

::

    GPT                                 modules of one class in one place are one line, however many layers there are,
      Block  x 12                       so that trees of two recordings match, whatever the numbers of their modules
        Attention  x 12
          Linear  x 24

Modules are those that torch's Python tracer saw (`with_stack=True` or `with_modules=True`), or `tessera run --modules`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..joules import Floats
from ..profile.open_recording import Progress, open_recording
from ..recording import Recording
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.kineto import MODULE
from .devices import explain_no_power, row_joules
from .mean_step import self_time
from .result import Result, columns

Path = tuple[str, ...]
NO_MODULES = (
    "the recording has no modules: tessera run --modules, or torch.profiler.profile(with_stack=True, with_modules=True)"
)
_NUMBERED = re.compile(r"_\d+$")
_COLUMNS = columns(
    ("name", "module", "indented by where it is"),
    ("instances", "instances"),
    ("calls", "calls"),
    ("time_s", "time", "of what it and everything inside it launched"),
    ("share_pct", "share"),
    ("self_s", "its own", "without the modules inside it"),
)
_JOULES = columns(("energy_j", "energy"))
_DIFF_COLUMNS = columns(
    ("name", "module", "indented by where it is"),
    ("before_s", "before"),
    ("after_s", "after"),
    ("change_s", "change"),
    ("change_pct", "change, %"),
    ("self_change_s", "its own", "without the modules inside it"),
    ("calls", "calls"),
    ("after_calls", "calls after"),
)
_DIFF_JOULES = columns(("before_j", "energy before"), ("after_j", "energy after"))


@dataclass(slots=True)
class ModuleSum:
    """The modules of one class in one place. Seconds and joules are those of what they launched."""

    time_s: float = 0.0
    self_s: float = 0.0
    energy_j: float = 0.0
    calls: int = 0
    names: set[str] = field(default_factory=set)


def sum_own(timeline: Timeline, rows: Ints, values: Floats) -> dict[int, float]:
    """Of each pass of a module what its rows sum to, without those of the modules inside it."""
    innermost, inverse = np.unique(timeline.linked.module[rows], return_inverse=True)
    own = np.bincount(np.asarray(inverse).reshape(-1), weights=values, minlength=len(innermost))
    return {m: value for m, value in zip(innermost.tolist(), own.tolist(), strict=True) if m != NONE}


def sum_passes(timeline: Timeline, rows: Ints, values: Floats) -> dict[int, float]:
    """Return, for each pass of a module, the sum over its rows and those of the modules inside it."""
    links, sums = timeline.linked, dict[int, float]()
    for module, value in sum_own(timeline, rows, values).items():
        for row in links.path(module):
            sums[row] = sums.get(row, 0.0) + value
    return sums


def read_tree(recording: Recording) -> dict[Path, ModuleSum]:
    """Return seconds, joules and calls by the classes of a module and of all modules around it."""
    timeline, table = recording.timeline, recording.find_energy()
    rows, seconds = self_time(timeline)
    links = timeline.linked
    tree: dict[Path, ModuleSum] = {}
    paths: dict[int, Path] = {}

    def path_of(row: int) -> Path:
        if row not in paths:
            outer = int(links.parent[row])
            paths[row] = (*(path_of(outer) if outer != NONE else ()), _class_of(timeline.name(row)))
        return paths[row]

    for row, value in sum_passes(timeline, rows, seconds).items():
        line = tree.setdefault(path_of(row), ModuleSum())
        line.time_s += value
        line.calls += 1
        line.names.add(timeline.name(row))
    if table is not None:
        for row, value in sum_passes(timeline, rows, row_joules(timeline, rows, table)).items():
            tree[path_of(row)].energy_j += value
    for row, value in sum_own(timeline, rows, seconds).items():
        tree[path_of(row)].self_s += value
    return tree


def modules(trace: Any, *, against: Any = None, power: Any = None, progress: Progress | None = None) -> Result:
    """Return the tree of modules with what each launched; with `against`, how another recording's differs, per step.

    Backward work belongs to the module of its forward. Rows are in the order of the tree, the longest first (with
    `against`, those that changed most).

    >>> analyze.modules("before.json.gz", against="after.json.gz").top(5, by="change_s")
    """
    recording = open_recording(trace, power=power, progress=progress)
    tree = read_tree(recording)
    if against is not None:
        return _compare(recording, open_recording(against, progress=progress), tree)
    whole_s = sum(line.time_s for path, line in tree.items() if len(path) == 1)
    has_joules = recording.find_energy() is not None
    rows = [
        {
            **_describe_place(path), "instances": len(tree[path].names), "calls": tree[path].calls,
            "time_s": tree[path].time_s,
            "share_pct": 100.0 * tree[path].time_s / whole_s if whole_s else None, "self_s": tree[path].self_s,
            "energy_j": tree[path].energy_j if has_joules else None,
        }
        for path in _order({path: line.time_s for path, line in tree.items()})
    ]  # fmt: skip
    missing = {} if rows else {"modules": NO_MODULES}
    if rows and not has_joules:
        missing["energy"] = explain_no_power(recording)
    return Result(
        kind="modules",
        title=f"Modules of {recording.facts.name}",
        columns=(*_COLUMNS, *(_JOULES if has_joules else ())),
        rows=rows,
        facts={"time_s": whole_s, "modules": sum(r["instances"] for r in rows)},
        notes=recording.notes,
        missing=missing,
    )


def _compare(before: Recording, after: Recording, tree: dict[Path, ModuleSum]) -> Result:
    other = read_tree(after)
    counts = [len(r.timeline.linked.steps) for r in (before, after)]
    per_step = all(counts)
    first, second = (float(n) if per_step else 1.0 for n in counts)
    none = ModuleSum()
    weight: dict[Path, float] = {}
    for path in {**tree, **other}:
        weight[path] = abs(other.get(path, none).time_s / second - tree.get(path, none).time_s / first)
    with_joules = all(r.find_energy() is not None for r in (before, after))
    rows: list[dict[str, Any]] = []
    for path in _order(weight):
        a, b = tree.get(path, none), other.get(path, none)
        before_s, after_s = a.time_s / first, b.time_s / second
        rows.append(
            {
                **_describe_place(path), "before_s": before_s, "after_s": after_s, "change_s": after_s - before_s,
                "change_pct": 100.0 * (after_s / before_s - 1.0) if before_s > 0 else None,
                "self_change_s": b.self_s / second - a.self_s / first, "calls": a.calls / first,
                "after_calls": b.calls / second, "before_j": a.energy_j / first if with_joules else None,
                "after_j": b.energy_j / second if with_joules else None,
            }
        )  # fmt: skip
    facts = {
        "per": "step" if per_step else "recording",
        "before_s": sum(r["before_s"] for r in rows if not r["depth"]),
        "after_s": sum(r["after_s"] for r in rows if not r["depth"]),
    }
    return Result(
        kind="modules",
        title=f"Modules of {before.facts.name} and {after.facts.name}, per {facts['per']}",
        columns=(*_DIFF_COLUMNS, *(_DIFF_JOULES if with_joules else ())),
        rows=rows,
        facts=facts,
        notes=[*before.notes, *(n for n in after.notes if n not in before.notes)],
        missing={} if rows else {"modules": NO_MODULES},
    )


def _describe_place(path: Path) -> dict[str, Any]:
    depth = len(path) - 1
    return {"name": f"{'  ' * depth}{path[-1]}", "path": "/".join(path), "depth": depth, "kind": "module"}


def _order(weight: dict[Path, float]) -> list[Path]:
    """Return paths in printing order: each before those inside it, and siblings by weight."""

    def key(path: Path) -> list[tuple[float, str]]:
        return [(-weight.get(path[: i + 1], 0.0), path[i]) for i in range(len(path))]

    return sorted(weight, key=key)


def _class_of(name: str) -> str:
    """Return a module's class: Linear for "nn.Module: Linear_3"; a hook's own name stays, without its number."""
    return _NUMBERED.sub("", name.removeprefix(MODULE)) or name
