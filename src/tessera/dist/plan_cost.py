"""What one layout costs on a cluster: seconds, joules by purpose, and memory, each from the training model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .layout import Layout
from .mesh import Mesh
from .training import estimate_training
from .training_memory import TrainingMemory
from .training_model import TrainingJob

if TYPE_CHECKING:
    from .plan_search import PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """One layout: the cost of a step on the whole cluster, and the memory of the fullest rank and of a node's host.

    `parts` are seconds and sum to `time_s`; `energy_parts` are joules and sum to `energy_j`: those of `TrainingCost`
    for all GPUs, those of GPUs that the layout leaves "idle", and the "host" with its CPUs, cards, fans and switches.
    Without `host_w` in the cluster's file, `energy_j` does not include the host.
    """

    layout: Layout
    time_s: float
    error_s: float
    energy_j: float
    error_j: float
    tokens: int
    memory: TrainingMemory
    capacity_bytes: float
    host_bytes: float
    parts: dict[str, float]
    energy_parts: dict[str, float]

    @property
    def power_w(self) -> float:
        """Return mean watts of the cluster."""
        return self.energy_j / self.time_s

    @property
    def energy_per_token_j(self) -> float:
        """Return joules for each token of the batch."""
        return self.energy_j / self.tokens

    @property
    def tokens_per_s(self) -> float:
        """Return tokens of the whole cluster each second."""
        return self.tokens / self.time_s

    @property
    def memory_bytes(self) -> float:
        """Return bytes that the fullest rank needs."""
        return self.memory.total

    def mesh(self) -> Mesh:
        """Return the mesh of the layout."""
        return self.layout.mesh()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        derived = ("power_w", "energy_per_token_j", "tokens_per_s", "memory_bytes")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


def make_job(problem: PlanProblem, layout: Layout) -> TrainingJob:
    """Return the training job of a layout on the problem's cluster."""
    options = {**problem.cluster.job_options(), **problem.options}
    return layout.make_job(problem.model, seq=problem.seq, precision=problem.precision, **options)


def evaluate_layout(problem: PlanProblem, layout: Layout) -> PlanCandidate:
    """Estimate seconds, joules and memory of a layout, whether it fits or not."""
    job = make_job(problem, layout)
    cost = estimate_training(job) if problem.work is None else problem.work.estimate(job)
    cluster, seconds = problem.cluster, cost.step_s
    joules = {part: layout.gpus * value for part, value in cost.energy_parts.items()}
    error_j = layout.gpus * cost.error_j
    idle, spare = cluster.device.idle_w, cluster.gpus - layout.gpus
    if idle is not None and spare:
        joules["idle"] = spare * idle.value * seconds
    if cluster.host_w is not None:
        host = cluster.nodes * cluster.host_w.value * seconds
        joules["host"] += host
        known = (cluster.host_w.error or 0.0) / cluster.host_w.value
        error_j = math.hypot(error_j + host * cost.error_s / seconds, host * known)
    elif not layout.offload:
        del joules["host"]
    return PlanCandidate(
        layout=layout,
        time_s=seconds,
        error_s=cost.error_s,
        energy_j=sum(joules.values()),
        error_j=error_j,
        tokens=problem.global_batch * problem.seq,
        memory=cost.memory,
        capacity_bytes=cost.capacity_bytes,
        host_bytes=cost.host_bytes * min(layout.gpus, cluster.node_gpus.value),
        parts=cost.parts,
        energy_parts=joules,
    )
