"""From a plan to the answer: a GPT planned for two ranks, divided, trained over Gloo, profiled, merged, reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_parallel.py"
RANKS, STEPS = 2, 3


def test_a_planned_job_is_profiled_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    argv = [sys.executable, "-m", "tessera", "run", "--nproc", str(RANKS), "--html", "job.html", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*argv, str(EXAMPLE), "--steps", str(STEPS)], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"dp{RANKS}" in done.stderr, "what the planner chose"
    said = json.loads(done.stdout)
    job, whole = said["job"], said["run"]
    assert [r["rank"] for r in job["ranks"]] == list(range(RANKS)) and whole["steps"] == STEPS
    assert sum(r["energy_j"] for r in job["ranks"]) == pytest.approx(whole["energy_j"])
    # Gradients are reduced among all ranks in every step, and each of these calls was found on each of them.
    reduced = next(row for row in job["collectives"] if row["kind"] == "all_reduce")
    assert reduced["ranks"] == RANKS and reduced["count"] >= STEPS and reduced["skew_s"] is not None
    assert reduced["bytes"] > 0 and reduced["path"] == "within a node"
    assert job["steps"] and all(0.0 <= step["overlap_pct"] <= 100.0 for step in job["steps"])
    page = (tmp_path / "job.html").read_text()
    assert all(f"rank {r} steps" in page for r in range(RANKS)) and "class='heat'" in page and "Overlap by step" in page
