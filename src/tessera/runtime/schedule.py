"""`schedule`: a power cap, an efficiency goal or hints for kernels, around any function that launches torch work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

from ..errors import ArgumentError, MissingExtra, ScheduleError, did_you_mean
from ..units import ScopedPower, format_duration, format_power, format_power_rate
from .options import CAP_WINDOW_MS, ScheduleOptions

if TYPE_CHECKING:  # these import numpy, which a schedule without a cap needs only for its report
    from .ballast_loop import BallastLoop
    from .cap_report import CapTracker, ScheduleReport
    from .driver_limits import DriverLimits
    from .shaper import JobShaper
    from .tuning.plan import Plan
    from .tuning.tuner import TunedFunction

F = TypeVar("F", bound=Callable[..., Any])
# How far dvfs="auto" lowers the SM clock for operators that only move bytes: a tenth of an H200's 1980 MHz; its memory
# clock stays. Not yet measured on a GPU.
LOW_MHZ = 200
# A function called in a loop finds the driver's limit still set; it is restored when no call came for this many
# seconds.
LINGER_S = 1.0


def schedule(
    *bare: Never,
    power_cap: ScopedPower | str | float | None = None,
    policy: str | None = None,
    dvfs: str | Sequence[str] | None = None,
    cap_policy: str | None = None,
    cap_window_ms: float = CAP_WINDOW_MS,
    max_slowdown: float | str | None = None,
    max_temp_c: float | str | None = None,
    cp_async_depth: int | None = None,
    warp_mma_concurrency: int | None = None,
    tokens: str = "joules",
    shaper: Any = None,
    power_floor: str | float | None = None,
    max_ramp: str | float | None = None,
    allow_control: bool | None = None,
    error_tolerance: float | None = None,
    budget_s: float = 120.0,
    search: Mapping[str, Sequence[Any]] | None = None,
    per: str | None = None,
    compile_modes: bool = True,
    cache: bool = True,
    dry_run: bool = False,
    **unknown: Never,
) -> Schedule:
    """Run a function, or a `with` block, under a schedule.

    >>> @schedule(power_cap="275W")
    ... def step(batch): ...
    >>> step(batch)
    >>> print(step.report())

    A power cap:

    * `power_cap`: watts per GPU ("275W") or for all processes of the node ("node:1.2kW"), or "governor": what this node
      may draw by its lease of a power governor.
    * `cap_window_ms`: the cap applies to the mean over this window, or over the sensor's resolution if that is longer.
    * `cap_policy`: "token_bucket" (default) pauses the GPU and needs no permission. "driver" sets the driver's limit:
      it needs permission and `allow_control=True` or TESSERA_CONTROL=1. If that is refused, pauses hold the cap.
    * `tokens`: what the bucket counts: "joules", or "launches", "warps" or "cp_async" of Tessera's own kernels only.

    Smoothing:

    * `shaper`: a policy file, or what `tessera.fleet.shaper` made. Each call is a step of it; its cap, floor and ramp
      apply too. `step.schedule.shaper.microbatch()` is called before each microbatch.
    * `power_floor` ("400W") and `max_ramp` ("200W/s"), of each GPU: ballast, work without a result between the
      calls, keeps power from falling below or faster. It costs joules, which the report shows. With `max_ramp` the
      first tenth of a second after a pause is paced too, so that its peak is lower.

    Tuning by measured joules:

    * `policy`: "latency", "throughput_per_watt", "energy", "peak_power" or "temperature".
    * `max_slowdown`, `max_temp_c`, `error_tolerance`: what the chosen setting must keep.
    * `budget_s`: the longest search. `search` adds arguments of the function with their values; `per` names the one
      that says how much work a call does. `compile_modes=False`: no torch.compile; `cache=False`: no plans are kept.

    Hardware and kernels: `dvfs` shapes clocks ("auto", "shape:sm_down_200MHz@flash_attention"). `cp_async_depth` and
    `warp_mma_concurrency` are hints for Tessera's own kernels. `dry_run` prints what would be done, and does nothing.
    """
    options = {name: value for name, value in locals().items() if name not in ("bare", "unknown")}
    if bare:
        raise ArgumentError(
            "schedule takes its options by name only",
            fix='use parentheses above a function: @schedule(power_cap="275W"), or policy="throughput_per_watt"',
        )
    for name in unknown:
        raise ArgumentError(
            f"schedule has no option {name!r}{did_you_mean(name, options)}", fix=f"options: {', '.join(options)}"
        )
    return Schedule(ScheduleOptions(**{**options, "search": search or {}}))


class Schedule:
    """A decorator and a context manager; made by `schedule`. Threads may share one."""

    def __init__(self, options: ScheduleOptions) -> None:
        shaper = None
        if options.shaper is not None:
            from .shaper import take_limits

            shaper, options = take_limits(options)
        self.options = options
        self._blocks: list[tuple[int, contextlib.ExitStack]] = []  # by thread
        self._lock = threading.Lock()
        self._tracker: CapTracker | None = None
        self._search_tracker: CapTracker | None = None
        self._driver: DriverLimits | None = None
        self._tuned: TunedFunction | None = None
        self.shaper: JobShaper | None = shaper
        self._ballast: BallastLoop | None = None
        self._calls = 0
        self._printed = False
        if options.cap is not None:
            from .cap_report import CapTracker

            make_tracker = functools.partial(
                CapTracker, options.cap, options.cap_window_ms * 1e-3, tokens=options.tokens
            )
            self._tracker, self._search_tracker = make_tracker(), make_tracker()

    # -- as a decorator -------------------------------------------------------------------------------------

    def __call__(self, fn: F) -> F:
        """Return the function under this schedule, with `report()` and `plan()`."""
        if isinstance(fn, (staticmethod, classmethod)):  # the decorator stands above the other one
            return cast(F, type(fn)(self(fn.__func__)))
        _check_function(fn)
        own = Schedule(self.options if self.shaper is None else dataclasses.replace(self.options, shaper=self.shaper))
        target: Callable[..., Any] = fn
        if self.options.policy is not None and not self.options.dry_run:
            _check_torch()
            from .tuning.tuner import TunedFunction

            own._tuned = target = TunedFunction(fn, self.options)
        wrapper = own._wrap(target, each_call=own._waits_between_calls(fn))
        functools.update_wrapper(wrapper, fn)
        wrapper.report, wrapper.plan, wrapper.schedule = own.report, own.plan, own  # type: ignore[attr-defined]
        return cast(F, wrapper)

    def _wrap(self, target: Callable[..., Any], *, each_call: bool) -> Callable[..., Any]:
        options = self.options
        if not options.limits:

            def direct(*args: Any, **kwargs: Any) -> Any:
                self._calls += 1
                return target(*args, **kwargs)

            return direct

        _check_torch()
        # A cap alone is the usual case, and may be entered for every small kernel, so it has a short path.
        only_cap = options.paces and not (options.hints or options.controls or options.dry_run or options.shapes)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._pace(each_call) if only_cap else self._around(each_call=each_call, linger_s=LINGER_S):
                return target(*args, **kwargs)

        return wrapper

    def _waits_between_calls(self, fn: Callable[..., Any]) -> bool:
        """Return whether a CPU waits only between calls: a mode would make compiled code compile again."""
        if self.options.policy is not None:  # the plan may be a compiled function or a graph
            return True
        return hasattr(fn, "_torchdynamo_orig_callable") or type(fn).__name__ == "OptimizedModule"

    # -- as a context ---------------------------------------------------------------------------------------

    def __enter__(self) -> Schedule:
        if self.options.policy is not None:
            raise ScheduleError(
                "a policy must call a function many times, and a block cannot be called again",
                fix="decorate a function with @schedule(policy=...)",
            )
        stack = contextlib.ExitStack()
        if self.options.limits:
            _check_torch()
            stack.enter_context(self._around())
        with self._lock:
            self._blocks.append((threading.get_ident(), stack))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            own = [i for i, (thread, _) in enumerate(self._blocks) if thread == threading.get_ident()]
            # a generator may be resumed, and its block left, by another thread than the one that entered it
            _, stack = self._blocks.pop(own[-1] if own else -1)
        stack.__exit__(kind, exc, trace)

    @contextlib.contextmanager
    def _around(self, *, each_call: bool = False, linger_s: float = 0.0) -> Iterator[None]:
        options = self.options
        if options.dry_run:
            self._print_actions()
            yield
            return
        with contextlib.ExitStack() as stack:
            if self.shaper is not None:
                self.shaper.step()
            if options.has_ballast:
                stack.enter_context(self._hold_floor())
            if options.hints:
                from ..op import hints

                stack.enter_context(hints.use(dataclasses.replace(hints.current(), **options.hints)))
            paces = options.paces
            if options.controls:
                from .driver_limits import hold_limits

                self._driver = stack.enter_context(
                    hold_limits(
                        cap_w=options.driver_cap_w,
                        dvfs=self._clock_rules(),
                        allow_control=options.allow_control,
                        linger_s=linger_s,
                    )
                )
                paces = options.cap is not None and self._driver.how != "driver"
            if paces:
                stack.enter_context(self._pace(each_call))
            else:
                self._calls += 1
            yield

    def _pace(self, each_call: bool) -> contextlib.AbstractContextManager[None]:
        from .control_loop import PacedCall

        searches = self._tuned is not None and self._tuned.chosen is None
        # a search is held at the cap too, but is not a call
        tracker = self._search_tracker if searches else self._tracker
        assert tracker is not None
        return PacedCall(tracker, each_call=each_call)

    @contextlib.contextmanager
    def _hold_floor(self) -> Iterator[None]:
        """Run ballast before and after the work."""
        from .ballast_loop import BallastLoop
        from .gpu_pacer import make_pacer

        if self._ballast is None:
            starts = make_pacer if self.options.cap is None else None  # a cap pauses the GPU itself
            self._ballast = BallastLoop(self.options.floor_w, self.options.ramp_w_per_s, make_pacer=starts)
        self._ballast.enter()
        try:
            yield
        finally:
            self._ballast.leave()

    def _clock_rules(self) -> str | Sequence[str] | None:
        """Return the `dvfs=` option; for "auto", the operators for which the plan says that a lower clock is enough."""
        dvfs = self.options.dvfs
        plan = self._tuned.chosen if self._tuned is not None else None
        if plan is None or dvfs is None:
            return dvfs  # not tuned, or not before the first call
        parts = [part.strip() for text in ([dvfs] if isinstance(dvfs, str) else dvfs) for part in text.split(";")]
        low = [f"shape:sm_down_{LOW_MHZ}MHz@{op.op}" for op in plan.ops if op.clock == "low"]
        return [*(p for p in parts if p != "auto"), *low] if low and "auto" in parts else dvfs

    # -- results --------------------------------------------------------------------------------------------

    def report(self) -> ScheduleReport:
        """Return what was asked, tuned, held, waited and spent so far."""
        from .cap_report import ScheduleReport

        notes = tuple(self._driver.notes) if self._driver is not None else ()
        plan = self._tuned.chosen if self._tuned is not None else None
        ballast = None if self._ballast is None else self._ballast.report()
        shaped = None if self.shaper is None else self.shaper.report()
        if self._tracker is not None and self._tracker.calls:
            from .control_loop import get_loop

            get_loop().wait_for_readings(self._tracker)
            return dataclasses.replace(self._tracker.report(notes), plan=plan, ballast=ballast, shaper=shaped)
        how = self._driver.how if self._driver is not None else None
        where = "by the driver's power limit" if how else None
        return ScheduleReport(
            cap=self.options.cap,
            how=how,
            where=where,
            calls=self._calls,
            plan=plan,
            ballast=ballast,
            shaper=shaped,
            notes=notes,
        )

    def plan(self) -> Plan:
        """Return the plan that the tuner chose."""
        if self._tuned is None:
            raise ScheduleError(
                "there is no plan", why="nothing was tuned", fix='@schedule(policy="throughput_per_watt")'
            )
        return self._tuned.plan()

    def actions(self) -> list[str]:
        """Return what this schedule does, in words, with notes on what it cannot do. This changes nothing."""
        actions, notes = self._plan_actions()
        return actions + notes

    def _plan_actions(self) -> tuple[list[str], list[str]]:
        options, cap = self.options, self.options.cap
        actions = []
        if options.policy:
            actions.append(f"tune for {options.policy} at the first call, within {format_duration(options.budget_s)}")
        if options.paces and cap is not None:
            scope = "all processes of this node together" if cap.scope == "node" else "each GPU"
            window = format_duration(options.cap_window_ms * 1e-3)
            waits = "pauses"
            if options.tokens != "joules":
                waits = f"waits after Tessera's own kernels, by their {options.tokens}"
            actions.append(f"hold {cap.power_w:g} W for {scope} by {waits}: the mean over {window}")
        if self.shaper is not None:
            actions.append("wait at steps and microbatches as the power shaper's policy says")
        if options.has_ballast:
            held = [format_power(options.floor_w) if options.floor_w is not None else ""]
            held.append(format_power_rate(options.ramp_w_per_s) if options.ramp_w_per_s is not None else "")
            what = " and at a fall of ".join(h for h in held if h)
            actions.append(f"run ballast between calls that keeps power at {what}, and count its joules")
        if options.cp_async_depth is not None:
            actions.append(f"keep {options.cp_async_depth} tiles in flight to shared memory in Tessera's kernels")
        if options.warp_mma_concurrency is not None:
            actions.append(f"use {options.warp_mma_concurrency} warp groups in Tessera's kernels")
        if options.controls:
            from .driver_limits import plan_limits

            limits = plan_limits(cap_w=options.driver_cap_w, dvfs=options.dvfs, allow_control=options.allow_control)
            return actions + limits.actions, limits.notes
        return actions, []

    def _print_actions(self) -> None:
        if not self._printed:
            self._printed = True
            actions, notes = self._plan_actions()
            lines = [f"would {action}" for action in actions or ["do nothing"]] + [f"note: {note}" for note in notes]
            sys.stdout.writelines(f"tessera: {line}\n" for line in lines)


def _check_function(fn: object) -> None:
    """Refuse coroutines and generators: they launch their work later, outside of the schedule."""
    call = getattr(fn, "__call__", None)  # noqa: B004  (an object's own, which may be a coroutine function)
    later = "its work is launched after the call has returned"
    for kind, is_kind, why in (
        ("an async function", inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call), later),
        ("a generator", inspect.isgeneratorfunction(fn) or inspect.isgeneratorfunction(call), later),
        ("an async generator", inspect.isasyncgenfunction(fn) or inspect.isasyncgenfunction(call), later),
        ("a class", inspect.isclass(fn), None),
        ("not a function", not callable(fn), None),
    ):
        if is_kind:
            raise ArgumentError(
                f"schedule cannot run {getattr(fn, '__name__', fn)!r}: it is {kind}",
                why=why,
                fix="decorate the function that launches the work, or use `with schedule(...):` around it",
            )


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "torch", "a schedule that limits something")
