"""Tells which rank of a job this process is, by its launcher's variables. No other module reads these.

::

    torchrun, Kubernetes' training operator   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID
    Slurm (srun)                              SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID
    Open MPI (mpirun)                         OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE
    Kubernetes (an indexed Job)               JOB_COMPLETION_INDEX
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_MPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (  # rank, world size, local rank, local world size, job
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"),
    (f"{_MPI}RANK", f"{_MPI}SIZE", f"{_MPI}LOCAL_RANK", f"{_MPI}LOCAL_SIZE", ""),
    ("JOB_COMPLETION_INDEX", "", "", "", ""),
)
_NO_JOB = "none"  # torchrun's name for a job without a name
_JOB_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRank:
    """A rank of a job. None: its launcher does not say it. `job` is "" if the job has no name."""

    rank: int
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    job: str = ""


def find_rank(environ: Mapping[str, str] | None = None) -> JobRank | None:
    """Return the rank that this process is; None if no launcher started it."""
    env = os.environ if environ is None else environ
    for rank, world, local_rank, local_world, job in _LAUNCHERS:
        number = _number(env, rank)
        if number is None or (rank == "SLURM_PROCID" and not _is_task(env)):
            continue
        world_size = _number(env, world)
        on_one_node = rank == "SLURM_PROCID" and env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"
        name = env.get(job, "")
        return JobRank(
            rank=number,
            world_size=world_size,
            local_rank=_number(env, local_rank),
            local_world_size=world_size if on_one_node else _number(env, local_world),
            job="" if name == _NO_JOB else name[:_JOB_LETTERS],
        )
    return None


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None


def _is_task(env: Mapping[str, str]) -> bool:
    """Return whether this is one of several tasks of srun. A batch script has the same variables but no step."""
    is_batch_script = "SLURM_STEP_ID" not in env and "SLURM_JOB_CPUS_PER_NODE" in env
    return not is_batch_script and (_number(env, "SLURM_NTASKS") or 1) > 1
