"""Plan activation checkpointing by joules: which blocks a training step keeps, and which it computes twice.

    plan = checkpoint.plan(model, inputs, on="h200", memory_bytes=40e9)
    print(plan)                                   # joules, seconds and bytes of each block, and of three settings
    with checkpoint.apply(model, plan):           # or applied = checkpoint.apply(...); applied.undo()
        train(model)

A block is kept, recomputed in backward, or recomputed except for a few operators. The cheapest mix that fits the memory
is chosen by `predict`'s model. It is then predicted as a whole, with the plan applied; the plan reports that
prediction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..device import Device
from ..errors import ArgumentError, CaptureError, DoesNotFit, RewriteError, check_choice, check_positive, did_you_mean
from ..graph.rewrites import Rewrite
from ..hardware import identify_board, lookup
from ..units import format_bytes
from .checkpoint_forward import AppliedPlan, apply_choices
from .checkpoint_search import (
    KEEP,
    RECOMPUTE,
    BlockChoice,
    BlockCost,
    CheckpointSetting,
    ChoiceTable,
    PredictedPlan,
    StepPredictor,
    list_choices,
    search,
)

if TYPE_CHECKING:
    from torch import nn

CheckpointPolicyName = Literal["energy", "memory", "latency"]
POLICIES = ("energy", "memory", "latency")
# With the policy "memory", a plan may exceed the least memory by this factor, so that no block is recomputed for
# nothing.
LEAST_SLACK = 1.002


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block: whether it is kept, and what memory that frees and what a step pays for it, compared with keeping it.

    `bytes_j` is what writing the freed bytes once and reading them once would cost: the most that not keeping them can
    save. In eager mode, forward writes them anyway, so `bytes_j` only explains the choice and is not a saving.
    """

    name: str
    kind: str
    choice: BlockChoice
    saved_bytes: float
    spent_j: float
    spent_s: float
    bytes_j: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """What is done with each block, and the settings that were compared: "none", "chosen" and "all"."""

    name: str
    device: str
    policy: CheckpointPolicyName
    memory_bytes: float | None
    blocks: tuple[BlockPlan, ...]
    settings: Mapping[str, CheckpointSetting]
    notes: tuple[str, ...] = ()

    @property
    def choices(self) -> dict[str, BlockChoice]:
        """Return what is done with each block, by its path."""
        return {b.name: b.choice for b in self.blocks}

    @property
    def rewrites(self) -> list[Rewrite]:
        """Return the plan as rewrites, one for each kind of block and choice; savings are negative where they cost."""
        groups: defaultdict[tuple[str, str], list[BlockPlan]] = defaultdict(list)
        for b in self.blocks:
            if b.choice.name != "keep":
                groups[b.kind, b.choice.name].append(b)
        none = self.settings["none"]
        error = none.error_j / none.energy_j if none.energy_j > 0 else 0.0
        return [_make_rewrite(kind, choice, members, error) for (kind, choice), members in groups.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        blocks = [{**asdict(b), "choice": b.choice.name, "saves": sorted(b.choice.saves)} for b in self.blocks]
        return {
            "name": self.name,
            "device": self.device,
            "policy": self.policy,
            "memory_bytes": self.memory_bytes,
            "blocks": blocks,
            "settings": {name: asdict(setting) for name, setting in self.settings.items()},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from ..report.rewrite import checkpoint_text

        return checkpoint_text(self)


def _make_rewrite(kind: str, choice: str, members: Sequence[BlockPlan], relative_error: float) -> Rewrite:
    names = [b.name for b in members]
    after = {"recompute": "recomputed in backward", "selective": "recomputed but for its most expensive operators"}
    return Rewrite(
        rule="checkpoint",
        before=f"{kind}: activations kept",
        after=f"{kind}: {after[choice]}",
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
    policy: CheckpointPolicyName = "energy",
    blocks: Sequence[str] | None = None,
    selective: bool = True,
    optimizer: Any = "sgd",
    precision: str | None = None,
    launch: Literal["eager", "graph"] = "eager",
) -> CheckpointPlan:
    """Choose for each block what to keep and what to recompute. Nothing is run, and the model is not changed.

    `policy` is what is minimised within `memory_bytes` (default: the chip's memory): joules, seconds, or the peak
    itself. `blocks` are names of modules; None finds the repeated ones. `selective=False` considers whole blocks only.
    `on=None` means this machine's GPU, or an H200 if there is none. The other arguments are those of `predict`.
    """
    check_choice("policy", policy, POLICIES)
    if memory_bytes is not None:
        check_positive("memory_bytes", memory_bytes, fix="bytes, or None for the chip's memory")
    if not hasattr(model, "named_modules"):
        raise ArgumentError(f"checkpoint.plan: model is a {type(model).__name__}", fix="an nn.Module")
    device = _find_device(on)
    modules = find_blocks(model, blocks)
    predictor = StepPredictor(model, inputs, tuple(modules), device, optimizer, precision, launch)
    kept, whole = predictor.predict(dict.fromkeys(modules, KEEP), "none"), _predict_all_recomputed(predictor, modules)
    least = min(kept.setting.peak_bytes, whole.setting.peak_bytes)
    budget = _choose_budget(memory_bytes, policy, device, least)
    _check_fits(least, budget)
    table = list_choices(kept, whole, predictor.names, selective)
    best = search(predictor, table, kept, whole, budget, "latency" if policy == "latency" else "energy")
    return CheckpointPlan(
        name=type(model).__name__,
        device=device.id,
        policy=policy,
        memory_bytes=budget,
        blocks=tuple(
            _make_block_plan(n, type(modules[n]).__name__, best, table, kept, device, budget) for n in predictor.names
        ),
        settings={"none": kept.setting, "chosen": best.setting, "all": whole.setting},
        notes=kept.notes,
    )


def _predict_all_recomputed(predictor: StepPredictor, names: Mapping[str, Any]) -> PredictedPlan:
    try:
        return predictor.predict(dict.fromkeys(names, RECOMPUTE), "all")
    except CaptureError as e:
        if "modified by an inplace operation" not in str(e.__cause__):  # torch's words; it has no class for them
            raise
        raise RewriteError(
            f"checkpoint.plan: a block of {type(predictor.model).__name__} cannot be recomputed",
            why="it writes into its input, so that what it would start from again is gone",
            fix="let it make a tensor of its own (x = x + y, not x += y), or name other blocks with blocks=",
        ) from e


def every(model: nn.Module, blocks: Sequence[str] | None = None) -> dict[str, BlockChoice]:
    """Return a plan for `apply` that recomputes all blocks."""
    return dict.fromkeys(find_blocks(model, blocks), RECOMPUTE)


def _find_device(on: str | Device | None) -> Device:
    if isinstance(on, Device):
        return on
    if on is not None:
        return lookup(on)
    import torch

    return identify_board(torch.cuda.get_device_name()) if torch.cuda.is_available() else lookup("h200")


def _choose_budget(
    memory_bytes: float | None, policy: CheckpointPolicyName, device: Device, least: int
) -> float | None:
    """Return the bytes the peak may reach: what was asked for, the least possible, or the chip's capacity."""
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


def _make_block_plan(
    name: str,
    kind: str,
    best: PredictedPlan,
    table: ChoiceTable,
    kept: PredictedPlan,
    device: Device,
    budget: float | None,
) -> BlockPlan:
    from ..estimate.power import PowerModel

    choice, costs = best.choices[name], dict(table[name])
    cost = costs[choice]
    freed = costs[RECOMPUTE] if choice == KEEP else cost
    bytes_j = 2.0 * max(0.0, -freed.kept_bytes) * PowerModel.from_device(device).hbm_j_per_byte
    return BlockPlan(
        name=name,
        kind=kind,
        choice=choice,
        saved_bytes=-cost.kept_bytes,
        spent_j=cost.energy_j,
        spent_s=cost.time_s,
        bytes_j=bytes_j,
        why=_explain_choice(choice, freed, bytes_j, kept.setting, budget),
    )


def _explain_choice(
    choice: BlockChoice, cost: BlockCost, bytes_j: float, kept: CheckpointSetting, budget: float | None
) -> str:
    against = f"{cost.energy_j:.3g} J to recompute, at most {bytes_j:.3g} J for its bytes"
    if choice == KEEP:
        return f"keeping is cheaper: {against}"
    if budget is not None and kept.peak_bytes > budget:
        return f"to fit {format_bytes(budget)}: {against}"
    return f"recomputing is cheaper: {against}"


# -- blocks ---------------------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, wanted: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the blocks by their path in the model, in the model's order. No block is inside another."""
    modules = dict(model.named_modules())
    unknown = next((name for name in wanted or () if name not in modules), None)
    if unknown is not None:
        raise ArgumentError(
            f"blocks={unknown!r}: no such module{did_you_mean(unknown, modules)}",
            fix="a path as model.named_modules() gives it",
        )
    chosen = set(_find_repeated(model) if wanted is None else wanted) - {""}
    blocks = {name: module for name, module in modules.items() if name in chosen}
    if not blocks:
        raise RewriteError(
            f"{type(model).__name__} has no blocks to checkpoint",
            why="no container of two or more equal modules was found" if wanted is None else "blocks= is empty",
            fix='blocks=["layer1", "layer2"] names them',
        )
    for inner in blocks:
        outer = next((o for o in blocks if inner.startswith(f"{o}.")), None)
        if outer is not None:
            raise ArgumentError(
                f"blocks= contains {outer!r} and {inner!r}, which is inside it",
                why="a block is recomputed as a whole",
                fix=f"leave one of them out, for example {inner!r}",
            )
    return blocks


def _find_repeated(model: nn.Module) -> list[str]:
    """Return children of one class, at least two, of the outermost containers: the layers of a transformer."""
    from torch import nn

    blocks: list[str] = []
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    for name, module in model.named_modules():
        if not isinstance(module, containers) or any(f"{name}.".startswith(f"{block}.") for block in blocks):
            continue
        kinds: defaultdict[type, list[str]] = defaultdict(list)
        for child, m in module.named_children():
            if next(m.children(), None) and next(m.parameters(), None) is not None and not isinstance(m, containers):
                kinds[type(m)].append(f"{name}.{child}" if name else child)
        blocks += [block for alike in kinds.values() if len(alike) > 1 for block in alike]
    return blocks


# -- applying -------------------------------------------------------------------------------------------------------


def apply(model: nn.Module, plan: CheckpointPlan | Mapping[str, BlockChoice]) -> AppliedPlan:
    """Make the blocks of a model recompute as planned: same results and gradients, less memory, more work.

    Leaving the result as a context manager, or calling its `undo()`, gives the blocks their own forward again.
    """
    return apply_choices(model, plan.choices if isinstance(plan, CheckpointPlan) else plan)
