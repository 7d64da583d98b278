"""A training job that can leave a hot node: it saves itself at a step, ends, and goes on elsewhere.

::

    job = fleet.migratable(model, optimizer, folder="/shared/job7", states={"schedule": scheduler})
    for step in job.steps(10_000):
        batch = data[job.indices(len(data), batch=256)]
        ...                                                     # forward, backward, optimizer.step(), scheduler.step()

An order (from a temperature, a signal, a file, a governor) is seen by all ranks at the same step. They save, and the
program ends with exit code 0 and "moved" in status.json. Started again, on other nodes or with another number of ranks,
it goes on at that step with the same weights, optimizer, schedules, random numbers and position in the data.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as c10d
from torch import nn

from ..errors import ArgumentError
from ..policy import ThermalPolicy
from .job_checkpoint import JobCheckpoint, JobPhase, Manifest, OrderKind, Stateful, find_newest, write_json
from .migration_order import HOLD_S, OrderFile, OrderWatch, OverheatSource, Source, read_hottest_c

_ORDERS: tuple[OrderKind, ...] = ("request", "signal", "overheat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A move that happened. `lost_s` is from the end of the last step before it to the start of the next step."""

    step: int
    order: OrderKind | None
    ranks_before: int
    ranks_after: int
    save_s: float
    load_s: float
    lost_s: float


class MigratableJob:
    """A job that saves itself and goes on; made by `migratable`."""

    def __init__(self, state: JobCheckpoint, folder: Path, watch: OrderWatch, *, seed: int, every: int | None) -> None:
        self.folder, self.seed, self.step = folder, seed, 0
        self.migration: Migration | None = None
        self._state, self._watch, self._every = state, watch, every
        self._stopped_ns = time.time_ns()
        self._resumed: tuple[Manifest, float] | None = None
        self._vote: tuple[torch.Tensor, Any] | None = None
        self._shuffle: tuple[tuple[int, int], torch.Tensor] | None = None
        found = find_newest(folder)
        if found is not None:
            start_s = time.monotonic()
            path, manifest = found
            state.load(path, manifest)
            self.step, self.seed = manifest.step, manifest.seed
            self._resumed = manifest, time.monotonic() - start_s

    @property
    def rank(self) -> int:
        """Return this process's number among the ranks of the job."""
        return self._state.rank

    @property
    def ranks(self) -> int:
        """Return how many ranks the job has now."""
        return self._state.ranks

    def steps(self, total: int) -> Iterator[int]:
        """Yield the remaining steps of `total`. At an order, leave the program when all ranks have saved."""
        self._note_phase("running")
        with self._watch.watch():
            while self.step < total:
                self._note_resumed()
                yield self.step
                self.step += 1
                self._stopped_ns = time.time_ns()
                order = self._agree()
                if self.step < total and order is not None:
                    self._leave(order)
                if self._every and self.step % self._every == 0 and self.step < total:
                    self.save()
            if self._vote is not None:  # the last vote is still under way
                self._vote[1].wait()
        self._note_phase("done")

    def request_move(self) -> None:
        """Order the job to move at the next step; one rank is enough."""
        self._watch.request()

    def save(self, order: OrderKind | None = None) -> Path:
        """Write a checkpoint now; all ranks call this."""
        hosts: list[Any] = [socket.gethostname()] * self.ranks
        if self._state.group is not None:
            c10d.all_gather_object(hosts, socket.gethostname(), group=self._state.group)
        manifest = Manifest(
            step=self.step,
            ranks=self.ranks,
            seed=self.seed,
            order=order,
            stopped_ns=self._stopped_ns,
            hosts=sorted(set(hosts)),
        )
        return self._state.save(self.folder, manifest)

    def indices(self, size: int, batch: int, *, rank: int | None = None, ranks: int | None = None) -> torch.Tensor:
        """Return this rank's part of the step's global batch, out of `size` samples, shuffled anew in each epoch.

        The global batch depends on the seed and the step only, so another number of ranks shares the same samples
        differently. `rank` and `ranks` are those of data parallel, if there are other kinds of parallelism.
        """
        rank, ranks = self.rank if rank is None else rank, self.ranks if ranks is None else ranks
        if batch % ranks or not ranks <= batch <= size:
            raise ArgumentError(
                f"a global batch of {batch} out of {size} samples for {ranks} ranks",
                fix="give a multiple of the ranks that is not larger than the data",
            )
        epoch, at = divmod(self.step, size // batch)
        if self._shuffle is None or self._shuffle[0] != (epoch, size):
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._shuffle = (epoch, size), torch.randperm(size, generator=generator)
        part = batch // ranks
        begin = at * batch + rank * part
        return self._shuffle[1][begin : begin + part]

    # -- orders -------------------------------------------------------------------------------------------------------

    def _agree(self) -> OrderKind | None:
        """Return the order that any rank had at the step before: the vote travels while this step is computed."""
        group = self._state.group
        if group is None:
            return self._watch.order
        order = None
        if self._vote is not None:
            votes, work = self._vote
            work.wait()
            order = _ORDERS[int(votes.item()) - 1] if votes.item() > 0 else None
        own = self._watch.order
        votes = torch.tensor([0 if own is None else 1 + _ORDERS.index(own)])
        self._vote = votes, c10d.all_reduce(votes, op=c10d.ReduceOp.MAX, group=group, async_op=True)
        return order

    def _leave(self, order: OrderKind) -> NoReturn:
        if self._vote is not None:
            self._vote[1].wait()
        self.save(order)
        self._note_phase("moved", **(OrderFile(self.folder).take() if self.rank == 0 else {}))
        raise SystemExit(0)

    # -- notes for the launcher ----------------------------------------------------------------------------------------

    def _note_phase(self, phase: JobPhase, **order: Any) -> None:
        if self.rank == 0:
            about = asdict(self.migration) if self.migration else None
            write_json(
                self.folder / "status.json", {"phase": phase, "step": self.step, "last_move": about, "order": order}
            )

    def _note_resumed(self) -> None:
        if self._resumed is None:
            return
        (manifest, load_s), self._resumed = self._resumed, None
        now_ns = time.time_ns()
        self.migration = Migration(
            step=manifest.step,
            order=manifest.order,
            ranks_before=manifest.ranks,
            ranks_after=self.ranks,
            save_s=(manifest.saved_ns - manifest.stopped_ns) * 1e-9,
            load_s=load_s,
            lost_s=(now_ns - manifest.stopped_ns) * 1e-9,
        )
        self._note_phase("running")


def migratable(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    folder: str | Path,
    states: Mapping[str, Stateful] | None = None,
    policy: ThermalPolicy | str | Path | None = None,
    orders: Sequence[Callable[[], OrderKind | None]] = (),
    signals: Sequence[signal.Signals] = (signal.SIGUSR1,),
    hold_s: float = HOLD_S,
    every: int | None = None,
    seed: int = 0,
) -> MigratableJob:
    """Return a job that leaves when it is ordered to, and continues if its folder has a checkpoint.

    `model` may be plain, DDP, FSDP2 or made of DTensors. `states` are saved beside it: schedulers, scalers, loaders.
    `policy` is a thermal policy or a file of one: with `migration_on_overheat`, a node above `hotspot_threshold` for
    `hold_s` orders a move. `orders` are asked about once a second. `every`: also write a checkpoint every so many
    steps.
    """
    folder = Path(folder)
    group = None
    if c10d.is_available() and c10d.is_initialized() and c10d.get_world_size() > 1:
        # A group of its own: votes must not queue behind gradients, and NCCL cannot send host memory.
        group = c10d.new_group(backend="gloo")
    state = JobCheckpoint(model, optimizer, states or {}, group)
    sources: list[Source] = list(orders)
    if state.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        sources.append(OrderFile(folder))
    threshold_c = _find_threshold(policy)
    if threshold_c is not None:
        sources.append(OverheatSource(read_hottest_c, threshold_c, hold_s=hold_s))
    return MigratableJob(state, folder, OrderWatch(sources, signals), seed=seed, every=every)


def _find_threshold(policy: ThermalPolicy | str | Path | None) -> float | None:
    if isinstance(policy, (str, Path)):
        from ..policy import load_policies

        policy = load_policies(policy).thermal_policy
    return policy.hotspot_threshold_c if policy is not None and policy.migration_on_overheat else None
