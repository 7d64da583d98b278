"""A schedule's power cap and clocks set by the driver, where that is wanted and permitted.

Control is opt-in: `allow_control=True`, or TESSERA_CONTROL=1 in the environment. Without it nothing is changed, and
pacing holds the cap. With it, if the driver refuses, the user is warned once and the function runs without the limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from ..actuators import Actuator, GpuHold, find_gpu, list_gpus
from ..errors import ActuatorError, TesseraError, warn_caller
from .dvfs import ClockRule, ClockShaper, follow_operators, parse_dvfs

VARIABLE = "TESSERA_CONTROL"
"""Environment variable: "1" lets schedules set power limits and clocks."""
_NO_HINTS = "dvfs='auto' lowers nothing yet: the plan has no clock hints"

Gpus = Sequence[str | int] | None

_warned: set[str] = set()


@dataclass(slots=True, kw_only=True)
class DriverLimits:
    """What the driver holds while the block runs.

    `how` is "driver" when the driver's limit holds the cap, else None. `actions` lists what was done or, in a plan,
    what would be done; `notes` are for people. `shaper` is None unless clocks are shaped.
    """

    how: str | None = None
    cap_w: float | None = None
    gpus: tuple[str, ...] = ()
    actions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shaper: ClockShaper | None = None


def is_allowed(allow_control: bool | None = None) -> bool:
    """Return whether the user opted in to control."""
    return os.environ.get(VARIABLE) == "1" if allow_control is None else allow_control


@contextlib.contextmanager
def hold_limits(
    gpus: Gpus = None,
    *,
    cap_w: float | None = None,
    dvfs: str | Sequence[str] | None = None,
    allow_control: bool | None = None,
    linger_s: float = 0.0,
) -> Iterator[DriverLimits]:
    """Hold a cap (per GPU) and shaped clocks by the driver while the block runs; restore everything afterwards.

    `gpus` are names as the sensors use them ("gpu0"); None means all GPUs that this process may use. With `linger_s`,
    the limits stay for so long after the block and are taken over if the same limits are asked for again: otherwise a
    function called in a loop would set the limit twice in every call.
    """
    wanted = parse_dvfs(dvfs)
    limits = DriverLimits(notes=[_NO_HINTS] if wanted.auto else [])
    if cap_w is None and not wanted.rules:
        yield limits
        return
    if not is_allowed(allow_control):
        _refuse(limits, _not_opted_in(cap_w), warn=bool(wanted.rules))
        yield limits
        return
    key = (None if gpus is None else tuple(gpus), cap_w, wanted.rules)
    limits, stack = _take_parked(key) or _open(gpus, cap_w, wanted.rules, limits)
    try:
        with _follow(limits.shaper) if limits.shaper is not None else contextlib.nullcontext():
            yield limits
    finally:
        _park(key, limits, stack, linger_s)


def plan_limits(
    gpus: Gpus = None,
    *,
    cap_w: float | None = None,
    dvfs: str | Sequence[str] | None = None,
    allow_control: bool | None = None,
) -> DriverLimits:
    """Return what `hold_limits` would do; this only reads."""
    wanted = parse_dvfs(dvfs)
    limits = DriverLimits(notes=[_NO_HINTS] if wanted.auto else [])
    if cap_w is None and not wanted.rules:
        return limits
    if not is_allowed(allow_control):
        _refuse(limits, _not_opted_in(cap_w), warn=False)
    with contextlib.ExitStack() as stack:
        try:
            actuators = _find_actuators(stack, gpus, limits)
            if cap_w is not None:
                limits.actions += [_describe_cap(a, cap_w) for a in actuators]
            limits.actions += _describe_rules(actuators, wanted.rules) if wanted.rules else []
        except ActuatorError as exc:
            limits.notes.append(str(exc))
    return limits


def _open(
    gpus: Gpus, cap_w: float | None, rules: tuple[ClockRule, ...], limits: DriverLimits
) -> tuple[DriverLimits, contextlib.ExitStack]:
    """Set what the driver allows: the cap, then the clocks. If it refuses only the clocks, the cap stays.

    Closing the stack restores everything.
    """
    with contextlib.ExitStack() as stack:
        try:
            actuators = _find_actuators(stack, gpus, limits)
            hold = GpuHold(actuators, cap_w)
            stack.callback(lambda: limits.notes.extend(n for n in hold.notes if n not in limits.notes))
            stack.callback(hold.release)
            hold.take()
            limits.notes += hold.notes
            if cap_w is not None:
                limits.how, limits.cap_w = "driver", cap_w
                limits.actions += [f"{gpu}: power limit at most {cap_w:g} W" for gpu in hold.gpus]
            if rules:
                limits.shaper = _start_shaper(stack, hold, cap_w, rules)
                limits.actions += _describe_rules(actuators, rules)
        except ActuatorError as exc:
            _refuse(limits, exc, warn=True)
        return limits, stack.pop_all()


def _find_actuators(stack: contextlib.ExitStack, gpus: Gpus, limits: DriverLimits) -> list[Actuator]:
    names = list(list_gpus()) if gpus is None else gpus
    if not names:
        raise ActuatorError(
            "there is no GPU to control",
            why="this process may use none, or only slices (MIG) of some",
            fix="check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    actuators = [stack.enter_context(contextlib.closing(find_gpu(name))) for name in names]
    limits.gpus = tuple(a.gpu for a in actuators)
    return actuators


def _start_shaper(
    stack: contextlib.ExitStack, hold: GpuHold, cap_w: float | None, rules: tuple[ClockRule, ...]
) -> ClockShaper:
    supported = _common_clocks(hold.actuators)
    whole = (min(supported), max(supported))
    # Lock the whole range first: it limits nothing, and shows at once whether clocks may be locked at all.
    hold.change(cap_w=cap_w, clocks_mhz=whole)

    def apply(ceiling_mhz: int | None) -> None:
        try:
            hold.change(cap_w=cap_w, clocks_mhz=whole if ceiling_mhz is None else (whole[0], ceiling_mhz))
        except ActuatorError as exc:  # on the shaper's thread: the work continues at the current clocks
            _warn_once(str(exc))

    shaper = ClockShaper(rules, supported, apply)
    shaper.start()
    stack.callback(shaper.stop)
    return shaper


def _common_clocks(actuators: Sequence[Actuator]) -> list[int]:
    """Return the clocks that all of the GPUs support."""
    common = set.intersection(*(set(a.supported_clocks_mhz()) for a in actuators))
    if not common:
        raise ActuatorError(
            f"{', '.join(a.gpu for a in actuators)}: no clocks to shape with",
            why="the driver lists no supported clocks, or the GPUs have none in common",
            fix="shape GPUs of one kind; `nvidia-smi -q -d SUPPORTED_CLOCKS` lists them",
        )
    return sorted(common)


@contextlib.contextmanager
def _follow(shaper: ClockShaper) -> Iterator[None]:
    """Tell the shaper which torch operators and which regions of the profiler run."""
    from ..profile.region import follow

    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:  # else there are no operators to follow
            stack.enter_context(follow_operators(shaper))
        stack.callback(follow, follow(shaper))
        yield


def _describe_cap(actuator: Actuator, cap_w: float) -> str:
    limit = actuator.power_limit()
    limit.check(actuator.gpu, cap_w)
    if limit.now_w <= cap_w:
        return f"{actuator.gpu}: leave the power limit at {limit.now_w:g} W, below the cap of {cap_w:g} W"
    return f"{actuator.gpu}: set the power limit from {limit.now_w:g} W to {cap_w:g} W, and back"


def _describe_rules(actuators: Sequence[Actuator], rules: tuple[ClockRule, ...]) -> list[str]:
    supported = _common_clocks(actuators)
    names = ", ".join(a.gpu for a in actuators)
    return [f"{names}: SM clock at most {r.ceiling_mhz(supported)} MHz in {r.target} ({r})" for r in rules]


def _not_opted_in(cap_w: float | None) -> ActuatorError:
    what = "power limits and clocks" if cap_w is not None else "clocks"
    return ActuatorError(
        f"{what} are not changed",
        why="a schedule changes them only when you opted in",
        fix=f"schedule(..., allow_control=True), or {VARIABLE}=1 in the environment",
    )


def _refuse(limits: DriverLimits, exc: TesseraError, *, warn: bool) -> None:
    limits.notes.append(str(exc))
    if warn:
        _warn_once(str(exc))


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn_caller(text)


# -- limits that stay for a moment after their block ------------------------------------------------------------------


_mutex = threading.Lock()
_parked: dict[Hashable, tuple[DriverLimits, contextlib.ExitStack, threading.Timer]] = {}


def _take_parked(key: Hashable) -> tuple[DriverLimits, contextlib.ExitStack] | None:
    """Return the limits parked under this key, if they are still there; the caller owns them now."""
    with _mutex:
        parked = _parked.pop(key, None)
    if parked is None:
        return None
    limits, stack, timer = parked
    timer.cancel()
    return limits, stack


def _park(key: Hashable, limits: DriverLimits, stack: contextlib.ExitStack, linger_s: float) -> None:
    """Restore after `linger_s`; at once where that is 0 or other limits are parked under this key."""
    with _mutex:
        if linger_s > 0 and key not in _parked:
            timer = threading.Timer(linger_s, _restore_parked, (key, stack))
            timer.daemon, timer.name = True, "tessera-linger"
            _parked[key] = (limits, stack, timer)
            timer.start()
            return
    stack.close()


def _restore_parked(key: Hashable, stack: contextlib.ExitStack) -> None:
    with _mutex:
        if key not in _parked or _parked[key][1] is not stack:
            return  # another block took the limits in the last moment
        del _parked[key]
    stack.close()


def _reset_after_fork() -> None:
    """Forget the parked limits in a forked child, which has neither the limits nor the threads."""
    global _mutex  # noqa: PLW0603  (one per process)
    _mutex = threading.Lock()
    _parked.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
