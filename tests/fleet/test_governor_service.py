"""The governor's store and service: what is on disk, what a restart and a reboot keep, and who may do what."""

from __future__ import annotations

import os
import stat

import pytest

from tessera.errors import ArgumentError, GovernorError, GovernorRefusal
from tessera.fleet import budget as budget_module
from tessera.fleet.governor import service as service_module
from tessera.fleet.governor.service import GovernorService, open_service
from tessera.fleet.governor.store import LeaseStore, encode_row
from tessera.fleet.governor.tokens import PREFIX, Role, TokenFile, read_secret
from tessera.fleet.leases import BudgetPolicy, JobState, PowerRequest

POLICY = BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0)


class Clock:
    now_s = 5000.0

    def __call__(self):
        return self.now_s


def save(service):
    service.store.write(service.take_changes())


@pytest.fixture
def clock():
    return Clock()


def start(tmp_path, clock, policy=POLICY):
    return GovernorService(policy, LeaseStore(tmp_path / "leases.db"), clock=clock)


def fill(service):
    service.join("n0", 1000.0, None, "s")
    service.join("n1", 1000.0, 4000.0, "s")
    service.request(PowerRequest(job="a", watts={"n0": 6000.0}, min_share=1.0, ttl_s=100.0))
    service.request(PowerRequest(job="b", watts={"n1": 4000.0}, min_share=1.0, ttl_s=100.0))
    service.request(PowerRequest(job="gone", watts={"n1": 1.0}))
    service.release("gone")
    return service.heartbeat("n0", "s", 0, 5900.0)


def test_a_restart_keeps_every_lease(tmp_path, clock):
    service = start(tmp_path, clock)
    grant = fill(service)
    assert grant.cap_w == 6000.0
    before = service.describe()
    save(service)
    service.store.close()
    again = start(tmp_path, clock)
    after = again.describe()
    assert [(j.job, j.state, j.ends_in_s) for j in after.jobs] == [(j.job, j.state, j.ends_in_s) for j in before.jobs]
    assert after.exposure_w == before.exposure_w == 7000.0
    assert again.show_job("gone").state is JobState.ENDED
    assert again.heartbeat("n0", "s", grant.seq, None).seq == grant.seq + 1


def test_ended_jobs_are_decoded_only_when_asked_for_and_the_oldest_is_forgotten_first(tmp_path, clock, monkeypatch):
    service = start(tmp_path, clock)
    fill(service)
    save(service)
    for name in ("z", "y", "x"):
        service.request(PowerRequest(job=name, watts={"n1": 1.0}))
        service.release(name)
        save(service)
    service.store.close()
    again = start(tmp_path, clock)
    assert list(again.budget.ended) == ["gone", "z", "y", "x"]
    assert all(isinstance(job, bytes) for job in again.budget.ended._jobs.values())
    assert again.request(PowerRequest(job="y", watts={"n1": 1.0})).state is JobState.ENDED  # a late copy
    monkeypatch.setattr(budget_module, "ENDED_KEPT", 4)
    again.release("b")
    save(again)
    again.store.close()
    last = start(tmp_path, clock)
    assert list(last.budget.ended) == ["z", "y", "x", "b"] and list(last.budget.queue.jobs) == ["a"]


def test_a_state_of_the_first_version_is_read(tmp_path, clock):
    """There, jobs that had ended stood among the others."""
    service = start(tmp_path, clock)
    fill(service)
    service.store.write([encode_row("job", "gone", service.budget.ended["gone"])])
    service.store._db.execute("DROP TABLE ended")
    service.store._db.execute("PRAGMA user_version=1")
    service.store.close()
    again = start(tmp_path, clock)
    assert again.show_job("gone").state is JobState.ENDED and "gone" not in again.budget.queue.jobs


def test_what_was_not_written_was_never_promised(tmp_path, clock):
    """A kill between the decision and the disk: nobody got an answer, and the restart knows nothing of it."""
    service = start(tmp_path, clock)
    fill(service)
    save(service)
    service.request(PowerRequest(job="lost", watts={"n1": 1.0}))
    service.store.close()
    with pytest.raises(GovernorRefusal, match="no job 'lost'"):
        start(tmp_path, clock).show_job("lost")


def test_after_a_reboot_leases_last_as_long_as_they_still_had(tmp_path, clock, monkeypatch):
    service = start(tmp_path, clock)
    fill(service)
    save(service)
    service.store.close()
    monkeypatch.setattr(service_module, "boot_id", lambda: "another")
    clock.now_s = 3.0  # the clock begins again
    again = start(tmp_path, clock)
    assert again.show_job("a").ends_in_s == 100.0
    assert again.describe().exposure_w == 7000.0
    clock.now_s = 3.0 + 19.9
    assert again.describe().exposure_w == 7000.0
    clock.now_s = 3.0 + 20.1
    assert again.describe().exposure_w == 2000.0
    clock.now_s = 104.0
    assert again.show_job("a").state is JobState.ENDED


def test_one_file_has_one_governor(tmp_path, clock):
    service = start(tmp_path, clock)
    with pytest.raises(GovernorError, match="in use"):
        LeaseStore(tmp_path / "leases.db")
    service.store.close()
    assert stat.S_IMODE((tmp_path / "leases.db").stat().st_mode) == 0o600


def test_a_cap_below_the_guaranteed_shares_does_not_start(tmp_path, clock):
    service = start(tmp_path, clock)
    fill(service)
    save(service)
    service.store.close()
    with pytest.raises(GovernorError, match="less than the nodes' guaranteed shares"):
        open_service(BudgetPolicy(cap_w=1500.0, breaker_margin=1.0), tmp_path / "leases.db")
    again = start(tmp_path, clock, BudgetPolicy(cap_w=4000.0, breaker_margin=1.0))  # it let go of the file
    assert again.heartbeat("n1", "s", 0, None).cap_w == 1000.0  # n0 may still draw 6000 W


def test_a_damaged_or_newer_file_is_refused(tmp_path):
    path = tmp_path / "leases.db"
    path.write_bytes(b"this is not a database" * 100)
    path.chmod(0o600)
    with pytest.raises(GovernorError, match="cannot be read or written"):
        LeaseStore(path)
    path.unlink()
    store = LeaseStore(path)
    store.write([encode_row("job", "x", {"nonsense": 1})])
    with pytest.raises(GovernorError, match="cannot be read"):
        store.read()
    store._db.execute("PRAGMA user_version=99")
    store.close()
    with pytest.raises(GovernorError, match="another version"):
        LeaseStore(path)


def test_a_full_disk_writes_all_or_nothing(tmp_path, clock):
    service = start(tmp_path, clock)
    fill(service)
    rows = service.take_changes()
    service.store._db.execute("PRAGMA max_page_count=1")  # no page more
    big = [encode_row("job", f"j{i}", "x" * 5000) for i in range(100)]
    with pytest.raises(GovernorError) as failed:
        service.store.write([*rows, *big])
    assert "full" in str(failed.value.why)
    assert service.store.read()["job"] == {}


def test_tokens_have_roles_and_only_their_hash_is_kept(tmp_path):
    tokens = TokenFile(tmp_path / "state" / "tokens.json")
    node, job = tokens.create("n1", Role.NODE), tokens.create("slurm", Role.JOB)
    assert node.startswith(PREFIX)
    text = tokens.path.read_text()
    assert node not in text and job not in text
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    again = TokenFile(tokens.path)
    found = again.find(node)
    assert found is not None
    assert found.may(Role.NODE, "n1") and found.may(Role.READ)
    assert not found.may(Role.NODE, "n2") and not found.may(Role.JOB) and not found.may(Role.OPERATOR)
    any_node = again.find(again.create("*", Role.NODE))
    assert any_node is not None and any_node.may(Role.NODE, "n2")
    operator = again.find(again.create("op", Role.OPERATOR))
    assert operator is not None and all(operator.may(role, "n9") for role in Role)
    assert again.find("") is None and again.find(PREFIX) is None
    with pytest.raises(ArgumentError, match="already"):
        again.create("n1", Role.NODE)
    tokens.revoke("n1")
    assert again.find(node) is None  # another process sees it
    with pytest.raises(ArgumentError, match="no token 'slrm'; did you mean 'slurm'"):
        tokens.revoke("slrm")


def test_files_of_tokens_that_others_can_read_are_refused(tmp_path):
    tokens = TokenFile(tmp_path / "tokens.json")
    secret = tokens.create("x", Role.READ)
    os.chmod(tokens.path, 0o644)
    with pytest.raises(GovernorError, match="open to other users"):
        TokenFile(tokens.path).find(secret)
    own = tmp_path / "own.token"
    own.write_text(secret + "\n")
    with pytest.raises(ArgumentError, match="open to other users"):
        read_secret(own)
    own.chmod(0o600)
    assert read_secret(own) == secret
