"""AMD GPUs, through AMD SMI: each GPU's energy counter, or its socket power if the counter is useless.

Written against amdsmi 7.0; tested against a fake at the ABI, untested on hardware.

The counter is checked first: on some boards and ROCm releases it stands still within a process (ROCm/amdsmi issues 22
and 38, rocm_smi_lib issue 180) or counts a small fraction of the energy (issue 38). `start` checks that it moves and
compares it with the power reading; polled power replaces a counter that fails.

On MI250X one package holds two dies (GCDs), each a GPU of its own, and the first one's reading covers both. So the
second has no domain (which would show 0 W), but a capability with the reason.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..clock import NS_PER_S, now_ns
from ..errors import SensorError, SensorLost, SensorPermission, SensorUnavailable
from ..schema import Capability, Domain, Hold
from ._amd_gpu import NO_PERMISSION, TRANSIENT, AmdGpu, Smi, error_text, select_visible
from ._meters import CounterPower, PolledPower
from .base import Batch

# The driver reads its metrics table anew after 1 ms (AMD's answer in ROCm issue 1649). A counter loses nothing at
# 0.1 s; polled power does, and 20 ms is the finest resolution of any vendor (docs/measuring.md).
COUNTER_PERIOD_S = 0.1
POLL_PERIOD_S = 0.02
# Power is polled every 20 ms; if it was not read for this long, the sampler could not run.
POLL_HOLE_S = 3.0
TELEMETRY_PERIOD_NS = NS_PER_S
# How long `start` waits for every counter to move.
PROBE_S = 0.3
# A counter that differs from the (smoothed) power reading by more than this factor is wrong, or the power is; the
# counter of issue 38 is off by a factor of 100 or more.
PROBE_FACTOR = 10.0
# AMD publishes no accuracy for its power telemetry; assumed are the 5% that NVIDIA documents for its boards.
ASSUMED_GAIN_ERROR = 0.05

_SECOND_DIE = "the second die (GCD) of an MI250X package: its power is counted by the first die"
_PERMISSION_FIX = "add the user to the groups of /dev/kfd: `sudo usermod -aG render,video $USER`, then log in again"


class AmdSensor:
    """Reads power, energy and telemetry of the AMD GPUs that this process may use.

    `HIP_VISIBLE_DEVICES` (or `CUDA_VISIBLE_DEVICES`, which HIP also obeys) and `ROCR_VISIBLE_DEVICES` choose the GPUs,
    by index or UUID. Domains are named by HIP's numbering of the whole machine: gpu0, gpu1...
    """

    name = "amdsmi"

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = os.environ if env is None else env
        self._smi: Smi | None = None
        self._gpus: list[AmdGpu] = []
        self._capabilities: list[Capability] = []
        self._telemetry_due_ns = 0
        self._lost = False

    @property
    def period_s(self) -> float:
        polled = any(isinstance(g.meter, PolledPower) for g in self._gpus)
        return POLL_PERIOD_S if polled else COUNTER_PERIOD_S

    def start(self) -> None:
        """Load AMD SMI and find the GPUs. Raises SensorUnavailable or SensorPermission."""
        smi = Smi(import_amdsmi())
        if self._lost:  # the library keeps the handles of its first init: only a shutdown makes it look again
            with contextlib.suppress(smi.error):
                smi.call("amdsmi_shut_down")
        self._smi, self._gpus, self._capabilities = smi, [], []
        try:
            smi.call("amdsmi_init")
            handles = smi.call("amdsmi_get_processor_handles")
        except smi.error as err:
            raise _start_error(err) from err
        machine = order_by_hip([AmdGpu(smi, handle) for handle in handles])
        visible = select_gpus(machine, self._env)
        if not visible:
            raise SensorUnavailable(
                "no AMD GPU to measure",
                why=f"AMD SMI lists {len(machine)} GPU(s), of which the environment makes none visible",
                fix="check ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES; `amd-smi list` shows the GPUs",
            )
        _choose_meters(visible)
        self._gpus = [gpu for gpu in visible if gpu.meter is not None]
        self._capabilities = [c for gpu in visible for c in gpu.capabilities]
        if not self._gpus:
            raise _no_meter(visible)
        for gpu in self._gpus:
            self._capabilities += gpu.probe_telemetry()
        self._telemetry_due_ns, self._lost = 0, False

    def domains(self) -> Sequence[Domain]:
        """Return one domain per GPU that reports its power; the resolution is refined while it is read."""
        return [_domain(gpu) for gpu in self._gpus if gpu.meter is not None]

    def capabilities(self) -> Sequence[Capability]:
        return list(self._capabilities)

    def read(self) -> Batch:
        if self._smi is None or not self._gpus:
            raise SensorLost("the AMD sensor is not started", fix="call start() first")
        batch = Batch()
        failures = [why for gpu in self._gpus if (why := _read_power(self._smi, gpu, batch)) is not None]
        if len(failures) == len(self._gpus):
            self._lost = True
            fix = "look for a GPU reset in `sudo dmesg | grep amdgpu`"
            raise SensorLost("no AMD GPU answers any more", why=failures[0], fix=fix)
        if now_ns() >= self._telemetry_due_ns:
            self._telemetry_due_ns = now_ns() + TELEMETRY_PERIOD_NS
            batch.telemetry += [gpu.telemetry() for gpu in self._gpus if not gpu.gone]
        return batch

    def stop(self) -> None:
        """Forget the GPUs.

        AMD SMI itself is not shut down: that would end it for the whole process, and PyTorch on ROCm uses it too
        (torch.cuda.power_draw).
        """
        self._smi, self._gpus = None, []


def import_amdsmi() -> Any:
    """Import the vendor's binding. The import loads libamd_smi.so with all its symbols."""
    try:
        # If the binding cannot find its library, it prints so and then fails with a KeyError.
        with contextlib.redirect_stdout(io.StringIO()):
            import amdsmi
    except ModuleNotFoundError as err:
        raise SensorUnavailable("AMD GPUs cannot be read", why=str(err), fix="pip install amdsmi") from err
    except (ImportError, OSError, KeyError) as err:
        raise SensorUnavailable(
            "AMD GPUs cannot be read: libamd_smi.so does not load",
            why="it is not on this machine" if isinstance(err, KeyError) else f"{type(err).__name__}: {err}",
            fix="install ROCm's amd-smi-lib, or point ROCM_PATH (usually /opt/rocm) at the one there is",
        ) from err
    except AttributeError as err:
        raise SensorUnavailable(
            "AMD GPUs cannot be read: libamd_smi.so is older than the Python package amdsmi",
            why=str(err),
            fix="install the amdsmi of the ROCm release: pip install 'amdsmi==<ROCm version>.*'",
        ) from err
    return amdsmi


def _start_error(err: Exception) -> SensorError:
    if getattr(err, "err_code", None) == NO_PERMISSION:
        return SensorPermission("AMD GPUs may not be read by this user", why=error_text(err), fix=_PERMISSION_FIX)
    return SensorUnavailable(
        "AMD SMI does not start", why=error_text(err), fix="check that the driver is loaded: `lsmod | grep amdgpu`"
    )


def _no_meter(visible: Sequence[AmdGpu]) -> SensorError:
    reasons = "; ".join(f"{gpu.name}: {gpu.failure}" for gpu in visible)
    if any(gpu.denied for gpu in visible):
        return SensorPermission("AMD GPU power may not be read by this user", why=reasons, fix=_PERMISSION_FIX)
    return SensorUnavailable("no visible AMD GPU reports its power", why=reasons, fix="compare `amd-smi metric -p -E`")


def order_by_hip(gpus: list[AmdGpu]) -> list[AmdGpu]:
    """Order and name the GPUs as HIP numbers them, or as AMD SMI does if it does not know HIP's order."""
    if all(gpu.hip_id is not None for gpu in gpus) and len({gpu.hip_id for gpu in gpus}) == len(gpus):
        gpus = sorted(gpus, key=lambda gpu: gpu.hip_id or 0)
    for index, gpu in enumerate(gpus):
        gpu.name = f"gpu{index}"
    return gpus


def select_gpus(gpus: list[AmdGpu], env: Mapping[str, str]) -> list[AmdGpu]:
    """Return the GPUs that both ROCr and HIP make visible. HIP's indices count within ROCr's list."""
    gpus = [gpus[i] for i in select_visible([g.uuids for g in gpus], env.get("ROCR_VISIBLE_DEVICES"))]
    # HIP treats an empty setting as not set, unlike ROCr.
    hip = env.get("HIP_VISIBLE_DEVICES") or env.get("CUDA_VISIBLE_DEVICES") or None
    return [gpus[i] for i in select_visible([g.uuids for g in gpus], hip)]


def _choose_meters(gpus: Sequence[AmdGpu]) -> None:
    """Give each GPU its counter if that moves and agrees with the power, else polled power, else nothing."""
    first = {gpu.name: gpu.probe(gpu.read_energy) for gpu in gpus}
    deadline_ns = now_ns() + int(PROBE_S * NS_PER_S)
    waiting = [gpu for gpu in gpus if first[gpu.name] is not None]
    while waiting and now_ns() < deadline_ns:
        time.sleep(PROBE_S / 10)
        waiting = [gpu for gpu in waiting if gpu.probe(gpu.read_energy) == first[gpu.name]]
    for gpu in gpus:
        power_w = gpu.probe(gpu.read_power_w)
        why = _counter_fault(gpu, first[gpu.name], power_w)
        gpu.capabilities.append(Capability(name=f"{gpu.name}.energy", available=why is None, reason=why))
        if why is None:
            gpu.meter = CounterPower(gpu.name)
        elif power_w is not None:
            gpu.meter = PolledPower(gpu.name, hole_s=POLL_HOLE_S)
        else:
            fix = "make the first die of the package visible too" if gpu.is_dual_die else None
            gpu.failure = _SECOND_DIE if gpu.is_dual_die else gpu.failure or why
            gpu.capabilities.append(Capability(name=f"{gpu.name}.power", available=False, reason=gpu.failure, fix=fix))


def _counter_fault(gpu: AmdGpu, first: tuple[float, int] | None, power_w: float | None) -> str | None:
    """Return why the energy counter is useless, or None."""
    if first is None:
        return gpu.failure or "the GPU has no energy counter"
    last = gpu.probe(gpu.read_energy)
    if last is None or last[0] == first[0]:
        return f"the energy counter did not move within {PROBE_S} s"
    span_s = (last[1] - first[1]) * 1e-9
    mean_w = (last[0] - first[0]) / span_s if span_s > 0 else None
    if mean_w is None or power_w is None:
        return None  # nothing to compare it with
    if not power_w / PROBE_FACTOR <= mean_w <= power_w * PROBE_FACTOR:
        return f"the energy counter says {mean_w:.3g} W where the power reading says {power_w:.0f} W"
    return None


def _domain(gpu: AmdGpu) -> Domain:
    counter = isinstance(gpu.meter, CounterPower)
    found_s = gpu.meter.resolution_s if gpu.meter is not None else None
    return Domain(
        name=gpu.name,
        source="amdsmi-energy" if counter else f"amdsmi-{gpu.power_field}",
        resolution_s=found_s if found_s is not None else COUNTER_PERIOD_S,
        gain_error=ASSUMED_GAIN_ERROR,
        hold=Hold.MEAN if counter else Hold.LINEAR,
        label=gpu.label,
        note=gpu.note,
    )


def _read_power(smi: Smi, gpu: AmdGpu, batch: Batch) -> str | None:
    """Add one reading to the batch. Return the reason if the GPU does not answer (any more)."""
    before_ns = now_ns()
    try:
        reason = None if _observe(gpu, batch, before_ns) else "the reading is N/A"
    except smi.error as err:
        if getattr(err, "err_code", None) in TRANSIENT:  # a counter goes on counting, the next read is soon
            return None
        reason = error_text(err)
    gpu.gone = reason is not None
    if reason is not None and gpu.meter is not None:
        gpu.meter.fail(batch, before_ns, reason)
    return reason


def _observe(gpu: AmdGpu, batch: Batch, before_ns: int) -> bool:
    """Hand a reading to the GPU's meter. Return False if it is N/A."""
    if isinstance(gpu.meter, CounterPower):
        energy = gpu.read_energy()
        if energy is None:
            return False
        joules, stamp_ns = energy
        gpu.meter.observe(batch, energy_j=joules, stamp_ns=stamp_ns, before_ns=before_ns, after_ns=now_ns())
        return True
    power_w = gpu.read_power_w()
    if power_w is None or gpu.meter is None:
        return False
    gpu.meter.observe(batch, power_w=power_w, time_ns=(before_ns + now_ns()) // 2)
    return True
