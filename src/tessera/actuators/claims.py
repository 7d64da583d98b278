"""The claims on one GPU, made true: the tightest cap and the lowest clocks of those alive; nothing, once none is left.

Every change is the same step, under the GPU's lock::

    journal (what was, what we are about to write)  ──►  driver  ──►  journal (what it now reads)

A value found that we did not write was set by somebody else. It becomes "what was": we tighten it while claims live and
leave it as it is when they end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ActuatorError, ActuatorPermission
from . import journal as journals
from .base import Actuator, check_clocks
from .journal import ROUNDING_W, Claim, ClockChange, Journal, LimitChange
from .lock import alive, gpu_lock

# Restoring is tried this often: a driver that is busy (a GPU reset, another tool's call) answers soon after.
ATTEMPTS = 4
_BACKOFF_S = 0.02


@dataclass(slots=True)
class Outcome:
    """What a step came to; `notes` are for people."""

    limit_w: float | None = None
    clocks_mhz: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)


def join(actuator: Actuator, claim: Claim) -> Outcome:
    """Add a claim, or replace the one of its id. When the driver refuses, all is as before and the error is raised."""
    if claim.cap_w is not None:
        actuator.power_limit().check(actuator.gpu, claim.cap_w)
    if claim.clocks_mhz is not None:
        check_clocks(actuator.gpu, actuator.supported_clocks_mhz(), *claim.clocks_mhz)
    with gpu_lock(actuator.uuid):
        outcome = Outcome()
        before = _live(actuator, outcome)
        others = tuple(c for c in before if c.id != claim.id)
        try:
            return _settle(actuator, (*others, claim), outcome)
        except ActuatorError as exc:
            try:
                _persistently(actuator, before, outcome)
            except ActuatorError as again:
                exc.why = f"{exc.why or exc.what}; nor could it be put back ({again.what}): `tessera doctor --restore`"
            raise


def leave(actuator: Actuator, claim_id: str) -> Outcome:
    """Take a claim away: the next tightest holds, or what was. Raises ActuatorError; the journal then stays."""
    with gpu_lock(actuator.uuid):
        outcome = Outcome()
        rest = tuple(c for c in _live(actuator, outcome) if c.id != claim_id)
        return _persistently(actuator, rest, outcome)


def heal(actuator: Actuator) -> Outcome:
    """Drop the claims of the dead and put right what they left."""
    with gpu_lock(actuator.uuid):
        outcome = Outcome()
        return _persistently(actuator, _live(actuator, outcome), outcome)


def tightest(claims: Sequence[Claim]) -> tuple[float | None, tuple[int, int] | None]:
    """The cap and the clocks that satisfy all of them; of clocks that do not overlap the lower ones."""
    caps = [c.cap_w for c in claims if c.cap_w is not None]
    ranges = [c.clocks_mhz for c in claims if c.clocks_mhz is not None]
    if not ranges:
        return min(caps, default=None), None
    high = min(high for _, high in ranges)
    return min(caps, default=None), (min(max(low for low, _ in ranges), high), high)


def describe(claim: Claim) -> str:
    """A claim in words."""
    parts = [f"a cap of {claim.cap_w:g} W"] if claim.cap_w is not None else []
    if claim.clocks_mhz is not None:
        parts.append(f"clocks of {claim.clocks_mhz[0]} to {claim.clocks_mhz[1]} MHz")
    return " and ".join(parts) or "nothing"


def _live(actuator: Actuator, outcome: Outcome) -> tuple[Claim, ...]:
    """The claims of processes that live; a journal of an earlier boot is void, as its limits are."""
    journal = journals.read(actuator.uuid)
    if journal is None:
        return ()
    if journal.boot != journals.boot_id():
        outcome.notes.append(f"{actuator.gpu}: a journal of an earlier boot is void: a reboot resets limits and clocks")
        journals.remove(actuator.uuid)
        return ()
    dead = [c for c in journal.claims if not alive(c.owner)]
    outcome.notes += [f"{actuator.gpu}: process {c.pid} ended without giving back {describe(c)}" for c in dead]
    return tuple(c for c in journal.claims if c not in dead)


def _persistently(actuator: Actuator, claims: tuple[Claim, ...], outcome: Outcome) -> Outcome:
    for attempt in range(ATTEMPTS - 1):
        try:
            return _settle(actuator, claims, outcome, thorough=True)
        except ActuatorError:
            time.sleep(_BACKOFF_S * 2**attempt)
    return _settle(actuator, claims, outcome, thorough=True)


def _settle(actuator: Actuator, claims: tuple[Claim, ...], outcome: Outcome, *, thorough: bool = False) -> Outcome:
    """Make the GPU what the claims ask for, and the journal say so; `thorough`: clocks even where the limit fails."""
    fresh = Journal(uuid=actuator.uuid, gpu=actuator.gpu, vendor=actuator.vendor, boot=journals.boot_id())
    journal = dataclasses.replace(journals.read(actuator.uuid) or fresh, claims=claims)
    failed: ActuatorError | None = None
    for part in (_settle_limit, _settle_clocks):
        try:
            journal = part(actuator, journal, outcome)
        except ActuatorError as exc:
            if not thorough:
                raise
            failed = failed or exc
            journal = dataclasses.replace(journals.read(actuator.uuid) or journal, claims=claims)
    if claims or journal.changed:
        journals.write(journal)
    else:
        journals.remove(actuator.uuid)
    if failed is not None:
        raise failed
    return outcome


def _settle_limit(actuator: Actuator, journal: Journal, outcome: Outcome) -> Journal:
    cap_w, _ = tightest(journal.claims)
    change = journal.limit
    if change is None and cap_w is None:
        return journal
    outcome.limit_w = now_w = actuator.power_limit().now_w
    ours = change is not None and change.wrote(now_w)
    was_w = change.was_w if change is not None and ours else now_w
    if change is not None and not ours and now_w != change.was_w:
        note = f"{actuator.gpu}: somebody else set the limit to {now_w:g} W meanwhile; that is left as it is"
        outcome.notes += [note] if note not in outcome.notes else []
    target_w = was_w if cap_w is None else min(was_w, cap_w)  # a cap never raises a limit
    restoring = target_w == was_w
    if now_w == target_w:
        kept = None if restoring else LimitChange(was_w=was_w, ours_w=(now_w,))
        return dataclasses.replace(journal, limit=kept)
    if not restoring:  # the journal on disk already covers a restore, even one that is cut short
        pending = LimitChange(was_w=was_w, ours_w=(now_w, target_w) if ours else (target_w,))
        journals.write(dataclasses.replace(journal, limit=pending))
    actuator.set_power_limit_w(target_w)
    outcome.limit_w = now_w = actuator.power_limit().now_w
    low_w, high_w = (target_w if restoring else 0.0) - ROUNDING_W, target_w + ROUNDING_W
    if not low_w <= now_w <= high_w:  # a cap may be rounded down by more
        raise ActuatorError(
            f"{actuator.gpu}: the limit was set to {target_w:g} W and reads {now_w:g} W",
            why="the driver took it and did not apply it, or somebody else set it at the same moment",
            fix="look for another tool that sets limits (dcgm, nvidia-smi in a cron job)",
        )
    return dataclasses.replace(journal, limit=None if restoring else LimitChange(was_w=was_w, ours_w=(now_w,)))


def _settle_clocks(actuator: Actuator, journal: Journal, outcome: Outcome) -> Journal:
    _, wanted_mhz = tightest(journal.claims)
    change = journal.clocks
    outcome.clocks_mhz = wanted_mhz
    if wanted_mhz is None:
        if change is None:
            return journal
        if change.was_mhz is None:
            actuator.reset_clocks()
        else:
            actuator.lock_clocks_mhz(*change.was_mhz)
        return dataclasses.replace(journal, clocks=None)
    if change is not None and change.done and change.ours_mhz == wanted_mhz:
        return journal
    was_mhz = change.was_mhz if change is not None else actuator.locked_clocks_mhz()
    pending = ClockChange(was_mhz=was_mhz, ours_mhz=wanted_mhz)
    journals.write(dataclasses.replace(journal, clocks=pending))
    try:
        actuator.lock_clocks_mhz(*wanted_mhz)
    except ActuatorPermission:  # refused outright: nothing changed, and nothing could be put back either
        journals.write(journal)
        raise
    return dataclasses.replace(journal, clocks=dataclasses.replace(pending, done=True))
