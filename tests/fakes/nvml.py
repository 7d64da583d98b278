"""Drives the fake `libnvidia-ml.so.1` (fake_nvml.c): the real nvidia-ml-py talks to a simulated board.

In this process::

    with FakeNvml() as fake:                      # pynvml now answers from the fake
        fake.set_time_us(T0_US)                   # virtual clock; leave out for the real one
        fake.set(Scenario(wave="square:100:700:0.5"))
        pynvml.nvmlInit()
        fake.advance(2.0)

In another one: `subprocess.run(..., env=fake_env(Scenario(...)))`.

A test that wants no GPU at all beside such tests gets none: a closed fake answers "library not found". A test
of a *real* GPU needs a process of its own, since a library once loaded stays in its process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tessera.clock import Clock

SOURCE = Path(__file__).with_name("fake_nvml.c")
BOARD = SOURCE.with_name("fake_board.h")
SONAME = "libnvidia-ml.so.1"
FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}")

T0_US = 1_790_000_000_000_000
"""A moment (September 2026) for virtual clocks to start at; a multiple of every period of the board."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the boards do. None leaves the default of the C side, that of an H200 (in parentheses below).

    Times `*_at_s` are seconds after the origin: `origin_us`, else the time the scenario was set. The groups
    (`ring`, `energy`, `power`, ...) take "off" (not supported) or "denied" (no permission); ring, energy and
    power also "zero". `gpu` has values for single devices: `gpu={1: {"wave": "const:300"}}`.
    """

    # What there is
    gpus: int | None = None  # (1)
    name: str | None = None  # (NVIDIA H200)
    uuid: str | None = None  # (GPU-00000000-0000-0000-0000-00000000000N); only sensible for one device
    mig: int | str | None = None  # slices per GPU; (0) is MIG mode off, "off" is a GPU without MIG
    driver_version: str | None = None  # (580.95.05)
    nvml_version: str | None = None
    cuda_version: int | None = None  # (13000)
    compute_capability: str | None = None  # (9.0)
    persistence_mode: int | None = None  # (1)

    # What it draws
    wave: str | None = (
        None  # const:W  square:LOW:HIGH:PERIOD_S[:DUTY]  ramp:LOW:HIGH:DURATION_S  sine:MEAN:AMP:PERIOD_S
    )
    before_w: float | None = None  # before the origin (W, LOW, LOW, MEAN)
    origin_us: int | None = None

    # The sample ring
    ring: str | None = None
    ring_len: int | None = None  # (119)
    ring_ms: float | None = None  # (20)
    jitter: str | None = None  # "off": exactly on the grid, none missing
    lag_ms: float | None = None  # (15)
    ring_freeze_at_s: float | None = None

    # The energy counter
    energy: str | None = None
    counter_base_mj: int | None = None  # (9,000,000)
    counter_lag_ms: float | None = None  # (9)
    counter_reset_at_s: float | None = None
    tick_ms: float | None = None  # (100), on multiples of the epoch plus the phase
    tick_phase_ms: float | None = None  # (0)

    # Polled power
    power: str | None = None
    fields: str | None = None
    average: str | None = None
    instant: str | None = None
    hbm: str | None = None
    hbm_fraction: float | None = None  # of the board's power (0.1)
    module: str | None = None
    module_factor: float | None = None  # on the board's power (1.1)
    refresh_ms: float | None = None  # (100)

    # What calls cost: slept in real time; by default only with the real clock
    cost_energy_us: float | None = None  # (3000)
    cost_samples_us: float | None = None  # (500)
    cost_power_us: float | None = None
    cost_fields_us: float | None = None
    cost_telemetry_us: float | None = None

    # Telemetry
    temperature: str | None = None
    temperature_c: float | None = None  # (45)
    memory_temperature_c: float | None = None  # (50)
    clocks: str | None = None
    clock_graphics: int | None = None  # (1980)
    clock_sm: int | None = None  # (1980)
    clock_mem: int | None = None  # (3201)
    clock_video: int | None = None  # (1545)
    reasons: int | str | None = None  # bits of nvmlClocksEventReason*
    supported_reasons: int | None = None  # (0x1ff)
    violation: str | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)
    """Share of the time since the origin, by reason: power, thermal, sync_boost, board_limit,
    low_utilization, reliability, sw_thermal, hw_thermal, power_brake."""
    utilization: str | None = None
    utilization_pct: int | None = None
    memory_utilization_pct: int | None = None
    memory: str | None = None
    memory_total_mib: float | None = None  # (143771)
    memory_used_mib: float | None = None
    processes: str | None = None  # PID:MIB,PID:MIB
    gpm: str | None = None
    gpm_values: Mapping[str, float] = field(default_factory=dict)
    """graphics, sm, occupancy, integer, tensor, hmma, dram, fp64, fp32, fp16, pcie_tx, pcie_rx,
    nvlink_rx, nvlink_tx: percent, or MiB/s."""

    # Limits and control
    limit: str | None = None
    limit_w: float | None = None  # the default limit (700)
    limit_min_w: float | None = None  # (200)
    limit_max_w: float | None = None  # (700)
    enforced_limit_w: float | None = None  # a limit by someone else
    control: str | None = None
    limit_step_w: float | None = None  # a driver that rounds down to this (off)
    cost_control_us: float | None = None  # (0)
    smoothing: str | None = None  # "on": a Blackwell GPU with power smoothing (off)
    profiles: int | None = None  # the mask of its workload power profiles (off)
    state_file: str | None = None  # an absolute path: limits and locks lie there, shared by processes

    # Faults
    fault_limit: str | None = None  # SKIP:COUNT:CODE[:applied]: that many calls succeed, then so many answer CODE
    fault_lock: str | None = None
    fault_unlock: str | None = None
    fault_smooth: str | None = None
    fault_profile: str | None = None
    init: str | None = None  # driver_not_loaded, lib_mismatch, absent
    lost_at_s: float | None = None
    lost_gpu: int | None = None  # all of them
    denied_at_s: float | None = None
    back_at_s: float | None = None  # the end of lost and denied
    restart_at_s: float | None = None  # uninitialized from here until the next nvmlInit
    restart_s: float | None = None  # nvmlInit answers "driver not loaded" for so long (0)
    epoch_step_us_at: str | None = None  # T_S:DELTA_US

    gpu: Mapping[int, Mapping[str, object]] = field(default_factory=dict)

    def text(self) -> str:
        """The scenario as the C side reads it."""
        lines: list[str] = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "gpu":
                for index, own in value.items():
                    lines += [f"gpu{index}.{line}" for line in Scenario(**own).text().splitlines()]
            elif f.name in ("throttled", "gpm_values"):
                lines += [f"{f.name.removesuffix('_values')}.{name}={share}" for name, share in value.items()]
            elif value is not None:
                # cost_energy_us is cost.energy_us there, clock_sm is clock.sm
                head, _, rest = f.name.partition("_")
                key = f"{head}.{rest}" if head in ("cost", "clock", "fault") else f.name
                lines.append(f"{key}={value}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Control:
    """What a `state_file` says of one GPU: 0 is "never set"."""

    limit_mw: int
    lock_min_mhz: int
    lock_max_mhz: int
    limit_calls: int
    lock_calls: int
    unlock_calls: int


CONTROL = struct.Struct("6I 12I 20d")  # struct control of fake_board.h; tests read its first part


def control_state(state_file: Path) -> list[Control]:
    """The `state_file` of a scenario, by GPU."""
    return [Control(*words[:6]) for words in CONTROL.iter_unpack(state_file.read_bytes())]


def missing_compiler() -> str | None:
    """Why the fake cannot be built here, or None."""
    return None if shutil.which("gcc") else "gcc is not installed: it compiles the fake libnvidia-ml.so.1"


def build_fake(tmp_dir: Path | None = None) -> Path:
    """Compile the fake, once per content of its source, and return the path of its libnvidia-ml.so.1."""
    key = hashlib.sha256(SOURCE.read_bytes() + BOARD.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    base = tmp_dir if tmp_dir is not None else Path(tempfile.gettempdir()) / f"tessera-fake-nvml-{os.getuid()}"
    library = base / key / SONAME
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Two test sessions may build at once: each writes its own file, the rename is atomic.
        draft = library.with_name(f"{SONAME}.{os.getpid()}")
        subprocess.run(["gcc", *FLAGS, str(SOURCE), "-o", str(draft), "-lm"], check=True, capture_output=True)
        draft.rename(library)
    return library


def load_fake() -> ctypes.CDLL:
    """Load the fake into this process, where the loader then finds it by its SONAME."""
    library = ctypes.CDLL(str(build_fake()), mode=ctypes.RTLD_GLOBAL)
    u64 = ctypes.c_uint64
    for name, result, arguments in (
        ("scenario", ctypes.c_int, [ctypes.c_char_p]),
        ("set_time_us", None, [u64]),
        ("epoch_us", u64, []),
        ("time_us", u64, []),
        ("origin_us", u64, []),
        ("true_joules", ctypes.c_double, [ctypes.c_int, u64, u64]),
        ("calls", ctypes.c_ulong, [ctypes.c_char_p]),
        ("locked_clocks", u64, [ctypes.c_uint]),
        ("reset", None, []),
    ):
        function = getattr(library, f"fake_nvml_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def fake_env(scenario: Scenario | Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which a process finds the fake; a Path is a file that holds the scenario's text."""
    env = dict(os.environ if base is None else base)
    folders = [str(build_fake().parent), env.get("LD_LIBRARY_PATH", "")]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(f for f in folders if f)
    env["FAKE_NVML_SCENARIO"] = f"@{scenario}" if isinstance(scenario, Path) else scenario.text()
    return env


class FakeNvml:
    """The fake in this process: pynvml answers from it from here until `close` (or the end of the `with`)."""

    def __init__(self) -> None:
        self._library = load_fake()
        self._scenario = Scenario()
        self._virtual = False
        self._forget_pynvml()
        # The loader knows a library by its SONAME; a real one that was loaded before ours would win.
        if not hasattr(ctypes.CDLL(SONAME), "fake_nvml_reset"):
            self._pynvml().nvmlLib = self._library
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def _pynvml() -> Any:
        import pynvml

        return pynvml

    def _forget_pynvml(self) -> None:
        pynvml = self._pynvml()
        pynvml.nvmlLib = None
        pynvml._nvmlLib_refcount = 0
        pynvml._nvmlGetFunctionPointer_cache.clear()

    def close(self) -> None:
        """Shut down; from here on nvmlInit finds no NVML in this process."""
        self.reset()
        self._library.fake_nvml_scenario(b"init=absent")
        self._forget_pynvml()

    def reset(self) -> None:
        """The default board, the real clock, no calls counted, not initialised."""
        self._library.fake_nvml_reset()
        self._scenario = Scenario()
        self._virtual = False

    @property
    def scenario(self) -> Scenario:
        """What holds now."""
        return self._scenario

    def set(self, scenario: Scenario) -> None:
        """Replace the scenario at once. Its origin is now, unless it has an `origin_us`."""
        line = self._library.fake_nvml_scenario(scenario.text().encode())
        if line:
            raise ValueError(f"the fake NVML does not understand {scenario.text().splitlines()[line - 1]!r}")
        self._scenario = scenario

    def change(self, **fields: Any) -> None:
        """Change the present scenario and keep its origin: counter and ring go on from the same history."""
        origin = {"origin_us": self._library.fake_nvml_origin_us()}
        self.set(dataclasses.replace(self._scenario, **(origin | fields)))

    def set_time_us(self, epoch_us: int) -> None:
        """Set the virtual clock; 0 goes back to the real one."""
        self._library.fake_nvml_set_time_us(epoch_us)
        self._virtual = bool(epoch_us)

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        if not self._virtual:
            raise RuntimeError("only a virtual clock can be advanced: call set_time_us first")
        self.set_time_us(self.time_us() + round(seconds * 1e6))

    def time_us(self) -> int:
        """The time all of this happens in: epoch microseconds, never stepped."""
        return int(self._library.fake_nvml_time_us())

    def epoch_ns(self) -> int:
        """What the wall clock says in this world, with its step: an `epoch_ns` for tessera.clock.EpochMap."""
        return 1000 * int(self._library.fake_nvml_epoch_us())

    def monotonic_ns(self) -> int:
        """A clock without the step: a `monotonic_ns` for tessera.clock.EpochMap."""
        return 1000 * self.time_us()

    def true_joules(self, from_us: int, to_us: int, gpu: int = 0) -> float:
        """What the waveform really draws between two times (of `time_us`)."""
        return float(self._library.fake_nvml_true_joules(gpu, from_us, to_us))

    def calls(self, name: str) -> int:
        """How often an entry point was called, by its C name: "nvmlDeviceGetCount_v2"."""
        return int(self._library.fake_nvml_calls(name.encode()))

    def locked_clocks(self, index: int) -> tuple[int, int] | None:
        """(min, max) MHz that the clocks of a GPU are locked to."""
        packed = int(self._library.fake_nvml_locked_clocks(index))
        return (packed >> 32, packed & 0xFFFFFFFF) if packed else None


def clock_of(fake: FakeNvml) -> Clock:
    return Clock(fake.monotonic_ns, fake.epoch_ns)
