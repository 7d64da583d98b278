"""Sharded programs on PyTorch's own engine: meshes, sharded tensors, and collectives that say what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import load_lazily
from .mesh import Mesh as Mesh
from .sharding import ShardedTensor as ShardedTensor
from .sharding import ShardSpec as ShardSpec
from .sharding import tensor as tensor

if TYPE_CHECKING:
    from .apply import apply_layout as apply_layout
    from .cluster import Cluster as Cluster
    from .cluster import load_cluster as load_cluster
    from .collectives import all_gather as all_gather
    from .collectives import all_reduce as all_reduce
    from .collectives import all_to_all as all_to_all
    from .collectives import broadcast as broadcast
    from .collectives import reduce_scatter as reduce_scatter
    from .compression import Codec as Codec
    from .compression import ErrorFeedback as ErrorFeedback
    from .cost import CollectiveCost as CollectiveCost
    from .cost import choose_all_reduce as choose_all_reduce
    from .cost import collective_cost as collective_cost
    from .experts import DispatchedTokens as DispatchedTokens
    from .experts import combine_tokens as combine_tokens
    from .experts import dispatch_tokens as dispatch_tokens
    from .fourier import fft as fft
    from .fourier import ifft as ifft
    from .gradient_report import GradientReport as GradientReport
    from .gradient_sync import GradientSync as GradientSync
    from .layout import Layout as Layout
    from .liveness import CollectiveError as CollectiveError
    from .model_shape import read_model_shape as read_model_shape
    from .modes import dry as dry
    from .modes import simulate as simulate
    from .overlap import overlap_gradients as overlap_gradients
    from .parallel_module import ParallelModule as ParallelModule
    from .plan_cost import PlanCandidate as PlanCandidate
    from .plan_neighbours import PlanNeighbour as PlanNeighbour
    from .plan_timeline import StepTimeline as StepTimeline
    from .planner import ParallelPlan as ParallelPlan
    from .planner import plan as plan
    from .records import CollectiveRecord as CollectiveRecord
    from .records import record_collectives as record_collectives
    from .tensor_parallel import ModuleSplit as ModuleSplit
    from .training import TrainingCost as TrainingCost
    from .training import estimate_training as estimate_training
    from .training_memory import TrainingMemory as TrainingMemory
    from .training_model import ModelShape as ModelShape
    from .training_model import TrainingJob as TrainingJob

load_lazily(
    __name__,
    {
        "mesh": "Mesh",
        "sharding": "ShardedTensor ShardSpec tensor",
        "apply": "apply_layout",
        "cluster": "Cluster load_cluster",
        "collectives": "all_gather all_reduce all_to_all broadcast reduce_scatter",
        "compression": "Codec ErrorFeedback",
        "cost": "CollectiveCost choose_all_reduce collective_cost",
        "experts": "DispatchedTokens combine_tokens dispatch_tokens",
        "fourier": "fft ifft",
        "gradient_report": "GradientReport",
        "gradient_sync": "GradientSync",
        "layout": "Layout",
        "liveness": "CollectiveError",
        "model_shape": "read_model_shape",
        "modes": "dry simulate",
        "overlap": "overlap_gradients",
        "parallel_module": "ParallelModule",
        "plan_cost": "PlanCandidate",
        "plan_neighbours": "PlanNeighbour",
        "plan_timeline": "StepTimeline",
        "planner": "ParallelPlan plan",
        "records": "CollectiveRecord record_collectives",
        "tensor_parallel": "ModuleSplit",
        "training": "TrainingCost estimate_training",
        "training_memory": "TrainingMemory",
        "training_model": "ModelShape TrainingJob",
    },
)
