"""The examples of Slurm and Kubernetes against a real governor: fake `scontrol`, fake API server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tessera.fleet.governor.tokens import Role
from tessera.fleet.leases import BudgetPolicy, JobState, PowerRequest

from governor_process import LocalGovernor
from places import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "governor"
POLICY = BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0)
SCONTROL = """#!/bin/bash
if [ "$2" = hostnames ]; then echo n0; echo n1; else
echo "JobId=7 Requeue=1 Restarts=${FAKE_RESTARTS:-0} BatchFlag=1 TimeLimit=1-02:30:00 NodeList=n[0-1]"; fi
"""


@pytest.fixture
def governor(tmp_path):
    with LocalGovernor(tmp_path / "state", POLICY) as running:
        for name in ("n0", "n1"):
            running.client().join(name, 100.0, session="s")
        token = tmp_path / "job.token"
        token.write_text(running.tokens[Role.JOB] + "\n")
        token.chmod(0o600)
        yield running


def run_script(name, tmp_path, governor, **env):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    env = {
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}", "TESSERA_GOVERNOR_URL": governor.url, "SLURM_JOB_ID": "7",
        "TESSERA_GOVERNOR_TOKEN_FILE": str(tmp_path / "job.token"), "TESSERA_GOVERNOR_CA": "",
        "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_USER": "ada", **env,
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(EXAMPLES / name)], env=env, capture_output=True, text=True, check=False, timeout=600
    )


def test_a_job_of_slurm_gets_its_watts_and_gives_them_back(tmp_path, governor):
    done = run_script("slurm_prolog.sh", tmp_path, governor, SLURM_JOB_COMMENT="team=a watts=3000")
    assert (done.returncode, done.stderr) == (0, "")
    lease = governor.service.budget.queue.jobs["slurm-7-0"]
    assert lease.state is JobState.ACTIVE
    assert (dict(lease.request.watts), lease.request.user) == ({"n0": 3000.0, "n1": 3000.0}, "ada")
    assert lease.request.ttl_s == 26.5 * 3600 + 600
    assert run_script("slurm_epilog.sh", tmp_path, governor).returncode == 0
    assert governor.service.show_job("slurm-7-0").state is JobState.ENDED


def test_a_job_that_slurm_requeues_starts_once_there_are_watts(tmp_path, governor):
    comment = {"SLURM_JOB_COMMENT": "watts=3000"}
    governor.client().request(PowerRequest(job="other", watts={"n0": 9000.0}, min_share=1.0))
    full = run_script("slurm_prolog.sh", tmp_path, governor, TESSERA_GOVERNOR_WAIT_S="1", **comment)
    assert full.returncode == 1 and "no watts for job 7" in full.stderr
    governor.client().release("other")
    again = run_script("slurm_prolog.sh", tmp_path, governor, FAKE_RESTARTS="1", **comment)
    assert (again.returncode, again.stderr) == (0, "")
    assert governor.service.show_job("slurm-7-1").state is JobState.ACTIVE
    # Slurm counts a requeue before the epilog of the run that it ends.
    assert run_script("slurm_epilog.sh", tmp_path, governor, FAKE_RESTARTS="2").returncode == 0
    assert governor.service.show_job("slurm-7-1").state is JobState.ENDED


def test_a_job_without_watts_runs_and_one_that_cannot_have_them_is_told(tmp_path, governor):
    assert run_script("slurm_prolog.sh", tmp_path, governor, SLURM_JOB_COMMENT="").returncode == 0
    assert not governor.service.budget.queue.jobs
    done = run_script("slurm_prolog.sh", tmp_path, governor, SLURM_JOB_COMMENT="watts=20000")
    assert done.returncode == 1
    assert "can never be admitted" in done.stderr


class _Cluster(BaseHTTPRequestHandler):
    pods: dict[str, dict] = {}  # noqa: RUF012

    def log_message(self, *args):
        pass

    def _answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer({"items": list(self.pods.values())})

    def do_PATCH(self):
        patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.pods[self.path.rpartition("/")[2]]["spec"]["schedulingGates"] = patch[0]["value"]
        self._answer({})


def pod(name, watts):
    asked = {"tessera.energy/watts": watts}
    return {
        "metadata": {"uid": f"uid-{name}", "name": name, "namespace": "team", "annotations": asked},
        "spec": {
            "schedulingGates": [{"name": "tessera.energy/watts"}],
            "nodeSelector": {"kubernetes.io/hostname": "n0"},
        },
        "status": {"phase": "Pending"},
    }  # fmt: skip


def test_pods_wait_behind_their_gate_until_there_are_watts(tmp_path, governor):
    spec = importlib.util.spec_from_file_location("kubernetes_controller", EXAMPLES / "kubernetes_controller.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _Cluster.pods = {"one": pod("one", "16000"), "two": pod("two", "16000")}  # at least half of it: 8 kW each
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Cluster)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        token = tmp_path / "job.token"
        cluster = module.JsonService(f"http://127.0.0.1:{server.server_port}", token, None)
        controller = module.Controller(cluster, module.JsonService(governor.url, token, None))
        controller.reconcile()
        gates = {name: bool(p["spec"]["schedulingGates"]) for name, p in _Cluster.pods.items()}
        assert gates == {"one": False, "two": True}
        _Cluster.pods["one"]["status"]["phase"] = "Succeeded"
        controller.reconcile()  # gives the watts back
        controller.reconcile()
        assert not _Cluster.pods["two"]["spec"]["schedulingGates"]
        assert governor.service.show_job("pod-uid-one").state is JobState.ENDED
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
