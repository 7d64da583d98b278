"""The user's settings: factors from joules to kilowatt-hours, money and CO2. They never come from a network.

::

    tessera --config KEY=VALUE  >  TESSERA_KEY  >  [tool.tessera] in pyproject.toml  >  ~/.config/tessera/config.toml

>>> from tessera import config
>>> config.load().price_per_kwh
>>> config.load().cost_of(3.6e6)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ArgumentError, did_you_mean
from .read_limits import TOML_BYTES, parse_toml, quote_value, read_bytes
from .units import J_PER_KWH, format_mass, format_watt_hours

PREFIX = "TESSERA_"
"""How the names of environment variables begin: TESSERA_PRICE_PER_KWH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyCost:
    """What joules cost by the user's factors; errors are half-widths of 90% intervals. None: no factor is set."""

    kwh: float
    kwh_error: float
    cost: float | None
    cost_error: float | None
    currency: str
    gco2e: float | None
    gco2e_error: float | None
    pue: float | None

    @property
    def text(self) -> str:
        """The cost as a screen shows it: "0.114 Wh   0.000034 EUR   0.043 g CO2e"."""
        parts = [format_watt_hours(self.kwh * J_PER_KWH)]
        if self.cost is not None:
            parts.append(f"{_format_money(self.cost)} {self.currency}".rstrip())
        if self.gco2e is not None:
            parts.append(f"{format_mass(self.gco2e)} CO2e")
        return "   ".join(parts) + (f"   with a PUE of {self.pue:g}" if self.pue is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings. `price_per_kwh` is in `currency`; `gco2e_per_kwh` is grams of CO2 equivalent, for the user's grid.

    `pue` is the power usage effectiveness of the data centre: the joules that the building draws for one joule of a
    machine. Kilowatt-hours, money and CO2 are the building's; joules on a screen are always the machine's.
    """

    price_per_kwh: float | None = None
    currency: str = ""
    gco2e_per_kwh: float | None = None
    pue: float | None = None

    def __post_init__(self) -> None:
        for name, least, example in (("price_per_kwh", 0, "0.30"), ("gco2e_per_kwh", 0, "380"), ("pue", 1, "1.2")):
            value: Any = getattr(self, name)
            if value is None:
                continue
            try:
                number = math.nan if isinstance(value, (bool, str)) else float(value) + 0.0  # -0.0 becomes 0.0
            except (TypeError, OverflowError):
                number = math.nan
            if not least <= number < math.inf:
                what = f"{name} = {quote_value(value)} is not a number of at least {least}"
                raise ArgumentError(what, fix=f"e.g. {name} = {example}")
            object.__setattr__(self, name, number)
        word: Any = self.currency  # from a file it may be anything
        if not isinstance(word, str) or not word.isprintable() or len(word) > 8:
            raise ArgumentError(f"currency = {quote_value(word)} is not a short word", fix='e.g. currency = "EUR"')

    def cost_of(self, energy_j: float, error_j: float | None = None) -> EnergyCost | None:
        """Return kilowatt-hours, money and CO2 of some joules; None without a factor, or if the joules are NaN."""
        if (self.price_per_kwh, self.gco2e_per_kwh, self.pue) == (None, None, None) or math.isnan(energy_j):
            return None
        factor = (self.pue or 1.0) / J_PER_KWH
        kwh, error = energy_j * factor, (error_j or 0.0) * factor
        price, grams = self.price_per_kwh, self.gco2e_per_kwh
        return EnergyCost(
            kwh=kwh,
            kwh_error=error,
            cost=None if price is None else kwh * price,
            cost_error=None if price is None else error * price,
            currency=self.currency,
            gco2e=None if grams is None else kwh * grams,
            gco2e_error=None if grams is None else error * grams,
            pue=self.pue,
        )


KEYS = tuple(f.name for f in dataclasses.fields(Config))


def load(folder: str | Path | None = None) -> Config:
    """Return the settings for a folder (the current one by default): each key from the first place that has it."""
    stated: dict[str, Any] = {}
    try:
        here = Path(folder or "").absolute()
    except FileNotFoundError:  # the current folder was removed: it is in no project
        here = Path("/")
    for where, values in _read_places(here):
        _check_values(where, values)
        stated = {**values, **stated}
    return Config(**stated)


def load_or_warn() -> Config:
    """Return the settings. If they cannot be read, only warn: a screen matters more than a price on it."""
    try:
        return load()
    except ArgumentError as exc:
        warnings.warn(str(exc), stacklevel=3)
        return Config()


def find_cost(energy_j: float, error_j: float | None = None) -> EnergyCost | None:
    """Return what joules cost by the present settings; None if no factor is set."""
    return load_or_warn().cost_of(energy_j, error_j)


def user_file() -> Path:
    """Return $XDG_CONFIG_HOME/tessera/config.toml, or the same in ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "tessera" / "config.toml"


def set_value(text: str) -> None:
    """Set "price_per_kwh=0.30" for this process and the processes it starts."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or key not in KEYS:
        wrong = f"is not a setting{did_you_mean(key, KEYS)}" if key not in KEYS else "has no value"
        fix = f"write KEY=VALUE, such as price_per_kwh=0.30; keys: {', '.join(KEYS)}"
        raise ArgumentError(f"--config {text!r} {wrong}", fix=fix)
    value = value.strip()
    if value:
        _check_values("--config", {key: _parse_value(f"--config {key}", key, value)})
    os.environ[PREFIX + key.upper()] = value


# -- the places -----------------------------------------------------------------------------------------------------


def _read_places(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every place that has settings, the one with the highest priority first."""
    for key in KEYS:
        text = os.environ.get(PREFIX + key.upper())
        if text:
            where = f"${PREFIX}{key.upper()}"
            yield where, {key: _parse_value(where, key, text)}
    for path in (parent / "pyproject.toml" for parent in (folder, *folder.parents)):
        where = f"[tool.tessera] of {path}"
        try:
            table = _read_section(path)
            if table is not None:
                _check_values(where, table)
                yield where, table
                break
        except ArgumentError as exc:  # only warn: the user did not name this file, and it may be somebody else's
            why = exc.what if exc.why is None else f"{exc.what} ({exc.why})"
            _warn_once(f"{where} is ignored: {' '.join(why.removeprefix(where).lstrip(': ').split())}")
    path = user_file()
    if path.is_file():
        yield str(path), _read_toml(path)


def _parse_value(where: str, key: str, text: str) -> float | str:
    try:
        return text if key == "currency" else float(text)
    except ValueError:
        raise ArgumentError(f"{where}={text!r} is not a number", fix="write it as 1.25") from None


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=5)


def _check_values(where: str, values: Mapping[str, Any]) -> None:
    """Check keys and values; an error names the place that has them."""
    for key in values:
        if key not in KEYS:
            what = f"{where} has an unknown key {quote_value(key)}{did_you_mean(key[:80], KEYS)}"
            raise ArgumentError(what, fix=f"one of: {', '.join(KEYS)}")
    try:
        Config(**values)
    except ArgumentError as exc:
        exc.what = f"{where}: {exc.what}"
        raise


def _read_section(path: Path) -> Mapping[str, Any] | None:
    """Return [tool.tessera] of a pyproject.toml; None if there is none. Other mistakes in the file are not ours.

    A file of another user is not read: anybody can put one into /tmp.
    """
    try:
        if path.stat().st_uid not in (0, os.geteuid()) or b"tool.tessera" not in read_bytes(path, TOML_BYTES):
            return None
    except (OSError, ValueError):
        return None
    table: Any = _read_toml(path)
    for name in ("tool", "tessera"):
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_bytes(path, TOML_BYTES))
    except (OSError, ValueError) as exc:
        raise ArgumentError(f"cannot read {path}", why=str(exc), fix='write lines such as: currency = "EUR"') from exc


def _format_money(amount: float) -> str:
    if amount >= 100:
        return f"{amount:,.0f}"
    if 0 < amount < 1e-4:
        return "<0.0001"
    return f"{amount:.2f}" if amount >= 0.1 else f"{amount:.2g}"
