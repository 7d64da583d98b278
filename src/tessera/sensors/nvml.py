"""NVIDIA GPUs through NVML (the package nvidia-ml-py), with a plain user's rights.

Each GPU has: board power from the driver's sample ring (20 ms) or else from the polled fields, the total-energy counter
as anchor, HBM power, and telemetry. Everything is read on the sampler's thread.

Failures stay local: a GPU that is lost leaves a gap with its reason, and is looked for again. If NVML as a whole is
gone (driver restart), `read` raises SensorLost, and the sampler starts this sensor again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..clock import REAL, Clock
from ..errors import SensorError, SensorLost, SensorPermission, SensorUnavailable
from ..schema import Capability, Domain, Gap
from . import response_store
from ._nvml_counter import EnergyCounter
from ._nvml_power import (
    MEMORY_SCOPE,
    POWER_AVERAGE,
    RING_LAG_S,
    FieldReader,
    RingReader,
    absent_errors,
    choose_reader,
    field_mw,
)
from ._nvml_telemetry import RAIL_VOLTAGE, TelemetryReader
from ._visible import GpuBoard, VisibleBoard, visible_boards
from .base import Batch

TELEMETRY_S = 2.0
# Activity (GPM) is measured between two readings. The second reading comes early, so that a short run has activity.
_SECOND_TELEMETRY_S = 0.5
# Field 185 is a ~1 s average (H200): a shorter period gives nothing new.
HBM_EVERY_S = 1.0
_RETRY_NS = 1_000_000_000
_RESUME_NS = 10_000_000_000
# The shortest time between two reads of the ring, for somebody who waits for a sample (they come every 20 ms) and
# while a counter is read densely, every few milliseconds.
_AGAIN_NS = 15_000_000
_DENSE_NS = 50_000_000
# Each wake-up of the thread costs about as much as a read. So what is due within this time (or within two fifths of the
# ring's period, if that is less) is read together with what is due now. All of it waits up to this long for the
# counter, which must be read at its own moment.
_TOGETHER_NS = 400_000_000


class NvmlSensor:
    """Reads all NVIDIA GPUs that this process may see. Telemetry is read once per `telemetry_s`.

    `environ` (by default the process's) may have CUDA_VISIBLE_DEVICES.
    """

    name = "nvml"

    def __init__(
        self, *, environ: Mapping[str, str] | None = None, telemetry_s: float = TELEMETRY_S, clock: Clock = REAL
    ) -> None:
        self._clock = clock
        self._environ = os.environ if environ is None else environ
        self._telemetry_s = telemetry_s
        self._nvml: Any = None
        self._gpus: list[NvidiaGpu] = []

    def start(self) -> None:
        """Load NVML and find the GPUs; again after a driver restart."""
        self.stop()
        nvml = import_nvml()
        try:
            nvml.nvmlInit()
            self._nvml = nvml
            visible = visible_boards(read_boards(nvml), self._environ.get("CUDA_VISIBLE_DEVICES"))
            self._gpus = [NvidiaGpu(nvml, v, self._telemetry_s, self._clock) for v in visible]
        except nvml.NVMLError as exc:
            raise translate_error(nvml, exc) from exc
        if not self._gpus:
            raise SensorUnavailable(
                "NVML shows no GPU to this process",
                why="the machine has none, or CUDA_VISIBLE_DEVICES hides them all",
                fix="check nvidia-smi, and unset CUDA_VISIBLE_DEVICES",
            )
        if not any(g.power for g in self._gpus):
            reasons = "; ".join(c.reason or "" for c in self._gpus[0].capabilities())
            raise SensorPermission("this user may not read the power of any GPU", why=reasons)

    @property
    def period_s(self) -> float:
        """Return the time until a part is due: 1 s with the ring, a few ms while the counter's ticks are sought."""
        now = self._clock.monotonic_ns()
        learner = next((g for g in self._gpus if g.learning), None)
        due = [g.due_ns(anchor=g is learner or not g.learning) for g in self._gpus]
        return max(min(due, default=now) - now, 1_000_000) * 1e-9

    def domains(self) -> Sequence[Domain]:
        return [d for g in self._gpus for d in g.domains()]

    def capabilities(self) -> Sequence[Capability]:
        return [*(c for g in self._gpus for c in g.capabilities()), RAIL_VOLTAGE]

    def read(self) -> Batch:
        batch = Batch()
        lost = 0
        # Only one counter at a time is read densely: with several, a round would take longer than a tick allows.
        learner = next((g for g in self._gpus if g.learning), None)
        for gpu in self._gpus:
            try:
                gpu.read(batch, anchor=gpu is learner or not gpu.learning, again_ns=_DENSE_NS if learner else _AGAIN_NS)
            except self._nvml.NVMLError as exc:
                if isinstance(exc, self._nvml.NVMLError_Uninitialized):
                    raise SensorLost("NVML was shut down under us", why=str(exc), fix="waiting for the driver") from exc
                lost += gpu.lose(batch, exc)
        if lost == len(self._gpus):
            raise SensorLost(
                "every GPU has stopped answering",
                why=self._gpus[0].lost or "",
                fix="see `dmesg` for Xid errors; the GPU may need a reset or the driver a restart",
            )
        return batch

    def stop(self) -> None:
        for gpu in self._gpus:
            gpu.close()
        self._gpus = []
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None


class NvidiaGpu:
    """One board: its power reader, counter, HBM power and telemetry, each with its own period."""

    def __init__(self, nvml: Any, visible: VisibleBoard, telemetry_s: float, clock: Clock) -> None:
        self._clock = clock
        self._nvml = nvml
        self._visible = visible
        self._telemetry_ns = round(telemetry_s * 1e9)
        self.name = f"gpu{visible.board.index}"
        self.refused: dict[str, str] = {}
        self.lost: str | None = None
        self._retry_ns = 0
        self._resume_ns: dict[str, int] = {}
        self._open()
        self._had_power = self.power is not None

    def _open(self) -> None:
        nvml = self._nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(self._visible.board.index)
        self.label = _text(nvml, nvml.nvmlDeviceGetName, self._handle) or self.name
        self._driver = _text(nvml, nvml.nvmlSystemGetDriverVersion)
        self.power = choose_reader(nvml, self._handle, self.name, self._clock, self._refuse)
        self._response = response_store.find(self._describe(self.power)) if self.power else None
        self._counter = self._open_counter()
        self._hbm = self._open_hbm()
        self._telemetry = TelemetryReader(nvml, self._handle, self._clock)
        self._limit_w = _highest_limit(nvml, self._handle)
        self._power_due = self._telemetry_due = self._hbm_due = self._power_read = 0

    def _refuse(self, what: str, exc: Exception) -> None:
        self.refused[what] = str(exc)

    def _open_counter(self) -> EnergyCounter | None:
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError as exc:
            self._refuse("energy counter (the anchor)", exc)
            return None
        lag_s = self._response.lag_s if self._response else RING_LAG_S
        ring = self.power if isinstance(self.power, RingReader) else None
        sampled_j = ring.joules_until if ring else lambda _time_ns: None
        return EnergyCounter(self._nvml, self._handle, self._clock, ring_lag_s=lag_s, sampled_j=sampled_j)

    def _open_hbm(self) -> FieldReader | None:
        ask = field_mw(self._nvml, self._handle, POWER_AVERAGE, MEMORY_SCOPE)
        try:
            if ask() == 0:
                self.refused["HBM power"] = "reads 0 W"
                return None
            name = f"{self.name}.memory"
            return FieldReader(ask, name=name, source="nvml-memory", averaged_s=1.0, probe=False, clock=self._clock)
        except self._nvml.NVMLError as exc:
            self._refuse("HBM power", exc)
            return None

    def domains(self) -> list[Domain]:
        domains = []
        if self.power:
            board = dataclasses.replace(self._describe(self.power), limit_w=self._limit_w)
            domains.append(self._response.apply(board) if self._response else board)
        if self._hbm:
            hbm = self._hbm.domain(f"{self.label} HBM", "part of the board's power")
            domains.append(dataclasses.replace(hbm, counted=False))
        return domains

    def _describe(self, power: RingReader | FieldReader) -> Domain:
        """Return the board's domain, with the assumed response if none was learnt."""
        note = ""
        if self._visible.mig:
            note = f"MIG: the energy is the whole board's, shared by all its slices (visible: {len(self._visible.mig)})"
        return dataclasses.replace(power.domain(self.label, note), driver=self._driver)

    def capabilities(self) -> list[Capability]:
        refused = [Capability(name=f"{self.name} {k}", available=False, reason=v) for k, v in self.refused.items()]
        return [*refused, *self._telemetry.capabilities(self.name)]

    @property
    def learning(self) -> bool:
        """Return whether the counter's ticks are being looked for, which takes many reads."""
        return not self.lost and self.power is not None and self._counter is not None and self._counter.learning

    def due_ns(self, anchor: bool) -> int:
        """Return when the first part must be read; the counter is included only if it is its turn (`anchor`)."""
        if self.lost:
            return self._retry_ns
        due = min(self._power_due, self._telemetry_due)
        if self._counter and self.power and anchor and self._counter.due_ns < due + self._together_ns:
            due = self._counter.due_ns
        return due

    @property
    def _together_ns(self) -> int:
        """Return how far apart the due times of parts may be that are read together."""
        return min(_TOGETHER_NS, round(0.4e9 * self.power.period_s)) if self.power else _TOGETHER_NS

    def read(self, batch: Batch, *, anchor: bool, again_ns: int) -> None:
        """Read what is due. Raises NVMLError if the GPU gives no power any more; `lose` then adds the gap."""
        now = self._clock.monotonic_ns()
        if self.lost:
            if now < self._retry_ns:
                return
            self._retry_ns = now + _RETRY_NS
            self._reopen()
        soon = now + self._together_ns
        if self.power and (soon >= self._power_due or now >= self._power_read + again_ns):
            # Read power even before it is due: the sampler reads early if somebody waits for data.
            self.power.read(batch)
            self._power_read = now
            self._power_due = now + round(self.power.period_s * 1e9)
        hbm = self._hbm
        if hbm and soon >= self._hbm_due:
            self._hbm_due = now + round(HBM_EVERY_S * 1e9)
            self._spare("HBM power", now, lambda: hbm.read(batch), lambda why: hbm.fail(batch, why))
        if self._counter and self.power and anchor:
            self._spare("energy counter (the anchor)", now, lambda: self._read_counter(batch))
        if soon >= self._telemetry_due:
            is_first = self._telemetry_due == 0
            pause_ns = min(round(_SECOND_TELEMETRY_S * 1e9), self._telemetry_ns) if is_first else self._telemetry_ns
            self._telemetry_due = now + pause_ns
            self._spare("telemetry", now, lambda: batch.telemetry.append(self._telemetry.read(self.name)))

    def _spare(
        self, what: str, now: int, part: Callable[[], None], failed: Callable[[str], None] = lambda _why: None
    ) -> None:
        """Run a part whose failure must not stop the power samples. A part that fails is not tried for a while."""
        if now < self._resume_ns.get(what, 0):
            return
        try:
            part()
        except (self._nvml.NVMLError_GpuIsLost, self._nvml.NVMLError_Uninitialized):
            raise
        except self._nvml.NVMLError as exc:
            self.refused[what] = f"{exc} (tried again every {_RESUME_NS // 10**9} s)"
            self._resume_ns[what] = now + _RESUME_NS
            failed(str(exc))
        else:
            if what in self._resume_ns:
                del self._resume_ns[what]
                self.refused.pop(what, None)

    def _read_counter(self, batch: Batch) -> None:
        assert self._counter is not None
        batch.anchors.setdefault(self.name, []).extend(self._counter.read())

    def _reopen(self) -> None:
        """Look for a lost GPU again. A GPU that comes back without power readings stays lost."""
        self.close()
        self._open()
        if self._had_power and self.power is None:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NO_PERMISSION)
        self.lost = None

    def lose(self, batch: Batch, exc: Exception) -> int:
        """Open a gap for a GPU that does not answer. Returns 1, so that the sensor can count lost GPUs."""
        if not self.lost:
            self.lost = str(exc)
            now = self._clock.monotonic_ns()
            for d in self.domains():
                batch.gaps.append(Gap(domain=d.name, start_ns=now, end_ns=None, reason=f"{self.name}: {exc}"))
        self._retry_ns = self._clock.monotonic_ns() + _RETRY_NS
        return 1

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._telemetry.close()


def _highest_limit(nvml: Any, handle: Any) -> float | None:
    """Return the highest power limit that a board accepts; None if the driver does not say."""
    try:
        return int(nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)[1]) * 1e-3 or None
    except nvml.NVMLError:
        return None


def _text(nvml: Any, ask: Callable[..., str | bytes], *args: Any) -> str:
    """Return a name, UUID or version as text; empty if the driver does not give it, since nothing depends on it."""
    try:
        value = ask(*args)
    except absent_errors(nvml):
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def import_nvml() -> Any:
    """Import the binding (nvidia-ml-py). Raises SensorUnavailable if it is not installed."""
    try:
        import pynvml
    except ImportError as exc:
        raise SensorUnavailable(
            "the package nvidia-ml-py is not installed", why=str(exc), fix="pip install nvidia-ml-py"
        ) from exc
    return pynvml


def read_boards(nvml: Any) -> list[GpuBoard]:
    """Return all boards of the machine, with their MIG slices."""
    boards = []
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        boards.append(GpuBoard(i, _text(nvml, nvml.nvmlDeviceGetUUID, handle), _mig_uuids(nvml, handle)))
    return boards


def _mig_uuids(nvml: Any, handle: Any) -> tuple[str, ...]:
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return ()
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return ()
    uuids = []
    for i in range(count):
        with contextlib.suppress(nvml.NVMLError):
            uuids.append(_text(nvml, nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)))
    return tuple(uuids)


def translate_error(nvml: Any, exc: Exception) -> SensorError:
    """Turn NVML's error into ours, with the fix."""
    if isinstance(exc, (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded)):
        return SensorUnavailable(
            "no NVIDIA driver on this machine",
            why=f"NVML reports: {exc}",
            fix="install the NVIDIA driver (in a container: run it with the NVIDIA runtime, --gpus all)",
        )
    if isinstance(exc, nvml.NVMLError_LibRmVersionMismatch):
        return SensorUnavailable(
            "the NVIDIA driver and its library differ in version",
            why=f"NVML reports: {exc}; a driver update waits for a reboot",
            fix="reboot, or reload the nvidia kernel modules",
        )
    if isinstance(exc, nvml.NVMLError_NoPermission):
        return SensorPermission("NVML refuses this user", why=str(exc), fix="ask for access to /dev/nvidia*")
    return SensorUnavailable("NVML does not work here", why=f"NVML reports: {exc}", fix="check nvidia-smi")
