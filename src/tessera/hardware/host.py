"""Finds this machine's CPU by its name in /proc/cpuinfo, and the share of it that this system sees."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from ..device import Device, Figure
from .index import catalogue, lookup


def host_cpu(cpuinfo: Path = Path("/proc/cpuinfo"), threads: int | None = None) -> Device:
    """Return this machine's CPU, scaled to the visible threads: a VM has part of a chip, two sockets are two chips."""
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
    def scale(figure: Figure | None) -> Figure | None:
        return None if figure is None else figure.scale(share)

    bandwidth = scale(device.memory.bandwidth_bytes_per_s)
    return dataclasses.replace(
        device,
        name=name or device.name,
        vector={key: figure.scale(share) for key, figure in device.vector.items()},
        matrix={key: figure.scale(share) for key, figure in device.matrix.items()},
        memory=dataclasses.replace(device.memory, bandwidth_bytes_per_s=bandwidth),
        units=scale(device.units),
        tdp_w=scale(device.tdp_w),
        idle_w=scale(device.idle_w),
    )
