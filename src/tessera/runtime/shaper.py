"""The shaper of a running job: it waits at steps and microbatches as a policy says.

>>> with tessera.fleet.shaper("policy.yaml", mesh=mesh) as shaper:
...     for batch in loader:
...         shaper.step()
...         for part in batch.chunk(4):
...             shaper.microbatch()
...             loss = train_on(part)
>>> print(shaper.report())

Groups of a synchronous job wait for each other, so a rank's offset is a wait in every step, and must be small (`LOSS`
of a step). Independent groups keep their offsets on a shared clock, and each group waits only when it is early.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ArgumentError, ScheduleError
from ..job_rank import find_rank
from ..policy import Policies, PowerShaper, load_policies, parse_policies
from ..units import parse_duration
from .options import ScheduleOptions
from .shaper_validation import PowerCurve, ShaperTrial, ShaperValidation, judge_trial
from .shaping import LOSS, GroupPlace, draw_jitter_s, phase_wait_s, rank_offset_s

# The period is learnt from LEARN steps, without the FIRST ones, which compile and allocate.
LEARN, FIRST = 8, 2
# A shared period is longer than the slowest group's own by this share, so that a group that is late catches up.
MARGIN = 0.01
AXES = {"replica": ("dp", "fsdp"), "stage": ("pp",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShaperReport:
    """What a shaper did on this rank."""

    policy: PowerShaper
    place: GroupPlace
    synchronous: bool
    period_s: float | None
    offset_s: float
    steps: int
    microbatches: int
    phase_wait_s: float
    jitter_wait_s: float
    run_s: float
    validation: ShaperValidation | None
    notes: tuple[str, ...]

    @property
    def waited_share(self) -> float:
        """Return the share of the time since the first step that this rank waited."""
        return (self.phase_wait_s + self.jitter_wait_s) / self.run_s if self.run_s > 0 else 0.0

    def __str__(self) -> str:
        from ..report.shaper import shaper_text

        return shaper_text(self)


class JobShaper:
    """Shapes the power of one rank; made by `shaper`. Call `step` at each step, `microbatch` before each microbatch."""

    def __init__(
        self,
        policy: PowerShaper,
        place: GroupPlace,
        *,
        seed: int = 0,
        synchronous: bool = True,
        period_s: float | None = None,
        duty: float | None = None,
        mesh: Any = None,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        self.policy, self.place, self.seed, self.synchronous = policy, place, seed, synchronous
        self.active = True
        self.offset_s = 0.0
        self._given_s, self._duty, self._mesh = period_s, duty, mesh
        self._clock, self._wait = clock, wait or _wait_here
        self._period_s: float | None = None  # None: not learnt yet
        self._origin_s = 0.0
        self._intervals: deque[float] = deque(maxlen=16)
        self._last_s: float | None = None
        self._first_s: float | None = None
        self._waited_s = 0.0  # since the last step
        self._sums = {"phase": 0.0, "jitter": 0.0}
        self._steps = self._microbatches = self._of_step = 0
        self._trial: ShaperTrial | None = None
        self._validation: ShaperValidation | None = None
        self._stack = contextlib.ExitStack()
        self._notes: dict[str, str] = {}

    # -- what a training loop calls -------------------------------------------------------------------------

    def step(self) -> None:
        """Wait for this rank's phase; called when a step begins."""
        now_s = self._clock()
        self._first_s = now_s if self._first_s is None else self._first_s
        if self._last_s is not None:
            self._intervals.append(now_s - self._last_s - self._waited_s)
        self._waited_s = 0.0
        self._steps += 1
        if self._period_s is None and not self.policy.phase_shift.is_off:
            if self._given_s is None and len(self._intervals) < LEARN:
                self._last_s = self._clock()
                return
            self._agree()
        if self._trial is not None:
            self._advance_trial(self._trial, now_s)
        elif self.active:
            self._wait_for_phase()
        self._of_step = 0
        self._last_s = self._clock()

    def microbatch(self) -> None:
        """Wait for this microbatch's jitter; called when it begins."""
        if self.active and self.policy.jitter_s[1] > 0:
            unit = self.place.jitter_unit
            self._pause(float(draw_jitter_s(self.policy.jitter_s, self.seed, unit, self._microbatches)), "jitter")
        self._microbatches += 1
        self._of_step += 1

    def validate(
        self, step: Callable[[], object], *, steps: int = 20, pairs: int = 3, show: bool = True
    ) -> ShaperValidation:
        """Run `step` in blocks without and with the shaper, print pass or fail by rule 9.4, and return it.

        `step` calls `microbatch` itself where it has microbatches. All ranks of the job must call this.
        """
        if steps < 4 or pairs < 1:
            raise ArgumentError(f"steps={steps} and pairs={pairs} are too few", fix="steps=20, pairs=3")
        was_active, self.active = self.active, False
        for _ in range(LEARN + 2):
            self.step()
            step()
        if self._period_s is None and not self.policy.phase_shift.is_off:
            self._agree()  # the period was given, so no step has agreed on it yet
        self._trial = ShaperTrial(steps, pairs)
        try:
            while True:
                self.step()
                if self._trial.is_over:
                    break
                step()
            measured = self._trial.finish()
        finally:
            self._trial, self.active = None, was_active
        self._validation = judge_trial(_gather(measured))
        if show:
            sys.stdout.write(f"{self._validation}\n")
        return self._validation

    # -- as a context ---------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        limits = _list_limits(self.policy)
        if limits:
            from .schedule import schedule

            self._stack.enter_context(schedule(**limits))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, exc, trace)

    def collective_pace(self) -> dict[str, Any]:
        """`phase=` and `jitter_ms=` of this policy, for a collective of the gradients.

        >>> dist.all_reduce(grad, mesh=mesh, axis="dp", **shaper.collective_pace())

        Groups start one after the other. Not for collectives inside of layers: each of them would wait.
        """
        from ..dist.pacing import DEFAULT_SLOT_S, Phase

        shift, pace = self.policy.phase_shift, {}
        axis, how = ("tp", shift.tp_groups) if shift.tp_groups is not None else ("dp", shift.dp_groups)
        spread_s = self.policy.jitter_s[1] - self.policy.jitter_s[0]
        if self.active and how is not None and self._mesh is not None and axis in self._mesh.axes:
            groups = self._mesh.size() // self._mesh.size(axis)
            slot_s = how if isinstance(how, float) else DEFAULT_SLOT_S
            if self._period_s is not None and groups > 1:
                slot_s = min(slot_s, LOSS * self._period_s / (groups - 1))
            pace["phase"] = Phase(axis, slot_s)
        return {**pace, "jitter_ms": spread_s * 1e3} if self.active and spread_s > 0 else pace

    # -- results --------------------------------------------------------------------------------------------

    def report(self) -> ShaperReport:
        """Return what this rank waited so far, and why."""
        notes = dict(self._notes)
        if self.policy.cap_rate is not None and self.policy.node_cap_w is None:
            notes["cap"] = "cap_rate is not held: the policy has no psu_limit, of which it is a share"
        if self._period_s is None and not self.policy.phase_shift.is_off:
            notes["period"] = f"nothing was shifted: the period is learnt from {LEARN} steps"
        return ShaperReport(
            policy=self.policy,
            place=self.place,
            synchronous=self.synchronous,
            period_s=self._period_s,
            offset_s=self.offset_s,
            steps=self._steps,
            microbatches=self._microbatches,
            phase_wait_s=self._sums["phase"],
            jitter_wait_s=self._sums["jitter"],
            run_s=0.0 if self._first_s is None else self._clock() - self._first_s,
            validation=self._validation,
            notes=tuple(notes.values()),
        )

    # -- phases ---------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Agree on the period and the clock that the ranks share; the ranks of a process group ask each other."""
        # A busy host makes some steps longer but none shorter, so the lower quartile is the step's own time.
        own_s = self._given_s
        if own_s is None:
            usual = sorted(list(self._intervals)[FIRST:])
            own_s = usual[len(usual) // 4] + self._of_step * sum(self.policy.jitter_s) / 2
            if not self.synchronous:
                own_s *= 1 + MARGIN
        period_s, origin_s = _largest(own_s, self._clock())
        if not _is_distributed() and self._given_s is None and not self.synchronous and self.place.replicas > 1:
            self._notes["alone"] = "the groups share no process group: give all of them the same period="
        self._origin_s = origin_s if _is_distributed() else 0.0
        self._period_s = period_s
        most_s = LOSS * period_s if self.synchronous else math.inf
        self.offset_s = rank_offset_s(self.policy.phase_shift, self.place, period_s, self._duty, most_s=most_s)

    def _wait_for_phase(self, *, first: bool = False) -> None:
        if self._period_s is None or self.policy.phase_shift.is_off:
            return
        if self.synchronous or first:
            self._pause(self.offset_s, "phase")
            return
        since_s = self._clock() - self._origin_s
        self._pause(phase_wait_s(since_s, self.offset_s, self._period_s, LOSS * self._period_s), "phase")

    def _advance_trial(self, trial: ShaperTrial, now_s: float) -> None:
        begins = trial.end_step(now_s)
        if trial.is_over:
            return
        if begins:
            _, self._origin_s = _largest(0.0, self._clock())  # all ranks begin a block together
            self.active = trial.begin_block(self._clock())
        if self.active:
            self._wait_for_phase(first=begins)

    def _pause(self, seconds: float, why: str) -> None:
        if seconds <= 0:
            return
        began = self._clock()
        self._wait(seconds)
        waited_s = max(self._clock() - began, 0.0)
        self._waited_s += waited_s
        self._sums[why] += waited_s


def _wait_here(seconds: float) -> None:
    """Wait in the current CUDA stream, where the work is; without CUDA, on the host."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.version.hip is not None:
        time.sleep(seconds)
        return
    from .wait_kernel import wait_in_stream

    wait_in_stream(round(seconds * 1e9))


# -- the other ranks ------------------------------------------------------------------------------------------------


def _is_distributed() -> bool:
    c10d: Any = sys.modules.get("torch.distributed")
    return c10d is not None and bool(c10d.is_available()) and bool(c10d.is_initialized())


def _largest(*values: float) -> tuple[float, ...]:
    """Return the largest of each value over all ranks, at the same time on all; without a process group, the values."""
    if not _is_distributed():
        return values
    import torch
    import torch.distributed as c10d

    from ..dist.mesh import device_type

    both = torch.tensor(values, dtype=torch.float64, device=device_type())
    c10d.all_reduce(both, op=c10d.ReduceOp.MAX)
    return tuple(both.tolist())


def _gather(measured: tuple[str, PowerCurve, list[list[float]]]) -> list[tuple[str, PowerCurve, list[list[float]]]]:
    if not _is_distributed():
        return [measured]
    import torch.distributed as c10d

    everyone: list[Any] = [None] * c10d.get_world_size()
    c10d.all_gather_object(everyone, measured)
    return everyone


def find_place(mesh: Any = None) -> tuple[GroupPlace, Any]:
    """Return where this rank is, and the `dist.Mesh` that says so.

    The mesh may be a `dist.Mesh` or a torch `DeviceMesh`. Without one, the launcher's variables count, and every rank
    is a replica.
    """
    rank = find_rank()
    if mesh is None:
        at, of = (rank.rank, rank.world_size or rank.rank + 1) if rank is not None else (0, 1)
        if _is_distributed():
            c10d = sys.modules["torch.distributed"]
            at, of = c10d.get_rank(), c10d.get_world_size()
        return GroupPlace(replica=at, replicas=of, tp_group=at, tp_groups=of), None
    from ..dist.mesh import Mesh

    mesh = mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh)
    number = sys.modules["torch.distributed"].get_rank() if _is_distributed() else rank.rank if rank else 0
    coordinate: Mapping[str, int] = mesh.coordinate(number)
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    replica, replicas = 0, 1
    for axis in AXES["replica"]:
        if axis in sizes:
            replica, replicas = replica * sizes[axis] + coordinate[axis], replicas * sizes[axis]
    has_tp = "tp" in sizes
    return (
        GroupPlace(
            replica=replica,
            replicas=replicas,
            tp_group=mesh.group_number("tp", number) if has_tp else number,
            tp_groups=mesh.size() // sizes["tp"] if has_tp else mesh.size(),
            stage=coordinate.get("pp", 0),
            stages=sizes.get("pp", 1),
        ),
        mesh,
    )


def _list_limits(policy: PowerShaper) -> dict[str, Any]:
    """Return a policy's cap, floor and ramp as options of `schedule`; a floor of 0 W is none."""
    cap = None if policy.node_cap_w is None else f"node:{policy.node_cap_w:.6g}W"
    limits = {"power_cap": cap, "power_floor": policy.power_floor_w, "max_ramp": policy.max_ramp_w_per_s}
    return {name: value for name, value in limits.items() if value}


def take_limits(options: ScheduleOptions) -> tuple[JobShaper, ScheduleOptions]:
    """Return the shaper of a schedule, and the schedule's options with the policy's limits that they do not state."""
    made = options.shaper if isinstance(options.shaper, JobShaper) else shaper(options.shaper)
    limits = {name: value for name, value in _list_limits(made.policy).items() if getattr(options, name) is None}
    return made, replace(options, shaper=made, **limits)


def shaper(
    policy: str | Path | Policies | PowerShaper | Mapping[str, Any],
    *,
    mesh: Any = None,
    seed: int = 0,
    synchronous: bool = True,
    period: str | float | None = None,
    duty: float | None = None,
) -> JobShaper:
    """Shape the power of this rank as a policy says: a file, its `Policies`, or a `PowerShaper`.

    `mesh` (a `dist.Mesh` or a `DeviceMesh`) says which group the rank is in; without one, the launcher's variables do.
    Use `synchronous=False` for groups that do not wait for each other at every step: other jobs, local SGD. `period` is
    learnt if it is not given; give it where the groups share no process group. `duty` lets "auto" use fewer phases.
    """
    made: Any = policy
    if isinstance(policy, (str, Path)):
        made = load_policies(policy)
    elif isinstance(policy, Mapping):
        made = parse_policies(dict(policy))
    if isinstance(made, Policies):
        if made.power_shaper is None:
            raise ScheduleError(f"{policy} has no power_shaper", fix="power_shaper: {jitter_ms: [1, 5]}")
        made = made.power_shaper
    if not isinstance(made, PowerShaper):
        raise ArgumentError(f"{policy!r} is not a policy", fix='the path of a file, such as "policy.yaml"')
    place, found = find_place(mesh)
    period_s = None if period is None else parse_duration(period)
    return JobShaper(made, place, seed=seed, synchronous=synchronous, period_s=period_s, duty=duty, mesh=found)
