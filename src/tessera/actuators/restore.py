"""Restores what dead processes left changed on this machine: `tessera doctor --restore`."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from ..clock import boot_id
from ..errors import ActuatorError
from ..sensors.health import MachineCheck
from . import journal as journals
from . import locks
from .actuator import find_gpu, list_gpus, open_uuid
from .claims import describe_claim, remove_claim, tightest_limits
from .journal import ROUNDING_W, Claim, Journal
from .smoothing import Smoother, describe_profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class OutstandingChange:
    """One GPU with a journal. `action` is what restoring would do, or did; `error` is why it failed."""

    gpu: str
    uuid: str
    holders: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    action: str = ""
    error: str | None = None
    needs_restore: bool = False

    @property
    def text(self) -> str:
        """Return one line for people."""
        return f"{self.gpu}: {self.error or self.action}"


def list_outstanding() -> list[OutstandingChange]:
    """Return what is changed now, and what `restore_outstanding` would do. It changes nothing."""
    return [_examine(uuid) for uuid in _list_journals()]


def restore_outstanding() -> list[OutstandingChange]:
    """Restore what dead processes left; live ones keep what they hold. If one GPU fails, the others still follow."""
    changes = (_restore_gpu(uuid) for uuid in _list_journals())
    return [change for change in changes if change is not None]


def check_limits() -> list[MachineCheck]:
    """Find GPUs whose power limit is not the default although no journal here says who changed it."""
    checks = []
    journals_here = _list_journals()
    try:
        gpus = list_gpus()
    except ActuatorError:
        return []
    for gpu, uuid in gpus.items():
        try:
            with contextlib.closing(find_gpu(gpu)) as actuator:
                limit, node, vendor = actuator.power_limit(), actuator.node, actuator.vendor
        except ActuatorError:
            continue
        if uuid in journals_here or abs(limit.now_w - limit.default_w) <= ROUNDING_W:
            continue
        detail = f"{limit.now_w:g} W, and the default is {limit.default_w:g} W: "
        if locks.is_node_locked(node):
            detail += "a process of Tessera holds it, with another folder for journals or with none any more"
            checks.append(MachineCheck(name=f"{gpu} power limit", ok=True, detail=detail))
            continue
        detail += "no process of Tessera holds it. Somebody set it, or a killed process left it and its journal is gone"
        command = f"nvidia-smi -i {uuid} -pl" if vendor == "nvidia" else f"amd-smi set -g {gpu[3:]} --power-cap"
        fix = f"if nobody wants that limit: sudo {command} {limit.default_w:g}"
        checks.append(MachineCheck(name=f"{gpu} power limit", ok=False, detail=detail, fix=fix))
    return checks


def check_smoothing() -> list[MachineCheck]:
    """Describe power smoothing and workload power profiles of the GPUs that have them."""
    checks = []
    try:
        gpus = list_gpus()
    except ActuatorError:
        return []
    for gpu in gpus:
        try:
            with contextlib.closing(find_gpu(gpu)) as actuator:
                if isinstance(actuator, Smoother):
                    checks += _describe_smoother(gpu, actuator)
        except ActuatorError:
            continue
    return checks


def _describe_smoother(gpu: str, smoother: Smoother) -> list[MachineCheck]:
    checks = []
    with contextlib.suppress(ActuatorError):
        limits = smoother.smoothing_limits()
        now = smoother.smoothing_state(limits.presets - 1)
        active = f"on, preset {now.active}" if now.enabled else "off"
        detail = (
            f"{active} of {limits.presets}; floors of {limits.min_floor_percent:g} to {limits.max_floor_percent:g}%, "
            f"privilege level {limits.privilege}: actuators.smooth_power (not tested on hardware)"
        )
        checks.append(MachineCheck(name=f"{gpu} power smoothing", ok=True, detail=detail))
    with contextlib.suppress(ActuatorError):
        has, requested = smoother.power_profiles()
        if has:
            detail = f"{describe_profiles(has)}; requested now: {describe_profiles(requested) or 'none'}"
            checks.append(MachineCheck(name=f"{gpu} workload power profiles", ok=True, detail=detail))
    return checks


def _list_journals() -> list[str]:
    try:
        return journals.list_journals()
    except ActuatorError:
        return []  # no folder, or not ours: then it has nothing of ours


def _examine(uuid: str) -> OutstandingChange:
    try:
        journal = journals.read_journal(uuid)
    except ActuatorError as exc:
        return OutstandingChange(gpu=uuid, uuid=uuid, error=str(exc), needs_restore=True)
    if journal is None:  # it ended since we listed it
        return OutstandingChange(gpu=uuid, uuid=uuid, action="nothing")
    if journal.boot != boot_id():
        return OutstandingChange(
            gpu=journal.gpu, uuid=uuid, action="void: the machine was restarted since", needs_restore=True
        )
    live = tuple(c for c in journal.claims if locks.is_alive(c.owner))
    dead = tuple(c for c in journal.claims if c not in live)
    in_use = bool(live) and not dead
    return OutstandingChange(
        gpu=journal.gpu,
        uuid=uuid,
        holders=tuple(f"process {c.pid}: {describe_claim(c)}" for c in live),
        dead=tuple(f"process {c.pid}: {describe_claim(c)}" for c in dead),
        action="nothing: held by live processes" if in_use else _describe_restore(journal, live),
        needs_restore=not in_use,
    )


def _describe_restore(journal: Journal, live: tuple[Claim, ...]) -> str:
    cap_w, clocks_mhz = tightest_limits(live)
    parts = []
    if journal.limit is not None:
        target_w = journal.limit.was_w if cap_w is None else min(cap_w, journal.limit.was_w)
        parts.append(f"set the limit from {journal.limit.ours_w[-1]:g} W to {target_w:g} W, unless somebody changed it")
    if journal.clocks is not None and clocks_mhz is None:
        was = journal.clocks.was_mhz
        parts.append("unlock the clocks" if was is None else f"lock the clocks to {was[0]}..{was[1]} MHz as before")
    elif journal.clocks is not None and clocks_mhz != journal.clocks.ours_mhz:
        parts.append(f"lock the clocks to {clocks_mhz} MHz")
    if journal.smoothing is not None:
        parts.append(
            "set its power smoothing as it was" if not live else "set its power smoothing to the other claims'"
        )
    if journal.profiles is not None:
        parts.append(f"clear the power profiles {describe_profiles(journal.profiles.added)}")
    return " and ".join(parts) or "forget the claims: nothing was changed"


def _restore_gpu(uuid: str) -> OutstandingChange | None:
    before = _examine(uuid)
    if not before.needs_restore:
        return None
    try:
        journal = journals.read_journal(uuid)
        if journal is None:
            return None
        if journal.boot != boot_id():
            journals.remove_journal(uuid)
            return before
        actuator = open_uuid(uuid, journal.vendor)
        try:
            outcome = remove_claim(actuator, None)
        finally:
            actuator.close()
    except ActuatorError as exc:
        return dataclasses.replace(before, holders=(), action="", error=str(exc))
    parts = [note.removeprefix(f"{actuator.gpu}: ") for note in outcome.notes]
    if journal.limit is not None and outcome.limit_w is not None:
        parts.append(f"its limit is {outcome.limit_w:g} W")
    if journal.clocks is not None:
        parts.append(
            f"its clocks are locked to {outcome.clocks_mhz}" if outcome.clocks_mhz else "its clocks are unlocked"
        )
    parts += ["its power smoothing is as it was"] if journal.smoothing is not None else []
    parts += ["its power profiles are as they were"] if journal.profiles is not None else []
    return OutstandingChange(
        gpu=actuator.gpu, uuid=uuid, dead=before.dead, action="; ".join(parts) or "nothing was changed"
    )
