"""What `tessera calibrate` found on this machine, laid over the predictions: factors on time and energy, and watts.

::

    calibrate ──► Overlay ──► save() ──► $XDG_CONFIG_HOME/tessera/calibration/<device>.json
                                                        │
    predict ◄── apply, charge, power, host ◄── find() ──┘

Every factor is measured over predicted, so 1 is "as predicted" and 1.2 "takes a fifth longer here"; how far it is
drawn towards 1 depends on how well the chip was known before (factors.py). What was not measured stays None with its
reason; what no group covers stays as it was predicted.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import ArgumentError, RecordingError

if TYPE_CHECKING:
    from .host import HostModel
    from .kernel_time import KernelTime
    from .power import PowerModel
    from .timeline import Iteration

SCHEMA = 1
"""Version of the file; a newer one is refused."""

GROUPS = (
    "gemm.bf16", "gemm.fp16", "gemm.fp32", "gemm.tf32", "gemm.fp8", "attention", "elementwise", "copy", "norm",
    "reduce", "conv",
)  # fmt: skip
"""What calibration measures a factor for."""

LIMIT = "limit"
"""The group of the one product that is there to reach the power limit: no factor comes from it."""

# Kinds nobody measures here, and the group they move with: the same units and the same memory do them. They take its
# factor and keep their own interval.
_LIKE = {
    "batch_norm": "norm", "softmax": "norm", "pool": "reduce", "resample": "elementwise", "gather": "copy",
    "scatter": "copy", "fill": "copy", "random": "elementwise", "foreach": "elementwise",
}  # fmt: skip

# From so many groups on their energies' intervals stand for the whole power model's.
_ENOUGH = 4
# A board's static power may not eat its limit; a boosted reading of an idle board must not break the solver.
_STATIC_SHARE = 0.8


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Measured over predicted, of `points` ratios: their geometric `mean`, and the `factor` that is used.

    `spread` is the relative 90% half-width one ratio lies within once the factor is applied; None where the interval
    stays the one that was predicted: of a single point, or of a chip whose own rests on more than these points.
    """

    factor: float
    spread: float | None
    points: int
    mean: float | None = None

    def __post_init__(self) -> None:
        for value in (self.factor, self.mean):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"a factor is a positive number, not {value!r}")
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread > 0):
            raise ValueError(f"a spread is a positive half-width, not {self.spread!r}")

    def error(self, before: float) -> float:
        """The relative error of what was scaled: its own where the points do not replace it."""
        return before if self.spread is None else self.spread


class Watts(msgspec.Struct, frozen=True, kw_only=True):
    """A power that was measured (`how` says how), or None and why not."""

    value: float | None
    how: str
    error_w: float | None = None

    def __post_init__(self) -> None:
        if self.value is not None and not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"watts are a positive number, not {self.value!r}")


class Overlay(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration: of which board, beside which host, when, and what it found.

    `static_w` is the board with its clocks up and its SMs waiting, `limit_w` what it sustains under a power-capped
    load, `idle_w` and `idle_context_w` the board at rest without and with a CUDA context.
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
    schema_version: int = SCHEMA

    @property
    def provenance(self) -> str:
        """What a scaled figure says of itself."""
        return f"calibrated on this machine, {self.date}"


# -- the file ---------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where calibrations lie."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "tessera" / "calibration"


def path_of(device_id: str) -> Path:
    """The file of a device."""
    if not device_id or Path(device_id).name != device_id or device_id.startswith("."):
        raise ArgumentError(f"{device_id!r} cannot be the name of a calibration file", fix="give the device a plain id")
    return folder() / f"{device_id}.json"


def save(overlay: Overlay) -> Path:
    """Write a calibration in place of the device's last one, whole or not at all; the file it is in."""
    path = path_of(overlay.device)
    text = msgspec.json.format(msgspec.json.encode(overlay), indent=2) + b"\n"
    made: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
            made = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(made).replace(path)
    except OSError as exc:
        if made is not None:
            Path(made).unlink(missing_ok=True)
        raise RecordingError(
            f"the calibration could not be written to {path}",
            why=str(exc),
            fix="make the folder writable, or set XDG_CONFIG_HOME to one that is",
        ) from exc
    return path


def find(device_id: str) -> Overlay | None:
    """The calibration of a device on this machine, or None; read again only when its file has changed."""
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
def _read(path: Path, _mtime_ns: int, _size: int, _inode: int) -> Overlay:
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Version).schema_version
        if version > SCHEMA:
            raise RecordingError(
                f"{path} was written by a newer Tessera",
                why=f"its schema is version {version}, this one reads up to {SCHEMA}",
                fix="upgrade tessera-energy, or delete the file and run `tessera calibrate` again",
            )
        return msgspec.json.decode(text, type=Overlay)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as exc:  # text that is no UTF-8 is a ValueError
        raise _unreadable(path, str(exc)) from exc


def _unreadable(path: Path, why: str) -> RecordingError:
    return RecordingError(
        f"the calibration {path} cannot be read", why=why, fix="delete it, or recalibrate: tessera calibrate"
    )


# -- laying it over a prediction --------------------------------------------------------------------------------


def group_of(kind: str, precision: str) -> tuple[str, bool]:
    """The group an operator's factor is found in, and whether it is of that group or only like it."""
    if kind == "gemm":
        return f"gemm.{precision}", True
    if kind == "rnn":
        return f"gemm.{precision}", False
    return _LIKE.get(kind, kind), kind not in _LIKE


def apply(kernel: KernelTime, kind: str, precision: str, overlay: Overlay | None) -> KernelTime:
    """A kernel's time as this machine takes it. `precision` is the one it runs in (a what-if's, where there is one)."""
    if overlay is None:
        return kernel
    group, own = group_of(kind, precision)
    scale = overlay.time_scale.get(group)
    if scale is None:
        return kernel
    return replace(
        kernel,
        seconds=kernel.seconds * scale.factor,
        clock_s=kernel.clock_s * scale.factor,
        relative_error=scale.error(kernel.relative_error) if own else kernel.relative_error,
        provenance=overlay.provenance if own else f"{kernel.provenance}; scaled like {group}, {overlay.provenance}",
    )


def charge(iteration: Iteration, work: Sequence[tuple[str, str]], overlay: Overlay | None) -> None:
    """Scale the dynamic energy of an iteration's kernels, in place; the static part is `power`'s.

    `work` is the kind and the precision of each kernel, as `apply` takes them.
    """
    if overlay is None or not overlay.energy_scale:
        return
    factors = [energy_factor(kind, precision, overlay) for kind, precision in work]
    for name in ("busy_s", "flops_j", "hbm_j", "l2_j"):
        setattr(iteration, name, getattr(iteration, name) * factors)


def energy_factor(kind: str, precision: str, overlay: Overlay | None) -> float:
    """Dynamic joules here over those predicted; 1 where nothing is known."""
    scale = overlay.energy_scale.get(group_of(kind, precision)[0]) if overlay is not None else None
    return scale.factor if scale is not None else 1.0


def power(model: PowerModel, overlay: Overlay | None) -> PowerModel:
    """The power model with the limit and the static power measured here, and the interval its energies then have."""
    if overlay is None:
        return model
    limit_w = overlay.limit_w.value or model.limit_w
    static_w = min(overlay.static_w.value or model.static_w, _STATIC_SHARE * limit_w)
    error = model.relative_error
    if len(overlay.energy_scale) >= _ENOUGH and any(s.spread is not None for s in overlay.energy_scale.values()):
        errors = [s.error(model.relative_error) for s in overlay.energy_scale.values()]
        error = math.sqrt(sum(e * e for e in errors) / len(errors))
    if (limit_w, static_w, error) == (model.limit_w, model.static_w, model.relative_error):
        return model
    return replace(
        model, limit_w=limit_w, static_w=static_w, relative_error=error,
        provenance=f"{model.provenance}; {overlay.provenance}",
    )  # fmt: skip


def host(default: HostModel, overlay: Overlay | None) -> HostModel:
    """The host model as this host launches."""
    if overlay is None or overlay.host_scale is None:
        return default
    scale = overlay.host_scale
    return default.scaled(
        scale.factor, f"{overlay.provenance} ({overlay.host_cpu})", scale.error(default.relative_error)
    )
