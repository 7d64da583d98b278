"""`schedule`: a power cap, an efficiency goal or hints for kernels, around any function that launches torch work."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

from ..errors import ArgumentError, MissingExtra, ScheduleError
from ..units import format_duration
from .options import CAP_WINDOW_MS, Options

if TYPE_CHECKING:  # numpy comes with it: for a schedule without a cap, not before its report
    from .held import Held, ScheduleReport

F = TypeVar("F", bound=Callable[..., Any])
# How far dvfs="auto" lowers the SM clock for operators that only move bytes: a tenth of an H200's 1980 MHz; its memory
# clock stays. Not yet measured on a GPU.
LOW_MHZ = 200
# A function called in a loop finds the driver's limit still set; after a pause this long it is put back.
LINGER_S = 1.0


def schedule(
    *bare: Never,
    power_cap: str | float | None = None,
    policy: str | None = None,
    dvfs: str | Sequence[str] | None = None,
    cap_policy: str | None = None,
    cap_window_ms: float = CAP_WINDOW_MS,
    max_slowdown: float | str | None = None,
    max_temp_c: float | str | None = None,
    cp_async_depth: int | None = None,
    warp_mma_concurrency: int | None = None,
    dry_run: bool = False,
    **more: Any,
) -> Schedule:
    """Run a function, or a `with` block, under a schedule.

    >>> @schedule(power_cap="275W")
    ... def step(batch): ...
    >>> step(batch)
    >>> print(step.report())

    `power_cap` is watts per GPU ("275W") or for all processes of the node ("node:1.2kW"). It is held for the mean over
    `cap_window_ms`, or the sensor's resolution if that is longer, by waits in the stream (`cap_policy="token_bucket"`,
    the default: needs no permission) or by the driver's limit (`"driver"`: needs permission and `allow_control=True` or
    TESSERA_CONTROL=1; refused, the waits hold the cap). `policy` tunes the function by measured joules: "latency",
    "throughput_per_watt", "energy" or "peak_power", within `max_slowdown` and `max_temp_c`. `dvfs` shapes clocks
    ("auto", "shape:sm_down_200MHz@flash_attention"). `cp_async_depth` and `warp_mma_concurrency` reach our own kernels.
    `dry_run` prints what would be done, and does nothing.

    `more`: `tokens`, what the bucket holds ("joules", or "launches", "warps" or "cp_async" of our own kernels alone),
    `points` ("op", "call" or "auto": where waits may come), `allow_control`, and what the tuner takes (`budget_s`,
    `error_tolerance`, `search`, `per`, `cache`).
    """
    if bare:
        raise ArgumentError(
            "schedule takes its wishes by name, and nothing else",
            fix='with parentheses above a function: @schedule(power_cap="275W"), or policy="throughput_per_watt"',
        )
    Options.refuse_unknown(more)
    return Schedule(
        Options(
            power_cap=power_cap, policy=policy, dvfs=dvfs, cap_policy=cap_policy, cap_window_ms=cap_window_ms,
            max_slowdown=max_slowdown, max_temp_c=max_temp_c, cp_async_depth=cp_async_depth,
            warp_mma_concurrency=warp_mma_concurrency, dry_run=dry_run, **more,
        )
    )  # fmt: skip


class Schedule:
    """A decorator and a context manager; made by `schedule`. Threads may share one."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._open = threading.local()
        self._held: Held | None = None
        self._limited: Any = None
        self._tuned: Any = None
        self._calls = 0
        self._said = False
        if options.cap is not None:
            from .held import Held

            self._held = Held(options.cap, options.cap_window_ms * 1e-3, tokens=options.tokens)

    # -- as a decorator -------------------------------------------------------------------------------------

    def __call__(self, fn: F) -> F:
        """The function under this schedule, with `report()` and `plan()`."""
        _refuse(fn)
        own = Schedule(self.options)
        target: Callable[..., Any] = fn
        if self.options.policy is not None and not self.options.dry_run:
            from .tuner import Wish, tuned

            _needs_torch()

            own._tuned = target = tuned(fn, Wish(**self.options.wish()))
        wrapped = own._wrap(target, each_call=own._each_call(fn))
        functools.update_wrapper(wrapped, fn)
        wrapped.report, wrapped.plan, wrapped.schedule = own.report, own.plan, own  # type: ignore[attr-defined]
        return cast(F, wrapped)

    def _wrap(self, target: Callable[..., Any], *, each_call: bool) -> Callable[..., Any]:
        if not self.limits:

            def direct(*args: Any, **kwargs: Any) -> Any:
                return target(*args, **kwargs)

            return direct

        _needs_torch()
        # A cap alone is the usual case, and may be entered for every small kernel.
        alone = self.options.bucket and not (self.options.hints or self.options.controls or self.options.dry_run)

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            with self._paced(each_call) if alone else self._around(each_call=each_call, linger_s=LINGER_S):
                return target(*args, **kwargs)

        return scheduled

    def _each_call(self, fn: Callable[..., Any]) -> bool:
        """Whether waits come between calls alone: asked for, or compiled code (a mode makes it compile again)."""
        if self.options.points != "auto":
            return self.options.points == "call"
        if self.options.policy is not None:  # the plan may be a compiled function or a graph
            return True
        return hasattr(fn, "_torchdynamo_orig_callable") or type(fn).__name__ == "OptimizedModule"

    # -- as a context ---------------------------------------------------------------------------------------

    def __enter__(self) -> Schedule:
        if self.options.policy is not None:
            raise ScheduleError(
                "a policy tunes a function, and a block cannot be called again",
                fix="decorate a function with @schedule(policy=...)",
            )
        stack = contextlib.ExitStack()
        if self.limits:
            _needs_torch()
            stack.enter_context(self._around(each_call=self.options.points == "call"))
        self._opened().append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened().pop().__exit__(kind, exc, trace)

    def _opened(self) -> list[contextlib.ExitStack]:
        if not hasattr(self._open, "stacks"):
            self._open.stacks = []
        return cast("list[contextlib.ExitStack]", self._open.stacks)

    # -- what holds meanwhile -------------------------------------------------------------------------------

    @property
    def limits(self) -> bool:
        """Whether anything is done around a call at all."""
        options = self.options
        return options.cap is not None or options.hints or options.controls or options.dry_run

    @contextlib.contextmanager
    def _around(self, *, each_call: bool, linger_s: float = 0.0) -> Iterator[None]:
        options = self.options
        if options.dry_run:
            self._say()
            yield
            return
        with contextlib.ExitStack() as stack:
            if options.hints:
                stack.enter_context(_hinted(options))
            bucket = options.bucket
            if options.controls:
                self._limited = stack.enter_context(self._driver(linger_s))
                bucket = options.cap is not None and self._limited.how != "driver"
            if bucket:
                stack.enter_context(self._paced(each_call))
            else:
                self._calls += 1
            yield

    def _paced(self, each_call: bool) -> contextlib.AbstractContextManager[None]:
        from .paced import Paced

        assert self._held is not None
        return Paced(self._held, each_call=each_call)

    def _driver(self, linger_s: float) -> contextlib.AbstractContextManager[Any]:
        from . import limits

        options = self.options
        cap_w = options.cap.power_w if options.cap is not None and options.cap_policy == "driver" else None
        return limits.hold(
            None, cap_w=cap_w, dvfs=self._clocks(), allow_control=options.allow_control, linger_s=linger_s
        )

    def _clocks(self) -> str | Sequence[str] | None:
        """What is asked of the clocks; "auto" becomes the operators that the plan says can do with less."""
        asked = self.options.dvfs
        if self._tuned is None or asked is None:
            return asked
        try:
            plan = self._tuned.plan()
        except ScheduleError:
            return asked  # not tuned before the first call
        given = [part.strip() for text in ([asked] if isinstance(asked, str) else asked) for part in text.split(";")]
        low = [f"shape:sm_down_{LOW_MHZ}MHz@{op.op}" for op in plan.ops if op.clock == "low"]
        return [*(p for p in given if p != "auto"), *low] if low and "auto" in given else asked

    # -- what came of it ------------------------------------------------------------------------------------

    def report(self) -> ScheduleReport:
        """What was asked, held, waited and spent so far."""
        from .held import ScheduleReport

        notes = tuple(self._limited.notes) if self._limited is not None else ()
        if self._held is not None and self._held.calls:
            from .loop import loop

            loop().settle(self._held)
            return self._held.report(notes)
        how = self._limited.how if self._limited is not None else None
        return ScheduleReport(
            cap=self.options.cap, how=how, where="by the driver's power limit" if how else None, window_s=None,
            window_from=None, calls=self._calls, notes=notes,
        )  # fmt: skip

    def plan(self) -> Any:
        """The plan the tuner chose."""
        if self._tuned is None:
            raise ScheduleError(
                "there is no plan", why="nothing was tuned", fix='@schedule(policy="throughput_per_watt")'
            )
        return self._tuned.plan()

    def actions(self) -> list[str]:
        """What this schedule does, in words; nothing is done by asking."""
        options, cap = self.options, self.options.cap
        done = []
        if options.policy:
            done.append(f"tune for {options.policy} at the first call, within {format_duration(options.budget_s)}")
        if options.bucket and cap is not None:
            each = "all processes of this node together" if cap.scope == "node" else "each GPU"
            window = format_duration(options.cap_window_ms * 1e-3)
            waits = "in the stream"
            if options.tokens != "joules":
                waits = f"after Tessera's own kernels, by their {options.tokens}"
            done.append(f"hold {cap.power_w:g} W for {each} by waits {waits}: the mean over {window}")
        if options.cp_async_depth is not None:
            done.append(f"keep {options.cp_async_depth} tiles in flight to shared memory in Tessera's kernels")
        if options.warp_mma_concurrency is not None:
            done.append(f"use {options.warp_mma_concurrency} warp groups in Tessera's kernels")
        if options.controls:
            from . import limits

            cap_w = cap.power_w if cap is not None and options.cap_policy == "driver" else None
            with limits.hold(None, cap_w=cap_w, dvfs=options.dvfs, dry_run=True) as would:
                done += [*would.actions, *would.notes]
        return done

    def _say(self) -> None:
        if not self._said:
            self._said = True
            for action in self.actions() or ["nothing"]:
                sys.stdout.write(f"tessera: would {action}\n")


def _hinted(options: Options) -> contextlib.AbstractContextManager[None]:
    """What holds already, with what this schedule asks over it."""
    import dataclasses

    from ..op import hints

    asked = {
        name: value
        for name in ("cp_async_depth", "warp_mma_concurrency")
        if (value := getattr(options, name)) is not None
    }
    return hints.use(dataclasses.replace(hints.current(), **asked))


def _refuse(fn: object) -> None:
    """Only what runs when it is called: a coroutine or generator launches its work later, outside of the schedule."""
    called = getattr(fn, "__call__", None)  # noqa: B004  (an object's own, which may be a coroutine function)
    kinds = {
        "an async function": inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called),
        "a generator": inspect.isgeneratorfunction(fn) or inspect.isgeneratorfunction(called),
        "an async generator": inspect.isasyncgenfunction(fn) or inspect.isasyncgenfunction(called),
        "a class": inspect.isclass(fn),
        "no function": not callable(fn),
    }
    for kind, is_it in kinds.items():
        if is_it:
            raise ArgumentError(
                f"schedule cannot hold {getattr(fn, '__name__', fn)!r}: it is {kind}",
                why="its work is launched after the call has returned" if "class" not in kind else None,
                fix="decorate the function that launches the work, or use `with schedule(...):` around it",
            )


def _needs_torch() -> None:
    """A schedule is around work of torch's."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "torch", "a schedule that limits something")
