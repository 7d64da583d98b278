"""`attribute(timeline, power)`: gives the joules of a run to what ran, so that the sum is conserved.

::

    Timeline ──► activity (classes, shares) ──► exposure ──┐
    PowerTrace ──► samples, response ──────────────────────┼──► fit ──► conserved ──► ledger (rows) ──► EnergyTable
    shapes, chip ──► prior ────────────────────────────────┘

Each device is solved by itself. Idle times are classes too: one for the short ones between kernels (clocks up, SMs
waiting) and one for the long ones. If power is modelled there is nothing to solve: see `by_time`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import MeasurementError
from ..joules import FULL, DomainSamples, Floats, Ints, sum_windows
from ..schema import DeviceId, Domain, Hold
from ..timeline import Timeline
from ..timeline.distinct import argsort_small
from ..timeline.link import Links
from ..trace import PowerTrace
from .activity import Activity, activity, gaps, host_activity, sum_by_key
from .blas_threads import one_blas_thread
from .fit import PowerFit, Response, add_level_error, conserve_energy, exposure, groups, response_of, solve
from .learn_response import Exposed, LearntResponse, horizon_s, learn_response
from .prior import Board, Prior, board_of, prior
from .share import HOST, Share, by_time, idle_class
from .table import EnergyTable
from .time_zones import explain_no_overlap

# More samples than this (2 min of the ring) do not sharpen the watts of a class, since its power drifts by more.
_MOST_SAMPLES = 6000
# The power of a class is not constant: temperature, operands and what ran before change it. With this standard
# deviation, as a share, the 90% intervals hold on recorded mixtures, compared with what the loads took alone at the
# same speed (benchmarks/measure/attribution.py; the set named `final` was not used for this).
_DRIFT = 0.02
# Times of an H200's samples deviate by 3 ms (root mean square) from a regular train of 20 ms, in eight recorded
# mixtures. By the residuals, the sensor measured at the stated time in seven of them, at the regular time in one
# (regions5-15).
_STAMP_S = 0.003
_MISPLACED = 2


def attribute(
    timeline: Timeline, power: PowerTrace, *, start_ns: int | None = None, end_ns: int | None = None,
    windows: Sequence[tuple[int, int]] = (), board: str | None = None, threads: int | None = None,
) -> EnergyTable:  # fmt: skip
    """Assign the joules of a run to kernels, operators, regions, modules and steps; fills `timeline.energy_j`.

    `start_ns` and `end_ns` (epoch) limit what is accounted for; by default, to where trace and samples overlap.
    `windows` are several such times, in order, if not all steps were traced; the time between them is left out. What
    the samples tell of other times is `untraced_j` of the table, since it is unknown what ran then. `threads` is the
    number of torch's threads for an operator on a CPU: with modelled power, it draws at most that many cores.
    """
    from .ledger import table

    links, is_cut = timeline.linked, bool(windows)
    if windows:
        traced_s = sum(b - a for a, b in windows) * 1e-9
        note = f"{len(windows)} windows were traced, {traced_s:.3g} s in all: joules and seconds are of those"
        notes = [*timeline.notes, note] if len(windows) > 1 else list(timeline.notes)
    else:
        begin, end = _window(timeline, power, start_ns, end_ns)
        asked = start_ns is not None and end_ns is not None
        windows, notes = [(begin, end)], [*timeline.notes, *([] if asked else _partly(timeline, begin, end))]
    parts = []
    for device, column, ran in _pairs(timeline, links, power, notes):
        with one_blas_thread():
            part = _solve(timeline, links, device, column, ran, windows, board, threads)
        if part is None:
            lost = "no sample lies within the trace" if column.known.any() else "all samples are impossible watts"
            notes.append(f"{column.domain.name}: {lost}, so its joules are not known")
        else:
            parts.append(part)
            in_step = column.counter.note_step(windows[0][0], windows[-1][1])
            notes += [in_step] if in_step else []
            if part.coverage < FULL:
                notes.append(
                    f"{column.domain.name}: power was sampled {part.coverage:.0%} of the time; what ran in the rest "
                    "has no joules"
                )
    if not parts:
        late_s = max((c.domain.lag_s for c in power.columns.values()), default=0.0)
        raise MeasurementError(
            "no joules can be attributed",
            why=f"no power sample above 0 W lies within the trace (its sensor shows power {late_s:.2g} s late)",
            fix="record power with the trace: tessera run, or --power with a log of the same time",
        )  # fmt: skip
    spent = table(timeline, links, parts, windows, notes, is_cut=is_cut)
    spans = _list_untraced(power, windows)
    untraced = [sum_windows([power.columns[p.domain.name].energy(*span) for span in spans]) for p in parts if spans]
    return dataclasses.replace(
        spent,
        untraced_j=sum_windows(untraced).energy_j if untraced else 0.0,
        untraced_s=max((e.time_s * e.coverage for e in untraced), default=0.0),  # boards draw at the same time
        learnt=[(p.domain, p.learnt.fit) for p in parts if p.learnt is not None],
    )


def _list_untraced(power: PowerTrace, windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a power log outside the windows."""
    edges = [power.start_ns, *(edge for window in windows for edge in window), power.end_ns]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]


def _window(timeline: Timeline, power: PowerTrace, start_ns: int | None, end_ns: int | None) -> tuple[int, int]:
    """Return the epoch window: as asked, or where both timeline and power have data."""
    first_ns, last_ns = timeline.traced_span
    begin = max(first_ns, power.start_ns) if start_ns is None else start_ns
    end = min(last_ns, power.end_ns) if end_ns is None else end_ns
    if end <= begin:
        raise explain_no_overlap((first_ns, last_ns), (power.start_ns, power.end_ns))
    return begin, end


def _partly(timeline: Timeline, begin: int, end: int) -> list[str]:
    """Return a note if power is known only for part of what ran on the devices (of all rows, if nothing did)."""
    rows = timeline.device_rows
    if len(rows) == 0:
        rows = timeline.rows("op")
    if len(rows) == 0:
        return []
    start_ns, stop_ns = int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max())
    inside_s = max(min(end, stop_ns) - max(begin, start_ns), 0) * 1e-9
    whole_s = (stop_ns - start_ns) * 1e-9
    if inside_s >= FULL * whole_s:
        return []
    return [f"power is known for {inside_s:.3g} s of the trace's {whole_s:.3g} s: all joules are of that part"]


def _pairs(
    timeline: Timeline, links: Links, power: PowerTrace, notes: list[str]
) -> list[tuple[DeviceId, DomainSamples, Activity]]:
    """Return each device with its power and what ran on it; the host's operators if nothing ran on a device."""
    counted = {name: c for name, c in power.columns.items() if c.domain.counted}
    if not counted:
        raise MeasurementError("there are no power samples", fix='record power too: activities=["gpu", "power"]')
    rows = timeline.device_rows
    if len(rows) == 0:
        return _host_pairs(timeline, links, counted, power.by_rank, notes)
    boards = {c.domain.device: c for c in counted.values() if c.domain.device.is_gpu}
    by_device = timeline.by_device(rows)
    unnamed = {name: c for name, c in counted.items() if c.domain.device.kind not in ("cpu", "dram")}
    only = next(iter((boards or unnamed).values())) if len(boards or unnamed) == len(by_device) == 1 else None
    pairs = []
    for device, own in by_device.items():
        column = boards.get(device) or only
        if column is None:
            notes.append(f"{device} ran {len(own):,} kernels, but its power was not recorded")
            continue
        board = column.domain.device
        if board.is_gpu and board.index != device.index:
            notes.append(
                f"the kernels ran on {device}, and the power is that of {board}: taken as one board, as where "
                "CUDA_VISIBLE_DEVICES numbers them anew; if they are two, log the power of the other"
            )
        pairs.append((device, column, activity(timeline, own, links)))
    if not pairs:
        raise MeasurementError(
            "no joules can be attributed",
            why=f"kernels ran on {_list_names(by_device)}, and the power is that of {_list_names(counted)}",
            fix="record the power of the devices that the program uses, or rename the domains of the power log",
        )
    others = [n for n in counted if n not in {c.domain.name for _, c, _ in pairs}]
    if others:
        notes.append(f"{', '.join(others)}: recorded, but no kernel ran there; its joules are not in this table")
    return pairs


def _list_names(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))


def _host_pairs(
    timeline: Timeline, links: Links, counted: dict[str, DomainSamples], by_rank: dict[int, DomainSamples],
    notes: list[str],
) -> list[tuple[DeviceId, DomainSamples, Activity]]:  # fmt: skip
    """Give operators of the host its joules; the joules of a board on which nothing ran count as idle.

    If the power of each rank's own processes is known, the operators of a rank get that.
    """
    hosts = {n: c for n, c in counted.items() if not c.domain.device.is_gpu}
    boards = {n: c for n, c in counted.items() if n not in hosts}
    if not hosts:
        launches = len(timeline.rows("runtime", "graph_launch"))
        lost = f", though {launches:,} calls to its driver are: it was cut, or recorded without the GPU's activity"
        notes.append(
            f"the trace has no kernel{lost if launches else ''}: all joules of {', '.join(boards)} count as idle, and "
            "none can be given to operators (if it is the power of the host, add a column domain with cpu0 to the log)"
        )
        nothing = np.zeros(0, np.int64)
        return [(c.domain.device, c, activity(timeline, nothing, links)) for c in boards.values()]
    notes.append("nothing ran on a GPU: the joules of the host are given to its operators")
    name, column = next(iter(hosts.items()))
    given = {c.domain.name.rpartition(".")[0] for c in by_rank.values()} or {name}
    others = [n for n in counted if n not in given]
    if others:
        notes.append(
            f"only {_list_names(sorted(given))} is given to operators; {', '.join(others)} not, and not in this table"
        )
    if by_rank:
        return [
            (dataclasses.replace(HOST, index=rank), own, host_activity(timeline, links, rank))
            for rank, own in by_rank.items()
        ]
    return [(HOST, column, host_activity(timeline, links))]


def _solve(
    timeline: Timeline, links: Links, device: DeviceId, column: DomainSamples, ran: Activity,
    windows: Sequence[tuple[int, int]], board_name: str | None, threads: int | None,
) -> Share | None:  # fmt: skip
    is_known = ~np.isnan(column.watts)
    times_ns, watts = column.times_ns[is_known], column.watts[is_known]
    if len(times_ns) == 0:
        return None
    energy = sum_windows([column.energy(begin, end) for begin, end in windows])
    if math.isnan(energy.energy_j) or energy.energy_j <= 0:
        return None
    spacing_s = float(np.median(np.diff(times_ns))) * 1e-9 if len(times_ns) > 1 else column.domain.resolution_s
    response = response_of(column.domain, spacing_s)
    # What ran in a hole of the samples gets no joules; otherwise every kernel would look cheaper than it is.
    seen = [stretch for window in windows for stretch in column.find_seen(*window)]
    ran = _clip_activity(ran, seen)
    if column.domain.basis == "modelled":
        return by_time(device, column, ran, seen, energy, _most_w(timeline, column, threads))
    board = board_of(board_name or column.domain.label or _board_name(timeline, device), watts)
    problem = _Problem.of(timeline, links, ran, seen, board, response, times_ns, watts)
    learnt = problem.learn_response(column.domain, response, seen, times_ns, watts)
    if learnt is not None and learnt.corrects(response):
        response = learnt.combine(response)
        problem.design = problem.expose(response)
    result = problem.solve_with(response)
    covariance = result.covariance + np.diag((_DRIFT * result.watts) ** 2)
    seconds = problem.totals()
    level, covariance = conserve_energy(result.watts, covariance, seconds, energy.energy_j)
    covariance = add_level_error(level, covariance, energy)
    return Share(
        device=device, domain=column.domain, activity=ran, gap_start_ns=problem.gap_start_ns,
        gap_end_ns=problem.gap_end_ns, gap_cls=problem.gap_cls, watts=level, covariance=covariance,
        group=groups(problem.design)[: ran.classes], joules=energy.energy_j, error_j=energy.error_j,
        coverage=energy.coverage, fit=result, learnt=learnt,
    )  # fmt: skip


def _most_w(timeline: Timeline, column: DomainSamples, threads: int | None) -> float | None:
    """Return the most watts of all operators at once: a core for each of torch's threads, on each calling thread."""
    if column.domain.core_w is None or threads is None:
        return None
    return column.domain.core_w * threads * len(np.unique(timeline["thread"][timeline.rows("op")]))


def _board_name(timeline: Timeline, device: DeviceId) -> str | None:
    names = {int(p.get("id", i)): p.get("name") for i, p in enumerate(timeline.device_properties)}
    return names.get(device.index)


def _clip_activity(ran: Activity, seen: Sequence[tuple[int, int]]) -> Activity:
    """Keep what lies within the times that were seen; rows that reach beyond are cut."""
    places, starts, stops = [], [], []
    for begin, end in seen:
        inside = np.flatnonzero((ran.end_ns > begin) & (ran.start_ns < end))
        places.append(inside)
        starts.append(np.maximum(ran.start_ns[inside], begin))
        stops.append(np.minimum(ran.end_ns[inside], end))
    none = np.zeros(0, np.int64)
    inside, start, stop = (np.concatenate([none, *part]) for part in (places, starts, stops))
    whole = (ran.end_ns[inside] - ran.start_ns[inside]).astype(np.float64)
    part = np.where(whole > 0, (stop - start) / np.maximum(whole, 1.0), 0.0)
    return dataclasses.replace(
        ran, rows=ran.rows[inside], start_ns=start, end_ns=stop, share_s=ran.share_s[inside] * part,
        weight=ran.weight[inside], cls=ran.cls[inside],
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Problem:
    """The least squares of one device: samples, classes (two of them idle), prior."""

    found: Activity
    gap_start_ns: Ints
    gap_end_ns: Ints
    gap_cls: Ints
    times_ns: Ints
    samples_w: Floats
    expected: Prior
    board: Board
    design: Floats
    by_class: tuple[Ints, Ints, Floats, Ints] | None = None

    @classmethod
    def of(
        cls, timeline: Timeline, links: Links, found: Activity, seen: Sequence[tuple[int, int]], board: Board,
        response: Response, times_ns: Ints, watts: Floats,
    ) -> _Problem:  # fmt: skip
        idle_in = [gaps(found, *stretch) for stretch in seen]
        gap_start, gap_end = (np.concatenate([part[i] for part in idle_in]) for i in (0, 1))
        use = _usable(times_ns, seen, response.memory_s)
        typical = _typical(found)
        expected = prior(timeline, found.first, typical, links, board)
        problem = cls(
            found=found, gap_start_ns=gap_start, gap_end_ns=gap_end,
            gap_cls=idle_class(gap_start, gap_end, found.classes), times_ns=times_ns[use],
            samples_w=watts[use] - _unseen_w(times_ns, watts, use, seen, response),
            expected=expected, board=board, design=np.zeros((0, 0)),
        )  # fmt: skip
        problem.design = problem.expose(response)
        return problem

    @property
    def classes(self) -> int:
        return self.found.classes + 2

    def _intervals(self) -> tuple[Ints, Ints, Floats, Ints]:
        """Return start, end, weighted seconds and class of all that ran or waited, sorted by class for `exposure`."""
        if self.by_class is None:
            gap_s = (self.gap_end_ns - self.gap_start_ns) * 1e-9
            cls = np.concatenate([self.found.cls, self.gap_cls])
            order = argsort_small(cls, self.classes)
            self.by_class = (
                np.concatenate([self.found.start_ns, self.gap_start_ns])[order],
                np.concatenate([self.found.end_ns, self.gap_end_ns])[order],
                np.concatenate([self.found.share_s * self.found.weight, gap_s])[order],
                cls[order],
            )
        return self.by_class

    def expose(self, response: Response, off_ns: Ints | int = 0) -> Floats:
        start, end, seconds, cls = self._intervals()
        return exposure(self.times_ns + off_ns, start, end, seconds, cls, self.classes, response)

    def totals(self) -> Floats:
        """Return the weighted seconds of each class in the window."""
        _, _, seconds, cls = self._intervals()
        return sum_by_key(cls, seconds, self.classes)

    def _prior(self) -> tuple[Floats, Floats]:
        """Return expected watts, scaled to the samples' level, which all share: data and clocks change all of them."""
        static_w = self.board.static_w
        watts = np.concatenate([self.expected.watts, [static_w, static_w]])
        sd = np.concatenate([self.expected.sd_w, [self.board.static_sd_w] * 2])
        busy = self.design[:, : self.found.classes]
        if len(self.samples_w) and busy.size:
            above = busy @ (self.expected.watts - static_w)
            seen = self.samples_w - static_w * self.design.sum(axis=1)
            level = float(above @ seen / max(above @ above, 1e-9))
            level = min(max(level, 0.3), 2.0)
            watts[: self.found.classes] = static_w + level * (self.expected.watts - static_w)
            sd[: self.found.classes] *= max(level, 0.5)
        return watts, sd

    def learn_response(
        self, domain: Domain, known: Response, seen: Sequence[tuple[int, int]], times_ns: Ints, watts: Floats
    ) -> LearntResponse | None:
        """Return the response that these samples show; None if they do not tell it, or are means and so have none."""
        if domain.hold is Hold.MEAN or not domain.device.is_gpu:
            return None
        use = _usable(times_ns, seen, horizon_s(known))
        start, end, seconds, cls = self._intervals()
        prior_w, sd_w = self._prior()
        ran = Exposed(start_ns=start, end_ns=end, seconds=seconds, cls=cls, prior_w=prior_w, sd_w=sd_w)
        try:
            return learn_response(times_ns[use], watts[use], ran, known)
        except MeasurementError:
            return None

    def solve_with(self, response: Response) -> PowerFit:
        """Return watts by class, with the covariance due to the sensor's response and to errors of sample times."""
        if len(self.samples_w) < 3:
            return self._solve(self.design, [], response)
        variants = [self.expose(variant) for variant in response.variants()]
        result = self._solve(self.design, variants, response)
        return dataclasses.replace(result, covariance=result.covariance + self._misplace(result, response, variants))

    def _solve(self, design: Floats, variants: Sequence[Floats], response: Response) -> PowerFit:
        watts, sd = self._prior()
        return solve(design, self.samples_w, variants, response.delay_sd_s, watts, sd, 0.5 * self.board.static_w)

    def _misplace(self, result: PowerFit, response: Response, variants: Sequence[Floats]) -> Floats:
        """Return the covariance due to errors of sample times: how far the watts change if the errors are increased.

        These errors do not average out: the samples seem to be from other moments of a step. (Cook and Stefanski,
        "Simulation-extrapolation estimation in parametric measurement error models", 1994.)
        """
        rng = np.random.default_rng(0)  # so that the same run gives the same result
        total = np.zeros_like(result.covariance)
        for _ in range(_MISPLACED):
            off_ns = np.round(rng.normal(0.0, _STAMP_S, len(self.times_ns)) * 1e9).astype(np.int64)
            moved = self._solve(self.expose(response, off_ns), variants, response).watts - result.watts
            total += np.outer(moved, moved) / _MISPLACED
        return total


def _usable(times_ns: Ints, seen: Sequence[tuple[int, int]], memory_s: float) -> Ints:
    """The samples whose whole memory was seen (all that contain some of what was, where those are too few), thinned."""
    memory_ns = round(memory_s * 1e9)
    for beyond_ns in (0, memory_ns):
        inside = np.zeros(len(times_ns), bool)
        for begin, end in seen:
            inside |= (times_ns - memory_ns + beyond_ns >= begin) & (times_ns <= end + beyond_ns)
        samples = np.flatnonzero(inside)
        if len(samples) >= 3:
            break
    if len(samples) > _MOST_SAMPLES:
        samples = samples[np.linspace(0, len(samples) - 1, _MOST_SAMPLES).astype(np.int64)]
    return samples


def _unseen_w(
    times_ns: Ints, watts: Floats, use: Ints, seen: Sequence[tuple[int, int]], response: Response
) -> Floats:  # fmt: skip
    """What samples contain of the time outside the seen stretches: at the power of the nearest that saw only it."""
    begins, ends = np.array(seen, np.int64).reshape(-1, 2).T
    memory_ns, dead_ns = round(response.memory_s * 1e9), round(response.dead_s * 1e9)
    reach_ns = memory_ns + abs(dead_ns)
    middles = (ends[:-1] + begins[1:]) // 2
    starts = np.maximum(begins - reach_ns, np.append(begins[:1] - reach_ns, middles))
    stops = np.minimum(ends + reach_ns, np.append(middles, ends[-1:] + reach_ns))
    before_w = watts[np.maximum(np.searchsorted(times_ns, begins + dead_ns, side="right") - 1, 0)]
    after_w = watts[np.minimum(np.searchsorted(times_ns, ends + memory_ns), len(times_ns) - 1)]
    start_ns, stop_ns = np.concatenate([starts, ends]), np.concatenate([begins, stops])
    joules = (stop_ns - start_ns) * 1e-9 * np.concatenate([before_w, after_w])
    order = np.argsort(start_ns)
    none = np.zeros(len(order), np.int64)
    return exposure(times_ns[use], start_ns[order], stop_ns[order], joules[order], none, 1, response)[:, 0]


def _typical(ran: Activity) -> Floats:
    """Return the mean duration of each class."""
    seconds = sum_by_key(ran.cls, (ran.end_ns - ran.start_ns) * 1e-9, ran.classes)
    return seconds / np.maximum(np.bincount(ran.cls, minlength=ran.classes), 1)
