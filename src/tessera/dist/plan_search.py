"""The space of layouts and the search in it: what divides, what fits, and bounds that save most evaluations.

The space: GPUs are all of the cluster's, or the largest power of two of them; for a module that is not a decoder, any
number that divides the batch. tp divides heads, width and MLP, and stays inside the fast domain. cp leaves at least
1,024 tokens to a rank. pp and vp divide the layers, or the layers and up to three more (5%), because the vocabulary
then takes the place of layers. ep divides the experts and a stage's ranks. dp and the microbatch, a power of two,
divide the batch. An interleaved pipeline takes microbatches in groups of pp.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..estimate.power import PowerModel
from .cluster import Cluster
from .layout import Layout
from .module_work import ModuleWork
from .plan_cost import PlanCandidate, evaluate_layout, make_job
from .training import estimate_training
from .training_memory import estimate_memory
from .training_model import AXES, RECOMPUTE, SHARDINGS, ModelShape, TrainingJob
from .training_offload import estimate_host

_LEAST_CHUNK = 1024  # least tokens of a rank under context parallelism
_MOST_MISSING, _MISSING_SHARE = 3, 0.05  # layers that may be missing for stages of equal size
_MOST_CHUNKS = 16
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MICRO_BATCHES_OF_MODULES = tuple(2**n for n in range(11))  # samples are small; each size needs a prediction of its own
_NEAR_PP = ("tp", "cp", "pp", "dp")
# Parts of a step that sharding, chunks, placement and offload do not make shorter.
_FIXED_PARTS = ("compute", "tensor parallel", "context parallel", "expert parallel", "pipeline bubble", "optimizer")
_LISTED, _WORTH = 6, 1.25  # divisions that the result lists at most, and how much worse than the best they may be


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """A planning problem: a model and its batch on a cluster; plans may fill `memory_limit` of a GPU's memory.

    `options` are settings of `TrainingJob` that neither a layout nor a cluster has. `applicable`: only layouts that
    `apply_layout` supports, so without cp and ep, and with the embedding on the GPU. `work` is set for a module that is
    not a decoder: then only data parallel ranks, microbatches and shardings are tried.
    """

    model: ModelShape
    cluster: Cluster
    seq: int
    global_batch: int
    precision: str = "bf16"
    memory_limit: float = 0.95
    gpus: int | None = None
    offload: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    applicable: bool = False
    work: ModuleWork | None = None

    def count_gpus(self) -> list[int]:
        """Return the numbers of GPUs that are tried."""
        if self.gpus is not None:
            return [self.gpus]
        whole = self.cluster.gpus
        some = {whole, 1 << (whole.bit_length() - 1)}
        if self.work is not None:  # only data parallelism, whose ranks divide the batch, so fewer GPUs may be better
            some.update(list_divisors(math.gcd(whole, self.global_batch)))
        return sorted(some, reverse=True)

    @property
    def recomputes(self) -> tuple[str, ...]:
        """Return what may be recomputed, the least first."""
        return RECOMPUTE if self.work is None else RECOMPUTE[:1]

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Return the sizes of a microbatch that are tried."""
        return _MICRO_BATCHES if self.work is None else _MICRO_BATCHES_OF_MODULES


@dataclass(slots=True)
class SearchState:
    """What a search has seen: the best of each division, the nearest misses, and evaluations.

    A second search, by another metric, evaluates nothing again.
    """

    evaluations: int = 0
    best: dict[tuple[int, ...], PlanCandidate] = field(default_factory=dict)
    over_bytes: dict[tuple[int, ...], tuple[float, Layout]] = field(default_factory=dict)
    fitting: set[tuple[int, ...]] = field(default_factory=set)
    bounds: dict[Layout, dict[str, float]] = field(default_factory=dict)
    variants: dict[Layout, list[PlanCandidate]] = field(default_factory=dict)


def list_divisors(n: int, most: int | None = None) -> list[int]:
    """Return divisors in order, up to `most`."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    both = sorted({*small, *(n // d for d in small)})
    return [d for d in both if most is None or d <= most]


def list_divisions(problem: PlanProblem) -> Iterator[Layout]:
    """Yield every tp, cp, pp, ep, dp and microbatch of the space, with the simplest other settings."""
    model, batch = problem.model, problem.global_batch
    for gpus in problem.count_gpus():
        for tp in list_divisors(gpus, problem.cluster.domain):
            if not _divides_model(model, tp):
                continue
            for pp in list_divisors(gpus // tp, model.layers):
                if not _is_balanced(model.layers, pp):
                    continue
                for cp in list_divisors(gpus // (tp * pp), 1 if problem.applicable else None):
                    if cp > 1 and (problem.seq % (2 * cp) or problem.seq < cp * _LEAST_CHUNK):
                        continue
                    dp = gpus // (tp * pp * cp)
                    if batch % dp:
                        continue
                    for micro in (n for n in problem.micro_batches if batch // dp % n == 0):
                        many = batch // dp // micro
                        if problem.applicable and many < pp:
                            continue
                        for ep in list_expert_ranks(problem, tp * cp * dp):
                            yield Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, micro_batch=micro, microbatches=many)


def list_expert_ranks(problem: PlanProblem, ranks: int) -> list[int]:
    """Return over how many of a stage's ranks the experts may be divided."""
    if problem.applicable or not problem.model.experts:
        return [1]
    return list_divisors(math.gcd(problem.model.experts, ranks))


def _divides_model(model: ModelShape, tp: int) -> bool:
    keys = model.key_heads
    whole = all(size % tp == 0 for size in (model.heads, model.hidden, model.ffn))
    return whole and (keys % tp == 0 or tp % keys == 0)


def _is_balanced(layers: int, stages: int) -> bool:
    return -layers % stages <= min(_MOST_MISSING, _MISSING_SHARE * layers)


def list_chunks(layout: Layout, model: ModelShape) -> list[int]:
    """Return the numbers of chunks of layers that each stage may hold."""
    if layout.pp == 1 or layout.microbatches % layout.pp:
        return [1]
    most = min(_MOST_CHUNKS, model.layers // layout.pp)
    return [vp for vp in range(1, most + 1) if vp == 1 or _is_balanced(model.layers, layout.pp * vp)]


def list_variants(problem: PlanProblem, base: Layout) -> Iterator[Layout]:
    """Yield the choices of chunks, sharding, placement and offload of a division, without recomputation."""
    far = base.gpus > problem.cluster.domain
    near = far and base.pp > 1 and base.dp > 1 and base.ep == 1
    placements = [AXES, _NEAR_PP] if near else [AXES]
    for vp, sharding, placement in itertools.product(
        list_chunks(base, problem.model), list_shardings(base), placements
    ):
        for offload in list_offloads(problem, base):
            if problem.applicable and offload and sharding == "none":
                continue
            yield dataclasses.replace(base, vp=vp, schedule="", sharding=sharding, placement=placement, offload=offload)


def list_shardings(base: Layout) -> list[str]:
    """Return what data-parallel ranks may divide among themselves."""
    return list(SHARDINGS) if base.dp * base.cp > 1 else ["none"]


def list_offloads(problem: PlanProblem, base: Layout) -> list[tuple[str, ...]]:
    """Return what may be on the host, the least first."""
    if problem.work is not None or not (problem.offload and problem.cluster.can_offload):
        return [()]
    some: list[tuple[str, ...]] = [(), ("optimizer",)]
    if base.pp == 1 and not problem.model.tied and not problem.applicable:
        some += [("embedding",), ("optimizer", "embedding")]
    return some


def count_over_bytes(problem: PlanProblem, layout: Layout, job: TrainingJob | None = None) -> float:
    """Return the bytes that the fullest rank, or a node's host, lacks for a layout; negative if there is room."""
    job = job or make_job(problem, layout)
    capacity = problem.cluster.device.memory.capacity_bytes
    assert capacity is not None  # estimate_training has checked it before
    memory = estimate_memory(job, layout.recompute) if problem.work is None else problem.work.estimate_memory(job)
    return max(memory.total - problem.memory_limit * capacity.value, count_host_over_bytes(problem, layout, job))


def count_host_over_bytes(problem: PlanProblem, layout: Layout, job: TrainingJob | None = None) -> float:
    """Return bytes by which a node's host is too small for what a layout keeps on it."""
    host = problem.cluster.host_memory_bytes
    if not layout.offload or host is None:
        return -math.inf
    node = min(layout.gpus, problem.cluster.node_gpus.value)
    return estimate_host(job or make_job(problem, layout)).held_bytes * node - problem.memory_limit * host.value


def find_least_recompute(problem: PlanProblem, layout: Layout) -> Layout | None:
    """Return the layout with the least recomputation that fits, or None; more recomputation always costs more."""
    job = make_job(problem, layout)
    for recompute in problem.recomputes:
        trial = dataclasses.replace(layout, recompute=recompute)
        if count_over_bytes(problem, trial, dataclasses.replace(job, recompute=recompute)) <= 0:
            return trial
    return None


def search_layouts(problem: PlanProblem, metric: str, state: SearchState, most_time_s: float = math.inf) -> None:
    """Evaluate what may be among the best by a metric ("time_s" or "energy_j"); bounds exclude the others."""
    queue: list[tuple[float, int, Layout]] = []
    for number, base in enumerate(list_divisions(problem)):
        if not may_fit(problem, base, state):
            continue
        if base not in state.bounds:
            state.bounds[base] = _bound(problem, base)
            state.evaluations += 1
        bounds = state.bounds[base]
        if bounds["time_s"] <= most_time_s:
            queue.append((bounds[metric], number, base))
    heapq.heapify(queue)
    while queue:
        bound, _, base = heapq.heappop(queue)
        if bound > _worst_worth(state, metric, most_time_s):
            return
        if base not in state.variants:
            state.variants[base] = list(evaluate_variants(problem, base))
            state.evaluations += len(state.variants[base])
        for candidate in state.variants[base]:
            if candidate.time_s <= most_time_s:
                key = _division(candidate.layout)
                known = state.best.get(key)
                if known is None or known.time_s > most_time_s or getattr(candidate, metric) < getattr(known, metric):
                    state.best[key] = candidate


def _division(layout: Layout) -> tuple[int, ...]:
    return (layout.tp, layout.cp, layout.pp, layout.ep, layout.dp)


def _worst_worth(state: SearchState, metric: str, most_time_s: float) -> float:
    """Return the metric above which a division would not be listed."""
    values: list[float] = sorted(getattr(c, metric) for c in state.best.values() if c.time_s <= most_time_s)
    if not values:
        return math.inf
    return min(values[:_LISTED][-1] if len(values) >= _LISTED else math.inf, _WORTH * values[0])


def may_fit(problem: PlanProblem, base: Layout, state: SearchState) -> bool:
    """Return whether the most frugal variant fits; if not, note how many bytes it lacks."""
    over, layout = math.inf, base
    for offload in reversed(list_offloads(problem, base)):  # offload less if the host is too small
        for sharding in list_shardings(base):
            frugal = dataclasses.replace(base, sharding=sharding, recompute=problem.recomputes[-1], offload=offload)
            over, layout = min((over, layout), (count_over_bytes(problem, frugal), frugal), key=lambda pair: pair[0])
        if over <= 0:
            break
    key = _division(base)
    if over <= 0:
        state.fitting.add(key)
        state.over_bytes.pop(key, None)
        return True
    if key not in state.fitting and (key not in state.over_bytes or over < state.over_bytes[key][0]):
        state.over_bytes[key] = (over, layout)
    return False


def _bound(problem: PlanProblem, base: Layout) -> dict[str, float]:
    """Return lower bounds of seconds and joules for all variants of a division: no recomputation, least bubble."""
    if problem.work is not None:  # there are few layouts, and all are evaluated
        return {"time_s": 0.0, "energy_j": 0.0}
    chunks = max(list_chunks(base, problem.model))
    best = dataclasses.replace(base, vp=chunks, schedule="", sharding="zero1" if base.dp * base.cp > 1 else "none")
    cost = estimate_training(make_job(problem, best))
    jitter = cost.step_s / (cost.step_s - cost.parts["waiting"])  # as a share of the rest
    seconds = jitter * sum(cost.parts[part] for part in _FIXED_PARTS)
    static_w = PowerModel.from_device(problem.cluster.device).static_w
    spent = sum(joules for part, joules in cost.energy_parts.items() if part != "waiting")
    # at most twice the static watts
    waiting = max(0.0, cost.energy_parts["waiting"] - 2.0 * static_w * (cost.step_s - seconds))
    joules = base.gpus * (spent + waiting)
    if problem.cluster.host_w is not None:
        joules += problem.cluster.nodes * problem.cluster.host_w.value * seconds
    return {"time_s": seconds, "energy_j": joules}


def evaluate_variants(problem: PlanProblem, base: Layout) -> Iterator[PlanCandidate]:
    """Yield the variants of a division that fit, each with the least recomputation."""
    plain: dict[tuple[object, ...], bool] = {}
    for variant in list_variants(problem, base):
        key = (variant.vp, variant.sharding, variant.placement)
        if plain.get(key):  # it fits without recomputation and without the host, so using the host would only add cost
            continue
        layout = find_least_recompute(problem, variant)
        if layout is None:
            continue
        if not layout.offload and layout.recompute == "none":
            plain[key] = True
        yield evaluate_layout(problem, layout)
