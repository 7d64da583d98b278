"""Reads the power policies of a YAML file: shaping, rack governors, thermal limits, the utility's limits.

::

    power_shaper:        {jitter_ms: [1, 5], phase_shift: {dp_groups: auto, pp_stages: round_robin}, cap_rate: 0.85}
    rack_power_governor: {rack_cap_kw: 20, soft_start: 60s, per_rack_jitter_ms: [10, 50], breaker_margin: 0.8}
    thermal_policy:      {hotspot_threshold: 85C, prefer_cool_nodes: true, cooling_budget_kw: {aisle1: 120}}
    utility_spec:        {ramp_mw_per_s: 10, dynamic_range_mw: 15, band_hz: [0.1, 20], band_share: 0.2}

One file may have any of them. Every quantity has a unit: in its key (`rack_cap_kw: 20`) or in its text
(`rack_cap: 20kW`). After reading, all are SI: `policies.rack_power_governor.rack_cap_w == 20000.0`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from .errors import ArgumentError, PolicyError, did_you_mean, is_number
from .read_limits import YAML_BYTES, parse_yaml, quote_value, read_bytes
from .units import (
    format_duration,
    format_power,
    format_power_rate,
    format_temperature,
    parse_duration,
    parse_fraction,
    parse_frequency,
    parse_power,
    parse_power_rate,
    parse_temperature,
    with_unit,
)

Range: TypeAlias = tuple[float, float]
GroupShift: TypeAlias = Literal["auto", "round_robin"] | float | None
"""How groups are shifted against each other. "auto": as few phases as cancel the swing of the job. "round_robin": a
phase for each group, spread over the whole period. A number: seconds between two groups. None: not shifted."""
GROUP_SHIFTS = ("auto", "round_robin")
_SHIFT_FIX = '"auto", "round_robin", "off", or the time between two groups such as "2ms"'
_NO_RANGE: Range = (0.0, 0.0)
_MOST_SHOWN = 20  # mistakes of one file that are shown
# Least and most value of each field; a range is a pair of such values. Shares must be above zero, since zero would mean
# that nothing may run. The hottest silicon works at 150 °C.
_LIMITS: dict[str, tuple[float, float]] = {
    "jitter_s": (0.0, 60.0),
    "per_rack_jitter_s": (0.0, 3600.0),
    "cap_rate": (1e-3, 1.0),
    "psu_limit_w": (1.0, 1e9),
    "power_floor_w": (0.0, 1e9),
    "max_ramp_w_per_s": (1e-3, 1e12),
    "rack_cap_w": (1.0, 1e12),
    "soft_start_s": (0.0, 86400.0),
    "breaker_margin": (1e-3, 1.0),
    "hotspot_threshold_c": (0.0, 150.0),
    "cooling_budget_w": (0.0, 1e12),
    "ramp_w_per_s": (1e-3, 1e12),
    "dynamic_range_w": (0.0, 1e12),
    "band_hz": (0.0, 1e6),
    "band_share": (0.0, 1.0),
    "crest_factor": (1.0, 1e3),
    "dp_groups": (0.0, 3600.0),
    "tp_groups": (0.0, 3600.0),
    "pp_stages": (0.0, 3600.0),
}


_FORMATS = {"_w_per_s": format_power_rate, "_w": format_power, "_s": format_duration, "_c": format_temperature}


def _show(name: str, value: float) -> str:
    """Return a value as text, with the unit that its field's name ends in."""
    field = name.partition(".")[0]
    return next((show(value) for end, show in _FORMATS.items() if field.endswith(end)), f"{value:g}")


def _check_number(name: str, value: Any, limits: tuple[float, float]) -> float:
    number = value if is_number(value) else math.nan
    if not limits[0] <= number <= limits[1]:
        low, high = (_show(name, limit) for limit in limits)
        raise PolicyError(f"{name} = {_show(name, number)} is not from {low} to {high}")
    return float(number)


def _check_range(name: str, value: Any, limits: tuple[float, float]) -> Range:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise PolicyError(f"{name} = {quote_value(value)} is not a pair of numbers", fix="[low, high], such as [1, 5]")
    low, high = (_check_number(name, v, limits) for v in value)
    if low > high:
        raise PolicyError(f"{name} = {_show(name, low)} to {_show(name, high)} begins above its end", fix="[low, high]")
    return low, high


def _check_shift(name: str, value: Any) -> GroupShift:
    if value is None or value in GROUP_SHIFTS:
        return value  # type: ignore[no-any-return]
    if isinstance(value, str):
        raise PolicyError(
            f"{name} = {quote_value(value)} is not a way to shift groups{did_you_mean(value[:40], GROUP_SHIFTS)}",
            fix=_SHIFT_FIX,
        )
    return _check_number(name, value, _LIMITS[name])


class _Checked:
    """Checks every field of a policy when it is made."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if value is not None and item.name in _LIMITS:
                object.__setattr__(self, item.name, _check_field(item.name, value))


def _check_field(name: str, value: Any) -> Any:
    if name in ("dp_groups", "tp_groups", "pp_stages"):
        return _check_shift(name, value)
    if name in ("jitter_s", "per_rack_jitter_s", "band_hz"):
        return _check_range(name, value, _LIMITS[name])
    if name == "cooling_budget_w":
        checked = {aisle: _check_number(f"{name}.{aisle}", w, _LIMITS[name]) for aisle, w in value.items()}
        return MappingProxyType(checked)
    return _check_number(name, value, _LIMITS[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseShift(_Checked):
    """How the groups of a job are shifted in time: data-parallel, tensor-parallel, and pipeline stages."""

    dp_groups: GroupShift = None
    tp_groups: GroupShift = None
    pp_stages: GroupShift = None

    @property
    def is_off(self) -> bool:
        """Whether nothing is shifted."""
        return self.dp_groups is None and self.tp_groups is None and self.pp_stages is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerShaper(_Checked):
    """How a job smooths its own power.

    `jitter_s`: a random wait at each microbatch, from this range. `cap_rate`: the share of `psu_limit_w` that a node
    may draw; at `psu_limit_w` its power supplies switch off. `power_floor_w` and `max_ramp_w_per_s` are for one GPU:
    work without a result keeps its power from falling below the former, or falling faster than the latter.
    """

    jitter_s: Range = _NO_RANGE
    phase_shift: PhaseShift = PhaseShift()
    cap_rate: float | None = None
    psu_limit_w: float | None = None
    power_floor_w: float | None = None
    max_ramp_w_per_s: float | None = None

    @property
    def node_cap_w(self) -> float | None:
        """What a node may draw; None without `cap_rate` or `psu_limit_w`."""
        return None if self.cap_rate is None or self.psu_limit_w is None else self.cap_rate * self.psu_limit_w


@dataclass(frozen=True, slots=True, kw_only=True)
class RackPowerGovernor(_Checked):
    """How the jobs of a rack share its power.

    `breaker_margin` is the share of `rack_cap_w` that is given out. `soft_start_s` is the time in which a job rises to
    its full power. `per_rack_jitter_s` is the random delay with which a rack begins.
    """

    rack_cap_w: float
    soft_start_s: float = 0.0
    per_rack_jitter_s: Range = _NO_RANGE
    breaker_margin: float = 0.8  # as in the guide's example, and in codes for a continuous load (NEC 210.20)

    @property
    def usable_w(self) -> float:
        """What the jobs may draw together."""
        return self.rack_cap_w * self.breaker_margin


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalPolicy(_Checked):
    """Where jobs are placed and when they leave, by temperature. `cooling_budget_w` is the heat each aisle can take."""

    hotspot_threshold_c: float | None = None
    redistribute: bool = False
    prefer_cool_nodes: bool = False
    migration_on_overheat: bool = False
    cooling_budget_w: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilitySpec(_Checked):
    """What the utility allows at the feed: how fast and how far power may change, and how much may oscillate.

    `band_share` is the share of the power's variance that may lie within `band_hz`, as `analyze.power` computes it.
    """

    ramp_w_per_s: float | None = None
    dynamic_range_w: float | None = None
    band_hz: Range | None = None
    band_share: float | None = None
    crest_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policies of one file; None for each that the file does not have."""

    power_shaper: PowerShaper | None = None
    rack_power_governor: RackPowerGovernor | None = None
    thermal_policy: ThermalPolicy | None = None
    utility_spec: UtilitySpec | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain SI values, for JSON; absent policies are left out."""
        return {
            item.name: _plain(getattr(self, item.name))
            for item in dataclasses.fields(self)
            if getattr(self, item.name) is not None
        }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


# -- keys of the file ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of a file: the field that it fills, and the function that converts its value to SI."""

    field: str
    read: Callable[[Any], Any]


def _number_in(factor: float) -> Callable[[Any], Any]:
    """Return a function that reads a number whose unit is in its key."""

    def read(value: Any) -> float:
        try:
            # YAML reads 1e3 as text; it expects 1.0e+3.
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            why = "the key already has the unit" if isinstance(value, str) else None
            raise PolicyError(f"{quote_value(value)} is not a number that can be used", why=why)
        return number * factor

    return read


def _pair_of(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_pair(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise PolicyError(f"{quote_value(value)} is not a pair", fix="[low, high], such as [1, 5]")
        return [read(item) for item in value]

    return read_pair


def _map_of(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_map(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise PolicyError(f"{quote_value(value)} is not a value for each aisle", fix="{aisle1: 120}")
        return {str(name): read(item) for name, item in value.items()}

    return read_map


def _quantity(
    base: str,
    name: str,
    parse: Callable[[str | float], float],
    suffixes: Mapping[str, float],
    many: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lambda read: read,
) -> dict[str, _Key]:
    """Return the keys of one quantity: `rack_cap` with the unit in its text, `rack_cap_kw` with the unit in the key."""
    keys = {base: _Key(name, many(with_unit(parse)))}
    return keys | {f"{base}_{end}": _Key(name, many(_number_in(factor))) for end, factor in suffixes.items()}


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{quote_value(value)} is not true or false")
    return value


def _read_share(value: Any) -> float:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return parse_fraction(value)
    raise PolicyError(f"{quote_value(value)} is not a share", fix="0.85 or 85%")


def _read_shift(value: Any) -> GroupShift:
    if value is False or value == "off":  # YAML reads a bare off as false
        return None
    if isinstance(value, str) and value[:1].isdigit():
        return parse_duration(value)
    if isinstance(value, str):
        return value  # type: ignore[return-value]  # checked when the policy is made
    raise PolicyError(f"{quote_value(value)} is not a way to shift groups", fix=_SHIFT_FIX)


def _read_phase_shift(value: Any) -> PhaseShift:
    keys = {name: _Key(name, _read_shift) for name in ("dp_groups", "tp_groups", "pp_stages")}
    mistakes: list[PolicyError] = []
    values = _read_section(value, keys, mistakes)
    if mistakes:
        raise mistakes[0]
    return PhaseShift(**values)


_WATTS = {"w": 1.0, "kw": 1e3, "mw": 1e6}  # "mw" means megawatts, since keys are in lower case
_WATTS_PER_S = {f"{unit}_per_s": factor for unit, factor in _WATTS.items()}
_SECONDS = {"ms": 1e-3, "s": 1.0}
_SECTIONS: dict[str, tuple[type[Any], dict[str, _Key]]] = {
    "power_shaper": (
        PowerShaper,
        {
            **_quantity("jitter", "jitter_s", parse_duration, _SECONDS, _pair_of),
            "phase_shift": _Key("phase_shift", _read_phase_shift),
            "cap_rate": _Key("cap_rate", _read_share),
            **_quantity("psu_limit", "psu_limit_w", parse_power, _WATTS),
            **_quantity("power_floor", "power_floor_w", parse_power, _WATTS),
            **_quantity("max_ramp", "max_ramp_w_per_s", parse_power_rate, _WATTS_PER_S),
        },
    ),
    "rack_power_governor": (
        RackPowerGovernor,
        {
            **_quantity("rack_cap", "rack_cap_w", parse_power, _WATTS),
            **_quantity("soft_start", "soft_start_s", parse_duration, _SECONDS),
            **_quantity("per_rack_jitter", "per_rack_jitter_s", parse_duration, _SECONDS, _pair_of),
            "breaker_margin": _Key("breaker_margin", _read_share),
        },
    ),
    "thermal_policy": (
        ThermalPolicy,
        {
            **_quantity("hotspot_threshold", "hotspot_threshold_c", parse_temperature, {"c": 1.0}),
            **{n: _Key(n, _read_bool) for n in ("redistribute", "prefer_cool_nodes", "migration_on_overheat")},
            **_quantity("cooling_budget", "cooling_budget_w", parse_power, _WATTS, _map_of),
        },
    ),
    "utility_spec": (
        UtilitySpec,
        {
            **_quantity("ramp", "ramp_w_per_s", parse_power_rate, _WATTS_PER_S),
            **_quantity("dynamic_range", "dynamic_range_w", parse_power, _WATTS),
            **_quantity("band", "band_hz", parse_frequency, {"hz": 1.0}, _pair_of),
            "band_share": _Key("band_share", _read_share),
            "crest_factor": _Key("crest_factor", _number_in(1.0)),
        },
    ),
}
POLICIES = tuple(_SECTIONS)
"""The names of the policies that a file may hold."""


# -- reading ------------------------------------------------------------------------------------------------------


def _unknown_key(key: Any, known: Iterable[str], shown: Iterable[str]) -> PolicyError:
    near = did_you_mean(key[:80], known) if isinstance(key, str) else ""
    unit = next((f"; or with its unit in the key, as {k}" for k in known if k not in shown and repr(k) in near), "")
    return PolicyError(f"unknown key {quote_value(key)}{near}", fix=f"one of: {', '.join(shown)}{unit}")


def _read_section(table: Any, keys: Mapping[str, _Key], mistakes: list[PolicyError]) -> dict[str, Any]:
    """Return the fields of a table. Mistakes are added to `mistakes`, so that all of them can be shown at once."""
    shown = list({made.field: key for key, made in list(keys.items())[::-1]}.values())[::-1]  # one key per field
    if not isinstance(table, dict):
        mistakes.append(
            PolicyError(f"{quote_value(table)} is not a table of settings", fix=f"keys: {', '.join(shown)}")
        )
        return {}
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, value in table.items():
        if key not in keys:
            mistakes.append(_unknown_key(key, keys, shown))
            continue
        name = keys[key].field
        if name in said:
            mistakes.append(PolicyError(f"{said[name]} and {key} say the same thing", fix="leave one of them out"))
        said[name] = key
        try:
            read = keys[key].read(value)
            values[name] = _check_field(name, read) if name in _LIMITS and read is not None else read
        except ArgumentError as error:
            what = error.what.removeprefix(f"{name} = ")  # the key already names the field, with the file's unit
            mistakes.append(PolicyError(f"{key}: {what}", why=error.why, fix=error.fix))
            values[name] = None
    return values


def parse_policies(table: Any, where: str = "the policy") -> Policies:
    """Return the policies of a table from YAML or JSON; an error begins with `where` and names all mistakes."""
    if not isinstance(table, dict):
        raise PolicyError(f"{where}: has no policies", fix=f"one or more of: {', '.join(POLICIES)}")
    made: dict[str, Any] = {}
    mistakes: list[PolicyError] = []
    for name, section in table.items():
        if name not in _SECTIONS:
            mistakes.append(_unknown_key(name, POLICIES, POLICIES))
            continue
        found: list[PolicyError] = []
        kind, keys = _SECTIONS[name]
        values = _read_section(section, keys, found)
        if kind is RackPowerGovernor and isinstance(section, dict) and "rack_cap_w" not in values:
            found.append(PolicyError("rack_cap is missing", fix="rack_cap_kw: 20"))
        mistakes += [PolicyError(f"{name}: {error.what}", why=error.why, fix=error.fix) for error in found]
        if not found:
            made[name] = kind(**values)
    if mistakes:
        raise _join_mistakes(mistakes, where)
    return Policies(**made)


def _join_mistakes(mistakes: list[PolicyError], where: str) -> PolicyError:
    if len(mistakes) == 1:
        return PolicyError(f"{where}: {mistakes[0].what}", why=mistakes[0].why, fix=mistakes[0].fix)
    shown = [f"{e.what}{f' (fix: {e.fix})' if e.fix else ''}" for e in mistakes[:_MOST_SHOWN]]
    more = [f"and {len(mistakes) - _MOST_SHOWN} more"] if len(mistakes) > _MOST_SHOWN else []
    return PolicyError(f"{where} has {len(mistakes)} mistakes:\n  " + "\n  ".join(shown + more))


def load_policies(path: str | Path) -> Policies:
    """Return the policies of a YAML (or JSON) file."""
    fix = "write it as docs/howto/shape-power.md shows"
    try:
        table = parse_yaml(read_bytes(Path(path), YAML_BYTES))
    except OSError as error:
        raise PolicyError(f"cannot read the policy {str(path)!r}", why=error.strerror, fix="check the path") from None
    except ValueError as error:
        raise PolicyError(f"cannot read the policy {str(path)!r}", why=str(error), fix=fix) from None
    return parse_policies(table, str(path))
