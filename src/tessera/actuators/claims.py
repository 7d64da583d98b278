"""Adds and removes claims on a GPU, and sets the tightest cap and the lowest clocks of all claims that are alive.

Every change is the same step, under the GPU's lock::

    journal (what was, what we are about to write)  ──►  driver  ──►  journal (what it now reads)

If the driver shows a value that we did not write, somebody else set it. It becomes "what was": claims may tighten it
while they last, and it is set again when they end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..clock import boot_id
from ..errors import ActuatorError, ActuatorPermission
from . import journal as journals
from . import locks
from .actuator import Actuator, check_clocks
from .journal import ROUNDING_W, Claim, ClockChange, Journal, LimitChange
from .smoothing import describe_profiles
from .smoothing_claims import apply_profiles, apply_smoothing, check_smoothing_claim

# How often a restore is tried: a driver that is busy (a GPU reset, another tool's call) answers soon after.
ATTEMPTS = 4
_BACKOFF_S = 0.02


@dataclass(slots=True)
class ClaimOutcome:
    """The GPU's state after a step; `notes` are for people."""

    limit_w: float | None = None
    clocks_mhz: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)


def add_claim(actuator: Actuator, claim: Claim) -> ClaimOutcome:
    """Add a claim, or replace the one with its id. If the driver refuses, the state before is restored."""
    if claim.cap_w is not None:
        actuator.power_limit().check(actuator.gpu, claim.cap_w)
    if claim.clocks_mhz is not None:
        check_clocks(actuator.gpu, actuator.supported_clocks_mhz(), *claim.clocks_mhz)
    check_smoothing_claim(actuator, claim)
    with locks.lock_gpu(actuator.uuid):
        outcome = ClaimOutcome()
        before = _live_claims(actuator, outcome)
        others = tuple(c for c in before if c.id != claim.id)
        locks.lock_node(actuator.uuid, actuator.gpu, actuator.node)
        try:
            return _apply(actuator, (*others, claim), outcome)
        except ActuatorError as exc:
            try:
                _restore(actuator, before, outcome)
            except ActuatorError as again:
                exc.why = f"{exc.why or exc.what}; restoring failed too ({again.what}): `tessera doctor --restore`"
            raise


def remove_claim(actuator: Actuator, claim_id: str | None) -> ClaimOutcome:
    """Remove a claim and those of dead processes; then the next tightest applies, or what was before.

    Raises ActuatorError, and then keeps the journal.
    """
    with locks.lock_gpu(actuator.uuid):
        outcome = ClaimOutcome()
        rest = tuple(c for c in _live_claims(actuator, outcome) if c.id != claim_id)
        return _restore(actuator, rest, outcome)


def tightest_limits(claims: Sequence[Claim]) -> tuple[float | None, tuple[int, int] | None]:
    """Return the cap and the clocks that satisfy all claims; the lower clocks if two ranges do not overlap."""
    caps = [c.cap_w for c in claims if c.cap_w is not None]
    ranges = [c.clocks_mhz for c in claims if c.clocks_mhz is not None]
    if not ranges:
        return min(caps, default=None), None
    high = min(high for _, high in ranges)
    return min(caps, default=None), (min(max(low for low, _ in ranges), high), high)


def describe_claim(claim: Claim) -> str:
    """Describe a claim in words."""
    parts = [f"a cap of {claim.cap_w:g} W"] if claim.cap_w is not None else []
    if claim.clocks_mhz is not None:
        parts.append(f"clocks of {claim.clocks_mhz[0]} to {claim.clocks_mhz[1]} MHz")
    parts += [] if claim.smoothing is None else [str(claim.smoothing)]
    parts += [f"the power profiles {describe_profiles(claim.profiles)}"] if claim.profiles else []
    return " and ".join(parts) or "nothing"


def _live_claims(actuator: Actuator, outcome: ClaimOutcome) -> tuple[Claim, ...]:
    """Return the claims of live processes. A journal from an earlier boot is void, because limits end with a boot."""
    journal = journals.read_journal(actuator.uuid)
    if journal is None:
        return ()
    if journal.boot != boot_id():
        outcome.notes.append(
            f"{actuator.gpu}: a journal from an earlier boot is void: a reboot resets limits and clocks"
        )
        journals.remove_journal(actuator.uuid)
        return ()
    dead = [c for c in journal.claims if not locks.is_alive(c.owner)]
    outcome.notes += [f"{actuator.gpu}: process {c.pid} ended without releasing {describe_claim(c)}" for c in dead]
    return tuple(c for c in journal.claims if c not in dead)


def _restore(actuator: Actuator, claims: tuple[Claim, ...], outcome: ClaimOutcome) -> ClaimOutcome:
    for attempt in range(ATTEMPTS - 1):
        try:
            return _apply(actuator, claims, outcome, thorough=True)
        except ActuatorError:
            time.sleep(_BACKOFF_S * 2**attempt)
    return _apply(actuator, claims, outcome, thorough=True)


def _apply(
    actuator: Actuator, claims: tuple[Claim, ...], outcome: ClaimOutcome, *, thorough: bool = False
) -> ClaimOutcome:
    """Set the GPU to what the claims ask for, and record it. If `thorough`, set clocks even if the limit fails."""
    fresh = Journal(uuid=actuator.uuid, gpu=actuator.gpu, vendor=actuator.vendor, boot=boot_id())
    journal = dataclasses.replace(journals.read_journal(actuator.uuid) or fresh, claims=claims)
    failed: ActuatorError | None = None
    for part in (_apply_limit, _apply_clocks, apply_smoothing, apply_profiles):
        try:
            journal = part(actuator, journal, outcome)
        except ActuatorError as exc:
            if not thorough:
                raise
            failed = failed or exc
            journal = dataclasses.replace(journals.read_journal(actuator.uuid) or journal, claims=claims)
    if claims or journal.is_changed:
        journals.write_journal(journal)
    else:
        journals.remove_journal(actuator.uuid)
    if failed is not None:
        raise failed
    return outcome


def _apply_limit(actuator: Actuator, journal: Journal, outcome: ClaimOutcome) -> Journal:
    cap_w, _ = tightest_limits(journal.claims)
    change = journal.limit
    if change is None and cap_w is None:
        return journal
    outcome.limit_w = now_w = actuator.power_limit().now_w
    ours = change is not None and change.wrote(now_w)
    was_w = change.was_w if change is not None and ours else now_w
    if change is not None and not ours and now_w != change.was_w:
        note = f"{actuator.gpu}: somebody else set the limit to {now_w:g} W meanwhile; it stays as it is"
        outcome.notes += [note] if note not in outcome.notes else []
    target_w = was_w if cap_w is None else min(was_w, cap_w)  # a cap never raises a limit
    restoring = target_w == was_w
    if now_w != target_w:
        if not restoring:  # for a restore, the journal on disk is already right, even if it is interrupted
            pending = LimitChange(was_w=was_w, ours_w=(now_w, target_w) if ours else (target_w,))
            journals.write_journal(dataclasses.replace(journal, limit=pending))
        actuator.set_power_limit_w(target_w)
        outcome.limit_w = now_w = actuator.power_limit().now_w
        low_w, high_w = (target_w if restoring else 0.0) - ROUNDING_W, target_w + ROUNDING_W
        if not low_w <= now_w <= high_w:  # a driver may round a cap down by more
            raise ActuatorError(
                f"{actuator.gpu}: the limit was set to {target_w:g} W but reads {now_w:g} W",
                why="the driver accepted it and did not apply it, or somebody else set it at the same moment",
                fix="look for another tool that sets limits (dcgm, nvidia-smi in a cron job)",
            )
    return dataclasses.replace(journal, limit=None if restoring else LimitChange(was_w=was_w, ours_w=(now_w,)))


def _apply_clocks(actuator: Actuator, journal: Journal, outcome: ClaimOutcome) -> Journal:
    _, wanted_mhz = tightest_limits(journal.claims)
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
    journals.write_journal(dataclasses.replace(journal, clocks=pending))
    try:
        actuator.lock_clocks_mhz(*wanted_mhz)
    except ActuatorPermission:  # refused outright: nothing changed, so there is nothing to restore
        journals.write_journal(journal)
        raise
    return dataclasses.replace(journal, clocks=dataclasses.replace(pending, done=True))
