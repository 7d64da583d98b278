"""`capped` and `locked`: a limit for the length of a block, put back on every way out of it (see guard)."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import warnings
from collections.abc import Iterator, Sequence

from ..errors import ActuatorError, ArgumentError
from . import claims, guard, lock
from .base import Actuator
from .discover import find
from .journal import Claim

Wants = tuple[float | None, tuple[int, int] | None]
Gpus = str | int | Actuator | Sequence[str | int | Actuator]


class Hold:
    """A claim on one or several GPUs, all or none of them. Made by `held`; `notes` say what came up."""

    def __init__(
        self, actuators: Sequence[Actuator], cap_w: float | None, clocks_mhz: tuple[int, int] | None = None
    ) -> None:
        # One order for everybody, so that two holds of the same GPUs do not each get half.
        self.actuators = tuple(sorted(actuators, key=lambda a: a.uuid))
        self.notes: list[str] = []
        self._id = uuid.uuid4().hex
        self._pid: int | None = os.getpid()
        self._wants = (cap_w, clocks_mhz)
        self._mutex = threading.Lock()  # taken inside guard.critical only
        self._state = "new"  # then "taken", "suspended" and "taken" again ..., at last "over"
        self._unrestored = False

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs it holds."""
        return tuple(a.gpu for a in self.actuators)

    @property
    def taken(self) -> bool:
        """Whether it holds: between `take` and `release`, but for the time a signal's handler runs."""
        return self._state == "taken"

    def take(self) -> None:
        """Set the limits. Raises ActuatorError, and then nothing is changed on any of the GPUs."""
        with guard.critical():
            guard.watch_over(self)
            with self._mutex:
                if self._state != "new":  # a signal came since, on the main thread: `resume` takes it, or all ends
                    return
                self._state = "taken"  # whatever happens from here on is for `release` to put back
                try:
                    self._claim(None, self._wants)
                except ActuatorError:
                    self._end()
                    raise

    def change(self, *, cap_w: float | None = None, clocks_mhz: tuple[int, int] | None = None) -> None:
        """Ask for something else from here on. Raises ActuatorError, and then what held before holds on."""
        if self._pid != os.getpid():
            return
        with guard.critical(), self._mutex:
            if self._state == "taken":
                self._claim(self._wants, (cap_w, clocks_mhz))
            if self._state != "over":
                self._wants = (cap_w, clocks_mhz)

    def release(self) -> None:
        """Put everything back. What cannot be is said loudly, tried again at exit, and left in the journal."""
        if self._pid != os.getpid():
            return
        with guard.critical(), self._mutex:
            state, self._state = self._state, "over"
            if state == "over" and not self._unrestored:
                return
            failed = [] if state == "new" else self._leave(self.actuators)
            self._unrestored = bool(failed)
            for exc in failed:
                self._shout(exc)
            if not failed:
                self._end()

    def suspend(self) -> None:
        """For a signal's handler: put back, and be ready to take again."""
        with guard.critical(), self._mutex:
            state = self._state
            if state != "over":
                self._state = "suspended"
            for exc in self._leave(self.actuators) if state == "taken" else ():
                self._shout(exc)

    def resume(self) -> None:
        """The program goes on: hold again what was suspended."""
        with guard.critical(), self._mutex:
            if self._state == "suspended":
                self._claim(None, self._wants)
                self._state = "taken"

    def _end(self) -> None:
        self._state = "over"
        guard.dismiss(self)
        for actuator in self.actuators:
            actuator.close()

    def disown(self) -> None:
        """In a forked child: the hold is the parent's."""
        self._pid = None

    def _claim(self, before: Wants | None, wants: Wants) -> None:
        done: list[Actuator] = []
        for actuator in self.actuators:
            try:
                self.notes += claims.join(actuator, self._as_claim(wants)).notes
            except ActuatorError as exc:
                raise self._undo(done, before, exc) from exc
            done.append(actuator)

    def _as_claim(self, wants: Wants) -> Claim:
        return Claim(id=self._id, owner=lock.owner(), pid=os.getpid(), cap_w=wants[0], clocks_mhz=wants[1])

    def _undo(self, done: list[Actuator], before: Wants | None, exc: ActuatorError) -> ActuatorError:
        """Put those back that were already changed; the error that says so of all of them."""
        if not done:
            return exc
        failed: list[ActuatorError] = []
        if before is None:
            failed = self._leave(done)
        else:
            for actuator in done:
                try:
                    claims.join(actuator, self._as_claim(before))
                except ActuatorError as again:
                    failed.append(again)
        others = ", ".join(a.gpu for a in done)
        state = "put back" if not failed else f"not put back ({failed[0].what}; `tessera doctor --restore` will)"
        return type(exc)(f"{exc.what}; {others} had been changed and was {state}", why=exc.why, fix=exc.fix)

    def _leave(self, actuators: Sequence[Actuator]) -> list[ActuatorError]:
        failed = []
        for actuator in actuators:
            try:
                self.notes += claims.leave(actuator, self._id).notes
            except ActuatorError as exc:
                failed.append(exc)
        return failed

    def _shout(self, exc: ActuatorError) -> None:
        text = f"a GPU could NOT be put back as it was: {exc}\n  `tessera doctor --restore` tries again"
        self.notes.append(text)
        warnings.warn(text, stacklevel=4)


@contextlib.contextmanager
def held(gpus: Gpus, *, cap_w: float | None = None, clocks_mhz: tuple[int, int] | None = None) -> Iterator[Hold]:
    """Hold a power cap and a range of clocks on one GPU or several, all or none, for the length of the block."""
    hold = Hold(_actuators(gpus), cap_w, clocks_mhz)
    try:
        hold.take()
        yield hold
    finally:
        hold.release()


def capped(gpus: Gpus, *, cap_w: float) -> contextlib.AbstractContextManager[Hold]:
    """Cap the board power of `gpus` by the driver. Of several caps on a GPU, by whomever, the tightest holds.

    >>> with actuators.capped("gpu0", cap_w=300):
    ...     train()

    A cap never raises a limit that is lower already.
    """
    return held(gpus, cap_w=cap_w)


def locked(gpus: Gpus, *, sm_mhz: int | tuple[int, int]) -> contextlib.AbstractContextManager[Hold]:
    """Lock the SM clock of `gpus`: to one value, or to a range (low, high). It holds for the whole GPU.

    NVML cannot tell whether somebody else had locked the clocks: such a lock is lifted at the end.
    """
    low, high = (sm_mhz, sm_mhz) if isinstance(sm_mhz, int) else sm_mhz
    return held(gpus, clocks_mhz=(low, high))


def _actuators(gpus: Gpus) -> list[Actuator]:
    named = [gpus] if isinstance(gpus, str | int | Actuator) else list(gpus)
    if not named:
        raise ArgumentError("gpus=[] names no GPU", fix='gpus="gpu0", or a list of such names')
    found: list[Actuator] = []
    try:
        for gpu in named:
            found.append(gpu if isinstance(gpu, Actuator) else find(gpu))
    except ActuatorError:
        for actuator in found:
            actuator.close()
        raise
    twice = {a.uuid for a in found if [b.uuid for b in found].count(a.uuid) > 1}
    if twice:
        raise ArgumentError(f"gpus={named!r} names a GPU twice", why=f"UUID {min(twice)}", fix="name each once")
    return found
