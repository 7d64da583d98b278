"""What is changed on this machine's GPUs, by whom, and what their dead left: the facts of `tessera doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ActuatorError
from . import claims, discover
from . import journal as journals
from .base import Actuator
from .journal import Claim, Journal
from .lock import alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """One GPU with a journal. `action` says what `heal` would do, or did; `error` why it could not."""

    gpu: str
    uuid: str
    holders: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    action: str = ""
    error: str | None = None
    needs_restore: bool = False

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.gpu}: {self.error or self.action}"


def examine() -> list[Outstanding]:
    """What is changed now and what `heal` would do; changes nothing."""
    return [_examine_one(uuid) for uuid in _uuids()]


def heal() -> list[Outstanding]:
    """Put back what dead processes left; live ones keep what they hold. One GPU that fails does not stop the others."""
    return [found for uuid in _uuids() if (found := _heal_one(uuid)) is not None]


def _uuids() -> list[str]:
    try:
        return journals.uuids()
    except ActuatorError:
        return []  # no folder, or not ours: then nothing of ours is there


def _examine_one(uuid: str) -> Outstanding:
    try:
        journal = journals.read(uuid)
    except ActuatorError as exc:
        return Outstanding(gpu=uuid, uuid=uuid, error=str(exc), needs_restore=True)
    if journal is None:  # ended since we looked
        return Outstanding(gpu=uuid, uuid=uuid, action="nothing")
    if journal.boot != journals.boot_id():
        return Outstanding(
            gpu=journal.gpu, uuid=uuid, action="void: the machine was restarted since", needs_restore=True
        )
    live = tuple(c for c in journal.claims if alive(c.owner))
    dead = tuple(c for c in journal.claims if c not in live)
    idle = bool(live) and not dead
    return Outstanding(
        gpu=journal.gpu,
        uuid=uuid,
        holders=tuple(_who(c) for c in live),
        dead=tuple(_who(c) for c in dead),
        action="nothing: held by live processes" if idle else _plan(journal, live),
        needs_restore=not idle,
    )


def _who(claim: Claim) -> str:
    return f"process {claim.pid}: {claims.describe(claim)}"


def _plan(journal: Journal, live: tuple[Claim, ...]) -> str:
    cap_w, clocks_mhz = claims.tightest(live)
    parts = []
    if journal.limit is not None:
        target_w = journal.limit.was_w if cap_w is None else min(cap_w, journal.limit.was_w)
        parts.append(f"set the limit from {journal.limit.ours_w[-1]:g} W to {target_w:g} W, unless somebody changed it")
    if journal.clocks is not None and clocks_mhz is None:
        was = journal.clocks.was_mhz
        parts.append("unlock the clocks" if was is None else f"lock the clocks to {was[0]}..{was[1]} MHz as they were")
    elif journal.clocks is not None and clocks_mhz != journal.clocks.ours_mhz:
        parts.append(f"lock the clocks to {clocks_mhz} MHz")
    return " and ".join(parts) or "forget the claims: nothing was changed"


def _heal_one(uuid: str) -> Outstanding | None:
    before = _examine_one(uuid)
    if not before.needs_restore:
        return None
    try:
        journal = journals.read(uuid)
        if journal is None:
            return None
        if journal.boot != journals.boot_id():
            journals.remove(uuid)
            return before
        actuator: Actuator = discover.open_uuid(uuid, journal.vendor)
        try:
            outcome = claims.heal(actuator)
        finally:
            actuator.close()
    except ActuatorError as exc:
        return Outstanding(gpu=before.gpu, uuid=uuid, dead=before.dead, error=str(exc), needs_restore=True)
    parts = [note.removeprefix(f"{actuator.gpu}: ") for note in outcome.notes]
    if journal.limit is not None and outcome.limit_w is not None:
        parts.append(f"its limit is {outcome.limit_w:g} W")
    if journal.clocks is not None:
        parts.append(
            f"its clocks are locked to {outcome.clocks_mhz}" if outcome.clocks_mhz else "its clocks are unlocked"
        )
    return Outstanding(gpu=actuator.gpu, uuid=uuid, dead=before.dead, action="; ".join(parts) or "nothing was changed")
