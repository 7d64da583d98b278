"""`cap_power` and `lock_clocks`: a limit for the duration of a block, restored however the block ends (see guard)."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import warnings
from collections.abc import Iterator, Sequence

from ..errors import ActuatorError, ArgumentError
from . import claims, guard
from .actuator import Actuator, find_gpu
from .journal import Claim
from .locks import owner_name
from .smoothing import PowerSmoothing, find_profiles

Wants = tuple[float | None, tuple[int, int] | None, PowerSmoothing | None, tuple[int, ...]]
Gpus = str | int | Actuator | Sequence[str | int | Actuator]


class GpuHold:
    """A claim on one or several GPUs, all or none of them. `hold_gpus` makes it; `notes` are for people."""

    def __init__(
        self,
        actuators: Sequence[Actuator],
        cap_w: float | None,
        clocks_mhz: tuple[int, int] | None = None,
        smoothing: PowerSmoothing | None = None,
        profiles: tuple[int, ...] = (),
    ) -> None:
        # Everybody takes GPUs in the same order, so that two holds of the same GPUs do not each get half.
        self.actuators = tuple(sorted(actuators, key=lambda a: a.uuid))
        self.notes: list[str] = []
        self._id = uuid.uuid4().hex
        self._pid: int | None = os.getpid()
        self._wants: Wants = (cap_w, clocks_mhz, smoothing, profiles)
        self._mutex = threading.Lock()  # taken inside guard.defer_signals only
        self._state = "new"  # then "active", perhaps "suspended" and "active" again, finally "over"
        self._unrestored = False

    @property
    def gpus(self) -> tuple[str, ...]:
        """The names of its GPUs."""
        return tuple(a.gpu for a in self.actuators)

    @property
    def is_active(self) -> bool:
        """Return whether the limits are set: between `take` and `release`, except while a signal's handler runs."""
        return self._state == "active"

    def take(self) -> None:
        """Set the limits. If it raises ActuatorError, nothing is changed on any of the GPUs."""
        with guard.defer_signals():
            guard.register(self)
            with self._mutex:
                if self._state != "new":  # a signal came since, on the main thread: `resume` takes it, or all ends
                    return
                self._state = "active"  # from here on `release` restores, whatever happens
                try:
                    self._claim(None, self._wants)
                except ActuatorError:
                    self._end()
                    raise

    def change(self, *, cap_w: float | None = None, clocks_mhz: tuple[int, int] | None = None) -> None:
        """Ask for another cap and other clocks from now on. If it raises ActuatorError, the limits are as before."""
        if self._pid != os.getpid():
            return
        with guard.defer_signals(), self._mutex:
            wants: Wants = (cap_w, clocks_mhz, *self._wants[2:])
            if self._state == "active":
                self._claim(self._wants, wants)
            if self._state != "over":
                self._wants = wants

    def release(self) -> None:
        """Restore everything. A failure is warned about, tried again at exit, and left in the journal."""
        if self._pid != os.getpid():
            return
        with guard.defer_signals(), self._mutex:
            state, self._state = self._state, "over"
            if state == "over" and not self._unrestored:
                return
            errors = [] if state == "new" else self._leave(self.actuators)
            self._unrestored = bool(errors)
            for exc in errors:
                self._warn(exc)
            if not errors:
                self._end()

    def suspend(self) -> None:
        """Restore for a signal's handler, but be ready to take again."""
        with guard.defer_signals(), self._mutex:
            state = self._state
            if state != "over":
                self._state = "suspended"
            for exc in self._leave(self.actuators) if state == "active" else ():
                self._warn(exc)

    def resume(self) -> None:
        """Take again what was suspended, because the program continues after a signal."""
        with guard.defer_signals(), self._mutex:
            if self._state == "suspended":
                self._claim(None, self._wants)
                self._state = "active"

    def disown(self) -> None:
        """Forget the claim in a forked child: it belongs to the parent."""
        self._pid = None

    def _end(self) -> None:
        self._state = "over"
        guard.unregister(self)
        for actuator in self.actuators:
            actuator.close()

    def _claim(self, before: Wants | None, wants: Wants) -> None:
        done: list[Actuator] = []
        for actuator in self.actuators:
            try:
                self.notes += claims.add_claim(actuator, self._as_claim(wants)).notes
            except ActuatorError as exc:
                raise self._undo(done, before, exc) from exc
            done.append(actuator)

    def _as_claim(self, wants: Wants) -> Claim:
        cap_w, clocks_mhz, smoothing, profiles = wants
        return Claim(
            id=self._id,
            owner=owner_name(),
            pid=os.getpid(),
            cap_w=cap_w,
            clocks_mhz=clocks_mhz,
            smoothing=smoothing,
            profiles=profiles,
        )

    def _undo(self, done: list[Actuator], before: Wants | None, exc: ActuatorError) -> ActuatorError:
        """Restore the GPUs that were already changed. Return an error that names all of them."""
        if not done:
            return exc
        errors: list[ActuatorError] = []
        if before is None:
            errors = self._leave(done)
        else:
            for actuator in done:
                try:
                    claims.add_claim(actuator, self._as_claim(before))
                except ActuatorError as again:
                    errors.append(again)
        others = ", ".join(a.gpu for a in done)
        state = "restored" if not errors else f"not restored ({errors[0].what}; run `tessera doctor --restore`)"
        return type(exc)(f"{exc.what}; {others} had been changed and was {state}", why=exc.why, fix=exc.fix)

    def _leave(self, actuators: Sequence[Actuator]) -> list[ActuatorError]:
        errors = []
        for actuator in actuators:
            try:
                self.notes += claims.remove_claim(actuator, self._id).notes
            except ActuatorError as exc:
                errors.append(exc)
        return errors

    def _warn(self, exc: ActuatorError) -> None:
        text = f"a GPU could NOT be restored: {exc}\n  `tessera doctor --restore` tries again"
        self.notes.append(text)
        warnings.warn(text, stacklevel=4)


@contextlib.contextmanager
def hold_gpus(
    gpus: Gpus,
    *,
    cap_w: float | None = None,
    clocks_mhz: tuple[int, int] | None = None,
    smoothing: PowerSmoothing | None = None,
    profiles: tuple[int, ...] = (),
) -> Iterator[GpuHold]:
    """Hold a cap, clocks, smoothing and power profiles on one GPU or several, all or none, during the block."""
    with guard.defer_signals():  # an interrupt within NVML's own lock would leave it locked, for all threads
        hold = GpuHold(_find_all(gpus), cap_w, clocks_mhz, smoothing, profiles)
    try:
        hold.take()
        yield hold
    finally:
        hold.release()


def cap_power(gpus: Gpus, *, cap_w: float) -> contextlib.AbstractContextManager[GpuHold]:
    """Cap the board power of `gpus` by the driver. If several processes cap a GPU, the tightest cap applies.

    >>> with actuators.cap_power("gpu0", cap_w=300):
    ...     train()

    A cap never raises a limit that is already lower.
    """
    return hold_gpus(gpus, cap_w=cap_w)


def lock_clocks(gpus: Gpus, *, sm_mhz: int | tuple[int, int]) -> contextlib.AbstractContextManager[GpuHold]:
    """Lock the SM clock of `gpus` to one value or to a range (low, high). A lock applies to the whole GPU.

    NVML cannot tell whether somebody else had locked the clocks, so such a lock is removed at the end.
    """
    low, high = (sm_mhz, sm_mhz) if isinstance(sm_mhz, int) else sm_mhz
    return hold_gpus(gpus, clocks_mhz=(low, high))


def smooth_power(
    gpus: Gpus,
    *,
    floor_percent: float | None = None,
    ramp_up_w_per_s: float | None = None,
    ramp_down_w_per_s: float | None = None,
    hysteresis_ms: float | None = None,
) -> contextlib.AbstractContextManager[GpuHold]:
    """Let the driver of a Blackwell GPU keep a floor and limit ramps. Of several holders, the strictest applies.

    >>> with actuators.smooth_power("gpu0", floor_percent=60, ramp_down_w_per_s=200):
    ...     train()

    It is tested against a fake of NVML, not on hardware.
    """
    asked = PowerSmoothing(
        floor_percent=floor_percent,
        ramp_up_w_per_s=ramp_up_w_per_s,
        ramp_down_w_per_s=ramp_down_w_per_s,
        hysteresis_ms=hysteresis_ms,
    )
    return hold_gpus(gpus, smoothing=asked)


def use_power_profiles(gpus: Gpus, names: str | Sequence[str]) -> contextlib.AbstractContextManager[GpuHold]:
    """Request workload power profiles ("llm_training", "max_q" ...) of a Blackwell GPU. Not tested on hardware."""
    return hold_gpus(gpus, profiles=find_profiles(names))


def _find_all(gpus: Gpus) -> list[Actuator]:
    names = [gpus] if isinstance(gpus, str | int | Actuator) else list(gpus)
    if not names:
        raise ArgumentError("gpus=[] contains no GPU", fix='gpus="gpu0", or a list of such names')
    actuators: list[Actuator] = []
    with contextlib.ExitStack() as to_close:
        for gpu in names:
            actuators.append(gpu if isinstance(gpu, Actuator) else find_gpu(gpu))
            to_close.callback(actuators[-1].close)
        uuids = [a.uuid for a in actuators]
        twice = {uuid for uuid in uuids if uuids.count(uuid) > 1}
        if twice:
            raise ArgumentError(f"gpus={names!r} names a GPU twice", why=f"UUID {min(twice)}", fix="name each once")
        to_close.pop_all()
    return actuators
