"""`dist.overlap_gradients(module)`: reduce gradients while the backward pass makes them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError, check_choice
from .agreement import count_ranks
from .collectives import ALGORITHMS, Algorithm
from .compression import Codec, make_codec
from .gradient_reducer import GradientReducer
from .gradient_report import GradientLedger
from .gradient_sync import GradientSync, ModuleSync
from .gradient_wrappers import ReplicatedSync, ShardedSync, is_sharded
from .mesh import Mesh
from .pacing import Phase


def overlap_gradients(
    module: nn.Module,
    *,
    mesh: Mesh | None = None,
    axis: str = "dp",
    bucket_mb: float = 25.0,
    defer: bool = False,
    deterministic: bool = False,
    algorithm: Algorithm = "flat",
    compress: str | Codec | None = None,
    feedback: bool = True,
    phase: str | Phase | None = None,
    power_sgd_rank: int | None = None,
    power_sgd_start: int = 10,
) -> GradientSync:
    """Replace each gradient by its mean over ranks, starting as soon as the backward pass makes it.

    The ranks are those along `axis` of `mesh`, or all. A plain module gets buckets of `bucket_mb`; DDP and FSDP2 keep
    their own buckets and overlap, and reduce them in the way asked for here. `deterministic`, `algorithm`, `compress`
    and `phase` are those of `dist.all_reduce`; `feedback` adds the rounding error in the next step. `power_sgd_rank`
    sends factors of that rank instead, by torch's own PowerSGD, from step `power_sgd_start` on.

    Gradients are there when `backward()` returns. With `defer`, the last ones may still be in transfer: call `wait()`
    before you read them. An optimizer waits by itself, and `step(optimizer)` updates each bucket when it arrives.
    """
    _check_module(module, bucket_mb)
    way = _choose_way(deterministic, algorithm, compress, phase)
    if power_sgd_rank is not None and way:
        raise ArgumentError("overlap_gradients: PowerSGD with another way to reduce", fix="choose one of them")
    if power_sgd_start < 2:
        raise ArgumentError(f"overlap_gradients: power_sgd_start={power_sgd_start} is less than 2", fix="2 or more")
    if is_sharded(module):
        return ShardedSync(module, way, feedback=feedback)
    is_ddp = isinstance(module, DistributedDataParallel)
    group = mesh.process_group(axis) if mesh is not None else module.process_group if is_ddp else None
    if count_ranks(group) == 1:
        return GradientSync(GradientLedger())
    power_sgd = {"matrix_approximation_rank": power_sgd_rank, "start_powerSGD_iter": power_sgd_start}
    way |= {"mesh": mesh} if phase else {}
    reducer = GradientReducer(group, way, feedback=feedback, power_sgd=power_sgd if power_sgd_rank else None)
    if is_ddp:
        return ReplicatedSync(module, reducer)
    return ModuleSync(module, reducer, bucket_bytes=int(bucket_mb * 2**20), defer=defer)


def _check_module(module: nn.Module, bucket_mb: float) -> None:
    if any(p.is_meta for p in module.parameters()):
        raise ArgumentError(
            "overlap_gradients: the module is on the meta device",
            why="its parameters have no values, and get new tensors later",
            fix="module.to_empty(device=...) and initialise it first",
        )
    if any(getattr(m, "sparse", False) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)):
        raise ArgumentError(
            "overlap_gradients: an embedding with sparse=True",
            why="its gradient is not a dense tensor",
            fix="sparse=False",
        )
    if not is_sharded(module) and any(isinstance(p, DTensor) for p in module.parameters()):
        raise ArgumentError(
            "overlap_gradients: the module has parameters that are DTensors",
            why="their gradients may be parts of sums over another axis",
            fix="fully_shard(module, mesh=...) over the data parallel axis, then overlap_gradients",
        )
    if bucket_mb <= 0:
        raise ArgumentError(f"overlap_gradients: bucket_mb={bucket_mb} is not positive", fix="bucket_mb=25")


def _choose_way(
    deterministic: bool, algorithm: str, compress: str | Codec | None, phase: str | Phase | None
) -> dict[str, Any]:
    """Return the arguments of `all_reduce` that are not its defaults."""
    check_choice("overlap_gradients: algorithm", algorithm, ALGORITHMS)
    way = {"deterministic": deterministic, "compress": make_codec(compress), "phase": phase}
    way["algorithm"] = algorithm if algorithm != "flat" else None
    return {name: value for name, value in way.items() if value}
