"""`tessera run --nproc`: torchrun's ranks as one job; and ranks that another launcher started."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tessera.cli.run import command
from tessera.errors import ArgumentError
from tessera.profile.runfile import RunFile
from warm_command import run_command

STEPS, LATE_S, FLOATS = 4, 0.6, 4096
# Ranks 0 and 1 are a tp group, 0 and 2 a dp group. Rank 1 is late to its all-reduce with rank 3: it sleeps once rank 3
# is there, however late a busy machine makes that.
SCRIPT = f"""
import sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
weight = torch.ones({FLOATS}, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
store = dist.distributed_c10d._get_default_store()
for step in range({STEPS}):
    (weight * 2).sum().backward()
    dist.all_reduce(weight.grad[:8].clone(), group=mesh.get_group("tp"))
    if dist.get_rank() == 3:
        store.set(f"waits{{step}}", "1")
    if dist.get_rank() == 1:
        store.wait([f"waits{{step}}"])
        time.sleep({LATE_S})
    dist.all_reduce(weight.grad, group=mesh.get_group("dp"))
    optimizer.step()
store.set(f"done{{dist.get_rank()}}", "1")
if "fail" in sys.argv and dist.get_rank() == 2:
    store.wait([f"done{{rank}}" for rank in range(4)])  # torchrun ends the others at once
    sys.exit(7)
dist.destroy_process_group()
"""


def tessera(folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), **environ}
    return run_command(*args, cwd=folder, env=env, modules=("cli.main", "cli.run", "analyze.answer", "report.run_html"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Four ranks, one of which fails after the last step."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT)
    done = tessera(folder, "run", "--nproc", "4", "--json", "train.py", "fail")
    assert done.returncode == 1, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def test_the_ranks_of_a_job_are_one_answer(job: tuple[Path, dict[str, Any], str]) -> None:
    folder, said, _ = job
    assert sorted(p.name for p in (folder / "runs/train").iterdir()) == [f"rank{r}.tessera" for r in range(4)]
    assert said["path"] == "runs/train.tessera" and said["run"]["steps"] == STEPS
    ranks = {r["rank"]: r for r in said["job"]["ranks"]}
    assert list(ranks) == [0, 1, 2, 3] and said["job"]["missing_ranks"] == []
    # Each rank has the joules of its own processes, and they are those of the job.
    assert sum(r["energy_j"] for r in ranks.values()) == pytest.approx(said["run"]["energy_j"])
    assert all(r["steps"] == STEPS - 1 and r["steps_per_s"] > 0 and 0 <= r["busy_share"] <= 1 for r in ranks.values())
    assert said["returncode"] == 1 and ranks[2]["returncode"] == 7


def test_collectives_of_gloo_are_matched_by_group(job: tuple[Path, dict[str, Any], str]) -> None:
    rows = {r["name"]: r for r in job[1]["job"]["collectives"]}
    assert {name: r["count"] for name, r in rows.items()} == {"AllReduce[dp]": 2 * STEPS, "AllReduce[tp]": 2 * STEPS}
    dp = rows["AllReduce[dp]"]
    assert (dp["bytes"], dp["ranks"], dp["path"]) == (2 * STEPS * 4 * FLOATS, 2, "within a node")
    assert dp["latency_s"] < LATE_S and dp["worst_skew_s"] > 0.5 * LATE_S, "waiting is skew, not duration"
    assert dp["energy_j"] is not None and 0 <= dp["overlap_pct"] <= 100


def test_the_rank_that_sleeps_is_the_straggler(job: tuple[Path, dict[str, Any], str]) -> None:
    ranks = {r["rank"]: r for r in job[1]["job"]["ranks"]}
    assert [r for r in ranks if ranks[r]["straggler"]] == [1]
    # Rank 3 waits for rank 1 in their dp group in every step that was watched.
    assert ranks[1]["last"] >= STEPS - 1 and ranks[1]["delays_s"] > 0.5 * LATE_S * (STEPS - 1)
    assert ranks[3]["wait_s"] > 0.5 * LATE_S * (STEPS - 1)


def test_a_report_of_the_folder_and_of_the_merged_run_say_the_same(job: tuple[Path, dict[str, Any], str]) -> None:
    folder, said, _ = job
    answers = [
        json.loads(tessera(folder, "report", path, "--json").stdout) for path in ("runs/train.tessera", "runs/train")
    ]
    assert answers[0]["answer"]["job"] == answers[1]["answer"]["job"] == said["job"]
    assert answers[0]["run"] == answers[1]["run"] == said["run"]
    screen = tessera(folder, "report", "runs/train", COLUMNS="100").stdout
    assert "AllReduce[dp]    latency=" in screen and "bandwidth=" in screen
    assert "rank 2 failed with exit code 7" in screen and "rank 1 is the straggler" in screen
    page = (folder / "runs/train.html").read_text()
    assert "<section id='ranks'>" in page and "class='heat'" in page and "AllReduce[tp]" in page


def test_wrong_ranks_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("")
    for args, text in (
        (["--nproc", "none"], "--nproc none is not a number of ranks"),
        (["--nproc", "0"], "is not a number of ranks"),
        (["--torchrun", "--nnodes 2"], "without --nproc"),
        (["--nproc", "2", "--counters"], "one process only"),
    ):
        done = CliRunner().invoke(command, [*args, "x.py"])
        assert isinstance(done.exception, ArgumentError) and text in str(done.exception)
    Path("job").mkdir()
    done = CliRunner().invoke(command, ["--nproc", "2", "--out", "job.tessera", "x.py"])
    assert "job already exists" in str(done.exception)
    assert not Path("runs").exists()


def test_tasks_of_srun_write_into_one_folder_and_the_first_reports(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import time; time.sleep(0.7)")
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"}
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    second = tessera(tmp_path, "run", "x.py", SLURM_PROCID="1", **slurm)
    assert "rank 1 wrote runs/x.4711/rank1.tessera" in second.stderr and not second.stdout
    first = tessera(tmp_path, "run", "x.py", SLURM_PROCID="0", **slurm)
    assert first.returncode == 0 and "others waited" in first.stderr, first.stderr
    assert (tmp_path / "runs/x.4711.tessera").exists() and (tmp_path / "runs/x.4711.html").exists()
    with RunFile(tmp_path / "runs/x.4711/rank0.tessera") as run:
        assert (run.get("rank"), run.get("world_size")) == (0, 2)


def test_rank_0_says_how_to_merge_what_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import time; time.sleep(0.7)")
    done = tessera(tmp_path, "run", "x.py", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    assert "this is rank 0 of 2; when all have ended: tessera report runs/x" in done.stderr, done.stderr
    assert not (tmp_path / "runs/x.tessera").exists()
