"""`plan`: how to divide a training step over a cluster, by the cost model: the choice, and why not its neighbours."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, DoesNotFit, did_you_mean
from .cluster import Cluster, load_cluster
from .layout import Layout
from .model_shape import read_model_shape
from .module_work import ModuleWork
from .plan_cost import PlanCandidate
from .plan_neighbours import PlanNeighbour, list_neighbours
from .plan_search import (
    PlanProblem,
    SearchState,
    count_host_over_bytes,
    list_divisions,
    may_fit,
    search_layouts,
)
from .plan_timeline import StepTimeline, draw_timeline
from .training import ERROR_EXPOSED
from .training_model import ModelShape, TrainingJob

if TYPE_CHECKING:
    from torch import nn

    from .parallel_module import ParallelModule

_PRECISIONS = ("bf16", "fp16", "fp8", "fp4", "tf32", "fp32")
_METRICS = {"time": "time_s", "energy": "energy_j"}
_AS_GOOD = 1.005  # a layout with fewer axes is preferred to one that is better by less than this
_DEFAULT_TOKENS = 2**22  # tokens of a step if no batch is given: Llama 2 was trained with 4 million


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastSure:
    """The figure that adds most to the error of the goal: `error` is its part of that error, in seconds or joules."""

    name: str
    error: float
    unit: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMisfit:
    """A division that does not fit, its most frugal layout, and the bytes that are missing."""

    layout: Layout
    over_bytes: float


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The layouts that were found for a model on a cluster, best first, and what is worse about the others."""

    problem: PlanProblem
    goal: str
    candidates: tuple[PlanCandidate, ...]
    neighbours: tuple[PlanNeighbour, ...]
    misfits: tuple[PlanMisfit, ...]
    least_sure: LeastSure
    evaluations: int
    search_s: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> PlanCandidate:
        """Return the layout to take."""
        return self.candidates[0]

    @property
    def metric(self) -> str:
        """Return the attribute of a candidate that the goal minimises: "time_s" or "energy_j"."""
        return _METRICS[self.goal.partition(",")[0]]

    @cached_property
    def timeline(self) -> StepTimeline:
        """One step of the best layout: stages over time."""
        return draw_timeline(self.best.layout, self.best.parts)

    def apply(self, module: nn.Module, *, example_inputs: Any = None) -> ParallelModule:
        """Divide a module over the ranks that torchrun started, as the best layout says: `dist.apply_layout`."""
        from .apply import apply_layout

        return apply_layout(module, self.best.layout, example_inputs=example_inputs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        problem = self.problem
        given = {"seq": problem.seq, "global_batch": problem.global_batch, "precision": problem.precision}
        return {
            "goal": self.goal,
            "model": dataclasses.asdict(problem.model) | {"parameters": problem.model.parameters},
            "cluster": problem.cluster.to_dict(),
            **given,
            "memory_limit": problem.memory_limit,
            "best": self.best.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "neighbours": [neighbour.to_dict() for neighbour in self.neighbours],
            "misfits": [dataclasses.asdict(misfit) for misfit in self.misfits],
            "least_sure": dataclasses.asdict(self.least_sure),
            "timeline": self.timeline.to_dict(),
            "evaluations": self.evaluations,
            "search_s": self.search_s,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from ..report.plan import plan_text

        return plan_text(self)


def plan(
    model: Any,
    inputs: Any = None,
    cluster: str | Cluster = "dgx-h200",
    goal: str = "time",
    *,
    seq: int | None = None,
    global_batch: int | None = None,
    precision: str = "bf16",
    gpus: int | None = None,
    offload: bool = True,
    memory_limit: float = 0.95,
    options: Mapping[str, Any] | None = None,
    applicable: bool | None = None,
) -> ParallelPlan:
    """Return the best division of a training step over a cluster, by the cost model of `estimate_training`.

    `model`: an `nn.Module` (also on the meta device), a `ModelShape`, its sizes as a mapping, or a configuration of
    Hugging Face ("hf:config.json"). `inputs`: token ids of one step (batch x tokens), or give `seq` and `global_batch`;
    without a batch it is about 4 million tokens. A module that is not a decoder needs `inputs`: it is divided by data
    parallelism alone, with `tessera.predict`'s figures for its compute. `cluster`: "gb200-nvl72", "dgx-h200:4" (four
    nodes) or the path of a file. `goal`: "time", "energy", or "energy, time<=1.05" (the fewest joules among layouts
    that take at most 5% longer than the fastest). `gpus` takes fewer than the cluster has. `memory_limit` is the share
    of a GPU's memory that a layout may fill. `options` are settings of `TrainingJob` that no layout has, such as
    {"attention": "flash2", "lora": True}. `applicable`: only layouts that `apply_layout` supports (no context
    parallelism, no expert parallelism); by default, this is set if `model` is a module.
    """
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    metric, slack = _parse_goal(goal)
    _check_precision(precision, where)
    shape, work, notes = _read_shape(model, inputs, where, precision)
    batch, tokens = _read_batch(inputs)
    seq = 1 if work is not None else tokens if seq is None else seq
    if seq is None:
        raise ArgumentError("the number of tokens in a sequence is missing", fix="give seq=8192, or inputs")
    used = where.gpus if gpus is None else gpus
    if not 1 <= used <= where.gpus:
        raise ArgumentError(f"gpus={gpus} of a cluster of {where.gpus}", fix=f"1 to {where.gpus}")
    given = batch if global_batch is None else global_batch

    def choose_batch(gpus: int) -> int:
        return given if given is not None else gpus if work is not None else default_batch(seq, gpus)

    global_batch = choose_batch(used)
    if seq < 1 or global_batch < 1:
        raise ArgumentError(f"a step of {global_batch} x {seq} tokens", fix="at least one sequence of one token")
    if not 0.0 < memory_limit <= 1.0:
        raise ArgumentError(f"memory_limit={memory_limit} is not a share of the memory", fix="0.95")
    problem = PlanProblem(
        model=shape,
        cluster=where,
        seq=seq,
        global_batch=global_batch,
        precision=precision,
        memory_limit=memory_limit,
        gpus=gpus,
        offload=offload,
        options=_check_options(options or {}) if work is None else work.options,
        applicable=hasattr(model, "named_modules") if applicable is None or work is not None else applicable,
        work=work,
    )
    return dataclasses.replace(_search(problem, goal, metric, slack, choose_batch), notes=notes)


def default_batch(seq: int, gpus: int) -> int:
    """Return the sequences of a step of about 4 million tokens, equally many for each GPU."""
    return gpus * max(1, round(_DEFAULT_TOKENS / max(1, seq) / gpus))


def _read_shape(
    model: Any, inputs: Any, cluster: Cluster, precision: str
) -> tuple[ModelShape, ModuleWork | None, tuple[str, ...]]:
    """Return the sizes of a decoder; for another module, its work for a microbatch, and a note that says so."""
    try:
        return _read_sizes(model), None, ()
    except ArgumentError as error:
        if not hasattr(model, "named_modules"):
            raise
        if inputs is None:
            fix = "give inputs with the module: one that is not a decoder is divided by data parallelism"
            raise ArgumentError(error.what, why=error.why, fix=fix) from None
        work = ModuleWork(model, inputs, cluster.device, precision)
        note = f"only data parallelism was tried: {error.what}, {error.why}"
        return work.shape, work, (note,)


def _read_sizes(model: Any) -> ModelShape:
    if not (isinstance(model, Mapping) and "hidden" in model):
        return read_model_shape(model)
    try:
        return ModelShape(**model)
    except TypeError as error:
        known = ", ".join(f.name for f in dataclasses.fields(ModelShape))
        raise ArgumentError("these are not the sizes of a model", why=str(error), fix=f"known: {known}") from None


def _check_precision(precision: str, cluster: Cluster) -> None:
    """Refuse a format for which the chip has no units."""
    device = cluster.device
    known = [name for name in _PRECISIONS if device.peak(name) is not None]
    if precision not in known:
        raise ArgumentError(
            f"{device.id} does not train in {precision!r}{did_you_mean(precision, known)}",
            fix=f"one of: {', '.join(known)}",
        )


def _check_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse options that a job does not have, or that the search or the cluster sets."""
    taken = {f.name for f in dataclasses.fields(Layout)} | {"model", "on", "gpus", "seq", "global_batch", "precision"}
    known = [f.name for f in dataclasses.fields(TrainingJob) if f.name not in taken]
    for name in options:
        if name not in known:
            raise ArgumentError(f"no option {name!r}{did_you_mean(name, known)}", fix=f"one of: {', '.join(known)}")
    return options


def _parse_goal(goal: str) -> tuple[str, float | None]:
    """Return the metric of a goal, and how much longer than the fastest a step may take."""
    match = re.fullmatch(r"(\w+)(?:\s*,\s*time\s*<=\s*(\d+(?:\.\d+)?))?", goal.strip().lower())
    word = match[1] if match else goal.partition(",")[0]
    if match is None or word not in _METRICS or (match[2] and word == "time"):
        raise ArgumentError(
            f"no goal {goal!r}{did_you_mean(word, _METRICS)}", fix='"time", "energy", or "energy, time<=1.05"'
        )
    slack = float(match[2]) if match[2] else None
    if slack is not None and slack < 1.0:
        raise ArgumentError(f"time<={slack:g} is faster than the fastest", fix="energy, time<=1.05")
    return _METRICS[word], slack


def _read_batch(inputs: Any) -> tuple[int | None, int | None]:
    """Return sequences and tokens of example inputs: the sizes of the first tensor with two axes."""
    for value in _walk(inputs):
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) >= 2:
            return int(shape[0]), int(shape[1])
    return None, None


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item)
    else:
        yield value


def _search(
    problem: PlanProblem, goal: str, metric: str, slack: float | None, choose_batch: Callable[[int], int]
) -> ParallelPlan:
    start = time.perf_counter()
    state, most_s = SearchState(), math.inf
    if slack is not None:
        search_layouts(problem, "time_s", state)
        most_s = slack * min((c.time_s for c in state.best.values()), default=math.inf)
    search_layouts(problem, metric, state, most_s)
    allowed = [c for c in state.best.values() if c.time_s <= most_s]
    if not allowed:
        raise _nothing_fits(problem, state, choose_batch)
    ranked = sorted(allowed, key=lambda c: _value(c, metric))
    good = [c for c in ranked if _value(c, metric) <= _AS_GOOD * _value(ranked[0], metric)]
    best = min(good, key=lambda c: (_count_axes(c.layout), _value(c, metric)))
    ranked = [best, *(c for c in ranked if c is not best)]
    neighbours = list_neighbours(problem, best, metric, most_s)
    misfits = sorted(state.over_bytes.values(), key=lambda pair: pair[0])
    return ParallelPlan(
        problem=problem,
        goal=goal.strip().lower(),
        candidates=tuple(ranked[:10]),
        neighbours=tuple(neighbours),
        misfits=tuple(PlanMisfit(layout=layout, over_bytes=over) for over, layout in misfits),
        least_sure=find_least_sure(problem, best, metric),
        evaluations=state.evaluations,
        search_s=time.perf_counter() - start,
    )


def _value(candidate: PlanCandidate, metric: str) -> float:
    value: float = getattr(candidate, metric)
    return value


def _count_axes(layout: Layout) -> int:
    sizes = (layout.tp, layout.cp, layout.pp, layout.ep, layout.vp)
    return sum(size > 1 for size in sizes) + len(layout.offload)


def _nothing_fits(
    problem: PlanProblem, state: SearchState, choose_batch: Callable[[int], int]
) -> DoesNotFit | ArgumentError:
    cluster, billions = problem.cluster, problem.model.parameters / 1e9
    used = problem.count_gpus()[0]
    if not state.over_bytes:
        return ArgumentError(
            f"no layout divides {used} GPUs and a batch of {problem.global_batch}",
            why="the data-parallel ranks must divide the batch, and tp the heads of the model",
            fix=f"a global batch that is a multiple of {used}, or a power of two of the GPUs",
        )
    over, layout = min(state.over_bytes.values(), key=lambda pair: pair[0])
    nodes = _count_needed_nodes(problem, choose_batch)
    more = f"take {nodes} nodes ({cluster.id}:{nodes})" if nodes else "take more nodes"
    if nodes == cluster.nodes:
        more = f"take all {cluster.gpus} GPUs"
    some = "" if problem.gpus is None else f"{used} of the GPUs of "
    words = [str(layout), "nothing sharded" if layout.sharding == "none" else layout.sharding]
    words += [f"{part} on the host" for part in layout.offload] + ["everything recomputed"]
    words += [] if layout.gpus == used else [f"{layout.gpus} of {used} GPUs"]
    place = "of the host's memory" if count_host_over_bytes(problem, layout) == over else "on each GPU"
    return DoesNotFit(
        f"a model of {billions:.1f} billion parameters does not fit on {some}{cluster.nodes} x {cluster.name}",
        why=f"the most frugal layout ({', '.join(words)}) lacks {over / 2**30:.1f} GiB {place}",
        fix=f"{more}, shorter sequences, or a smaller model",
    )


def _count_needed_nodes(problem: PlanProblem, choose_batch: Callable[[int], int]) -> int | None:
    """Return the fewest nodes on which a layout of the search fits; None: not even on 64 times as many.

    Powers of two are tried first, then numbers below the first that fits, in at most 32 steps, because each is a
    search.
    """

    def fits(nodes: int) -> bool:
        larger = dataclasses.replace(problem.cluster, nodes=nodes)
        trial = dataclasses.replace(problem, cluster=larger, gpus=None, global_batch=choose_batch(larger.gpus))
        return any(may_fit(trial, base, SearchState()) for base in list_divisions(trial))

    last = problem.cluster.nodes
    if problem.gpus is not None and fits(last):
        return last
    for nodes in (problem.cluster.nodes * 2**power for power in range(1, 7)):
        if fits(nodes):
            between = range(last + 1, nodes, max(1, (nodes - last) // 32))
            return next((fewer for fewer in between if fits(fewer)), nodes)
        last = nodes
    return None


def find_least_sure(problem: PlanProblem, best: PlanCandidate, metric: str) -> LeastSure:
    """Return the figure that adds most to the error of the metric."""
    scale = 1.0 if metric == "time_s" else best.energy_j / best.time_s
    unit = "s" if metric == "time_s" else "J"
    exposed = 1.0 - best.parts["compute"] / best.time_s
    hidden = math.sqrt(max(0.0, (best.error_s / best.time_s) ** 2 - (ERROR_EXPOSED * exposed) ** 2))
    waits = {part: s for part, s in best.parts.items() if part not in ("compute", "optimizer")}
    largest = max(waits, key=waits.__getitem__)
    known = [
        LeastSure(
            name="the speed of products and attention in training" if problem.work is None else "the time of kernels",
            error=hidden * best.time_s * scale,
            unit=unit,
            why="published runs of one model on one chip differ by this between frameworks and releases"
            if problem.work is None
            else "it is predicted, with the waiting for their launches",
        ),
        LeastSure(
            name=f"what compute does not hide, most of it {largest}",
            error=ERROR_EXPOSED * exposed * best.time_s * scale,
            unit=unit,
            why="overlap follows the framework, and no network was measured",
        ),
    ]
    host = problem.cluster.host_w
    if metric == "energy_j" and host is not None and host.error is not None:
        error = host.error * problem.cluster.nodes * best.time_s
        known.append(LeastSure(name="the watts of the host", error=error, unit=unit, why=host.source))
    return max(known, key=lambda figure: figure.error)
