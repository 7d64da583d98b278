"""`limits.hold`: a schedule's power cap and clocks by the driver, where that is wanted and permitted.

Control is opt-in: `allow_control=True`, or TESSERA_CONTROL=1 in the environment. Without it nothing is changed and the
cap is the pacing's to hold. With it, what the driver refuses is said once and the function runs without.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..actuators import Actuator, GpuHold, find_gpu, list_gpus
from ..errors import ActuatorError, TesseraError
from . import dvfs as dvfs_room
from . import lingering
from .dvfs import Dvfs, Shape, Shaper

VARIABLE = "TESSERA_CONTROL"
"""Environment variable: "1" lets schedules set power limits and clocks."""

_NO_HINTS = "dvfs='auto' lowers nothing yet: the plan has no clock hints"

_said: set[str] = set()


@dataclass(slots=True, kw_only=True)
class Held:
    """What the driver holds while the block runs.

    `how` is "driver" when the driver's limit holds the cap, None when something else has to. `actions` is what was done
    or, in a dry run, what would be; `notes` is what a person should know. `shaper` is there where clocks are shaped.
    """

    how: str | None = None
    cap_w: float | None = None
    gpus: tuple[str, ...] = ()
    actions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shaper: Shaper | None = None


def allowed(allow_control: bool | None = None) -> bool:
    """Whether control was opted in."""
    return os.environ.get(VARIABLE) == "1" if allow_control is None else allow_control


@contextlib.contextmanager
def hold(
    gpus: Sequence[str | int] | None = None,
    *,
    cap_w: float | None = None,
    dvfs: str | Sequence[str] | Dvfs | None = None,
    clock_hints: Mapping[str, int] | None = None,
    allow_control: bool | None = None,
    dry_run: bool = False,
    required: bool = False,
    linger_s: float = 0.0,
) -> Iterator[Held]:
    """Hold a cap (per GPU) and shaped clocks by the driver for the length of the block; everything is put back.

    `gpus` are names as the sensors have them ("gpu0"), all that this process may use if None. `clock_hints` (MHz by
    operator) are the plan's, for dvfs="auto". With `required` a refusal raises instead of being noted. With `linger_s`
    it is put back only so long after the block, unless the same is asked for again before: for a function called in a
    loop, whose every call would otherwise set the limit twice.
    """
    asked = dvfs_room.parse(dvfs)
    shapes = asked.shapes + (dvfs_room.from_hints(clock_hints or {}) if asked.auto else ())
    nothing = Held(notes=[_NO_HINTS] if asked.auto and not clock_hints else [])
    if cap_w is None and not shapes:
        yield nothing
        return
    if not allowed(allow_control):
        _refuse(nothing, _not_opted_in(cap_w), loudly=bool(shapes) and not dry_run, required=required and not dry_run)
    if dry_run or not allowed(allow_control):
        if dry_run:
            _plan(nothing, gpus, cap_w, shapes)
        yield nothing
        return
    key = (None if gpus is None else tuple(gpus), cap_w, shapes)
    parked = lingering.take(key)
    told, stack = parked if parked is not None else _open(gpus, cap_w, shapes, nothing, required)
    try:
        with _followed(told.shaper) if told.shaper is not None else contextlib.nullcontext():
            yield told
    finally:
        lingering.park(key, told, stack, linger_s)


def _open(
    gpus: Sequence[str | int] | None, cap_w: float | None, shapes: tuple[Shape, ...], told: Held, required: bool
) -> tuple[Held, contextlib.ExitStack]:
    """Take what the driver gives; the stack gives it back."""
    with contextlib.ExitStack() as stack:
        try:
            _enter(stack, _opened(stack, gpus, told), cap_w, shapes, told, required)
        except ActuatorError as exc:
            _refuse(told, exc, loudly=True, required=required)
        return told, stack.pop_all()


def _opened(stack: contextlib.ExitStack, gpus: Sequence[str | int] | None, told: Held) -> list[Actuator]:
    names = list(list_gpus()) if gpus is None else gpus
    if not names:
        raise ActuatorError(
            "there is no GPU to control",
            why="this process may use none, or only slices (MIG) of some",
            fix="check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    actuators = [stack.enter_context(contextlib.closing(find_gpu(name))) for name in names]
    told.gpus = tuple(a.gpu for a in actuators)
    return actuators


def _enter(
    stack: contextlib.ExitStack,
    actuators: list[Actuator],
    cap_w: float | None,
    shapes: tuple[Shape, ...],
    told: Held,
    required: bool,
) -> None:
    """Take the cap, then the clocks: where only the clocks are refused the cap stays."""
    held = GpuHold(actuators, cap_w)
    stack.callback(lambda: told.notes.extend(n for n in held.notes if n not in told.notes))
    stack.callback(held.release)
    held.take()
    if cap_w is not None:
        told.how, told.cap_w = "driver", cap_w
        told.actions += [f"{gpu}: power limit at most {cap_w:g} W" for gpu in held.gpus]
    if shapes:
        try:
            told.shaper = _shape(stack, held, cap_w, shapes)
        except ActuatorError as exc:
            _refuse(told, exc, loudly=True, required=required)
        else:
            told.actions += _shape_actions(actuators, shapes)
    told.notes += held.notes


def _shape(stack: contextlib.ExitStack, held: GpuHold, cap_w: float | None, shapes: tuple[Shape, ...]) -> Shaper:
    supported = _supported(held.actuators)
    whole = (min(supported), max(supported))
    # The whole range to begin with: it limits nothing, and shows at once whether clocks may be locked at all.
    held.change(cap_w=cap_w, clocks_mhz=whole)

    def apply(ceiling_mhz: int | None) -> None:
        try:
            held.change(cap_w=cap_w, clocks_mhz=whole if ceiling_mhz is None else (whole[0], ceiling_mhz))
        except ActuatorError as exc:  # on the shaper's thread: the work goes on at the clocks there are
            _say_once(str(exc))

    shaper = Shaper(shapes, supported, apply)
    shaper.start()
    stack.callback(shaper.stop)
    return shaper


def _supported(actuators: Sequence[Actuator]) -> list[int]:
    """The clocks that all of the GPUs have."""
    common = set.intersection(*(set(a.supported_clocks_mhz()) for a in actuators))
    if not common:
        raise ActuatorError(
            f"{', '.join(a.gpu for a in actuators)}: no clocks to shape with",
            why="the driver lists no supported clocks, or the GPUs have none in common",
            fix="shape GPUs of one kind; `nvidia-smi -q -d SUPPORTED_CLOCKS` lists them",
        )
    return sorted(common)


@contextlib.contextmanager
def _followed(shaper: Shaper) -> Iterator[None]:
    """Let torch's operators and the profiler's regions be names for the shaper."""
    from ..profile.region import follow

    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:  # else there are no operators to follow
            stack.enter_context(dvfs_room.operators(shaper))
        stack.callback(follow, follow(shaper))
        yield


def _plan(told: Held, gpus: Sequence[str | int] | None, cap_w: float | None, shapes: tuple[Shape, ...]) -> None:
    """Note what would be done; reading alone."""
    with contextlib.ExitStack() as stack:
        try:
            actuators = _opened(stack, gpus, told)
            if cap_w is not None:
                told.actions += [_plan_cap(a, cap_w) for a in actuators]
            told.actions += _shape_actions(actuators, shapes) if shapes else []
        except ActuatorError as exc:
            told.notes.append(str(exc))


def _plan_cap(actuator: Actuator, cap_w: float) -> str:
    limit = actuator.power_limit()
    limit.check(actuator.gpu, cap_w)
    if limit.now_w <= cap_w:
        return f"{actuator.gpu}: leave the power limit at {limit.now_w:g} W, below the cap of {cap_w:g} W"
    return f"{actuator.gpu}: set the power limit from {limit.now_w:g} W to {cap_w:g} W, and back"


def _shape_actions(actuators: Sequence[Actuator], shapes: tuple[Shape, ...]) -> list[str]:
    supported = _supported(actuators)
    names = ", ".join(a.gpu for a in actuators)
    return [f"{names}: SM clock at most {s.ceiling_mhz(supported)} MHz in {s.target} ({s})" for s in shapes]


def _not_opted_in(cap_w: float | None) -> ActuatorError:
    what = "power limits and clocks" if cap_w is not None else "clocks"
    return ActuatorError(
        f"{what} are left alone",
        why="a schedule changes them only when that was opted in",
        fix=f"schedule(..., allow_control=True), or {VARIABLE}=1 in the environment",
    )


def _refuse(told: Held, exc: TesseraError, *, loudly: bool, required: bool) -> None:
    if required:
        raise exc
    told.notes.append(str(exc))
    if loudly:
        _say_once(str(exc))


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=5)
