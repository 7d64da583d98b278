"""A `Calibration`: factors on predicted time and energy, and watts, measured on this machine by `tessera calibrate`.

::

    calibrate ──► Calibration ──► save() ──► $XDG_CONFIG_HOME/tessera/calibration/<device>.json
                                                            │
    predict ◄── scale_kernel, scale_power, ... ◄── find() ──┘

Every factor is measured over predicted: 1 means "as predicted", 1.2 "takes a fifth longer here". How far it is drawn
towards 1 depends on how well the chip was known before (calibration_fit.py). A value that was not measured is None with
its reason; kernels that belong to no group keep their prediction.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import ArgumentError, RecordingError
from ..output import replace_when_written
from ..read_limits import read_bytes

if TYPE_CHECKING:
    from .host import HostModel
    from .iteration import Iteration
    from .kernel_time import KernelTime
    from .power import PowerModel

SCHEMA = 1
"""Version of the file; a newer one is refused."""

GROUPS = (
    *("gemm.bf16", "gemm.fp16", "gemm.fp32", "gemm.tf32", "gemm.fp8"),
    *("attention", "elementwise", "copy", "norm", "reduce", "conv"),
)
"""The groups of kernels that have a factor."""

LIMIT = "limit"
"""The group of the one product that should reach the power limit: it has no factor."""

# Kinds that are not measured, and the group whose factor they take: the same units and the same memory run them. They
# keep their own interval.
_LIKE = {
    "batch_norm": "norm",
    "softmax": "norm",
    "pool": "reduce",
    "gather": "copy",
    "scatter": "copy",
    "fill": "copy",
} | {"resample": "elementwise", "random": "elementwise", "foreach": "elementwise"}

# With this many groups, the intervals of their energies replace the power model's.
_ENOUGH_GROUPS = 4
# Static power stays below this share of the limit, whatever was read: the solver needs room above it.
_STATIC_SHARE = 0.8


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Measured over predicted, for `points` ratios: their geometric `mean`, and the `factor` that is used.

    `spread` is the relative 90% half-width of one ratio once the factor is applied. It is None where the predicted
    interval stays: after a single point, or on a chip whose interval rests on more data than these points.
    """

    factor: float
    spread: float | None
    points: int
    mean: float | None = None

    def __post_init__(self) -> None:
        for value in (self.factor, self.mean, self.spread):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"a factor must be a positive number, not {value!r}")

    def error(self, before: float) -> float:
        """The relative error after scaling: `before` where the points do not replace it."""
        return before if self.spread is None else self.spread


class Watts(msgspec.Struct, frozen=True, kw_only=True):
    """A measured power and how it was measured, or None and why not."""

    value: float | None
    how: str
    error_w: float | None = None

    def __post_init__(self) -> None:
        if self.value is not None and not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"watts must be a positive number, not {self.value!r}")


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration: the board, its host, the date, and the measured factors and watts.

    `static_w` is the board with its clocks up and its SMs waiting, `limit_w` what it sustains under a power-capped
    load, `idle_w` and `idle_context_w` the board at rest without and with a CUDA context. `received`: another machine
    measured it, and somebody sent the file.
    """

    device: str
    board: str
    driver: str | None
    torch: str
    date: str
    host_cpu: str
    host_scale: Scale | None
    time_scale: Mapping[str, Scale]
    energy_scale: Mapping[str, Scale]
    idle_w: Watts
    idle_context_w: Watts
    static_w: Watts
    limit_w: Watts
    notes: tuple[str, ...] = ()
    received: bool = False
    schema_version: int = SCHEMA

    @property
    def provenance(self) -> str:
        """The provenance of a scaled figure."""
        where = f"another {self.board}" if self.received else "this machine"
        return f"calibrated on {where}, {self.date}"

    def without_limit(self) -> Calibration:
        """The same, for a board under another power limit."""
        return msgspec.structs.replace(self, limit_w=Watts(value=None, how="another limit was asked for"))

    def scale_kernel(self, kernel: KernelTime, kind: str, precision: str) -> KernelTime:
        """A kernel's time on this machine. `precision` is the one it runs in (a what-if's, where there is one)."""
        group, own = group_of(kind, precision)
        scale = self.time_scale.get(group)
        if scale is None:
            return kernel
        like = f"{kernel.provenance}; scaled like {group}, {self.provenance}"
        return replace(
            kernel,
            seconds=kernel.seconds * scale.factor,
            clock_s=kernel.clock_s * scale.factor,
            relative_error=scale.error(kernel.relative_error) if own else kernel.relative_error,
            provenance=self.provenance if own else like,
        )

    def scale_energy(self, iteration: Iteration, work: Sequence[tuple[str, str]]) -> None:
        """Scale the dynamic energy of an iteration's kernels, in place; `work` is the kind and precision of each."""
        if not self.energy_scale:
            return
        factors = [self.energy_factor(kind, precision) for kind, precision in work]
        for name in ("busy_s", "flops_j", "hbm_j", "l2_j"):
            setattr(iteration, name, getattr(iteration, name) * factors)

    def energy_factor(self, kind: str, precision: str) -> float:
        """Measured over predicted dynamic joules; 1 where nothing was measured."""
        scale = self.energy_scale.get(group_of(kind, precision)[0])
        return scale.factor if scale is not None else 1.0

    def scale_power(self, model: PowerModel) -> PowerModel:
        """The power model with the measured limit and static power, and the interval of the measured energies."""
        limit_w = self.limit_w.value or model.limit_w
        static_w = min(self.static_w.value or model.static_w, _STATIC_SHARE * limit_w)
        error, scales = model.relative_error, self.energy_scale.values()
        if len(scales) >= _ENOUGH_GROUPS and any(s.spread is not None for s in scales):
            errors = [s.error(model.relative_error) for s in scales]
            error = math.sqrt(sum(e * e for e in errors) / len(errors))
        if (limit_w, static_w, error) == (model.limit_w, model.static_w, model.relative_error):
            return model
        provenance = f"{model.provenance}; {self.provenance}"
        return replace(model, limit_w=limit_w, static_w=static_w, relative_error=error, provenance=provenance)

    def scale_host(self, default: HostModel) -> HostModel:
        """The host model with the measured factor."""
        scale = self.host_scale
        if scale is None:
            return default
        return default.scale(scale.factor, f"{self.provenance} ({self.host_cpu})", scale.error(default.relative_error))


def group_of(kind: str, precision: str) -> tuple[str, bool]:
    """The group whose factor an operator takes, and whether it belongs to that group or is only like it."""
    if kind == "gemm":
        return f"gemm.{precision}", True
    if kind == "rnn":
        return f"gemm.{precision}", False
    return _LIKE.get(kind, kind), kind not in _LIKE


# -- the file ---------------------------------------------------------------------------------------------------


def folder() -> Path:
    """The folder of calibrations."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "tessera" / "calibration"


def path_of(device_id: str) -> Path:
    """The file of a device."""
    if not device_id or Path(device_id).name != device_id or device_id.startswith("."):
        raise ArgumentError(f"{device_id!r} cannot be the name of a calibration file", fix="give the device a plain id")
    return folder() / f"{device_id}.json"


def save(calibration: Calibration) -> Path:
    """Replace the device's calibration file atomically; returns its path."""
    path = path_of(calibration.device)
    try:
        write_calibration(calibration, path)
    except ArgumentError as exc:
        raise RecordingError(
            f"the calibration could not be written to {path}",
            why=exc.why,
            fix="make the folder writable, or set XDG_CONFIG_HOME to another folder",
        ) from exc
    return path


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration to a file, which `receive` reads."""
    with replace_when_written(path, make_folder=True) as draft:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")


def receive(path: Path, *, replace_own: bool = False) -> tuple[Calibration, Path]:
    """Keep a calibration that somebody measured elsewhere, without what it says about that host; returns its place.

    One that was measured here is replaced only if `replace_own`.
    """
    try:
        stat = path.stat()
    except OSError as exc:
        raise _unreadable(path, str(exc)) from exc
    sent = _read(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    own = find(sent.device)
    if own is not None and not own.received and not replace_own:
        raise ArgumentError(
            f"{sent.device} is calibrated on this machine already",
            why=f"{path_of(sent.device)} was measured here on {own.date}",
            fix="add --force to replace it",
        )
    kept = msgspec.structs.replace(sent, received=True, host_scale=None)
    return kept, save(kept)


def find(device_id: str) -> Calibration | None:
    """The calibration of a device on this machine, or None; the file is read again only when it has changed."""
    path = path_of(device_id)
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise _unreadable(path, str(exc)) from exc
    return _read(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)


class _Version(msgspec.Struct):
    schema_version: int


@functools.lru_cache(maxsize=16)
def _read(path: Path, _mtime_ns: int, _size: int, _inode: int) -> Calibration:
    try:
        text = read_bytes(path)
        version = msgspec.json.decode(text, type=_Version).schema_version
        if version > SCHEMA:
            raise RecordingError(
                f"{path} was written by a newer Tessera",
                why=f"its schema is version {version}, this one reads up to {SCHEMA}",
                fix="upgrade tessera-energy, or delete the file and run `tessera calibrate` again",
            )
        return msgspec.json.decode(text, type=Calibration)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as exc:  # text that is not UTF-8 is a ValueError
        raise _unreadable(path, str(exc)) from exc


def _unreadable(path: Path, why: str) -> RecordingError:
    return RecordingError(
        f"the calibration {path} cannot be read", why=why, fix="delete it, or recalibrate: tessera calibrate"
    )
