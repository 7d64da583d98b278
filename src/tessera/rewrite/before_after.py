"""The program before and after, priced: by the model alone, or with the seconds and joules that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .compilation import Compilation, Replacement
from .eager_ops import EagerOp
from .kernel_times import KernelProfile, group_by_kernel, group_by_operator
from .program_cost import (
    HostWork,
    OpCost,
    ProgramCost,
    add_up,
    estimate_program,
    set_kernel_times,
    share_measured_joules,
)

if TYPE_CHECKING:
    from ..device import Device

TIMED = "timed"
"""The basis of savings whose seconds were measured kernel by kernel, and whose joules are shared out by the model."""

# What tells one attention from another.
_ATTENTION_SHAPE = ("batch", "heads", "q_len", "kv_len", "head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Both programs priced; `launched` is the one after without a replay.

    `ours` is what each replacement of our passes saves, `ours_timed` the numbers of those whose kernels were profiled,
    `extra` what `before` lacks because our passes came first. `basis` says what the seconds are.
    """

    before: ProgramCost
    launched: ProgramCost
    after: ProgramCost
    ours: Sequence[OpCost]
    extra: OpCost
    ours_timed: frozenset[int] = frozenset()
    basis: str = "modelled"


def price_by_model(
    compilation: Compilation,
    after: Sequence[EagerOp],
    device: Device,
    host: HostWork,
    replayed: bool,
    eager_s: float | None,
) -> BeforeAfter:
    """Price both programs by the model alone; `eager_s` is the measured time of the first."""
    before, launched = estimate_program(compilation.ops, device, host), estimate_program(after, device)
    ours = [_price_replacement(replacement, device) for replacement in compilation.replacements]
    return BeforeAfter(
        before=before if eager_s is None else before.set_time(eager_s),
        launched=launched,
        after=estimate_program(after, device, replayed=True) if replayed else launched,
        ours=ours,
        extra=add_up(ours),
    )


def _price_replacement(replacement: Replacement, device: Device) -> OpCost:
    """Return what a pass of ours saved: the operators it replaced against those it put there, each alone."""
    if replacement.saved_j is not None:
        return OpCost(replacement.saved_s or 0.0, replacement.saved_j, 0.5 * abs(replacement.saved_j))
    if replacement.ops_before and replacement.ops_after:
        old, new = (
            add_up(estimate_program(ops, device, replayed=True).costs)
            for ops in (replacement.ops_before, replacement.ops_after)
        )
        return old - new
    return OpCost()


def price_by_profile(
    compilation: Compilation,
    after: Sequence[EagerOp],
    device: Device,
    host: HostWork,
    replayed: bool,
    profiles: tuple[KernelProfile, KernelProfile],
) -> BeforeAfter:
    """Price both programs with the seconds their kernels took, and the measured joules shared out among them.

    Eager torch ran what our passes replaced, not what they put there: those operators are exchanged, and for
    Inductor's lines cost what they cost now.
    """
    old_profile, new_profile = profiles
    inserted = _find_inserted_ops(compilation)
    gone = {i for indices in inserted.values() for i in indices}
    kept = [i for i in range(len(compilation.ops)) if i not in gone]
    eager, spans = [compilation.ops[i] for i in kept], {}
    for n in inserted:
        replaced = compilation.replacements[n].ops_before
        spans[n] = range(len(eager), len(eager) + len(replaced))
        eager += [_prefix_memory(op, n) for op in replaced]
    before = set_kernel_times(
        estimate_program(eager, device, host),
        group_by_operator(dict(enumerate(eager)), old_profile.kernels),
        old_profile.iteration_s,
    )
    later = set_kernel_times(
        estimate_program(after, device, replayed=replayed),
        group_by_kernel(compilation.kernels, compilation.ops, new_profile.kernels, replayed=replayed),
        new_profile.iteration_s,
    )
    owned, _ = compilation.assign_ops()
    later = _copy_work(compilation, owned, dict(zip(kept, before.costs, strict=False)), later)
    same = _find_unchanged_calls(compilation, owned, kept)
    before, later = share_measured_joules(before, later, same, old_profile.iteration_j, new_profile.iteration_j)
    costs = dict(zip(kept, before.costs, strict=False))  # those of the replaced operators come behind
    costs |= {i: later.costs[k] for k, indices in owned.items() for i in indices if i in gone}
    ours = [_price_replacement(replacement, device) for replacement in compilation.replacements]
    for n, indices in inserted.items():
        ours[n] = add_up(before.costs[i] for i in spans[n]) - add_up(costs.get(i, OpCost()) for i in indices)
    return BeforeAfter(
        before=replace(before, costs=tuple(costs.get(i, OpCost()) for i in range(len(compilation.ops)))),
        launched=later,
        after=later,
        ours=ours,
        extra=add_up(ours[n] for n in inserted),
        ours_timed=frozenset(inserted),
        basis=TIMED,
    )


def _prefix_memory(op: EagerOp, n: int) -> EagerOp:
    """Tell memory names apart: each replacement was traced alone, and all have their own mul_1."""
    reads, writes = (tuple((f"found {n}/{name}", t) for name, t in side) for side in (op.reads, op.writes))
    return replace(op, reads=reads, writes=writes)


def _copy_work(
    compilation: Compilation, owned: Mapping[int, Sequence[int]], before: Mapping[int, OpCost], after: ProgramCost
) -> ProgramCost:
    """Give a generated kernel of one operator that operator's work: the model knows only the kernel's bytes."""
    costs = list(after.costs)
    for k, indices in owned.items():
        launching = [i for i in indices if compilation.ops[i].launches]
        if compilation.kernels[k].call is None and len(launching) == 1 and launching[0] in before:
            same = before[launching[0]].set_seconds(costs[k].time_s, after.limit_w)
            costs[k] = replace(same, nbytes=costs[k].nbytes)
    return replace(after, costs=tuple(costs))


def _find_unchanged_calls(
    compilation: Compilation, owned: Mapping[int, Sequence[int]], kept: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """Yield the places of operators that are called as before: among those eager torch ran, and among kernels."""
    place = {i: n for n, i in enumerate(kept)}
    for k, indices in owned.items():
        launching, call = [i for i in indices if compilation.ops[i].launches], compilation.kernels[k].call
        if call is None or len(launching) != 1 or launching[0] not in place:
            continue
        if call.channels_last == compilation.ops[launching[0]].channels_last:
            yield place[launching[0]], k


def _find_inserted_ops(compilation: Compilation) -> dict[int, list[int]]:
    """Return, by the number of a replacement, the operators it put there; without those that cannot be told."""
    free = [i for i, op in enumerate(compilation.ops) if op.launches]
    inserted: dict[int, list[int]] = {}
    for n, replacement in enumerate(compilation.replacements):
        if not (replacement.ops_before and replacement.ops_after):
            continue
        matches: list[int] = []
        for op in replacement.ops_after:
            matches += [i for i in free if i not in matches and _is_same_attention(compilation.ops[i], op)][:1]
        if len(matches) == len(replacement.ops_after):
            inserted[n] = matches
            free = [i for i in free if i not in matches]
    return inserted


def _is_same_attention(a: EagerOp, b: EagerOp) -> bool:
    shapes = [tuple(op.params.get(key) for key in _ATTENTION_SHAPE) for op in (a, b)]
    return (a.kind, a.backward) == (b.kind, b.backward) and shapes[0] == shapes[1]
