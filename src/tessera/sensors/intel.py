"""Intel GPUs, through Level Zero Sysman: the energy counter of each card, and of its parts if they have counters.

Written against pyzes 0.1; tested against a fake at the ABI, untested on hardware.

A GPU may have several counters that overlap: card ⊃ package ⊃ stacks (tiles) and memory. The widest one is the domain
gpuN that counts. The others (gpu0.package, gpu0.stack1, gpu0.memory) are shown, but not counted again. If only the
tiles have counters, each one is a counted domain of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..clock import NS_PER_S, now_ns
from ..errors import SensorError, SensorLost, SensorPermission, SensorUnavailable
from ..schema import Capability, Domain, Hold
from ._intel_gpu import PERMISSION, TRANSIENT, IntelGpu, PowerDomain, Sysman, ZesError
from ._meters import CounterPower
from .base import Batch

# The counters have time stamps, so a late read loses nothing. 0.1 s is the time resolution that we want.
PERIOD_S = 0.1
TELEMETRY_PERIOD_NS = NS_PER_S
# Intel publishes no accuracy for its GPU energy counters; assumed are the 5% that NVIDIA documents for its boards.
ASSUMED_GAIN_ERROR = 0.05

_GPU = 1  # ze_device_type_t; Sysman lists neural processors too
_PERMISSION_FIX = "add the user to the group of /dev/dri/render*: `sudo usermod -aG render $USER`, log in again"


class IntelSensor:
    """Reads energy and telemetry of the Intel GPUs that this process may use.

    `ZE_AFFINITY_MASK` chooses the GPUs; `ZE_FLAT_DEVICE_HIERARCHY` says how to read it. If the mask has one tile of a
    card, the whole card is measured. Domains are named by Sysman's numbering of the whole machine: gpu0, gpu1...
    """

    name = "level-zero"
    period_s = PERIOD_S

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = os.environ if env is None else env
        self._parts: list[tuple[IntelGpu, list[PowerDomain]]] = []
        self._capabilities: list[Capability] = []
        self._telemetry_due_ns = 0

    def start(self) -> None:
        """Load Level Zero and find the GPUs. Raises SensorUnavailable or SensorPermission."""
        self._parts, self._capabilities = [], []
        sysman = Sysman(_load())
        try:
            sysman.call("zesInit", 0)
            machine = _gpus(sysman)
        except ZesError as err:
            raise _start_error(err) from err
        chosen = select_masked(
            [gpu.tiles for gpu in machine],
            self._env.get("ZE_AFFINITY_MASK"),
            flat=self._env.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() != "COMPOSITE",
        )
        visible = [machine[i] for i in chosen]
        if not visible:
            raise SensorUnavailable(
                "no Intel GPU to measure",
                why=f"Level Zero lists {len(machine)} GPU(s), of which ZE_AFFINITY_MASK leaves none",
                fix="check ZE_AFFINITY_MASK, and that the driver's package libze-intel-gpu1 is installed",
            )
        for gpu in visible:
            self._take(gpu)
        if not self._parts:
            raise _no_counter(visible)
        self._telemetry_due_ns = 0

    def _take(self, gpu: IntelGpu) -> None:
        """Choose the counters of a GPU, and note what it can measure."""
        parts = gpu.power_domains()
        reason = None if parts else gpu.failure or "the GPU has no energy counter"
        self._capabilities.append(Capability(name=f"{gpu.name}.energy", available=bool(parts), reason=reason))
        if not parts:
            return
        whole = parts[0].subdevice is None
        for i, part in enumerate(parts):
            part.meter = CounterPower(gpu.name if whole and i == 0 else f"{gpu.name}.{part.suffix}")
        self._parts.append((gpu, parts))
        self._capabilities += gpu.probe_telemetry(parts[0].handle)

    def domains(self) -> Sequence[Domain]:
        """Return the domains; their resolution is refined while they are read."""
        return [_domain(gpu, part, parts[0]) for gpu, parts in self._parts for part in parts]

    def capabilities(self) -> Sequence[Capability]:
        return list(self._capabilities)

    def read(self) -> Batch:
        if not self._parts:
            raise SensorLost("the Intel sensor is not started", fix="call start() first")
        batch = Batch()
        results = [_read_counter(gpu, part, batch) for gpu, parts in self._parts for part in parts]
        failures = [reason for reason in results if reason is not None]
        if len(failures) == len(results):
            fix = "look for a GPU reset in `sudo dmesg | grep -E 'i915|xe'`"
            raise SensorLost("no Intel GPU answers any more", why=failures[0], fix=fix)
        if now_ns() >= self._telemetry_due_ns:
            self._telemetry_due_ns = now_ns() + TELEMETRY_PERIOD_NS
            batch.telemetry += [g.telemetry(p[0].handle) for g, p in self._parts if not p[0].gone]
        return batch

    def stop(self) -> None:
        """Forget the GPUs. Sysman has no shutdown, and its handles need no release."""
        self._parts = []


def select_masked(tiles: Sequence[int], mask: str | None, *, flat: bool) -> list[int]:
    """Return the indices of the cards of which `ZE_AFFINITY_MASK` leaves at least a part.

    In the flat hierarchies an entry counts tiles over all cards; in the composite one it is "card" or "card.tile"
    (Level Zero specification, affinity mask). Sysman itself always shows the whole system (Sysman device mapping
    extension), so the mask is applied here. Entries that match nothing are ignored, as the specification says.
    """
    if mask is None or not mask.strip():
        return list(range(len(tiles)))
    owners = [card for card, count in enumerate(tiles) for _ in range(count if flat else 1)]
    entries = (entry.strip().partition(".")[0] for entry in mask.split(","))
    return sorted({owners[int(entry)] for entry in entries if entry.isdigit() and int(entry) < len(owners)})


def _load() -> Any:
    """Import the vendor's binding. The import loads the Level Zero loader."""
    try:
        import pyzes
    except ModuleNotFoundError as err:
        raise SensorUnavailable("Intel GPUs cannot be read", why=str(err), fix="pip install pyzes") from err
    except (ImportError, OSError) as err:
        raise SensorUnavailable(
            "Intel GPUs cannot be read: the Level Zero loader does not load",
            why=str(err),
            # pyzes 0.1 knows no other place than Debian's.
            fix="apt install libze1; elsewhere than on Debian and Ubuntu also link libze_loader.so.1 into "
            "/usr/lib/x86_64-linux-gnu, the only place pyzes looks",
        ) from err
    return pyzes


def _gpus(sysman: Sysman) -> list[IntelGpu]:
    z = sysman.module
    gpus: list[IntelGpu] = []
    for driver in sysman.enumerate("zesDriverGet", z.zes_driver_handle_t):
        for handle in sysman.enumerate("zesDeviceGet", z.zes_device_handle_t, driver):
            gpu = IntelGpu(sysman, handle, f"gpu{len(gpus)}")
            if gpu.kind == _GPU:
                gpus.append(gpu)
    return gpus


def _start_error(err: ZesError) -> SensorError:
    if err.code == PERMISSION:
        return SensorPermission("Intel GPUs may not be read by this user", why=str(err), fix=_PERMISSION_FIX)
    fix = "check that the driver is loaded: `lsmod | grep -E 'i915|xe'`"
    return SensorUnavailable("Level Zero Sysman does not start", why=str(err), fix=fix)


def _no_counter(visible: Sequence[IntelGpu]) -> SensorError:
    reasons = "; ".join(f"{gpu.name}: {gpu.failure or 'no energy counter'}" for gpu in visible)
    if any(gpu.denied for gpu in visible):
        return SensorPermission("Intel GPU energy may not be read by this user", why=reasons, fix=_PERMISSION_FIX)
    return SensorUnavailable(
        "no visible Intel GPU has an energy counter",
        why=reasons,
        fix="integrated GPUs have none of their own: measure the processor with the RAPL sensor",
    )


def _domain(gpu: IntelGpu, part: PowerDomain, first: PowerDomain) -> Domain:
    meter = part.meter
    assert meter is not None
    tiles_only = first.subdevice is not None
    return Domain(
        name=meter.domain,
        source=f"level-zero-{part.kind}",
        resolution_s=meter.resolution_s or PERIOD_S,
        gain_error=ASSUMED_GAIN_ERROR,
        hold=Hold.MEAN,
        # If the whole GPU has no domain, its tiles add up to it. A tile's memory is already in its stack.
        counted=part is first or (tiles_only and part.kind == first.kind),
        label=gpu.label,
        note=gpu.note,
    )


def _read_counter(gpu: IntelGpu, part: PowerDomain, batch: Batch) -> str | None:
    """Add one reading to the batch. Return the reason if the counter does not answer (any more)."""
    meter = part.meter
    assert meter is not None
    before_ns = now_ns()
    try:
        joules, stamp_ns = gpu.energy(part.handle)
    except ZesError as err:
        if err.code in TRANSIENT:  # the counter goes on counting, the next read is soon
            return None
        part.gone = True
        meter.fail(batch, before_ns, str(err))
        return str(err)
    part.gone = False
    meter.observe(batch, energy_j=joules, stamp_ns=stamp_ns, before_ns=before_ns, after_ns=now_ns())
    return None
