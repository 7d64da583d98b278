"""`Plan`: what a search chose for a function, what it tried, and why. A plan saves and loads.

Plans are stored in $XDG_CACHE_HOME/tessera/plans/<digest of what they are valid for>.json, in the owner's own folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import ArgumentError, RecordingError
from ...output import replace_when_written
from ...read_limits import read_bytes
from ...rewrite.search_cost import count_calls_to_pay
from ...rewrite.use_report import UseReport

if TYPE_CHECKING:
    from .parts import FunctionParts

SCHEMA = 2
"""Version of the file format; a newer file is refused."""
_RENAMED = {"seconds": "time_s", "seconds_error": "error_s", "energy_error_j": "error_j"}  # since version 1

Value = str | int | float | bool | None
Setting = dict[str, Value]
"""The value of each knob; a knob that is missing stays as the program has it."""


class TuningTrial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One setting and its measured figures per call.

    Errors are half-widths of 90% intervals. Figures are None if the setting was not measured: see `refused`.
    `deviation` is the relative Frobenius distance of its result from the unchanged function's.
    """

    setting: Setting
    time_s: float | None = None
    error_s: float | None = None
    energy_j: float | None = None
    error_j: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    deviation: float | None = None
    prepared_s: float = 0.0
    basis: str = ""
    refused: str = ""


class OpPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the plan says about one kind of operator.

    `clock` is a hint for `dvfs="auto"`: "low" or "high". `tile` is that of Tessera's kernel ("128x128x64"); None: the
    library chooses.
    """

    op: str
    calls: int
    share_pct: float
    precision: str | None = None
    tile: str | None = None
    clock: str | None = None
    why: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The schedule of one function for one machine and one kind of input.

    `key` says when it is valid: device, driver, versions of libraries, the function and the shapes of its inputs.
    `spent_s` and `spent_j` are what the search took; `in_use` is how the plan did in its first calls, None before them.
    """

    function: str
    policy: str
    setting: Setting
    why: dict[str, str]
    trials: list[TuningTrial]
    ops: list[OpPlan] = []
    device: str = ""
    key: dict[str, str] = {}
    notes: list[str] = []
    spent_s: float = 0.0
    spent_j: float | None = None
    in_use: UseReport | None = None
    made: str = ""
    schema: int = SCHEMA

    @property
    def baseline(self) -> TuningTrial:
        """Return the trial of the function as it was given."""
        return self.trials[0]

    @property
    def best(self) -> TuningTrial:
        """Return the measurement of the chosen setting."""
        return next((t for t in reversed(self.trials) if t.setting == self.setting and not t.refused), self.trials[0])

    @property
    def paid_after_calls(self) -> int | None:
        """Return after how many calls the search has saved what it took; None where a call saves nothing.

        Costs are those in use if the settings were compared there, else those of their trials.
        """
        used = self.in_use.find_cost() if self.in_use is not None else None
        return count_calls_to_pay(self.spent_s, self.spent_j, *(used or (self.baseline, self.best)))

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON."""
        with replace_when_written(Path(path), make_folder=True) as draft:
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        fix = "give a file that plan.save(path) wrote"
        try:
            raw = msgspec.json.decode(read_bytes(Path(path)))
            if isinstance(raw, dict) and raw.get("schema", 1) == 1:
                raw |= {"schema": SCHEMA} | {k: [_rename(row) for row in raw.get(k, ())] for k in ("trials", "ops")}
            plan = msgspec.convert(raw, type=cls)
        except OSError as exc:
            raise RecordingError(f"cannot read the plan {path}", why=str(exc), fix=fix) from exc
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as exc:
            raise RecordingError(f"{path} is not a plan", why=str(exc), fix=fix) from exc
        if plan.schema > SCHEMA:
            why = f"its version is {plan.schema}, this Tessera reads up to {SCHEMA}"
            raise RecordingError(f"{path} is from a newer Tessera", why=why, fix="upgrade, or tune again")
        return plan

    def __str__(self) -> str:
        from ...report.schedule import plan_text

        return plan_text(self)


def _rename(row: Any) -> Any:
    """Give a trial or an operator of version 1 today's names; drop its tile, which was never set."""
    return {_RENAMED.get(k, k): v for k, v in row.items() if k != "tile"} if isinstance(row, dict) else row


def format_value(value: Value) -> str:
    """Return a knob's value for people."""
    if value is None:
        return "as it is"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def format_setting(setting: Mapping[str, Value]) -> str:
    """Return a setting for people."""
    return ", ".join(f"{knob}={format_value(value)}" for knob, value in setting.items()) or "unchanged"


def is_same(a: Mapping[str, Value], b: Mapping[str, Value]) -> bool:
    """Return whether two settings do the same."""
    return {k: v for k, v in a.items() if v is not None} == {k: v for k, v in b.items() if v is not None}


# -- plans on disk ----------------------------------------------------------------------------------------------------


def plan_folder() -> Path:
    """Return the folder in which plans are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tessera" / "plans"


def plan_key(
    fn: Any, parts: FunctionParts, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, str]:
    """Return what a plan is valid for: the machine, libraries, function, modules, shapes, and schedule options."""
    import torch

    device = parts.device
    on_cuda = device is not None and device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "driver": _driver_version() if on_cuda else "",
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "triton": _package_version("triton"),
        "function": _digest(_describe_code(fn)),
        "modules": _digest(_describe_modules(parts)),
        "inputs": _describe_inputs(torch, (args, dict(kwargs))),
        "asked": json.dumps(dict(wanted), sort_keys=True, default=str),
    }


def load_plan(key: Mapping[str, str]) -> Plan | None:
    """Return the plan stored for exactly this key, if there is one that can be read."""
    try:
        plan = Plan.load(_plan_path(key))
    except RecordingError:
        return None
    return plan if plan.key == dict(key) else None


def store_plan(plan: Plan) -> Path | None:
    """Store a plan where the next process finds it; return None if the disk does not allow it."""
    with contextlib.suppress(ArgumentError):
        return plan.save(_plan_path(plan.key))
    return None


def _plan_path(key: Mapping[str, str]) -> Path:
    return plan_folder() / f"{_digest(json.dumps(dict(key), sort_keys=True))}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _describe_code(fn: Any) -> str:
    """Describe the function's own code and constants, so that an edited function is tuned again."""
    fn = inspect.unwrap(getattr(fn, "func", fn))
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return f"{type(fn).__module__}.{type(fn).__qualname__}"
    constants = [c.co_code.hex() if inspect.iscode(c) else repr(c) for c in code.co_consts]
    return f"{getattr(fn, '__qualname__', '')}|{code.co_code.hex()}|{code.co_names}|{constants!r}"


def _describe_modules(parts: FunctionParts) -> str:
    texts = [f"{type(m).__qualname__}:{m.training}" for m in parts.submodules()]
    texts += [f"{tuple(p.shape)}{p.dtype}{p.requires_grad}" for m in parts.modules for p in m.parameters()]
    return "|".join(texts + [type(o).__qualname__ for o in parts.optimizers])


def _describe_inputs(torch: Any, inputs: Any) -> str:
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return "; ".join(f"{tuple(t.shape)}{t.dtype}" if torch.is_tensor(t) else repr(t)[:80] for t in leaves)


def _package_version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _driver_version() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""
