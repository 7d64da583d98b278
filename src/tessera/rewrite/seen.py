"""What the kernels of an iteration took, as torch.profiler saw them: plain data, and which pieces each kernel runs.

`look` is the only part that touches torch. A kernel is told with the operators around the call that launched it, the
outermost last; inside a CUDA graph none are known, and generated kernels are told by their names.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MeasurementError
from ..graph.op_kinds import KINDS, kind_of
from .pieces import Piece
from .watch import Kernel

# So many iterations are looked at, or as many as fit into the seconds, and at least one: kernels repeat themselves.
_MOST, _MOST_S = 5, 0.25
_OPERATOR = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_GENERATED = re.compile(r"triton_[a-z]+_(fused\w*?)(?:_\d+)?")
_ALIKE = 0.3  # words that two names share, of all they have: below that they are not the same kernel's
LEFT_OVER = "left over"
LOOKS: list[float] = []
"""Seconds of the iterations that were looked at in this process: with the first one CUPTI came, and stays."""
LIBRARY = "library calls"
OUTSIDE = "around the graphs"

# One operator goes by several names: eager torch picks a library's, a traced graph has the one that was picked for it.
_NAMES = {
    "batch_norm": "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index "
    "_native_batch_norm_legit _native_batch_norm_legit_no_training _native_batch_norm_legit_functional "
    "_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update",
    "batch_norm_backward": "batch_norm_backward native_batch_norm_backward cudnn_batch_norm_backward "
    "miopen_batch_norm_backward _batch_norm_impl_index_backward",
}
_SAME = {name: key for key, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Op:
    """An operator or a marked range on the host; `id` is how kernels name the one that launched them."""

    id: int
    thread: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel, copy or fill on the device; `op` is 0 where nobody is known to have launched it."""

    name: str
    start_ns: int
    end_ns: int
    op: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """What one kernel took of an iteration, all its runs together, and the operators it was launched in."""

    name: str
    seconds: float
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The kernels of an iteration. `iteration_s` and `iteration_j` are what it takes when nobody looks."""

    launches: tuple[Launch, ...]
    iteration_s: float
    iteration_j: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds of an iteration in which the device ran anything."""
        return sum(launch.seconds for launch in self.launches)


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces, by their index, and the seconds their kernels took together; without pieces nobody knows whose."""

    name: str
    members: tuple[int, ...]
    seconds: float


# -- looking -------------------------------------------------------------------------------------------------------


def look(iteration: Callable[[], object], iteration_s: float, iteration_j: float | None = None) -> Seen:
    """Run a few iterations under torch.profiler; `MeasurementError` where it shows no kernels."""
    import torch

    what = "the kernels could not be looked at"
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):  # a second one ends in a segmentation fault
        raise MeasurementError(what, why="another profiler is running", fix="call optimize outside of it")
    count = max(1, min(_MOST, int(_MOST_S / max(iteration_s, 1e-9))))
    LOOKS.append(iteration_s)
    try:
        _profiled(iteration, 1)  # CUPTI starts with the first one, which is thrown away
        ops, spans = _profiled(iteration, count)
    except RuntimeError as e:  # what Kineto raises where it cannot start
        first = (str(e).splitlines() or ["no message"])[0]
        raise MeasurementError(what, why=f"torch.profiler: {first}", fix="end other profilers of this process") from e
    launches = told(ops, spans, count)
    if not launches:
        raise MeasurementError(
            what, why="torch.profiler showed no kernels: CUPTI is taken by another tool, or the driver forbids it",
            fix="run without other profilers (nsys, ncu), or price by the model",
        )  # fmt: skip
    return Seen(launches=launches, iteration_s=iteration_s, iteration_j=iteration_j)


def _profiled(iteration: Callable[[], object], count: int) -> tuple[list[Op], list[Span]]:
    """Operators and kernels of some iterations, as Kineto recorded them."""
    # Kineto announces each start and stop on standard error; 99 is above all its levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch
    from torch.profiler import ProfilerActivity, profile

    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & torch.profiler.supported_activities()
    with profile(activities=list(wanted)) as found:
        for _ in range(count):
            iteration()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return read(found.profiler.kineto_results.events())


def read(events: Iterable[Any]) -> tuple[list[Op], list[Span]]:
    """Kineto's own events as plain data: operators of the host, and what ran on the device."""
    from torch.autograd import DeviceType

    ops, spans = [], []
    for event in events:
        start, end = int(event.start_ns()), int(event.start_ns() + event.duration_ns())
        if event.device_type() != DeviceType.CPU:
            marks = getattr(event, "is_user_annotation", None)  # a marked range, drawn over its kernels
            if marks is None or not marks():
                spans.append(Span(str(event.name()), start, end, int(event.linked_correlation_id())))
        elif not event.is_async() and not event.linked_correlation_id():  # with a link it is a call of the driver
            ops.append(Op(int(event.correlation_id()), int(event.start_thread_id()), str(event.name()), start, end))
    return ops, spans


def told(ops: Sequence[Op], spans: Sequence[Span], iterations: int) -> tuple[Launch, ...]:
    """Kernels with the operators around them, per iteration. Together they take as long as the device was busy."""
    around = _around(ops)
    marked = {op.name for op in ops}
    sums: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    kernels = [s for s in spans if s.name not in marked or _GENERATED.fullmatch(s.name)]
    for span in kernels:
        sums[span.name, around.get(span.op, ())] += span.end_ns - span.start_ns
    # Kernels of several streams, and those that begin before the one before them ends, overlap.
    all_ns = sum(sums.values())
    share = _covered_ns(kernels) / all_ns if all_ns else 0.0
    return tuple(
        Launch(name, took_ns * 1e-9 * share / iterations, operators)
        for (name, operators), took_ns in sums.items()
        if took_ns
    )


def _around(ops: Iterable[Op]) -> dict[int, tuple[str, ...]]:
    """For each operator its own name and those of the operators it runs in, the outermost last."""
    found: dict[int, tuple[str, ...]] = {}
    open_ops: dict[int, list[Op]] = defaultdict(list)
    for op in sorted(ops, key=lambda op: (op.start_ns, -op.end_ns)):
        stack = open_ops[op.thread]
        while stack and stack[-1].end_ns < op.end_ns:
            stack.pop()
        stack.append(op)
        found[op.id] = tuple(o.name for o in reversed(stack) if _OPERATOR.fullmatch(o.name))
    return found


def _covered_ns(spans: Iterable[Span]) -> int:
    """Nanoseconds in which any of them ran."""
    covered, until = 0, 0
    for span in sorted(spans, key=lambda s: s.start_ns):
        covered += max(0, span.end_ns - max(span.start_ns, until))
        until = max(until, span.end_ns)
    return covered


# -- whose kernels they are ----------------------------------------------------------------------------------------


def by_operator(pieces: Mapping[int, Piece], launches: Sequence[Launch]) -> list[Group]:
    """Pieces and kernels by the operator's name, then by its kind; the others of both are one group, left over.

    The outermost operator that is a piece counts: what it calls in turn is how it works. Every second is in one group,
    and every piece that launches: one whose kernels are nowhere took its part of what is left over, be it nothing.
    """
    named: dict[str, list[int]] = defaultdict(list)
    for i, piece in pieces.items():
        if piece.launches:
            named[_key(piece.name)].append(i)
    sums: dict[str, float] = defaultdict(float)
    nameless: list[Launch] = []
    for launch in launches:
        key = next((k for op in reversed(launch.operators) if (k := _key(op)) in named), None)
        if key is None:
            nameless.append(launch)
        else:
            sums[key] += launch.seconds
    groups = [Group(key, tuple(named[key]), seconds) for key, seconds in sums.items()]
    unseen = [i for key, members in named.items() if key not in sums for i in members]
    return groups + _by_kind({i: pieces[i] for i in unseen}, nameless)


def _by_kind(pieces: Mapping[int, Piece], launches: Sequence[Launch]) -> list[Group]:
    kinds: dict[str, list[int]] = defaultdict(list)
    for i, piece in pieces.items():
        kinds[piece.kind].append(i)
    sums: dict[str, float] = defaultdict(float)
    left_s = 0.0
    for launch in launches:
        known = (_kind(operator) for operator in launch.operators)
        kind = next((k for k in known if k in kinds), None)
        if kind is None:
            left_s += launch.seconds
        else:
            sums[kind] += launch.seconds
    groups = [Group(f"other {kind}", tuple(kinds[kind]), seconds) for kind, seconds in sums.items()]
    others = tuple(i for kind, members in kinds.items() if kind not in sums for i in members)
    return groups + ([Group(LEFT_OVER, others, left_s)] if others or left_s else [])


def by_kernel(
    kernels: Sequence[Kernel], pieces: Sequence[Piece], launches: Sequence[Launch], *, replayed: bool
) -> list[Group]:
    """Kernels of a compiled program: generated ones by their names, library calls by operator, in a graph as one group.

    `pieces` are those of the program before, which generated kernels are named after.
    """
    made = [launch for launch in launches if _GENERATED.fullmatch(launch.name)]
    others = [launch for launch in launches if not _GENERATED.fullmatch(launch.name)]
    calls = {i: kernel.call for i, kernel in enumerate(kernels) if kernel.call is not None}
    groups = _by_name(kernels, pieces, made)
    if not replayed:
        return groups + by_operator(calls, others)
    # In a graph no operator is known: what has one copies inputs and results, and fills and copies nobody asked for.
    around_s = sum(launch.seconds for launch in others if launch.operators or _moves(launch.name))
    inside_s = sum(launch.seconds for launch in others) - around_s
    found = [Group(OUTSIDE, (), around_s), Group(LIBRARY, tuple(i for i, c in calls.items() if c.launches), inside_s)]
    return groups + [group for group in found if group.members or group.seconds]


def _by_name(kernels: Sequence[Kernel], pieces: Sequence[Piece], launches: Sequence[Launch]) -> list[Group]:
    """Generated kernels by what Inductor calls them: after the operators they stem from, with a number behind.

    Kernels of the same code share a name, which is then that of the first: where no name fits, the nearest does.
    """
    sums: dict[str, float] = defaultdict(float)
    for launch in launches:
        found = _GENERATED.fullmatch(launch.name)
        assert found is not None  # only such are given
        sums[found.group(1)] += launch.seconds
    members: dict[str, list[int]] = {name: [] for name in sums}
    piece_of = {node: piece for piece in pieces for node in piece.nodes}
    for i, kernel in enumerate(kernels):
        if kernel.call is None:
            name = generated_name(kernel, piece_of)
            members.setdefault(name if name in sums else _nearest(name, sums), []).append(i)
    lost_s = sum(sums[name] for name, found in members.items() if not found)
    lost = tuple(members.pop("", []))
    groups = [Group(name, tuple(found), sums[name]) for name, found in members.items() if found]
    return groups + ([Group("other generated kernels", lost, lost_s)] if lost or lost_s else [])


def generated_name(kernel: Kernel, piece_of: Mapping[str, Piece]) -> str:
    """What Inductor calls a kernel, without kind and number: fused_add_native_layer_norm (`get_fused_kernel_name`)."""
    stems = {piece_of[node].name.rpartition(".")[2] for node in kernel.origins if node in piece_of}
    return "_".join(["fused", *sorted(stems)])


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known name that shares most words; "" where none is alike."""
    words = set(name.split("_")) - {"fused", ""}

    def alike(other: str) -> float:
        theirs = set(other.split("_")) - {"fused", ""}
        return len(words & theirs) / max(1, len(words | theirs))

    best = max(known, key=alike, default="")
    return best if best and alike(best) > _ALIKE else ""


def _moves(name: str) -> bool:
    return name.lower().startswith(("memset", "memcpy"))


def _key(name: str) -> str:
    """An operator's name, whatever variant of it: in place or not, by whichever library."""
    space, _, short = name.replace("::", ".").partition(".")
    short = short.rstrip("_") or short
    if "scaled_dot_product" in short:
        return "attention_backward" if short.endswith("backward") else "attention"
    return f"{space}.{_SAME.get(short, short)}"


def _kind(operator: str) -> str | None:
    """Its family, where it is known to have one."""
    short = operator.rpartition("::")[2]
    known = short in KINDS or short.rstrip("_") in KINDS or short.startswith(("_foreach_", "_fused_"))
    return kind_of(operator) if known else None
