"""`energy_scope`: the joules of a block, a function or a coroutine. `power_trace`: the power samples of a block."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from ..clock import EpochNs
from ..errors import ArgumentError, MeasurementError, check_positive
from ..joules import DomainSamples, sum_domains
from ..schema import Basis, Energy, EnergyReport, Gap, PowerEvent, Telemetry
from ..sums import sum_known
from ..trace import PowerTrace
from .core import Monitor, Window, default

OVERLAPS = (
    "scopes of other threads or asyncio tasks were open at the same time: each contains what all of this process did, "
    "so their joules must not be added; the sum of one name counts each moment once"
)
P = ParamSpec("P")
R = TypeVar("R")

_MAX_AROUND = 64  # deeper nesting can only be a mistake
_around: ContextVar[tuple[weakref.ref[EnergyScope], ...]] = ContextVar("tessera_scopes_around", default=())
on_close: Callable[[str, int, int, bool], None] | None = None
"""Called with every scope that ends: its name, its two (monotonic) host times, and whether it was inside another scope
of its name. A recording session sets it."""


class EnergyScope:
    """A context manager (`async with` too) or decorator that measures the joules between entering and leaving.

    Entering and leaving note the clock and, if CUDA is initialised, an event in the current stream: nothing is
    synchronised (unless `sync=True`) and no sensor is read. Reading a result waits until the sensor has caught up.
    Inside the block a result contains the joules so far. A sensor does not see threads: each of several overlapping
    scopes contains everything that this process did meanwhile. `report().notes` says so if different threads opened
    them.
    """

    __slots__ = ("__weakref__", "_given", "_monitor", "_open", "_sync", "_window", "name")

    def __init__(self, name: str = "scope", *, sync: bool = False, monitor: Monitor | None = None) -> None:
        self.name = name
        self._sync = sync
        self._given = monitor
        self._monitor: Monitor | None = monitor
        self._window: Window | None = None  # the window that a result is read from: the open or the last closed one
        self._open: list[Window] = []  # entered but not left: the object may be entered again inside itself

    def __enter__(self) -> EnergyScope:
        # Not the monitor of the last time: it may have been replaced (`use`), or belong to the parent process (fork).
        monitor = self._monitor = default() if self._given is None else self._given
        if self._sync:
            synchronize()
        # Scopes that are open around this one, in this thread or asyncio task; forgotten ones are gone.
        around = [scope for ref in _around.get() if (scope := ref()) is not None and scope._open]
        self._window = monitor.open(self.name, nested=any(scope.name == self.name for scope in around))
        self._open.append(self._window)
        _around.set((*map(weakref.ref, around[-_MAX_AROUND:]), weakref.ref(self)))
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if self._sync and exc_type is None:
                synchronize()
        finally:
            window = self._window = self._open.pop()
            self._monitor.close(window)  # type: ignore[union-attr]
            if on_close is not None and window.end is not None:
                on_close(self.name, window.start.host_ns, window.end.host_ns, window.nested)

    async def __aenter__(self) -> EnergyScope:
        return self.__enter__()

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self.__exit__(exc_type)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function or coroutine function: open a scope of this name around every call."""
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise ArgumentError(
                f"energy_scope cannot decorate the generator {fn.__name__!r}",
                why="its body runs between its caller's steps, not in the call",
                fix="open the scope inside it: with monitor.energy_scope(...):",
            )
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
                with self._renew():
                    return await fn(*args, **kwargs)

            return async_wrapper  # type: ignore[return-value]

        @functools.wraps(fn)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._renew():
                return fn(*args, **kwargs)

        return wrapper

    def _renew(self) -> EnergyScope:
        return EnergyScope(self.name, sync=self._sync, monitor=self._given)

    # -- the result -----------------------------------------------------------------------------------------

    def _read(self, everything: bool) -> Mapping[str, Energy]:
        if self._window is None or self._monitor is None:
            raise MeasurementError(
                f"the scope {self.name!r} was never entered", fix="use it as: with monitor.energy_scope(...) as energy:"
            )
        return self._monitor.read(self._window, everything=everything)

    @property
    def by_domain(self) -> Mapping[str, Energy]:
        """Energy by domain (gpu0, gpu0.memory, cpu0, ...), each with error, coverage and source."""
        return dict(self._read(everything=True))

    def _counted_energies(self) -> list[Energy]:
        parts = self._read(everything=False)
        assert self._monitor is not None
        return [parts[n] for n in self._monitor.sampler.counted_domains() if n in parts]

    @property
    def energy(self) -> Energy:
        """The energy of all counted domains together: joules, error_j, seconds, source, coverage, basis."""
        counted = self._counted_energies()
        assert self._window is not None and self._monitor is not None
        if self._window.end is not None:
            return self._monitor.total(self._window)
        return sum_domains(counted, max((e.time_s for e in counted), default=0.0))

    @property
    def energy_j(self) -> float:
        """Joules of all counted domains."""
        return self.energy.energy_j

    joules = energy_j

    @property
    def error_j(self) -> float:
        """90% half-width of the joules."""
        return self.energy.error_j

    @property
    def power_w(self) -> float | None:
        """Mean power, summed over the domains; None for an empty window."""
        return sum_known(e.power_w for e in self._counted_energies())

    @property
    def time_s(self) -> float:
        """Length of the window, on the device's clock if the edges were marked in a CUDA stream."""
        return self.energy.time_s

    @property
    def host_time_s(self) -> float:
        """Length of the window on the host's clock; launching may end long before the device's work does."""
        if self._window is None:
            return 0.0
        return self._window.seconds(device=False)

    @property
    def coverage(self) -> float:
        """Share of the window that the worst counted domain's sensor has seen; `report().gaps` explains the rest."""
        return self.energy.coverage

    @property
    def source(self) -> str:
        """Where the joules come from, such as "nvml-samples+counter"; "modelled" without a sensor."""
        return self.energy.source

    @property
    def basis(self) -> Basis:
        """Either "measured", or "modelled" as soon as one counted domain is."""
        return self.energy.basis

    @property
    def start_ns(self) -> int:
        """Monotonic start of the window (device time if known)."""
        return self._edge_ns(start=True)

    @property
    def end_ns(self) -> int:
        """Monotonic end of the window (device time if known)."""
        return self._edge_ns(start=False)

    def _edge_ns(self, start: bool) -> int:
        self._read(everything=False)  # settles the window, so that its edges are known
        assert self._window is not None
        edge = self._window.start if start else self._window.end
        return edge.time_ns(on_device=True) if edge is not None else time.monotonic_ns()

    def report(self) -> EnergyReport:
        """Return the result as an EnergyReport, for diff, JSON and rendering."""
        by_domain = dict(self.by_domain)
        assert self._monitor is not None
        sampler = self._monitor.sampler
        return EnergyReport(
            name=self.name,
            total=self.energy,
            by_domain=by_domain,
            domains=sampler.domains,
            gaps=sampler.gaps_between(self.start_ns, self.end_ns),
            missing=self._monitor.missing,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        """Return what a reader of the joules should know."""
        window = self._window
        if window is None or self._monitor is None:
            return []
        in_step = self._monitor.note_steps(window.start, window.end) if window.end else []
        return [*([OVERLAPS] if window.overlaps else []), *in_step]

    def __repr__(self) -> str:
        if self._window is None:
            return f"<EnergyScope {self.name!r}, not entered>"
        if not self._window.reported:
            return f"<EnergyScope {self.name!r}, {'open' if self._window.end is None else 'not read yet'}>"
        e = self.energy
        return f"<EnergyScope {self.name!r}: {e.energy_j:.6g} ± {e.error_j:.2g} J in {e.time_s:.6g} s, {e.source}>"


def synchronize() -> None:
    """Wait for the device, if this process uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured. Waiting for the device would then break the capture."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def energy_scope(name: str = "scope", *, sync: bool = False, monitor: Monitor | None = None) -> EnergyScope:
    """Measure the joules of a `with` block, or of every call of a decorated function.

    >>> with monitor.energy_scope("training_epoch") as energy:
    ...     run_training()
    >>> energy.energy_j, energy.error_j, energy.power_w, energy.time_s
    """
    return EnergyScope(name, sync=sync, monitor=monitor)


class LiveTrace(PowerTrace):
    """A `PowerTrace` of a `with` block, as fine as the sensor; complete after the block.

    The body is not slowed down: the sampler reads in the background. The first access after the block waits until the
    sensor has caught up with the end of the block.
    """

    def __init__(self, interval_ms: float | None = None, *, monitor: Monitor | None = None) -> None:
        if interval_ms is not None:
            fix = "milliseconds, such as interval_ms=20, or leave it out for the sensor's own resolution"
            check_positive("interval_ms", interval_ms, fix=fix)
        super().__init__({}, start_ns=0, end_ns=0, asked_ms=interval_ms)
        self._given = monitor
        self._monitor: Monitor | None = None
        self._offset_ns = 0
        self._closed = False

    def __enter__(self) -> LiveTrace:
        self._monitor = self._given or default()
        self._offset_ns = self._monitor.sampler.epoch.offset_ns
        self._start_ns = self._now_ns()
        self._closed = False
        self._columns = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._end_ns = self._now_ns()
        self._closed = True

    @property
    def notes(self) -> list[str]:
        """What a reader should know: a sensor coarser than the interval that was asked for, or a modelled one."""
        notes = []
        for c in self._select_counted(None):
            d, true_ms = c.domain, c.domain.resolution_s * 1e3
            if self.asked_ms is not None and self.asked_ms < 0.75 * true_ms:
                notes.append(
                    f"{d.name}: asked for {self.asked_ms:g} ms, but {d.source} has a new value every {true_ms:.3g} ms; "
                    "the trace has those, repeats are not counted as data"
                )
            if d.basis != "measured":
                notes.append(f"{d.name}: {d.basis}, not measured ({d.note})")
        return notes

    @property
    def end_ns(self) -> EpochNs:
        """The end; while the block runs, now."""
        return EpochNs(self._end_ns if self._closed or self._monitor is None else self._now_ns())

    def _now_ns(self) -> EpochNs:
        return self.to_epoch(time.monotonic_ns())

    def to_epoch(self, monotonic_ns: int) -> EpochNs:
        """Convert a time of the sampler's clock to the clock of this trace."""
        return EpochNs(monotonic_ns + self._offset_ns)

    @property
    def monotonic_span_ns(self) -> tuple[int, int]:
        """Start and end on the sampler's clock."""
        return self.start_ns - self._offset_ns, self.end_ns - self._offset_ns

    @property
    def columns(self) -> Mapping[str, DomainSamples]:
        """The samples by domain, with one beyond each edge; while the block runs, those so far."""
        if self._columns or self._monitor is None:
            return self._columns
        sampler = self._monitor.sampler
        start_ns, end_ns = self.monotonic_span_ns
        if self._closed:
            sampler.wait_for(end_ns)
        with sampler.lock:
            # Keep every sample even if a coarser interval was asked for: thinning would only lose peaks.
            columns = {n: s.column(start_ns, end_ns).shift(self._offset_ns) for n, s in sampler.series.items()}
        if self._closed:
            self._columns = columns
        return columns

    @property
    def gaps(self) -> Sequence[Gap]:
        """Gaps within the trace."""
        if self._monitor is None:
            return ()
        gaps = self._monitor.sampler.gaps_between(*self.monotonic_span_ns)
        return [gap.shift(self._offset_ns) for gap in gaps]

    @property
    def events(self) -> list[PowerEvent]:
        """What power supplies, PDUs and BMCs reported during the trace."""
        if self._monitor is None:
            return []
        start_ns, end_ns = self.monotonic_span_ns
        known = list(self._monitor.sampler.events)
        return [e.shift(self._offset_ns) for e in known if e.time_ns >= start_ns and e.start_ns <= end_ns]

    def telemetry(self, domain: str) -> list[Telemetry]:
        """Return clocks, temperature and throttling of a domain during the trace."""
        if self._monitor is None:
            return []
        start_ns, end_ns = self.monotonic_span_ns
        readings = list(self._monitor.sampler.telemetry.get(domain, ()))
        return [
            dataclasses.replace(t, time_ns=t.time_ns + self._offset_ns)
            for t in readings
            if start_ns <= t.time_ns <= end_ns
        ]


def power_trace(interval_ms: float | None = None, *, monitor: Monitor | None = None) -> LiveTrace:
    """Record power during a `with` block.

    >>> with monitor.power_trace(interval_ms=5) as pwr:
    ...     run_hotstep()
    >>> pwr.peak_w, pwr.crest_factor(), pwr.true_resolution_ms
    """
    return LiveTrace(interval_ms, monitor=monitor)
