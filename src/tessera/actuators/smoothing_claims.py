"""Turns claims on power smoothing and workload power profiles into settings, by the same steps as in claims.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ActuatorError, ActuatorPermission
from . import journal as journals
from .actuator import Actuator
from .journal import Claim, Journal
from .smoothing import (
    PARAMETERS,
    PowerSmoothing,
    ProfileChange,
    Smoother,
    SmoothingChange,
    SmoothingState,
    describe_profiles,
)

if TYPE_CHECKING:
    from .claims import ClaimOutcome


def check_smoothing_claim(actuator: Actuator, claim: Claim) -> None:
    """Raise ActuatorError if the GPU cannot do what the claim asks for."""
    if claim.smoothing is not None:
        smoother = _as_smoother(actuator)
        smoother.smoothing_limits().check(actuator.gpu, claim.smoothing)
    if claim.profiles:
        has, _ = _as_smoother(actuator).power_profiles()
        missing = [p for p in claim.profiles if p not in has]
        if missing:
            raise ActuatorError(
                f"{actuator.gpu} has no workload power profile {describe_profiles(missing)}",
                why=f"it has {describe_profiles(has) or 'none'}",
                fix="use one of those",
            )


def strictest_smoothing(claims: Sequence[Claim]) -> PowerSmoothing | None:
    """Return the smoothing that satisfies all claims: the highest floor, the slowest ramps, the longest hysteresis."""
    asked = [c.smoothing for c in claims if c.smoothing is not None]
    if not asked:
        return None
    values = {name: [v for a in asked if (v := getattr(a, name)) is not None] for name in PARAMETERS}
    pick = {"floor_percent": max, "ramp_up_w_per_s": min, "ramp_down_w_per_s": min, "hysteresis_ms": max}
    return PowerSmoothing(**{name: pick[name](v) for name, v in values.items() if v})


def apply_smoothing(actuator: Actuator, journal: Journal, outcome: ClaimOutcome) -> Journal:
    """Set the GPU's power smoothing to what the claims ask for, or back to what it was."""
    wanted, change = strictest_smoothing(journal.claims), journal.smoothing
    if wanted is None and change is None:
        return journal
    smoother = _as_smoother(actuator)
    if wanted is None:
        assert change is not None
        if change.done and not smoother.smoothing_state(change.ours.profile).is_near(change.ours):
            note = f"{actuator.gpu}: somebody else changed its power smoothing meanwhile; it stays as it is"
            outcome.notes += [note] if note not in outcome.notes else []
        else:
            smoother.set_smoothing(change.was)
        return dataclasses.replace(journal, smoothing=None)
    preset = smoother.smoothing_limits().presets - 1
    was = change.was if change is not None else smoother.smoothing_state(preset)
    ours = _with(was, wanted)
    if change is not None and change.done and change.ours == ours:
        return journal
    pending = SmoothingChange(was=was, ours=ours)
    journals.write_journal(dataclasses.replace(journal, smoothing=pending))
    try:
        smoother.set_smoothing(ours)
    except ActuatorPermission:  # refused outright: nothing changed, so there is nothing to restore
        journals.write_journal(journal)
        raise
    now = smoother.smoothing_state(preset)
    if not now.is_near(ours):
        raise ActuatorError(
            f"{actuator.gpu}: its power smoothing was set and reads otherwise",
            why=f"asked for {wanted}; it reads {now}",
            fix="an administrator's override may stand above it: `nvidia-smi power-smoothing -h`",
        )
    return dataclasses.replace(journal, smoothing=dataclasses.replace(pending, done=True))


def apply_profiles(actuator: Actuator, journal: Journal, _: ClaimOutcome) -> Journal:
    """Request the workload power profiles of all claims, and take back ours that no claim needs any more."""
    wanted = sorted({p for c in journal.claims for p in c.profiles})
    ours = journal.profiles.added if journal.profiles is not None else ()
    if not wanted and not ours:
        return journal
    smoother = _as_smoother(actuator)
    requested = smoother.power_profiles()[1]
    extra = [p for p in ours if p not in wanted and p in requested]
    missing = [p for p in wanted if p not in requested]
    added = tuple(sorted({p for p in (*ours, *missing) if p in wanted}))
    if missing:
        before = tuple(sorted({*ours, *missing}))
        journals.write_journal(dataclasses.replace(journal, profiles=ProfileChange(added=before)))
        try:
            smoother.request_profiles(missing)
        except ActuatorPermission:
            journals.write_journal(journal)
            raise
    if extra:
        smoother.clear_profiles(extra)
    return dataclasses.replace(journal, profiles=ProfileChange(added=added) if added else None)


def _with(was: SmoothingState, wanted: PowerSmoothing) -> SmoothingState:
    asked = {name: value for name in PARAMETERS if (value := getattr(wanted, name)) is not None}
    return dataclasses.replace(was, enabled=True, active=was.profile, **asked)


def _as_smoother(actuator: Actuator) -> Smoother:
    if isinstance(actuator, Smoother):
        return actuator
    raise ActuatorError(
        f"{actuator.gpu} has no power smoothing",
        why="NVIDIA's driver offers it, for Blackwell or newer",
        fix="@schedule(power_floor=, max_ramp=) does it by ballast",
    )
