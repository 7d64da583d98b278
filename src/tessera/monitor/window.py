"""A window of time and the joules in it: settled as the data come in, in constant memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..integral import Mark
from ..joules import Anchor, apply_correction, correct_by_counter, energy_between
from ..schema import Domain, Energy
from .anchors import Anchors
from .cuda import DeviceClocks, Edge
from .sampler import Sampler
from .series import Series


def on_device(domain: Domain) -> bool:
    """Whether a domain runs on the GPU's time (the edges in the stream) or on the host's."""
    return domain.name.startswith("gpu")


class Window:
    """Two edges and what lay between them, by domain.

    Each edge is marked in the running sums as soon as the samples have passed it, so a window may last for days
    or be read hours later and needs no samples kept. `settle` is called by the sampler's thread after each read,
    and by whoever reads the result.
    """

    __slots__ = ("_ends", "_firsts", "_starts", "end", "energies", "name", "reported", "start")

    def __init__(self, name: str, start: Edge) -> None:
        self.name = name
        self.start = start
        self.end: Edge | None = None
        self.energies: dict[str, Energy] = {}
        self.reported = False
        self._starts: dict[str, Mark] = {}
        self._ends: dict[str, Mark] = {}
        self._firsts: dict[str, Anchor] = {}

    def settle(self, sampler: Sampler, clocks: DeviceClocks, names: Collection[str], force: bool = False) -> bool:
        """Mark what can be marked of the named domains; True when their joules are known. `force`: as it is."""
        if self._has(names):
            return True
        if not clocks.resolve(self.start) and not force:
            return False
        with sampler.lock:
            self._mark(sampler, self.start, self._starts, names, force)
            self._find_first_anchors(sampler)
            if self.end is None or (not clocks.resolve(self.end) and not force):
                return False
            self._mark(sampler, self.end, self._ends, names, force)
            for name in names:
                if name not in self.energies and name in self._starts and name in self._ends:
                    series = sampler.series[name]
                    self.energies[name] = self._energy(series, sampler.anchors[name], self.end)
        return self._has(names)

    def _has(self, names: Collection[str]) -> bool:
        return all(n in self.energies for n in names)

    def so_far(self, sampler: Sampler, end: Edge) -> Mapping[str, Energy]:
        """The joules up to a provisional end, without ending the window."""
        probe = Window(self.name, self.start.known())
        probe.end = end.known()
        probe._starts.update(self._starts)
        probe._firsts.update(self._firsts)
        probe.settle(sampler, DeviceClocks(), list(sampler.series), force=True)
        return probe.energies

    def seconds(self, device: bool) -> float:
        """Length of the window on the device's or the host's clock."""
        if self.end is None:
            return 0.0
        return max(self.end.time_ns(device) - self.start.time_ns(device), 0) * 1e-9

    def _mark(self, sampler: Sampler, edge: Edge, marks: dict[str, Mark], names: Collection[str], force: bool) -> None:
        for name in names:
            series = sampler.series[name]
            time_ns = edge.time_ns(on_device(series.domain))
            if name not in marks and (force or series.covers(time_ns)):
                marks[name] = series.mark(time_ns)

    def _find_first_anchors(self, sampler: Sampler) -> None:
        for name, kept in sampler.anchors.items():
            if name not in self._firsts:
                first = kept.first_after(self.start.time_ns(on_device(sampler.series[name].domain)))
                if first is not None:
                    self._firsts[name] = first

    def _energy(self, series: Series, anchors: Anchors, end: Edge) -> Energy:
        """By the samples alone, or with the counter's joules for the span between the first and last anchor."""
        domain = series.domain
        device = on_device(domain)
        seconds = self.seconds(device)
        start_mark, end_mark = self._starts[domain.name], self._ends[domain.name]
        fix = correct_by_counter(self._firsts.get(domain.name), anchors.last_before(end.time_ns(device)))
        if fix is None:
            return energy_between(domain, start_mark, end_mark, seconds)
        return apply_correction(start_mark, end_mark, fix, domain, seconds)
