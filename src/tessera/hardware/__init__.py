"""What chips can do and what that costs: the catalogue (`catalog/*.toml`) and the look-up in it.

The catalogue is small so far: the CPUs the modelled sensor may meet and the GPU the sensors were measured on.
"""

from __future__ import annotations

import functools
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, did_you_mean
from ..schema import Device, Figure


@functools.cache
def catalogue() -> dict[str, Device]:
    """Every device by its id."""
    folder = resources.files(__package__) / "catalog"
    devices = [_device(tomllib.loads(f.read_text())) for f in folder.iterdir() if f.name.endswith(".toml")]
    return {d.id: d for d in sorted(devices, key=lambda d: d.id)}


def lookup(name: str) -> Device:
    """The device of an id or alias; a wrong name is answered with the nearest one."""
    wanted = name.strip().lower()
    for device in catalogue().values():
        if wanted == device.id or wanted in device.aliases:
            return device
    known = [n for d in catalogue().values() for n in (d.id, *d.aliases)]
    raise ArgumentError(
        f"no device {name!r} in the catalogue{did_you_mean(wanted, known)}", fix=f"known: {', '.join(catalogue())}"
    )


def host_cpu(cpuinfo: Path = Path("/proc/cpuinfo"), threads: int | None = None) -> Device:
    """The CPU of this machine, its power scaled to the threads we see: a VM has a share, two sockets are two."""
    seen = threads or os.cpu_count() or 1
    model = _model_name(cpuinfo)
    for device in catalogue().values():
        if device.kind == "cpu" and device.threads and any(a in model.lower() for a in device.aliases):
            return _share(device, seen / device.threads)
    return _share(lookup("generic-cpu"), seen / (lookup("generic-cpu").threads or 1), name=model or None)


def _model_name(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _share(device: Device, share: float, name: str | None = None) -> Device:
    def scaled(figure: Figure | None) -> Figure | None:
        if figure is None:
            return None
        error = None if figure.error is None else figure.error * share
        return Figure(value=figure.value * share, source=figure.source, error=error, assumed=figure.assumed)

    return Device(
        id=device.id, name=name or device.name, kind=device.kind, vendor=device.vendor, aliases=device.aliases,
        tdp_w=scaled(device.tdp_w), idle_w=scaled(device.idle_w), threads=device.threads, notes=device.notes,
    )  # fmt: skip


def _device(raw: dict[str, Any]) -> Device:
    return Device(
        id=raw["id"], name=raw["name"], kind=raw["kind"], vendor=raw["vendor"],
        aliases=tuple(raw.get("aliases", ())), tdp_w=_figure(raw, "tdp_w"), idle_w=_figure(raw, "idle_w"),
        threads=raw.get("threads"), notes=raw.get("notes", {}),
    )  # fmt: skip


def _figure(raw: dict[str, Any], key: str) -> Figure | None:
    entry = raw.get(key)
    if entry is None:
        return None
    return Figure(
        value=float(entry["value"]),
        source=entry["source"],
        error=entry.get("error"),
        assumed=entry.get("assumed", False),
    )
