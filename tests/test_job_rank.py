"""Ranks by the variables of their launchers."""

from __future__ import annotations

import pytest

from tessera.job_rank import JobRank, find_rank

SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": ""}, None),
        ({"RANK": "-1"}, None),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            JobRank(rank=3, world_size=8, local_rank=1, local_world_size=2),
        ),
        ({"RANK": "0", "WORLD_SIZE": "4"}, JobRank(rank=0, world_size=4)),  # Kubernetes' training operator
        (SRUN, JobRank(rank=5, world_size=8, local_rank=1, job="4711")),
        ({**SRUN, "SLURM_STEP_ID": "0", "SLURM_JOB_CPUS_PER_NODE": "64", "SLURM_NNODES": "1"},
         JobRank(rank=5, world_size=8, local_rank=1, local_world_size=8, job="4711")),
        # The batch script itself is no task, nor is a task that is alone.
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_JOB_CPUS_PER_NODE": "64"}, None),
        ({**SRUN, "SLURM_NTASKS": "1"}, None),
        ({**SRUN, "RANK": "2", "WORLD_SIZE": "4"}, JobRank(rank=2, world_size=4)),  # torchrun inside srun
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, JobRank(rank=1, world_size=2, local_rank=1, local_world_size=2)),
        ({"JOB_COMPLETION_INDEX": "7"}, JobRank(rank=7)),
    ],
)  # fmt: skip
def test_the_rank_of_each_launcher(environ: dict[str, str], expected: JobRank | None) -> None:
    assert find_rank(environ) == expected


def test_a_long_name_of_a_job_is_shortened() -> None:
    found = find_rank({"RANK": "0", "TORCHELASTIC_RUN_ID": "3f2a9c1b-0000-4000-8000-000000000000"})
    assert found is not None and found.job == "3f2a9c1b-000"
