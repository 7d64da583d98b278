"""`tessera governor` as a stranger types it: one machine, from serve to release, and a kill between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessera.cli import governor as command_module
from tessera.errors import GovernorError
from tessera.fleet.governor.client import GovernorClient
from tessera.fleet.governor.tokens import Role, TokenFile, read_secret
from tessera.fleet.leases import JobState, PowerRequest

from governor_process import GovernorProcess


def tessera(*words: str, env: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tessera", "governor", *words],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_what_is_typed_next_reaches_this_governor(tmp_path, monkeypatch):
    monkeypatch.setattr(command_module, "default_state", lambda: tmp_path / "own")
    own = command_module._join_command("http://127.0.0.1:9410", tmp_path / "own", None)
    assert own == "tessera governor join --guaranteed 300W"
    other = command_module._join_command("https://127.0.0.1:9411", tmp_path / "a rack", Path("cert.pem"))
    token = tmp_path / "a rack" / "operator.token"
    assert other == f"{own} --url https://127.0.0.1:9411 --token-file '{token}' --ca cert.pem"


def test_a_first_start_makes_an_operator_also_where_a_node_has_a_token(tmp_path):
    TokenFile(tmp_path / "tokens.json").create("node1", Role.NODE)
    tokens = command_module._first_token(tmp_path)
    made = tokens.find(read_secret(tmp_path / "operator.token"))
    assert made.role is Role.OPERATOR
    tokens.revoke("operator")
    assert [t.name for t in command_module._first_token(tmp_path).read()] == ["node1"], "what was revoked stays so"


@pytest.fixture
def governor(tmp_path):
    process = GovernorProcess(tmp_path / "state", "--cap", "10kW", "--margin", "100%", "--soft-start", "0s")
    yield process
    if process.process is not None and process.process.poll() is None:
        process.stop()


def test_from_serve_to_release(tmp_path, governor):
    address = governor.start()
    env = {
        "TESSERA_GOVERNOR_URL": address.url,
        "TESSERA_GOVERNOR_TOKEN_FILE": str(tmp_path / "state" / "operator.token"),
        "TESSERA_GOVERNOR_LEASE": str(tmp_path / "lease.json"),
        "TESSERA_RUNTIME_DIR": str(tmp_path / "run"),
    }
    join = ["governor", "join", "--guaranteed", "300W", "--node", "me", "--sensor", "modelled"]
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tessera", *join], env={**os.environ, **env}, stdout=subprocess.DEVNULL
    )
    lease = tmp_path / "lease.json"
    try:
        client = GovernorClient(address, timeout_s=30.0)
        deadline = time.monotonic() + 600.0
        while not client.describe().nodes and time.monotonic() < deadline:
            time.sleep(0.05)
        said = tessera("request", "train", "--watts", "me=2kW", "--wait", "60s", env=env)
        assert "job train: active" in said
        while not lease.exists() or json.loads(lease.read_text())["cap_w"] < 2000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        said = tessera("status", env=env)
        assert "of 10 kW allowed" in said and "train" in said and "me" in said
        assert json.loads(tessera("status", "--json", env=env))["jobs"][0]["state"] == "active"
        assert "did you mean 'me'" in tessera("request", "x", "--watts", "mee=1W", env=env, code=1)
        assert "would shed nothing" in tessera("shed", "--reason", "x", "--to", "11kW", env=env, code=1)
        assert "no emergency" in tessera("resume", env=env)
        assert "to 1 kW" in tessera("shed", "--reason", "feed B lost", "--to", "1kW", env=env)
        assert "feed B lost" in tessera("resume", env=env)
        assert "job train: active" in tessera("renew", "train", env=env)
        assert "released" in tessera("release", "train", env=env)
        assert "released" in tessera("release", "train", env=env)
        assert "ended (released)" in tessera("renew", "train", env=env, code=1)
        assert "ended (released)" in tessera("request", "train", "--watts", "me=2kW", env=env, code=1)
        client.close()
    finally:
        daemon.terminate()
        assert daemon.wait(60.0) == 0
    assert governor.stop() == 0


def test_killed_and_started_again_it_has_every_lease(governor):
    client = GovernorClient(governor.start(), timeout_s=30.0)
    client.join("n0", 300.0, session="s")
    client.request(PowerRequest(job="a", watts={"n0": 2000.0}, ttl_s=1000.0))
    seq = client.heartbeat("n0", session="s", acked=0, measured_w=None).seq
    governor.kill()
    with pytest.raises(GovernorError, match="cannot be asked"):
        client.describe()
    governor.start()
    assert client.show_job("a").state is JobState.ACTIVE
    assert client.request(PowerRequest(job="a", watts={"n0": 2000.0}, ttl_s=1000.0)).state is JobState.ACTIVE
    assert client.heartbeat("n0", session="s", acked=seq, measured_w=None).seq == seq + 1
    client.close()


def test_what_is_wrong_is_said_before_anything_listens(tmp_path):
    env = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    state = ("--state", str(tmp_path / "s"))
    assert "--cap or --policy" in tessera("serve", *state, env=env, code=2)
    assert "without TLS" in tessera("serve", "--cap", "1kW", "--listen", "0.0.0.0:0", *state, env=env, code=2)
    assert "belong together" in tessera("serve", "--cap", "1kW", "--tls-cert", "x.pem", *state, env=env, code=2)
    policy = tmp_path / "rack.yaml"
    policy.write_text("utility_spec: {crest_factor: 1.3}\n")
    assert "no section rack_power_governor" in tessera("serve", "--policy", str(policy), *state, env=env, code=2)
    assert "NODE=POWER" in tessera("request", "a", "--watts", "2kW", env=env, code=2)
    refused = json.loads(tessera("status", "--url", "http://127.0.0.1:1", "--json", env=env, code=1))
    assert refused["error"]["kind"] == "GovernorError" and refused["error"]["fix"]
    secret = tessera("token", "create", "n1", "--role", "node", *state, env=env).strip()
    assert secret.startswith("tsg_")
    assert tessera("token", "list", *state, env=env).split() == ["node", "n1"]
    assert "revoked 1" in tessera("token", "revoke", "n1", *state, env=env)


def test_a_token_is_written_for_its_owner_only(tmp_path):
    out = tmp_path / "node1.token"
    words = ["token", "create", "node1", "--role", "node", "--state", str(tmp_path / "state"), "--out", str(out)]
    said = tessera(*words, env={})
    assert out.stat().st_mode & 0o777 == 0o600
    assert read_secret(out).startswith("tsg_") and read_secret(out) not in said
    before = out.read_text()
    tessera(*words, env={}, code=2)  # there is one already: the file stays as it was
    assert out.read_text() == before
