"""Tables of the YAML files that describe a fleet: values are checked; for an unknown key, the nearest is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, did_you_mean, is_integer, is_number
from ..read_limits import YAML_BYTES, parse_yaml, quote_value, read_bytes

Read = Callable[[Any], Any]
Keys = Mapping[str, tuple[str, Read]]
"""By a key of the file: the name of the field, and the function that makes its value."""


def load_yaml(path: Path, example: str) -> Any:
    """Return what a YAML file holds; `example` says what to write where it cannot be read."""
    try:
        return parse_yaml(read_bytes(path, YAML_BYTES))
    except OSError as error:
        raise ArgumentError(f"cannot read {str(path)!r}", why=error.strerror, fix="check the path") from None
    except ValueError as error:
        raise ArgumentError(f"cannot read {str(path)!r}", why=str(error), fix=example) from None


def prefix_error(where: object, error: ArgumentError) -> ArgumentError:
    """Return the error with the place that it is about in front."""
    return ArgumentError(f"{where}: {error.what}", why=error.why, fix=error.fix)


def check_keys(table: Any, known: Iterable[str], where: str) -> None:
    """Refuse a value that is not a table, and unknown keys."""
    known = list(known)
    if not isinstance(table, Mapping):
        fix = f"keys: {', '.join(known)}"
        raise ArgumentError(f"{where}: {quote_value(table)} is not a table of settings", fix=fix)
    for key in table:
        if key not in known:
            near = did_you_mean(key[:80], known) if isinstance(key, str) else ""
            raise ArgumentError(f"{where}: unknown key {quote_value(key)}{near}", fix=f"one of: {', '.join(known)}")


def read_section(table: Any, keys: Keys, where: str) -> dict[str, Any]:
    """Return the values of a table by the names of fields."""
    check_keys(table, keys, where)
    values = {}
    for key, value in table.items():
        name, read = keys[key]
        try:
            values[name] = read(value)
        except ArgumentError as error:
            raise prefix_error(f"{where}.{key}", error) from None
        except (TypeError, ValueError):
            raise ArgumentError(f"{where}.{key}: cannot use {quote_value(value)}") from None
    return values


def build(kind: type[Any], table: Any, keys: Keys, where: str) -> Any:
    """Build an object from a table; errors name the table."""
    values = read_section(table, keys, where)
    try:
        return kind(**values)
    except ArgumentError as error:
        raise prefix_error(where, error) from None
    except TypeError:
        needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory]
        raise ArgumentError(f"{where}: needs {', '.join(needed) or 'more keys'}") from None


def list_tables(value: Any, where: str, example: str) -> list[Any]:
    """Return the tables of a list."""
    if not isinstance(value, list):
        raise ArgumentError(f"{where} is not a list", fix=f"{where}: [{example}]")
    return value


def check_names(names: Iterable[str]) -> None:
    """Refuse two jobs with the same name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ArgumentError(f"two jobs have the same name, {name!r}", fix="give each job a name of its own")
        seen.add(name)


def read_whole(value: Any) -> int:
    """Return a whole number from 1 on."""
    if not is_integer(value) or value < 1:
        raise ArgumentError(f"{quote_value(value)} is not a whole number from 1 on")
    return value


def read_count(value: Any) -> int:
    """Return a whole number, or 0."""
    return 0 if value == 0 and not isinstance(value, bool) else read_whole(value)


def read_number(value: Any) -> float:
    """Return a plain number."""
    if not is_number(value):
        raise ArgumentError(f"{quote_value(value)} is not a number")
    return float(value)


def read_text(value: Any) -> str:
    """Return text."""
    if not isinstance(value, str):
        raise ArgumentError(f"{quote_value(value)} is not text")
    return value


def read_bool(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{quote_value(value)} is not true or false")
    return value


def keep(value: Any) -> Any:
    """Return the value as it is in the file; its user checks it."""
    return value
