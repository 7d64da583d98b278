"""Profile the kernels of an iteration with torch.profiler, and tell which operators each of them runs.

A kernel is listed with the operators around the call that launched it, the outermost last. For kernels inside a CUDA
graph no operators are known; generated kernels are recognised by their names.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import MeasurementError
from ..graph.op_kinds import KINDS, kind_of
from ..timeline.columns import Timeline
from ..timeline.intervals import union
from ..timeline.kineto import read
from .compilation import InductorKernel
from .eager_ops import EagerOp

# At most so many iterations are profiled, or as many as fit into so many seconds, and at least one: iterations are
# alike.
_MAX_ITERATIONS, _MAX_S = 5, 0.25
_OPERATOR = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_GENERATED = re.compile(r"triton_[a-z]+_(fused\w*?)(?:_\d+)?")
# The share of common words among all words of two names. Below this, they are not the same kernel's.
_MIN_SIMILARITY = 0.3
LEFT_OVER = "left over"
LIBRARY = "library calls"
OUTSIDE = "around the graphs"
PROFILED_S: list[float] = []
"""Seconds of the iterations that were profiled in this process: the first one loaded CUPTI, which stays loaded."""

# One operator has several names: eager torch chooses a library's, and a traced graph has the chosen one.
_ALIASES = {
    "batch_norm": "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index "
    "_native_batch_norm_legit _native_batch_norm_legit_no_training _native_batch_norm_legit_functional "
    "_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update",
    "batch_norm_backward": "batch_norm_backward native_batch_norm_backward cudnn_batch_norm_backward "
    "miopen_batch_norm_backward _batch_norm_impl_index_backward",
}
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """The seconds that one kernel takes per iteration, in all its runs, and the operators that launched it."""

    name: str
    time_s: float
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """The kernels of an iteration. `iteration_s` and `iteration_j` are measured without the profiler."""

    kernels: tuple[KernelTotal, ...]
    iteration_s: float
    iteration_j: float | None = None

    @property
    def busy_s(self) -> float:
        """Return the seconds of an iteration in which the device ran anything."""
        return sum(kernel.time_s for kernel in self.kernels)


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Operators, by their index, and the seconds that their kernels took together; `members` may be empty."""

    name: str
    members: tuple[int, ...]
    time_s: float


# -- profiling -----------------------------------------------------------------------------------------------------


def profile_kernels(
    iteration: Callable[[], object], iteration_s: float, iteration_j: float | None = None
) -> KernelProfile:
    """Run a few iterations under torch.profiler; raise `MeasurementError` if it shows no kernels."""
    import torch

    what = "the kernels could not be profiled"
    # a second profiler ends in a segmentation fault
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        raise MeasurementError(what, why="another profiler is running", fix="call optimize outside of it")
    count = max(1, min(_MAX_ITERATIONS, int(_MAX_S / max(iteration_s, 1e-9))))
    PROFILED_S.append(iteration_s)
    try:
        _run_profiler(iteration, 1)  # CUPTI starts with the first run, which is thrown away
        kernels = sum_kernels(_run_profiler(iteration, count), count)
    except RuntimeError as e:  # Kineto raises it if it cannot start
        first = (str(e).splitlines() or ["no message"])[0]
        raise MeasurementError(what, why=f"torch.profiler: {first}", fix="end other profilers of this process") from e
    if not kernels:
        raise MeasurementError(
            what,
            why="torch.profiler showed no kernels: CUPTI is used by another tool, or the driver forbids it",
            fix="run without other profilers (nsys, ncu), or price by the model",
        )
    return KernelProfile(kernels=kernels, iteration_s=iteration_s, iteration_j=iteration_j)


def _run_profiler(iteration: Callable[[], object], count: int) -> Timeline:
    # Kineto announces each start and stop on standard error; 99 is above all its levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch
    from torch.profiler import ProfilerActivity, profile

    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & torch.profiler.supported_activities()
    with profile(activities=list(wanted)) as session:
        for _ in range(count):
            iteration()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        session.export_chrome_trace(f"{folder}/trace.json")
        return read(f"{folder}/trace.json")


def sum_kernels(timeline: Timeline, iterations: int) -> tuple[KernelTotal, ...]:
    """Add up kernels by name and the operators around them. In total, they take as long as the device was busy."""
    links, rows = timeline.linked, timeline.device_rows
    start_ns, end_ns = timeline["start_ns"][rows], timeline["end_ns"][rows]
    sums: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for row, took_ns in zip(rows.tolist(), (end_ns - start_ns).tolist(), strict=True):
        around = [timeline.name(op) for op in reversed(links.path(links.op[row]))]
        sums[timeline.name(row), tuple(filter(_OPERATOR.fullmatch, around))] += took_ns
    # Kernels overlap, of several streams or where one begins before the last ends.
    share = union(start_ns, end_ns).total_ns / max(1, sum(sums.values()))
    return tuple(
        KernelTotal(name, total_ns * 1e-9 * share / iterations, operators)
        for (name, operators), total_ns in sums.items()
        if total_ns
    )


# -- whose kernels they are ----------------------------------------------------------------------------------------


def group_by_operator(ops: Mapping[int, EagerOp], kernels: Sequence[KernelTotal]) -> list[KernelGroup]:
    """Group operators and kernels by the operator's name, then by its kind; the rest of both is one group.

    For a kernel, the outermost operator that is among `ops` counts: the operators that it calls are how it works. Every
    second is in one group, and so is every operator that launches: an operator whose kernels are not seen takes its
    share of the rest.
    """
    launching = {i: op for i, op in ops.items() if op.launches}
    named, unseen, unnamed = _match(
        launching,
        kernels,
        lambda op: _canonical_name(op.name),
        lambda kernel: map(_canonical_name, reversed(kernel.operators)),
    )
    kinds, others, rest = _match(
        unseen,
        unnamed,
        lambda op: f"other {op.kind}",
        lambda kernel: (f"other {_find_kind(o)}" for o in kernel.operators),
    )
    left_s = sum(kernel.time_s for kernel in rest)
    return [*named, *kinds, *([KernelGroup(LEFT_OVER, tuple(others), left_s)] if others or left_s else [])]


def _match(
    ops: Mapping[int, EagerOp],
    kernels: Sequence[KernelTotal],
    key_of: Callable[[EagerOp], str],
    list_keys: Callable[[KernelTotal], Iterable[str]],
) -> tuple[list[KernelGroup], dict[int, EagerOp], list[KernelTotal]]:
    """Group the operators and kernels that share a key, and return the rest of both.

    A kernel may have several keys; the first that any operator has counts.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for i, op in ops.items():
        members[key_of(op)].append(i)
    sums: dict[str, float] = defaultdict(float)
    rest = []
    for kernel in kernels:
        key = next((key for key in list_keys(kernel) if key in members), None)
        if key is None:
            rest.append(kernel)
        else:
            sums[key] += kernel.time_s
    groups = [KernelGroup(key, tuple(members[key]), seconds) for key, seconds in sums.items()]
    return groups, {i: ops[i] for key, indices in members.items() if key not in sums for i in indices}, rest


def group_by_kernel(
    compiled: Sequence[InductorKernel], ops: Sequence[EagerOp], kernels: Sequence[KernelTotal], *, replayed: bool
) -> list[KernelGroup]:
    """Group generated kernels by name and library calls by operator; in a CUDA graph, library calls are one group.

    `ops` are the operators of the program before compiling, after which Inductor names generated kernels.
    """
    generated = [kernel for kernel in kernels if _GENERATED.fullmatch(kernel.name)]
    others = [kernel for kernel in kernels if not _GENERATED.fullmatch(kernel.name)]
    calls = {i: kernel.call for i, kernel in enumerate(compiled) if kernel.call is not None}
    groups = _group_by_name(compiled, ops, generated)
    if not replayed:
        return groups + group_by_operator(calls, others)
    # In a graph no operator is known. Kernels with a known operator copy inputs and results, beside other copies and
    # fills.
    around_s = sum(k.time_s for k in others if k.operators or k.name.lower().startswith(("memset", "memcpy")))
    inside_s = sum(k.time_s for k in others) - around_s
    members = tuple(i for i, call in calls.items() if call.launches)
    rest = [KernelGroup(OUTSIDE, (), around_s), KernelGroup(LIBRARY, members, inside_s)]
    return groups + [group for group in rest if group.members or group.time_s]


def _group_by_name(
    compiled: Sequence[InductorKernel], ops: Sequence[EagerOp], kernels: Sequence[KernelTotal]
) -> list[KernelGroup]:
    """Group generated kernels by Inductor's name: the operators that they come from, and a number.

    Kernels of the same code share the name of the first. If no name is the same, the most similar one is taken.
    """
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        match = _GENERATED.fullmatch(kernel.name)
        assert match is not None  # only generated kernels are passed
        sums[match.group(1)] += kernel.time_s
    members: dict[str, list[int]] = {name: [] for name in sums}
    op_of = {node: op for op in ops for node in op.nodes}
    for i, each in enumerate(compiled):
        if each.call is None:
            name = make_generated_name(each, op_of)
            members.setdefault(name if name in sums else _find_similar(name, sums), []).append(i)
    lost_s = sum(sums[name] for name, indices in members.items() if not indices)
    lost = tuple(members.pop("", []))
    groups = [KernelGroup(name, tuple(indices), sums[name]) for name, indices in members.items() if indices]
    return groups + ([KernelGroup("other generated kernels", lost, lost_s)] if lost or lost_s else [])


def make_generated_name(kernel: InductorKernel, op_of: Mapping[str, EagerOp]) -> str:
    """Return Inductor's name of a kernel, without kind and number: fused_add_native_layer_norm."""
    stems = {op_of[node].name.rpartition(".")[2] for node in kernel.origins if node in op_of}
    return "_".join(["fused", *sorted(stems)])  # as torch/_inductor/codegen's get_fused_kernel_name does


def _find_similar(name: str, names: Iterable[str]) -> str:
    """Return the name that shares most words; "" if none is similar."""
    words = set(name.split("_")) - {"fused", ""}

    def compute_similarity(other: str) -> float:
        theirs = set(other.split("_")) - {"fused", ""}
        return len(words & theirs) / max(1, len(words | theirs))

    best = max(names, key=compute_similarity, default="")
    return best if best and compute_similarity(best) > _MIN_SIMILARITY else ""


def _canonical_name(name: str) -> str:
    """Return an operator's name without its variant: in place or not, and of whichever library."""
    space, _, short = name.replace("::", ".").partition(".")
    short = short.rstrip("_") or short
    if "scaled_dot_product" in short:
        return "attention_backward" if short.endswith("backward") else "attention"
    return f"{space}.{_CANONICAL.get(short, short)}"


def _find_kind(operator: str) -> str | None:
    """Return an operator's family, if it has one."""
    short = operator.rpartition("::")[2]
    known = short in KINDS or short.rstrip("_") in KINDS or short.startswith(("_foreach_", "_fused_"))
    return kind_of(operator) if known else None
