"""Everything that a training job needs to go on elsewhere, written and read by torch.distributed.checkpoint.

::

    folder/
      order.json              a request to move, written by `tessera fleet migrate`
      status.json             running, moved or done: what a launcher looks at when the job has ended
      step-00000120/          one checkpoint; it is complete once it has its manifest
        *.distcp, .metadata   model and optimizer, by torch.distributed.checkpoint: any number of ranks can read them
        rank-0.pt ...         what each rank has of its own: random numbers, schedules, positions in the data
        manifest.json         step, ranks, times

The folder must be on storage that the old and the new nodes can reach.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import PickleError
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as c10d
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..errors import MigrationError
from ..output import replace_when_written
from ..read_limits import read_bytes

# Checkpoints to keep: the newest, and the one before it in case the newest cannot be read.
KEPT = 2
# Most bytes of a JSON file: a scheduler or a loader has some kilobytes, our own files less.
_JSON_BYTES = 1 << 16
_STEP = re.compile(r"step-(\d{8,})")
OrderKind = Literal["request", "signal", "overheat"]
"""Who ordered a job to move: a person or a service, a signal, a temperature."""
JobPhase = Literal["running", "moved", "done"]


class Stateful(Protocol):
    """An object with a state that can be saved: schedulers, gradient scalers, loaders."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is: the next step, how many ranks wrote it, when and why. Times are epoch ns."""

    step: int
    ranks: int
    seed: int
    order: OrderKind | None
    stopped_ns: int
    saved_ns: int = 0
    hosts: Sequence[str] = ()
    version: int = 1


def find_newest(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the newest complete checkpoint; None if there is none."""
    found = sorted((p for p in folder.glob("step-*") if _STEP.fullmatch(p.name)), key=lambda p: p.name, reverse=True)
    for path in found:
        manifest = read_json(path / "manifest.json")
        if manifest is not None:
            if manifest.get("version") != 1:
                raise MigrationError(
                    f"{path} was written by a newer version of Tessera",
                    why=f"its manifest has version {manifest.get('version')!r}",
                    fix="update Tessera on this node, or remove the folder to begin anew",
                )
            return path, Manifest(**manifest)
    return None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a small object of ours; None if the file does not exist or is broken (half written on a full disk)."""
    try:
        content = json.loads(read_bytes(path, _JSON_BYTES))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small object completely or not at all."""
    with replace_when_written(path, make_folder=True) as part:
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")


class JobCheckpoint:
    """The parts of a job, and how they are written and read. `group` is a process group that can send host memory."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        states: Mapping[str, Stateful],
        group: c10d.ProcessGroup | None,
    ) -> None:
        self.model, self.optimizer, self.states, self.group = model, optimizer, states, group
        self.rank = c10d.get_rank() if group is not None else 0
        self.ranks = c10d.get_world_size() if group is not None else 1

    def save(self, folder: Path, manifest: Manifest) -> Path:
        """Write a checkpoint; it counts when all ranks have finished, which rank 0's manifest says."""
        path = folder / f"step-{manifest.step:08d}"
        own = self._pack_own()  # first, so that what cannot be packed does not stop a job half way
        if self.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            (path / "manifest.json").unlink(missing_ok=True)  # this step was saved before, by a run that was killed
        self._wait_for_all()
        with _quiet_alone():
            dcp.save(self._tensors(), checkpoint_id=path, process_group=self.group, no_dist=self.group is None)
        with replace_when_written(path / f"rank-{self.rank}.pt") as part:
            part.write_bytes(own)
        self._wait_for_all()
        if self.rank == 0:
            write_json(path / "manifest.json", asdict(replace(manifest, saved_ns=time.time_ns())))
            _remove_old(folder, path)
        self._wait_for_all()
        return path

    def load(self, path: Path, manifest: Manifest) -> None:
        """Read a checkpoint into the model, the optimizer and the rest, whatever number of ranks wrote it."""
        tensors = self._tensors()
        try:
            with _quiet_alone():
                dcp.load(tensors, checkpoint_id=path, process_group=self.group, no_dist=self.group is None)
        except (c10d.checkpoint.CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise MigrationError(
                f"{path} does not fit this model",
                why=str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__,
                fix="give the model and the optimizer that wrote it, or another folder",
            ) from error
        set_state_dict(
            self.model,
            self.optimizer if self.optimizer is not None else [],
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=_OPTIONS,
        )
        self._unpack_own(path, manifest)

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(
            self.model, self.optimizer if self.optimizer is not None else [], options=_OPTIONS
        )
        return {"model": model, "optimizer": optimizer}

    def _wait_for_all(self) -> None:
        if self.group is not None:
            c10d.barrier(self.group)

    # -- what each rank has of its own --------------------------------------------------------------------------------

    def _pack_own(self) -> bytes:
        version, internal, gauss = random.getstate()
        kind, keys, at, has_gauss, cached = np.random.get_state(legacy=True)
        own: dict[str, Any] = {
            "python": [version, list(internal), gauss],
            "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(at), int(has_gauss), cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            "states": {name: state.state_dict() for name, state in self.states.items()},
        }
        packed = io.BytesIO()
        try:
            torch.save(own, packed)
            packed.seek(0)
            torch.load(packed, weights_only=True)
        except (PickleError, AttributeError, TypeError) as error:  # pickle raises them for a local class
            raise MigrationError(
                "a state is not plain data, so it could not be read again",
                why=str(error).strip().splitlines()[0][:200],
                fix="state_dict() must return numbers, texts, tensors, lists and dicts; "
                f"given were: {', '.join(self.states) or 'none'}",
            ) from error
        return packed.getvalue()

    def _unpack_own(self, path: Path, manifest: Manifest) -> None:
        # A rank that did not exist before takes rank 0's schedules, and its own random numbers.
        source = self.rank if self.rank < manifest.ranks else 0
        try:
            own = torch.load(path / f"rank-{source}.pt", weights_only=True, map_location="cpu")
        except (OSError, PickleError, RuntimeError) as error:
            raise MigrationError(
                f"the state of rank {source} in {path} cannot be read",
                why=str(error).strip().splitlines()[0][:200],
                fix="use the checkpoint before it: remove this folder",
            ) from error
        for name, state in self.states.items():
            if name not in own["states"]:
                raise MigrationError(
                    f"{path} has no state {name!r}",
                    why=f"it has: {', '.join(own['states']) or 'none'}",
                    fix="give the same states as the run that wrote it",
                )
            state.load_state_dict(own["states"][name])
        if self.rank >= manifest.ranks:
            seed = (manifest.seed * 1_000_003 + manifest.step * 8191 + self.rank) % 2**32
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            return
        version, internal, gauss = own["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, at, has_gauss, cached = own["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), at, has_gauss, cached))
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["cuda"])


# Flat, because the parameters of a group may be on other ranks afterwards (a pipeline with other stages).
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@contextlib.contextmanager
def _quiet_alone() -> Iterator[None]:
    """Silence torch's warning to a job of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _remove_old(folder: Path, newest: Path) -> None:
    whole = sorted(p for p in folder.glob("step-*") if _STEP.fullmatch(p.name) and p.name <= newest.name)
    for path in whole[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
