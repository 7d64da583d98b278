"""Loads the catalogue (the package's `catalog/*.toml`, with the user's own files on top) and finds devices in it.

A user's `$XDG_CONFIG_HOME/tessera/hardware/*.toml` (default `~/.config`) adds a device. With the id of an existing
device, it replaces just the figures that it gives. Such a figure names its file in its source, the device in `origin`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..device import Device
from ..errors import ArgumentError, did_you_mean
from ..output import replace_when_written
from .load import Table, bad, build, merge, read

_PACKAGED = "the catalogue"
_NEAREST = 3
# Words of a board's name that say nothing about the chip; "VF" is a virtual function of it, as a cloud rents it out.
_MARKETING = ("nvidia", "tesla", "geforce", "amd", "instinct", "intel(r)", "intel", "vf", "")
_MOST_BYTES = 1 << 20  # of a user's file: the longest of the catalogue has 3 KB


def catalogue() -> Mapping[str, Device]:
    """Return every device by its id. The user's files are read again when they change."""
    return _load_catalogue(tuple((path, path.stat().st_mtime_ns) for path in user_files()))


def lookup(name: str) -> Device:
    """Return the device of an id or alias, e.g. "a100-80gb-sxm", or of a named power mode, e.g. "jetson-orin@15W".

    A power limit or a clock that the driver would set works too: "h200@400W", "h200@1200MHz".

    The error for a wrong name has the nearest one.
    """
    wanted, _, point = name.strip().partition("@")
    wanted = wanted.lower()
    devices = catalogue()
    for device in devices.values():
        if wanted == device.id or wanted in device.aliases:
            return device.at(point) if point else device
    with contextlib.suppress(ArgumentError):  # a board's name as its driver gives it
        device = identify_board(wanted)
        return device.at(point) if point else device
    raise _unknown(name, devices)


def _unknown(name: str, devices: Mapping[str, Device]) -> ArgumentError:
    """Return the error for an unknown name, with the nearest known ones."""
    import difflib

    wanted = name.strip().lower().partition("@")[0]
    names = [n for d in devices.values() for n in (d.id, *d.aliases)]
    # An H100 with another memory is nearer to an H100 than to an A100.
    model = next(iter(_plain_name(wanted).split()), "")
    names = [n for n in names if model in n] or names
    near = difflib.get_close_matches(wanted, devices, n=_NEAREST, cutoff=0.4)
    if wanted in ("cpu", "host"):
        near = [name for name, device in devices.items() if device.kind == "cpu" and device.threads]
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return ArgumentError(
        f"no device {name!r} in the catalogue{did_you_mean(wanted, names)}",
        # The folder stands on a line of its own below the first one's text, because its path may be long.
        fix=f"{nearest}`tessera hardware list` shows them all;\n"
        f"       or describe it in a file of your own in {user_folder()}",
    )


def identify_board(board: str) -> Device:
    """Return the device for a board's name as its driver gives it ("NVIDIA A100-SXM4-80GB")."""
    name = _plain_name(board)
    for device in catalogue().values():
        if any(name == _plain_name(alias) for alias in (device.id, device.name, *device.aliases)):
            return device
    for device in catalogue().values():  # "Tesla V100-SXM2-32GB": a known name and its memory
        for alias in (device.id, *device.aliases):
            rest = name.removeprefix(_plain_name(alias) + " ")
            if rest != name and _is_memory_of(device, rest):
                return device
    raise ArgumentError(
        f"the catalogue does not know the GPU {board!r}",
        why="predictions need the figures of the chip, and this one has none",
        fix=f"describe it in {user_folder()}/my-gpu.toml with aliases = [{board.lower()!r}] "
        "(peaks, memory, clocks, tdp_w, as `tessera hardware show h200 --json` has them), then try again",
    )


def _plain_name(name: str) -> str:
    words = re.split(r"[\s\-_]+", name.strip().lower())
    return " ".join(word for word in words if word not in _MARKETING)


def _is_memory_of(device: Device, rest: str) -> bool:
    """Return whether the words after a known name describe its memory correctly."""
    for word in rest.split():
        size = re.fullmatch(r"(\d+)gb", word)
        if size is None and not word.startswith("hbm"):
            return False
        capacity = device.memory.capacity_bytes
        if size is not None and (capacity is None or abs(capacity.value / (int(size[1]) * 1e9) - 1) > 0.15):
            return False
    return True


def user_folder() -> Path:
    """Return the folder of the user's own device files."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "tessera" / "hardware"


def user_files() -> list[Path]:
    """Return the user's device files, in the order in which they are laid over the catalogue."""
    return sorted(path for path in user_folder().glob("*.toml") if path.is_file())


def add_file(path: Path, *, force: bool = False) -> tuple[Device, Path]:
    """Check the description of a chip, and copy it to the user's folder. Return the device and its file."""
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}", fix="give the TOML file of a chip")
    text = _text(path)
    table = read(text, str(path))
    _sign(table, path)
    key = table["id"]
    packaged = _read_packaged()
    device = build(merge(packaged[key], table) if key in packaged else table, str(path), (str(path),))
    if Path(key).name != key or key.startswith("."):
        raise bad(str(path), "id", f"{key!r} cannot be the name of a file", fix="give it a plain id")
    target = user_folder() / f"{key}.toml"
    if target.exists() and not force:
        raise ArgumentError(f"{target} already exists", fix="add --force to replace it")
    with replace_when_written(target, make_folder=True) as draft:
        draft.write_text(text, encoding="utf-8")
    try:
        catalogue()
    except ArgumentError:  # an alias that another chip has: the catalogue must stay readable
        target.unlink()
        raise
    return device, target


@functools.cache
def _read_packaged() -> dict[str, Table]:
    folder = resources.files(__package__) / "catalog"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    tables = [read(f.read_text(encoding="utf-8"), f.name) for f in files]
    return {table["id"]: table for table in tables}


@functools.lru_cache(maxsize=4)
def _load_catalogue(user: tuple[tuple[Path, int], ...]) -> Mapping[str, Device]:
    tables = dict(_read_packaged())
    origins = dict.fromkeys(tables, (_PACKAGED,))
    for path, _ in user:
        over = read(_text(path), str(path))
        _sign(over, path)
        key = over["id"]
        tables[key] = _without_stale_notes(merge(tables[key], over), over) if key in tables else over
        origins[key] = (*origins.get(key, ()), str(path))
    devices: dict[str, Device] = {}
    taken: dict[str, str] = {}
    for key in sorted(tables):
        file = f"{key}.toml" if origins[key] == (_PACKAGED,) else origins[key][-1]
        device = devices[key] = build(tables[key], file, origins[key])
        for name in (device.id, *device.aliases):
            if name in taken:
                raise bad(file, "aliases", f"{name!r} is already {taken[name]!r}", fix="give it another name")
            taken[name] = device.id
    return MappingProxyType(devices)


def _without_stale_notes(merged: Table, over: Table) -> Table:
    """Drop the notes ("not found", "a single reading") about figures that the user's file replaces."""
    own = over.get("notes", {})
    notes = {key: text for key, text in merged.get("notes", {}).items() if key in own or not _has_key(over, key)}
    return {**merged, "notes": notes}


def _has_key(table: Table, key: str) -> bool:
    value: Any = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value is not None


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise bad(str(path), "", "is too large for the description of a chip")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise bad(str(path), "", f"cannot be read: {exc}", fix="make it readable, or move it away") from None


def _sign(table: Table, path: Path) -> None:
    """Add the user's file to the source of each of its figures; without a source, the file is the source."""
    for value in table.values():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict):
                _sign(entry, path)
    if "value" in table:
        source = table.get("source")
        table["source"] = f"{source} ({path})" if isinstance(source, str) and source else f"given in {path}"
