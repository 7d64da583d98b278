"""`Layout`: how a training step is divided over many GPUs. The planner chooses one, `apply_layout` applies it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..device import Device
from ..errors import ArgumentError, check_choice
from .mesh import Mesh
from .training_model import AXES, RECOMPUTE, SHARDINGS, ModelShape, TrainingJob

SCHEDULES = ("1f1b", "interleaved", "gpipe")
OFFLOADS = ("optimizer", "embedding")
"""What may be on the host: the optimizer's state with its step, and the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, the microbatches of a replica, and what is sharded, recomputed or on the host.

    `ep` is not an axis of its own: groups of `ep` among the tp x cp x dp ranks of a stage divide the experts, as in
    Megatron. `vp` chunks of layers on each stage make a schedule "interleaved". `placement` names the axes from the
    nearest ranks to the farthest.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vp: int = 1
    micro_batch: int = 1
    microbatches: int = 1
    schedule: str = ""
    sharding: str = "none"
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    placement: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "vp", "micro_batch", "microbatches"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"a layout needs {name} of at least 1, not {getattr(self, name)}")
        if not self.schedule:
            object.__setattr__(self, "schedule", "interleaved" if self.vp > 1 else "1f1b")
        for name, known in (("schedule", SCHEDULES), ("sharding", SHARDINGS), ("recompute", RECOMPUTE)):
            check_choice(name, getattr(self, name), known)
        for what in self.offload:
            check_choice("offload", what, OFFLOADS)
        if (self.schedule == "interleaved") != (self.vp > 1) or (self.vp > 1 and self.pp == 1):
            raise ArgumentError(
                f"schedule={self.schedule!r} with pp={self.pp} and vp={self.vp}",
                why="an interleaved pipeline has several stages (pp), and several chunks of layers on each (vp)",
                fix="vp=1 for other schedules",
            )
        if sorted(self.placement) != sorted(AXES):
            raise ArgumentError(f"placement={self.placement} must name {', '.join(AXES)}, each once")
        if self.tp * self.cp * self.dp % self.ep:
            raise ArgumentError(f"ep={self.ep} does not divide the {self.tp * self.cp * self.dp} ranks of a stage")

    @property
    def gpus(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def global_batch(self) -> int:
        """Return the sequences of one step."""
        return self.dp * self.micro_batch * self.microbatches

    def mesh(self, devices: Iterable[int] | int | None = None) -> Mesh:
        """Return the mesh with the axes pp, dp, cp, tp, placed as the layout says."""
        sizes = {axis: getattr(self, axis) for axis in ("pp", "dp", "cp", "tp")}
        devices = self.gpus if devices is None else devices
        return Mesh(list(sizes), devices, list(sizes.values()), order=self.placement)

    @classmethod
    def from_job(cls, job: TrainingJob, recompute: str | None = None) -> Layout:
        """Return the layout of a training job. `recompute` is needed if the job does not decide it."""
        names = ("tp", "pp", "dp", "cp", "ep", "vp", "micro_batch", "microbatches", "sharding", "offload", "placement")
        sizes = {name: getattr(job, name) for name in names}
        return cls(**sizes, recompute=recompute or job.recompute or "none")

    def make_job(self, model: ModelShape, *, on: str | Device, seq: int, **options: Any) -> TrainingJob:
        """Return the training job of a model with this layout.

        `options` are those of `TrainingJob` that no layout has.
        """
        names = ("tp", "pp", "cp", "ep", "vp", "micro_batch", "sharding", "recompute", "offload", "placement")
        options |= {name: getattr(self, name) for name in names}
        return TrainingJob(model=model, on=on, gpus=self.gpus, seq=seq, global_batch=self.global_batch, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Layout:
        """Make a layout from what `to_dict` returned."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            check_choice("setting of a layout", key, known)
        lists: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**lists)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("tp", "cp", "ep", "pp", "vp", "dp")}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "dp1"
