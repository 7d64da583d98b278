"""Starts a migratable job again wherever it moves to, until it is done.

The command may contain {node} and {ranks}: `ssh {node} torchrun --nproc-per-node {ranks} train.py`. The order (`tessera
fleet migrate`) replaces those that it states; the others stay.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, MigrationError
from ..policy import ThermalPolicy
from .job_checkpoint import read_json
from .node_floor import REFUSALS, PlacementJob
from .node_metrics import fill_nodes
from .placement import place_jobs
from .placement_file import FleetFile

# A job that moves more often than this gets nothing done: its orders come faster than its steps.
MOST_MOVES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLaunch:
    """One start of the job: its command and its node."""

    number: int
    command: tuple[str, ...]
    node: str | None
    ranks: int | None


class CoolNodeChooser:
    """Chooses a node for a job that moves, as `place_jobs` does: the coolest that may take it, not the one it left."""

    def __init__(self, fleet: FleetFile, policy: ThermalPolicy, *, gpus: int, power_w: float) -> None:
        self._fleet, self._policy = fleet, policy
        self._job = PlacementJob(name="(the job that moves)", gpus=gpus, power_w=power_w)

    def __call__(self, left: str | None) -> str | None:
        """Ask the nodes now. Raises if none may take the job: it stays saved, and can be started later."""
        nodes, _ = fill_nodes(self._fleet.nodes, self._fleet.metrics)
        open_nodes = [replace(n, is_available=n.is_available and n.name != left) for n in nodes]
        running = [j for j in self._fleet.jobs if j.on]
        placement = place_jobs(open_nodes, [*running, self._job], self._policy, rack_limits_w=self._fleet.rack_limits_w)
        if not placement.placed:
            reasons = "; ".join(f"{r.count} {REFUSALS[r.kind]}" for r in placement.waiting[0].refused)
            raise MigrationError(
                "no node may take the job now", why=reasons, fix="run the same command again later: the job is saved"
            )
        return placement.placed[0].on[0].node


def run_until_done(
    command: Sequence[str],
    folder: str | Path,
    *,
    node: str | None = None,
    ranks: int | None = None,
    choose_node: Callable[[str | None], str | None] | None = None,
    run: Callable[[Sequence[str]], int] = lambda command: subprocess.run(command, check=False).returncode,
) -> Iterator[JobLaunch]:
    """Start the command, and again after each move. Yields before each start; a failure raises `MigrationError`.

    If the order names no node, `choose_node` is called with the node that the job left.
    """
    check_placeholders(command, node=node, ranks=ranks)
    status_path = Path(folder) / "status.json"
    for number in range(1, MOST_MOVES + 1):
        filled = tuple(fill_command(command, node=node, ranks=ranks))
        yield JobLaunch(number=number, command=filled, node=node, ranks=ranks)
        status_path.unlink(missing_ok=True)  # the status of an earlier run must not count as this run's answer
        code = run(filled)
        status = read_json(status_path) or {}
        if code != 0:
            raise MigrationError(
                f"the job ended with exit code {code} at step {status.get('step', 'unknown')}",
                fix="see its output above; run the same command again to go on from its last checkpoint",
            )
        if status.get("phase") == "done":
            return
        if status.get("phase") != "moved":
            raise MigrationError(
                "the job ended without saying whether it is done",
                why=f"{status_path} has no phase 'done' or 'moved'",
                fix="train with `for step in fleet.migratable(..., folder=...).steps(total)`, with this folder",
            )
        order: dict[str, Any] = status.get("order") or {}
        ranks = order.get("ranks") or ranks
        node = order.get("node") or (choose_node(node) if choose_node else None) or node
    raise MigrationError(
        f"the job moved {MOST_MOVES} times", why="it is ordered away wherever it goes", fix="look at the orders"
    )


def fill_command(command: Sequence[str], *, node: str | None, ranks: int | None) -> Iterator[str]:
    """Yield the command with its placeholders replaced."""
    for word in command:
        yield word.replace("{node}", node or "").replace("{ranks}", "" if ranks is None else str(ranks))


def check_placeholders(command: Sequence[str], *, node: str | None, ranks: int | None) -> None:
    """Raise if a placeholder has no initial value."""
    if not command:
        raise ArgumentError("there is no command to start", fix="tessera fleet run FOLDER -- torchrun train.py")
    for name, value in (("node", node), ("ranks", ranks)):
        if value is None and any(f"{{{name}}}" in word for word in command):
            raise ArgumentError(f"the command has {{{name}}}, and no value for it", fix=f"give --{name} as well")
