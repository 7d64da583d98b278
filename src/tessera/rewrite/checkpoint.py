"""Energy-aware activation checkpointing: which blocks a training step keeps, and which it computes twice.

    plan = checkpoint.plan(model, inputs, on="h200", memory_bytes=40e9)
    print(plan)                                   # joules, seconds and bytes of each block, and of three settings
    with checkpoint.apply(model, plan):           # or applied = ...; applied.undo()
        train(model)

A block is kept, recomputed in backward, or recomputed but for a few operators. The cheapest mix within the memory is
chosen by `predict`'s model and then predicted as a whole, with the plan applied: what is reported is that prediction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..device import Device
from ..errors import ArgumentError, CaptureError, DoesNotFit, RewriteError, did_you_mean
from ..graph.rewrites import Rewrite
from ..hardware import identify_board, lookup
from ..units import format_bytes
from . import blocks as block_finder
from .recompute import KEEP, RECOMPUTE, Cost, Way
from .trial import Setting, Table, Trial, Tried, options_of, search

if TYPE_CHECKING:
    from torch import nn

    from .applied import Applied

Policy = Literal["energy", "memory", "latency"]
POLICIES = ("energy", "memory", "latency")
# What "as little memory as possible" may exceed the least by, so that a block is not recomputed for nothing.
LEAST_SLACK = 1.002


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block: how it goes, and what that frees and costs a step against keeping it.

    `bytes_j` is what writing the freed bytes once and reading them once would cost: the most that not keeping them can
    spare. In eager mode forward writes them all the same, so it is the bound of a rule, not a saving.
    """

    name: str
    way: Way
    saved_bytes: float
    spent_j: float
    spent_s: float
    bytes_j: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """What each block does, and the settings it was chosen among: "none", "chosen" and "all"."""

    name: str
    device: str
    policy: Policy
    memory_bytes: float | None
    blocks: tuple[BlockPlan, ...]
    settings: Mapping[str, Setting]
    notes: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def ways(self) -> dict[str, Way]:
        """How each block goes, by its path."""
        return {b.name: b.way for b in self.blocks}

    @property
    def rewrites(self) -> list[Rewrite]:
        """The plan as rewrites, one for each kind of block and way; savings are negative where they cost."""
        groups: defaultdict[tuple[str, str], list[BlockPlan]] = defaultdict(list)
        for b in self.blocks:
            if b.way.name != "keep":
                groups[self.kinds.get(b.name, "block"), b.way.name].append(b)
        none = self.settings["none"]
        error = none.energy_error_j / none.energy_j if none.energy_j > 0 else 0.0
        return [_rewrite(kind, way, members, error) for (kind, way), members in groups.items()]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain = [{**asdict(b), "way": b.way.name, "saves": sorted(b.way.saves)} for b in self.blocks]
        return {
            "name": self.name, "device": self.device, "policy": self.policy, "memory_bytes": self.memory_bytes,
            "blocks": plain, "settings": {k: asdict(s) for k, s in self.settings.items()}, "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        from ..report.rewrite import checkpoint_text

        return checkpoint_text(self)


def _rewrite(kind: str, way: str, members: Sequence[BlockPlan], relative_error: float) -> Rewrite:
    names = [b.name for b in members]
    saved = {"recompute": "recomputed in backward", "selective": "recomputed but for its dearest operators"}
    return Rewrite(
        rule="checkpoint",
        before=f"{kind}: activations kept",
        after=f"{kind}: {saved[way]}",
        by="tessera",
        where=names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
        times=len(names),
        saved_bytes=sum(b.saved_bytes for b in members),
        saved_j=-sum(b.spent_j for b in members),
        saved_error_j=relative_error * abs(sum(b.spent_j for b in members)),
        saved_s=-sum(b.spent_s for b in members),
        why=members[0].why,
    )


# -- planning -------------------------------------------------------------------------------------------------------


def plan(
    model: nn.Module,
    inputs: Any,
    *,
    on: str | Device | None = None,
    memory_bytes: float | None = None,
    policy: Policy = "energy",
    blocks: block_finder.Wanted = None,
    selective: bool = True,
    optimizer: Any = "sgd",
    precision: str | None = None,
    launch: Literal["eager", "graph"] = "eager",
) -> CheckpointPlan:
    """Choose, block by block, what to keep and what to recompute; nothing is run and the model is left as it is.

    `policy` is what is made least within `memory_bytes` (default: the chip's memory): joules, seconds, or the peak
    itself. `blocks` are names, a class or a question; None finds the repeated ones. `selective=False` considers whole
    blocks only. `on=None` is the GPU at hand, else an H200. The other arguments are those of `predict`.
    """
    if policy not in POLICIES:
        raise ArgumentError(f"policy={policy!r}{did_you_mean(policy, POLICIES)}", fix=f"one of {', '.join(POLICIES)}")
    if memory_bytes is not None and not (math.isfinite(memory_bytes) and memory_bytes > 0):
        raise ArgumentError(f"memory_bytes={memory_bytes!r}", fix="a positive number of bytes, or None for the chip's")
    if not hasattr(model, "named_modules"):
        raise ArgumentError(f"checkpoint.plan: model is a {type(model).__name__}", fix="an nn.Module")
    device = _device(on)
    found = block_finder.find(model, blocks)
    trial = Trial(model, inputs, tuple(found), device, optimizer, precision, launch)
    kept, whole = trial.run(dict.fromkeys(found, KEEP), "none"), _recomputed(trial, found)
    least = min(kept.setting.peak_bytes, whole.setting.peak_bytes)
    budget = _budget(memory_bytes, policy, device, least)
    _check_fits(least, budget)
    table = options_of(kept, whole, trial.names, selective)
    best = search(trial, table, kept, whole, budget, "latency" if policy == "latency" else "energy")
    return CheckpointPlan(
        name=type(model).__name__,
        device=device.id,
        policy=policy,
        memory_bytes=budget,
        blocks=tuple(_block_plan(n, best, table, kept, device, budget) for n in trial.names),
        settings={"none": kept.setting, "chosen": best.setting, "all": whole.setting},
        notes=kept.notes,
        kinds={name: type(m).__name__ for name, m in found.items()},
    )


def _recomputed(trial: Trial, names: Iterable[str]) -> Tried:
    """The step with every block recomputed."""
    try:
        return trial.run(dict.fromkeys(names, RECOMPUTE), "all")
    except CaptureError as e:
        if "modified by an inplace operation" not in str(e.__cause__):  # torch's words; it has no class for them
            raise
        raise RewriteError(
            f"checkpoint.plan: a block of {type(trial.model).__name__} cannot be recomputed",
            why="it writes into its input, so that what it would start from again is gone",
            fix="let it make a tensor of its own (x = x + y, not x += y), or name other blocks with blocks=",
        ) from e


def every(model: nn.Module, blocks: block_finder.Wanted = None) -> dict[str, Way]:
    """All blocks recomputed: what `apply` takes where nothing is to be chosen."""
    return dict.fromkeys(block_finder.find(model, blocks), RECOMPUTE)


def _device(on: str | Device | None) -> Device:
    if isinstance(on, Device):
        return on
    if on is not None:
        return lookup(on)
    import torch

    return identify_board(torch.cuda.get_device_name()) if torch.cuda.is_available() else lookup("h200")


def _budget(memory_bytes: float | None, policy: Policy, device: Device, least: int) -> float | None:
    """Bytes the peak may reach: what was given, the least there is, or the chip's capacity."""
    if policy == "memory":
        return min(least * LEAST_SLACK, memory_bytes or math.inf)
    if memory_bytes is not None:
        return float(memory_bytes)
    capacity = device.memory.capacity_bytes
    return None if capacity is None else capacity.value


def _check_fits(least: int, budget: float | None) -> None:
    if budget is not None and least > budget:
        raise DoesNotFit(
            f"with every block recomputed the step still peaks at {format_bytes(least)}, "
            f"more than {format_bytes(budget)}",
            why="weights, gradients, optimizer state and what lies outside the blocks are never recomputed",
            fix="a smaller batch, more memory_bytes=, or blocks= that cover more of the model",
        )


def _block_plan(name: str, best: Tried, table: Table, kept: Tried, device: Device, budget: float | None) -> BlockPlan:
    from ..estimate.power import PowerModel

    way = best.ways[name]
    cost = next(c for w, c in table[name] if w == way)
    freed = next(c for w, c in table[name] if w == RECOMPUTE) if way == KEEP else cost
    bytes_j = 2.0 * max(0.0, -freed.kept_bytes) * PowerModel.from_device(device).hbm_j_per_byte
    return BlockPlan(
        name=name, way=way, saved_bytes=-cost.kept_bytes, spent_j=cost.energy_j, spent_s=cost.seconds,
        bytes_j=bytes_j, why=_why(way, freed, bytes_j, kept.setting, budget),
    )  # fmt: skip


def _why(way: Way, cost: Cost, bytes_j: float, kept: Setting, budget: float | None) -> str:
    against = f"{cost.energy_j:.3g} J to recompute, at most {bytes_j:.3g} J for its bytes"
    if way == KEEP:
        return f"keeping is cheaper: {against}"
    if budget is not None and kept.peak_bytes > budget:
        return f"to fit {format_bytes(budget)}: {against}"
    return f"recomputing is cheaper: {against}"


# -- applying -------------------------------------------------------------------------------------------------------


def apply(model: nn.Module, plan: CheckpointPlan | Mapping[str, Way]) -> Applied:
    """Make the blocks of a model recompute as planned: same results and gradients, less memory, more work.

    What comes back is a context and has `undo()`: both give the blocks their own forward again.
    """
    from .applied import apply_ways

    return apply_ways(model, plan.ways if isinstance(plan, CheckpointPlan) else plan)
