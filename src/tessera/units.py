"""Converts quantities as people write them ("275W", "node:1.2kW", "20ms") to SI floats, and back.

Each `parse_*` accepts text, or a plain number that is already in SI, and raises `UnitError` that shows the position of
the mistake. Prefixes are case-sensitive on purpose: mW and MW are nine orders of magnitude apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import ArgumentError, UnitError, did_you_mean, is_number

_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_SPACE = re.compile(r"\s*")
_SCOPE = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*:")


# In the order in which "did you mean" lists them.
_PREFIXES = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9, "p": 1e-12, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _with_prefixes(unit: str, *prefixes: str) -> dict[str, float]:
    return {f"{prefix}{unit}": factor for prefix, factor in _PREFIXES.items() if prefix in ("", *prefixes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dimension:
    """One kind of quantity: its units with factor (and offset) to SI, and an example."""

    name: str
    units: dict[str, float]
    example: str
    show: tuple[str, ...]  # units used when writing, largest first
    minimum: float = -math.inf
    offsets: dict[str, float] = field(default_factory=dict)


_POWER = _Dimension(
    name="power",
    units=_with_prefixes("W", "m", "u", "µ", "k", "M"),
    example="'275W', '1.2kW' or '20 kW'",
    show=("MW", "kW", "W", "mW", "µW"),
    minimum=0.0,
)
_POWER_RATE = _Dimension(
    name="power ramp",
    units={
        **{f"{unit}/s": factor for unit, factor in _with_prefixes("W", "k", "M").items()},
        **{f"{unit}/min": factor / 60.0 for unit, factor in _with_prefixes("W", "k", "M").items()},
    },
    example="'200W/s', '10MW/s' or '5MW/min'",
    show=("MW/s", "kW/s", "W/s"),
    minimum=0.0,
)
J_PER_KWH = 3.6e6
_WATT_HOURS = {unit: 3600.0 * factor for unit, factor in _with_prefixes("Wh", "m", "k", "M", "G").items()}
_ENERGY = _Dimension(
    name="energy",
    units={**_with_prefixes("J", "m", "u", "µ", "n", "p", "k", "M", "G"), **_WATT_HOURS},
    example="'4.1J', '12 mJ' or '2kWh'",
    show=("GWh", "MWh", "kWh", "MJ", "kJ", "J", "mJ", "µJ", "nJ", "pJ"),  # people use kWh from one kilowatt-hour on
)
_JOULES = replace(_ENERGY, show=("GJ", "MJ", "kJ", "J", "mJ", "µJ"))
_ELECTRICITY = _Dimension(name="energy", units=_WATT_HOURS, example="'2kWh'", show=("GWh", "MWh", "kWh", "Wh", "mWh"))
_MASS = _Dimension(
    name="mass", units={**_with_prefixes("g", "m", "k"), "t": 1e6}, example="'3kg'", show=("t", "kg", "g", "mg")
)
_DURATION = _Dimension(
    name="duration",
    units={**_with_prefixes("s", "m", "u", "µ", "n"), "min": 60.0, "h": 3600.0, "d": 86400.0},
    example="'60s', '20ms', '5min', '2h' or '30d'",
    show=("s", "ms", "µs", "ns"),
    minimum=0.0,
)
_FREQUENCY = _Dimension(
    name="frequency",
    units=_with_prefixes("Hz", "k", "M", "G"),
    example="'200MHz' or '1.98GHz'",
    show=("GHz", "MHz", "kHz", "Hz"),
    minimum=0.0,
)
_BYTES = _Dimension(
    name="size",
    units={**_with_prefixes("B", "k", "M", "G", "T"), "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    example="'64MiB', '2GB' or '512B'",
    show=("TiB", "GiB", "MiB", "KiB", "B"),
    minimum=0.0,
)
_TEMPERATURE = _Dimension(
    name="temperature",
    units={"C": 1.0, "°C": 1.0, "K": 1.0, "F": 5 / 9, "°F": 5 / 9},
    offsets={"K": -273.15, "F": -32.0 * 5 / 9, "°F": -32.0 * 5 / 9},
    example="'85C' or '358K' (in degrees Celsius)",
    show=("°C",),
    minimum=-273.15,
)
_FRACTION = _Dimension(name="fraction", units={"%": 0.01, "": 1.0}, example="'5%' or '0.05'", show=("%",))


@dataclass(frozen=True, slots=True)
class ScopedPower:
    """Watts, and what they apply to: `gpu` (the default), `node`, `rack` or `cluster`."""

    scope: str
    power_w: float

    def __str__(self) -> str:
        text = format_power(self.power_w).replace(" ", "")
        return text if self.scope == "gpu" else f"{self.scope}:{text}"


POWER_SCOPES = ("gpu", "node", "rack", "cluster")


def _parse(text: str | float, dim: _Dimension, start: int = 0) -> float:
    if is_number(text):
        try:
            value = float(text)
        except OverflowError:  # an int above 1.8e308
            value = math.inf
        if not math.isfinite(value) or value < dim.minimum:
            raise UnitError(str(value), 0, f"not a possible {dim.name}", dim.example)
        return value
    if not isinstance(text, str):
        raise UnitError(repr(text), 0, f"a {dim.name} is text or a number", dim.example)
    start = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    number = _NUMBER.match(text, start)
    if not number:
        raise UnitError(text, start, "a number is expected here", dim.example)
    at = _SPACE.match(text, number.end()).end()  # type: ignore[union-attr]
    unit = text[at:].rstrip().replace("\N{GREEK SMALL LETTER MU}", "\N{MICRO SIGN}")  # keyboards have one or the other
    if unit not in dim.units:
        wrong = f"unknown unit {unit!r}" + _near_unit(unit, dim) if unit else f"a unit of {dim.name} is missing"
        raise UnitError(text, at, wrong, dim.example)
    value = float(number.group()) * dim.units[unit] + dim.offsets.get(unit, 0.0)
    if not math.isfinite(value):
        raise UnitError(text, start, "the number is too large", dim.example)
    if value < dim.minimum:
        raise UnitError(text, start, f"not a possible {dim.name} (below {dim.minimum:g})", dim.example)
    return value


def _near_unit(unit: str, dim: _Dimension) -> str:
    same_letters = [u for u in dim.units if u and u.lower() == unit.lower()]
    if same_letters:  # both mW and MW: a wrong guess would be off by nine orders of magnitude
        return f"; did you mean {' or '.join(map(repr, same_letters))}?"
    return did_you_mean(unit, [u for u in dim.units if u])


def parse_power(text: str | float) -> float:
    """Return the watts of "275W", "1.2kW", "20 kW" or a plain number of watts."""
    return _parse(text, _POWER)


def parse_power_rate(text: str | float) -> float:
    """Return the watts per second of "200W/s", "10MW/s", "5MW/min" or a plain number of watts per second."""
    return _parse(text, _POWER_RATE)


def parse_scoped_power(text: str | float) -> ScopedPower:
    """Return scope and watts of "node:1.2kW"; the scope of a bare "275W" is a GPU."""
    prefix = _SCOPE.match(text) if isinstance(text, str) else None
    if not prefix:
        return ScopedPower("gpu", _parse(text, _POWER))
    scope = prefix.group(1)
    if scope not in POWER_SCOPES:
        problem = f"unknown scope {scope!r}{did_you_mean(scope, POWER_SCOPES)}"
        raise UnitError(prefix.string, prefix.start(1), problem, f"{', '.join(POWER_SCOPES)}, then a colon and watts")
    return ScopedPower(scope, _parse(text, _POWER, prefix.end()))


def parse_energy(text: str | float) -> float:
    """Return the joules of "4.1J", "12mJ", "2kWh" or a plain number of joules."""
    return _parse(text, _ENERGY)


def parse_duration(text: str | float) -> float:
    """Return the seconds of "60s", "20ms", "5min", "30d" or a plain number of seconds."""
    return _parse(text, _DURATION)


def parse_frequency(text: str | float) -> float:
    """Return the hertz of "200MHz" or a plain number of hertz."""
    return _parse(text, _FREQUENCY)


def parse_bytes(text: str | float) -> int:
    """Return the whole bytes of "64MiB", "2GB" or a plain number of bytes."""
    return round(_parse(text, _BYTES))


def parse_temperature(text: str | float) -> float:
    """Return the degrees Celsius of "85C", "358K" or a plain number of degrees Celsius."""
    return _parse(text, _TEMPERATURE)


def parse_fraction(text: str | float) -> float:
    """Return the fraction that "5%" or "0.05" is."""
    return _parse(text, _FRACTION)


def with_unit(parse: Callable[[str | float], float]) -> Callable[[Any], float]:
    """Return a parser for values in files; it refuses a bare number, since 60 may mean seconds or minutes."""

    def read(value: Any) -> float:
        try:
            return parse(value if isinstance(value, str) else str(value))
        except UnitError as error:
            if isinstance(value, str):
                raise
            raise ArgumentError(f"{str(value)[:40]} has no unit", fix=error.fix) from None

    return read


def _format(value: float, dim: _Dimension, digits: int) -> str:
    if not math.isfinite(value):
        return str(value)
    for unit in dim.show:
        # Compare the rounded value: 999.96 W is written "1 kW" with four digits, but 999.6 W not "0.9996 kW".
        if abs(float(f"{value / dim.units[unit]:.{digits}g}")) >= 1:
            break
    else:
        plain = next((u for u in dim.show if dim.units[u] == 1.0), min(dim.show, key=len))  # "Wh", not "mWh"
        unit = dim.show[-1] if value else plain
    scaled = value / dim.units[unit]
    text = f"{scaled:.{digits}g}"
    if "e" in text and digits < 15 and abs(scaled) >= 1:  # not for smaller values, which would read "0"
        text = f"{scaled:.0f}"
    return f"{text} {unit}"


def format_power(power_w: float, digits: int = 4) -> str:
    """Watts for people: 1200 -> "1.2 kW"."""
    return _format(power_w, _POWER, digits)


def format_power_rate(rate_w_per_s: float, digits: int = 4) -> str:
    """Watts a second for people: 1e7 -> "10 MW/s"."""
    return _format(rate_w_per_s, _POWER_RATE, digits)


def format_energy(energy_j: float, digits: int = 4) -> str:
    """Joules for people: 0.0123 -> "12.3 mJ"; from a kilowatt-hour on in kWh, MWh: 4.32e9 -> "1.2 MWh"."""
    return _format(energy_j, _ENERGY, digits)


def format_joules(energy_j: float, digits: int = 4) -> str:
    """Joules for people, never in kWh: for figures that are compared and lie on both sides of a kilowatt-hour."""
    return _format(energy_j, _JOULES, digits)


def format_count(count: int, noun: str) -> str:
    """A number of things: "1 rack", "1,200 racks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def pick_energy_format(largest_j: float) -> Callable[[float, int], str]:
    """Return one format for all joules of a screen: watt-hours if the largest is a kilowatt-hour or more."""
    return format_watt_hours if largest_j >= _WATT_HOURS["kWh"] else format_energy


def format_watt_hours(energy_j: float, digits: int = 3) -> str:
    """Joules in watt-hours, as electricity is billed: 412 -> "114 mWh", 4.32e9 -> "1.2 MWh"."""
    return _format(energy_j, _ELECTRICITY, digits)


def format_mass(mass_g: float, digits: int = 3) -> str:
    """Grams for people: 1200 -> "1.2 kg"."""
    return _format(mass_g, _MASS, digits)


def format_duration(duration_s: float, digits: int = 4) -> str:
    """Seconds for people: 0.02 -> "20 ms"; from two minutes on in h, min, s."""
    if duration_s < 120 or not math.isfinite(duration_s) or digits >= 15:
        return _format(duration_s, _DURATION, digits)
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def format_share(share: float, *, signed: bool = False) -> str:
    """A share for people: 0.284 -> "28.4%"; a small one that would round to zero becomes "<0.1%"."""
    if not math.isfinite(share):
        return str(share)
    if share == 0:
        return "0%"
    if abs(share) < 0.001:
        return "<0.1%"
    sign = "+" if signed else ""
    return f"{share:{sign}.1%}" if abs(share) < 0.9995 else f"{share:{sign}.0%}"


def format_frequency(frequency_hz: float, digits: int = 4) -> str:
    """Hertz for people: 1.98e9 -> "1.98 GHz"."""
    return _format(frequency_hz, _FREQUENCY, digits)


def format_bytes(size_bytes: float, digits: int = 4) -> str:
    """Bytes for people: 67108864 -> "64 MiB"."""
    return _format(size_bytes, _BYTES, digits)


_MULTIPLES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SUBMULTIPLES = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"), (1e-12, "p"))


def format_si(value: float | None, unit: str = "", digits: int = 4, *, submultiples: bool = False) -> str:
    """A value of any unit for people: 4.8e12 -> "4.8 TB/s"; "-" if unknown. `submultiples` allows "2.1 pJ/op"."""
    if value is None or not math.isfinite(value):
        return "-"
    prefixes = (*_MULTIPLES, *_SUBMULTIPLES) if submultiples else _MULTIPLES
    fits = ((f, p) for f, p in prefixes if abs(float(f"{value / f:.{digits}g}")) >= 1)  # as it will be written
    factor, prefix = next(fits, prefixes[-1] if value else (1.0, ""))
    return f"{value / factor:.{digits}g} {prefix}{unit}".rstrip() if unit else f"{value / factor:.{digits}g}{prefix}"


def format_error(value: float, error: float | None, unit: str = "", *, signed: bool = False) -> str:
    """A value with as many digits as its error allows: "412.3 ± 1.8 W".

    Energy, power and time are never negative, so if the error is larger than the value, this becomes "0 to 7.4 W".
    Differences may be negative: for these set `signed`.
    """
    space = f" {unit}" if unit else ""
    if error is None or not error > 0:
        return f"{value:.4g}{space}"
    if 0 <= value < error and not signed:
        top = value + error
        return f"0 to {top:.{max(0, 1 - math.floor(math.log10(top)))}f}{space}"
    digits = min(max(0, 1 - int(f"{error:e}".split("e")[1])), 9)
    return f"{value:.{digits}f} ± {error:.{digits}f}{space}"


def format_energy_error(
    energy_j: float,
    error_j: float | None,
    *,
    signed: bool = False,
    show: Callable[[float, int], str] = format_energy,
) -> str:
    """Joules with their error, in the unit of the larger one: "1.20 ± 0.31 mJ"; "unknown J" if they are NaN.

    Joules with an error above their value become "0 to 1.1 J", unless they are a difference (`signed`). `show` chooses
    the unit.
    """
    if math.isnan(energy_j):
        return "unknown J"
    error = 0.0 if error_j is None or math.isnan(error_j) else error_j
    if not (math.isfinite(error) and math.isfinite(energy_j)):
        return show(energy_j, 4)
    if 0 <= energy_j < error and not signed:
        return f"0 to {show(energy_j + error, 2)}"
    unit = show(max(abs(energy_j), error), 4).split()[1]
    factor = _ENERGY.units[unit]
    return format_error(energy_j / factor, error / factor, unit, signed=signed)


def format_duration_error(duration_s: float, error_s: float | None = None) -> str:
    """Seconds with their error: "1.92 ± 0.11 ms"."""
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e-3, "ms")) if duration_s >= f * 0.9995), (1e-6, "µs"))
    return format_error(duration_s / factor, None if error_s is None else error_s / factor, unit)


def format_temperature(temperature_c: float, digits: int = 4) -> str:
    """Degrees Celsius for people."""
    return f"{temperature_c:.{digits}g} °C"
