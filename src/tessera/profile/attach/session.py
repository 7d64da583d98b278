"""`attach`: look at a running process for a while, and let it trace itself if libkineto waits in it.

monitor (power, telemetry) ─┐
ProcessSampler (/proc, NVML)├─► tracks ──► Attached: metrics, trace, notes
TraceDaemon ◄─► libkineto ──┤   Kineto's file
PySpy (no trace possible) ──┘   Python stacks
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ArgumentError, RecordingError, SensorError, TesseraError
from ...monitor import LiveTrace, Monitor, power_trace
from ...recording import Stack
from ...schema import Energy
from ...sensors.base import Sensor
from ...sensors.discover import DiscoveredSensors, discover
from ...sensors.gpu_processes import GpuProcessReader
from ...sensors.processes import ProcessTree
from .daemon import TraceDaemon
from .process import Kineto, NoProcess, Target, descendants, find, kineto, maps_python
from .request import Folder, TraceFigures, What, figures
from .sampling import ProcessSampler, ProcessUse
from .stacks import PySpy
from .tracks import SECTIONS, Section, Track, TrackSummary, device_tracks, write_summary, write_trace

DEFAULT_S = 5.0
"""How long to look if there is no trace to wait for."""
LEAST_S = 1.0
"""How long to look at least, even if the trace is complete earlier."""
TIMEOUT_S = 30.0
"""How long to wait for a trace."""
TELEMETRY_S = 0.1  # GPM's shortest window
_BEAT_S = 0.05
_MIN_SAMPLE_S = 1e-3

Wait = Callable[[float], bool]


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """What to look at. `duration_s` None: until the trace is complete; `DEFAULT_S` if no trace is possible."""

    sample_s: float = 0.01
    duration_s: float | None = None
    sections: Collection[Section] = SECTIONS
    what: What = field(default_factory=What)
    trace: bool = True
    timeout_s: float = TIMEOUT_S
    sensors: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.sample_s >= _MIN_SAMPLE_S:
            raise ArgumentError(
                f"a sample every {self.sample_s * 1e3:g} ms is too often",
                why="reading a process more than a thousand times per second would slow it",
                fix="give 1 ms or more; power has a new value every 20 ms at best",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What was seen of a process. `kineto` is the trace that it wrote, unchanged; if None, `kineto_state` says why."""

    target: Target
    seconds: float
    sample_s: float
    tracks: Sequence[Track]
    power: LiveTrace
    kineto_state: Kineto
    kineto: bytes | None = None
    stacks: Sequence[Stack] = ()
    """Python stacks that py-spy read, if the process cannot be traced."""
    figures: TraceFigures | None = None
    trace_s: float | None = None
    """Seconds from the beginning until the trace was complete."""
    traced_pid: int | None = None
    ended: bool = False
    stopped: bool = False
    notes: Sequence[str] = ()

    @property
    def metrics(self) -> list[TrackSummary]:
        return [t.metric() for t in self.tracks]

    @property
    def energy(self) -> Mapping[str, Energy]:
        """Joules of each counted domain while we looked: whole GPUs, and the process's share of the CPU."""
        return {d.name: self.power.energy(d.name) for d in self.power.domains if d.counted}

    def export(self, path: Path) -> None:
        """Write the trace with the counters in it; gzipped if the name ends in .gz."""
        write_trace(path, self.kineto, self.tracks)

    def summary(self, path: Path) -> None:
        write_summary(path, self.metrics)


def attach(
    pid: int,
    options: AttachOptions | None = None,
    *,
    wait: Wait = _sleep,
    tell: Callable[[str], None] = lambda _text: None,
) -> Attached:
    """Look at a process. `wait` sleeps and returns whether to stop early; `tell` gets what is being waited for."""
    begun = time.monotonic()
    target = find(pid)
    try:
        return _Session(target, options or AttachOptions(), wait, tell, begun).run()
    finally:
        target.close()


class _Session:
    """The state of one call of `attach`."""

    def __init__(
        self, target: Target, options: AttachOptions, wait: Wait, tell: Callable[[str], None], begun: float
    ) -> None:
        self._target, self._options, self._wait, self._tell, self._begun = target, options, wait, tell, begun
        self._notes: list[str] = []
        self._kineto = kineto(target)
        self._data: bytes | None = None
        self._refusal: RecordingError | None = None
        self._trace_s: float | None = None
        self._stopped = False
        self._daemon: TraceDaemon | None = None
        self._spy: PySpy | None = None

    def run(self) -> Attached:
        target, options = self._target, self._options
        sensors = _sensors(target, options)
        monitor = Monitor(sensors.sensors, sensors.missing).start()
        try:
            pids = [target.pid] if target.torch else [target.pid, *descendants(target.pid)]
            gpus = GpuProcessReader.open()
            use = None if gpus is None else ProcessUse(gpus, pids)
            with (
                power_trace(interval_ms=options.sample_s * 1e3, monitor=monitor) as power,
                ProcessSampler(target, options.sample_s, monitor.sampler, use) as sampler,
            ):
                self._look(sampler)
            # Wait for counted domains only: HBM power is an average over a second, too long to wait for.
            monitor.sampler.wait_for(power.monotonic_span_ns[1], names=monitor.sampler.counted_domains())
        finally:
            monitor.stop()
        if use is not None:
            self._notes += _use_notes(use.found, use.others, use.missing)
        return self._result(power, sampler)

    def _look(self, sampler: ProcessSampler) -> None:
        """Look until the time is over and the trace is complete or given up, or until the process ends."""
        with contextlib.ExitStack() as stack:
            folder = self._listen(stack)
            if self._kineto.state == "off" or (self._kineto.state == "not torch" and maps_python(self._target.pid)):
                self._spy = stack.enter_context(PySpy(self._target.pid))
            looked = time.monotonic()
            while sampler.ended_ns is None:
                if self._wait(_BEAT_S):
                    self._stopped = True
                    return
                if folder is not None and self._data is None and folder.has_begun and not self._take(folder):
                    folder = None
                now = time.monotonic()
                waiting = folder is not None and self._data is None and now - self._begun < self._options.timeout_s
                if now - looked >= self._least_s(tracing=folder is not None) and not waiting:
                    return
                self._tell(self._daemon.state if waiting and self._daemon is not None else "sampling")
            if folder is not None and self._data is None:
                self._take(folder)  # the process may have written its trace just before it ended

    def _least_s(self, *, tracing: bool) -> float:
        if self._options.duration_s is not None:
            return self._options.duration_s
        return LEAST_S if tracing else DEFAULT_S

    def _listen(self, stack: contextlib.ExitStack) -> Folder | None:
        if not self._kineto.possible or not self._options.trace:
            return None
        try:
            folder = stack.enter_context(Folder(self._target))
            self._daemon = stack.enter_context(TraceDaemon(self._target, folder, self._options.what))
        except TesseraError as exc:
            self._kineto = Kineto(state="unreachable", reason=f"{exc.what}: {exc.why}", fix=exc.fix or "")
            return None
        return folder

    def _take(self, folder: Folder) -> bool:
        """Take the trace if it is complete. Return False if it can never be taken."""
        try:
            self._data = folder.take()
        except RecordingError as exc:
            self._refusal = exc
        if self._data is not None:
            self._trace_s = time.monotonic() - self._begun
        return self._refusal is None

    def _result(self, power: LiveTrace, sampler: ProcessSampler) -> Attached:
        ended = sampler.ended_ns is not None
        tracks = sampler.tracks(self._options.sections)
        if not tracks and ended:
            raise NoProcess(f"process {self._target.pid} ended before it could be looked at")
        telemetry = sampler.device_telemetry(power.start_ns, power.end_ns)
        tracks += device_tracks(power, telemetry, self._options.sections)
        counted = None
        if self._data is not None:
            try:
                counted = figures(self._data)
                self._notes += _lost_kernels(counted)
            except RecordingError as exc:
                self._notes.append(f"{exc.what}: {exc.why}; it is exported as it is")
        elif self._daemon is not None:
            self._kineto = self._why_not(self._daemon, ended)
        if self._spy is not None and self._spy.why_not is not None:
            self._notes.append(f"no Python functions: {self._spy.why_not}")
        return Attached(
            target=self._target,
            seconds=power.seconds,
            sample_s=sampler.interval_s,
            tracks=tracks,
            power=power,
            kineto_state=self._kineto,
            kineto=self._data,
            stacks=self._spy.stacks if self._spy is not None else (),
            figures=counted,
            trace_s=self._trace_s,
            traced_pid=self._daemon.answered_pid if self._daemon else None,
            ended=ended,
            stopped=self._stopped,
            notes=self._notes,
        )

    def _why_not(self, daemon: TraceDaemon, ended: bool) -> Kineto:
        """Return why a process that could have been traced has left no trace."""
        state, again = self._kineto.state, f"tessera-prof --pid {self._target.pid}"
        if self._refusal is not None:
            return Kineto(state=state, reason=f"{self._refusal.what}: {self._refusal.why}", fix=f"{again} --steps 1")
        if ended:
            return Kineto(state=state, reason="it ended before its trace was written")
        if self._stopped:
            return Kineto(state=state, reason="stopped before the trace was written", fix=again)
        if daemon.asked_s is None:
            reason = self._kineto.reason or f"it did not ask for one in {self._options.timeout_s:g} s"
            return Kineto(state=state, reason=reason, fix=self._kineto.fix or f"{again} --timeout 60s")
        if daemon.sent_s is None:
            return Kineto(state=state, reason="another profiler is active in it", fix="try again when that has ended")
        return Kineto(
            state=state,
            reason="it took the order and wrote no trace: no optimizer step came, or it cannot write in /tmp",
            fix=f"{again} --steps 0 (by time), or --timeout 120s for slow steps",
        )


def _sensors(target: Target, options: AttachOptions) -> DiscoveredSensors:
    """Return this machine's sensors; GPUs are those that the process sees, with telemetry as often as GPM has it."""
    discovered = discover(list(options.sensors) or None, tree=ProcessTree(target.pid))
    return DiscoveredSensors([_finer(s, target, options) for s in discovered.sensors], discovered.missing)


def _finer(sensor: Sensor, target: Target, options: AttachOptions) -> Sensor:
    if sensor.name != "nvml":
        return sensor
    from ...sensors.nvml import NvmlSensor

    finer = NvmlSensor(environ=target.environ, telemetry_s=max(options.sample_s, TELEMETRY_S))
    try:
        finer.start()
    except SensorError:  # the process hides all GPUs from itself: show those we see
        finer.stop()
        return sensor
    sensor.stop()
    return finer


def _lost_kernels(trace: TraceFigures) -> list[str]:
    """Return a note if over half of the kernels are lost: more than can be cut off at the edges of a recording."""
    if trace.kernels >= trace.launches / 2:
        return []
    return [
        f"the trace has {trace.launches} launches and {trace.kernels} kernels: PyTorch's profiler lost the others; "
        "try --warmup-s 1, a longer --trace-ms, or --steps"
    ]


def _use_notes(is_listed: bool, others: bool, missing: Mapping[str, str]) -> list[str]:
    notes = [f"NVML gives no {what}: {why}" for what, why in missing.items()]
    if others and not is_listed:
        notes.append("NVML lists other processes, not this one (in a container it lists the host's PIDs)")
    return notes
