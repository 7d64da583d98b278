"""`energy_scope`: the joules of a block, a function or a coroutine, for the cost of two clock readings."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ..errors import ArgumentError, MeasurementError
from ..joules import sum_domains
from ..schema import Basis, Energy, EnergyReport
from .core import Monitor, default
from .window import Window

P = ParamSpec("P")
R = TypeVar("R")

on_close: Callable[[str, int, int], None] | None = None
"""Told of every scope that was left: its name and its two times on the host (monotonic). Set by whoever records."""


class EnergyScope:
    """The joules between entering and leaving. A context manager, and a decorator that opens one per call.

    Entering and leaving note the clock and, where CUDA is initialised, an event in the current stream: nothing
    is synchronised (`sync=True` asks for it) and no sensor is touched. Reading a result waits until the sensor
    has caught up. Read inside the block it gives the joules so far.
    """

    __slots__ = ("__weakref__", "_given", "_monitor", "_open", "_sync", "_window", "name")

    def __init__(self, name: str = "scope", *, sync: bool = False, monitor: Monitor | None = None) -> None:
        self.name = name
        self._sync = sync
        self._given = monitor
        self._monitor: Monitor | None = monitor
        self._window: Window | None = None  # the one a result is read from: open, or the last that was closed
        self._open: list[Window] = []  # entered and not yet left: the same object may be entered again inside itself

    def __enter__(self) -> EnergyScope:
        # Not the one of the last time: that may have been replaced (`use`), or left behind in the parent (fork).
        monitor = self._monitor = default() if self._given is None else self._given
        if self._sync:
            synchronize()
        self._window = monitor.open(self.name)
        self._open.append(self._window)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if self._sync and exc_type is None:
                synchronize()
        finally:
            self._window = self._open.pop()
            window = self._window
            self._monitor.close(window)  # type: ignore[union-attr]
            if on_close is not None and window.end is not None:
                on_close(self.name, window.start.host_ns, window.end.host_ns)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function or coroutine function: a scope of this name around every call."""
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise ArgumentError(
                f"energy_scope cannot decorate the generator {fn.__name__!r}",
                why="its body runs between its caller's steps, not in the call",
                fix="open the scope inside it: with monitor.energy_scope(...):",
            )
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def around(*args: Any, **kwargs: Any) -> Any:
                with self._fresh():
                    return await fn(*args, **kwargs)

            return around  # type: ignore[return-value]

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._fresh():
                return fn(*args, **kwargs)

        return wrapped

    def _fresh(self) -> EnergyScope:
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

    def _counted(self) -> list[Energy]:
        parts = self._read(everything=False)
        assert self._monitor is not None
        return [parts[n] for n in self._monitor.sampler.counted() if n in parts]

    @property
    def energy(self) -> Energy:
        """The counted domains together: joules, error_j, seconds, source, coverage, basis."""
        counted = self._counted()
        assert self._window is not None and self._monitor is not None
        if self._window.end is not None:
            return self._monitor.total(self._window)
        return sum_domains(counted, max((e.seconds for e in counted), default=0.0))

    @property
    def joules(self) -> float:
        """Joules of all counted domains."""
        return self.energy.joules

    @property
    def error_j(self) -> float:
        """90% half-width of the joules."""
        return self.energy.error_j

    @property
    def watts(self) -> float | None:
        """Mean power: the sum over the domains of joules by seconds; None for an empty window."""
        known = [e.watts for e in self._counted() if e.watts is not None]
        return sum(known) if known else None

    @property
    def seconds(self) -> float:
        """Length of the window: on the device's clock where the edges were marked in a CUDA stream."""
        return self.energy.seconds

    @property
    def host_seconds(self) -> float:
        """Length of the window on the host's clock (launching may be over long before the device is done)."""
        if self._window is None:
            return 0.0
        return self._window.seconds(device=False)

    @property
    def coverage(self) -> float:
        """Share of the window the sensors have seen (of the worst counted domain); under 1 see `gaps`."""
        return self.energy.coverage

    @property
    def source(self) -> str:
        """Where the joules come from, e.g. "nvml-samples+counter"; "modelled" where there is no sensor."""
        return self.energy.source

    @property
    def basis(self) -> Basis:
        """Either "measured", or "modelled" as soon as one counted domain is."""
        return self.energy.basis

    @property
    def start_ns(self) -> int:
        """Monotonic start of the window (device time where known)."""
        return self._edge_ns(start=True)

    @property
    def end_ns(self) -> int:
        """Monotonic end of the window (device time where known)."""
        return self._edge_ns(start=False)

    def _edge_ns(self, start: bool) -> int:
        self._read(everything=False)  # settles the window, so that the edges are resolved
        assert self._window is not None
        edge = self._window.start if start else self._window.end
        return edge.time_ns(on_device=True) if edge is not None else time.monotonic_ns()

    def report(self) -> EnergyReport:
        """The same as an EnergyReport, for diff, JSON and rendering."""
        parts = self.by_domain
        monitor = self._monitor
        assert monitor is not None
        start, end = self.start_ns, self.end_ns
        return EnergyReport(
            name=self.name,
            total=self.energy,
            by_domain=dict(parts),
            domains=monitor.sampler.domains,
            gaps=[g for g in list(monitor.sampler.gaps) if g.start_ns < end and (g.end_ns is None or g.end_ns > start)],
            missing=monitor.missing,
        )

    def __repr__(self) -> str:
        if self._window is None:
            return f"<EnergyScope {self.name!r}, not entered>"
        if not self._window.reported:
            return f"<EnergyScope {self.name!r}, {'open' if self._window.end is None else 'not read yet'}>"
        e = self.energy
        return f"<EnergyScope {self.name!r}: {e.joules:.6g} ± {e.error_j:.2g} J in {e.seconds:.6g} s, {e.source}>"


def synchronize() -> None:
    """Wait for the device, where this process uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def energy_scope(name: str = "scope", *, sync: bool = False, monitor: Monitor | None = None) -> EnergyScope:
    """Measure the joules of a `with` block, or of every call of a decorated function.

    >>> with monitor.energy_scope("training_epoch") as energy:
    ...     run_training()
    >>> energy.joules, energy.error_j, energy.watts, energy.seconds
    """
    return EnergyScope(name, sync=sync, monitor=monitor)
