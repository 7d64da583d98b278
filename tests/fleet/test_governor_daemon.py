"""The node's daemon: it keeps to its lease, falls back in time without a governor, and schedules follow it."""

from __future__ import annotations

import json
import threading
import time

import pynvml as nv
import pytest

from tessera import schedule
from tessera.clock import boot_id, read_boot_clock
from tessera.errors import ActuatorError, ActuatorPermission, GovernorError, ScheduleError
from tessera.fleet.governor.daemon import NO_SHARE, DriverCap, LeaseFile, NodeDaemon, find_node_power
from tessera.fleet.governor.tokens import Role
from tessera.fleet.leases import BudgetPolicy, PowerRequest
from tessera.monitor.snapshot import DomainReading, Snapshot
from tessera.report.governor import describe_daemon
from tessera.runtime import options
from tessera.runtime.cap_report import CapTracker
from tessera.runtime.control_loop import ControlLoop
from tessera.runtime.node_lease import LeaseReader, NodeLease, check_lease, write_lease
from tessera.units import ScopedPower

from fakes.nvml import Scenario
from governor_process import LocalGovernor

POLICY = BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0)


class Clock:
    now_s = 1e6

    def __call__(self):
        return self.now_s


class Caps:
    """An applier that notes what it is told, and may refuse."""

    def __init__(self):
        self.told, self.refuses, self.closed = [], False, False

    def apply(self, cap_w, guaranteed_w, end_s):
        if self.refuses:
            raise ActuatorError("the driver refuses")
        self.told.append((cap_w, guaranteed_w))

    def close(self):
        self.closed = True


@pytest.fixture
def governor(tmp_path):
    with LocalGovernor(tmp_path, POLICY) as running:
        yield running


def make(governor, caps, clock, **more):
    client = governor.client(Role.NODE)
    return NodeDaemon(
        governor=client, node="n0", guaranteed_w=500.0, appliers=[caps], clock=clock, settle_s=0.0, **more
    )


def step(daemon):
    daemon.beat()
    daemon.enforce()


def test_a_node_keeps_to_its_lease_and_falls_back_before_it_ends(governor):
    caps, clock, seen = Caps(), Clock(), []
    daemon = make(governor, caps, clock, on_change=seen.append, read_power=lambda: (321.0, 4000.0))
    daemon.enforce()
    assert seen[-1].cap_w is None and "waits for the governor" in describe_daemon(seen[-1])  # it is not 0 W
    step(daemon)
    assert caps.told == [(500.0, 500.0)]
    governor.client().request(PowerRequest(job="a", watts={"n0": 3000.0}))
    step(daemon)
    assert caps.told[-1] == (3000.0, 500.0)
    assert seen[-1].jobs == ("a",) and seen[-1].measured_w == 321.0
    status = governor.client().describe()
    assert (status.nodes[0].measured_w, status.measured_w) == (321.0, 4000.0)  # the rack's meter, too
    clock.now_s += 16.9  # nothing is heard any more
    daemon.enforce()
    assert caps.told[-1] == (3000.0, 500.0)
    clock.now_s += 0.2
    daemon.enforce()
    assert caps.told[-1] == (500.0, 500.0)
    assert not seen[-1].leased
    assert governor.service.describe().exposure_w == 3000.0  # the governor still counts it


def test_a_cap_that_is_refused_is_said_and_keeps_no_other_applier_from_it(governor):
    caps, other, seen = Caps(), Caps(), []
    daemon = make(governor, caps, Clock(), on_change=seen.append)
    daemon.appliers = [caps, other]
    caps.refuses = True
    step(daemon)
    assert other.told == [(500.0, 500.0)] and caps.told == []
    assert seen[-1].problem == "the driver refuses"
    caps.refuses = False
    step(daemon)
    assert caps.told == [(500.0, 500.0)]
    assert seen[-1].problem is None


def test_a_node_whose_share_is_not_free_says_so(governor):
    full = governor.client()
    full.join("busy", 500.0, session="s")
    full.heartbeat("busy", session="s", acked=0, measured_w=None)
    full.request(PowerRequest(job="a", watts={"busy": 10_000.0}, min_share=1.0))
    full.heartbeat("busy", session="s", acked=1, measured_w=None)
    seen = []
    daemon = make(governor, Caps(), Clock(), on_change=seen.append)
    step(daemon)
    assert seen[-1].cap_w == 0.0 and seen[-1].problem == NO_SHARE
    assert "guaranteed share is not free yet" in describe_daemon(seen[-1])
    full.release("a")
    full.heartbeat("busy", session="s", acked=2, measured_w=None)
    full.heartbeat("busy", session="s", acked=3, measured_w=None)
    step(daemon)
    assert (seen[-1].cap_w, seen[-1].problem) == (500.0, None)


def test_only_what_is_in_force_is_confirmed(governor):
    caps, clock = Caps(), Clock()
    daemon = make(governor, caps, clock)
    step(daemon)
    step(daemon)
    node = governor.service.budget.ledger.nodes["n0"]
    assert node.acked == 1
    caps.refuses = True
    step(daemon)
    step(daemon)
    assert node.acked == 2  # of before
    caps.refuses = False
    step(daemon)
    step(daemon)
    assert node.acked == 5


def test_a_new_cap_is_confirmed_once_it_had_time_to_take_effect(governor):
    caps, clock = Caps(), Clock()
    daemon = make(governor, caps, clock)
    daemon.settle_s = 1.0
    step(daemon)
    clock.now_s += 0.9
    step(daemon)
    assert daemon._holder.acked == 0
    clock.now_s += 0.2
    daemon.enforce()
    assert daemon._holder.acked == 2  # the cap did not change meanwhile


def test_a_governor_that_was_set_up_anew_is_joined_again(governor):
    caps, clock = Caps(), Clock()
    daemon = make(governor, caps, clock)
    step(daemon)
    governor.client().join("n0", 500.0, session="another")
    with pytest.raises(GovernorError, match="another daemon"):
        step(daemon)
    step(daemon)  # joins again
    assert governor.service.budget.ledger.nodes["n0"].sessions[-1] == daemon._session


def test_the_daemon_runs_without_a_governor_and_stops(tmp_path):
    caps, stop = Caps(), threading.Event()

    class Silent:
        def join(self, *args, **more):
            raise GovernorError("the governor cannot be asked")

    states = []
    daemon = NodeDaemon(governor=Silent(), node="n0", guaranteed_w=1.0, appliers=[caps], on_change=states.append)
    thread = threading.Thread(target=daemon.run, args=(stop,))
    thread.start()
    deadline = time.monotonic() + 600.0
    while not any(s.problem == "the governor cannot be asked" for s in states) and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    thread.join(600.0)
    assert not thread.is_alive()
    assert any(s.problem == "the governor cannot be asked" for s in states)
    assert caps.closed and not caps.told


def test_power_of_a_node_is_the_bmcs_or_the_supplies_or_the_sum():
    def reading(domain, power_w, counted=False):
        return DomainReading(
            domain=domain, label="", source="x", basis="measured", counted=counted, resolution_s=1.0, power_w=power_w
        )

    def power(*readings):
        return find_node_power(
            Snapshot(
                epoch_s=0.0,
                time_s=1.0,
                readings=readings,
                power_w=700.0,
                mean_w=None,
                energy_j=0.0,
                error_j=0.0,
                basis="measured",
            )
        )

    gpu = reading("gpu0", 700.0, counted=True)
    assert power(gpu) == (700.0, None)
    assert power(gpu, reading("node.psu0", 500.0), reading("node.psu1", 450.0)) == (950.0, None)
    assert power(gpu, reading("node", 1000.0), reading("node.psu0", 500.0)) == (1000.0, None)
    pdus = [reading("rack.pdu.a", 3000.0), reading("rack.pdu.b", 2000.0), reading("rack.pdu.a.outlet.1", 100.0)]
    assert power(gpu, *pdus, reading("rack.pdu.c", None)) == (700.0, 5000.0)


# -- the lease file -------------------------------------------------------------------------------------------------


def test_a_lease_ends_by_itself_for_whoever_reads_it(tmp_path):
    path, now_s = tmp_path / "lease.json", read_boot_clock()
    reader = LeaseReader(path)
    assert reader.allow_w() is None
    LeaseFile(path).apply(900.0, 300.0, now_s + 1000.0)
    assert reader.allow_w() == 900.0
    LeaseFile(path).apply(900.0, 300.0, now_s - 1.0)
    assert reader.allow_w() == 300.0
    write_lease(path, NodeLease(cap_w=900.0, guaranteed_w=300.0, end_s=now_s + 1000.0, boot="another"))
    assert reader.allow_w() == 300.0
    path.unlink()
    assert reader.allow_w() == 300.0
    assert json.loads(json.dumps(boot_id()))


def test_a_lease_whose_folder_cannot_be_made_does_not_end_the_daemon(governor, tmp_path):
    (tmp_path / "file").touch()
    seen = []
    daemon = make(governor, LeaseFile(tmp_path / "file" / "lease.json"), Clock(), on_change=seen.append)
    step(daemon)
    assert "cannot write" in seen[-1].problem


def test_a_lease_that_others_could_write_is_not_read(tmp_path):
    path = tmp_path / "lease.json"
    LeaseFile(path).apply(900.0, 300.0, read_boot_clock() + 1000.0)
    path.chmod(0o666)
    assert LeaseReader(path).allow_w() is None
    path.chmod(0o644)
    (tmp_path / "link.json").symlink_to(path)
    assert LeaseReader(tmp_path / "link.json").allow_w() is None
    path.write_text("{")
    assert LeaseReader(path).allow_w() is None


def test_a_schedule_follows_the_lease(tmp_path, monkeypatch):
    path = tmp_path / "lease.json"
    monkeypatch.setenv("TESSERA_GOVERNOR_LEASE", str(path))
    with pytest.raises(ScheduleError, match="no lease"):
        options.ScheduleOptions(power_cap="governor")
    LeaseFile(path).apply(900.0, 300.0, read_boot_clock() + 1000.0)
    cap = options.ScheduleOptions(power_cap="governor").cap
    assert cap is not None and (cap.scope, cap.power_w) == ("node", 900.0)

    loop = ControlLoop()
    loop._lease = LeaseReader(path)
    follower, node = CapTracker(cap, 0.2), CapTracker(ScopedPower("node", 1000.0), 0.2)
    assert loop._node_cap(follower).power_w == 900.0
    assert loop._node_cap(node).power_w == 900.0 and f"900 W ({path})" in node.notes["lease"]
    LeaseFile(path).apply(1500.0, 300.0, read_boot_clock() + 1000.0)
    assert loop._node_cap(follower).power_w == 1500.0  # followed upwards, too
    assert loop._node_cap(node).power_w == 1000.0 and not node.notes
    assert loop._node_cap(CapTracker(ScopedPower("gpu", 2000.0), 0.2)).power_w == 2000.0


def test_doctor_tells_of_a_lease_and_that_one_which_has_ended_still_limits(tmp_path):
    path = tmp_path / "lease.json"
    assert check_lease(path) == []
    LeaseFile(path).apply(900.0, 300.0, read_boot_clock() + 1000.0)
    (live,) = check_lease(path)
    assert live.ok and "allows this node 900 W for 1" in live.detail
    LeaseFile(path).apply(900.0, 300.0, read_boot_clock() - 1.0)
    (ended,) = check_lease(path)
    assert not ended.ok and "300 W" in ended.detail and f"rm {path}" in ended.fix


def test_a_scheduled_function_runs_under_a_lease(tmp_path, monkeypatch):
    path = tmp_path / "lease.json"
    monkeypatch.setenv("TESSERA_GOVERNOR_LEASE", str(path))
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path / "run"))
    LeaseFile(path).apply(5000.0, 300.0, read_boot_clock() + 1000.0)

    @schedule(power_cap="governor")
    def work():
        return 7

    assert [work() for _ in range(3)] == [7, 7, 7]
    report = work.report()
    assert report.cap is not None and report.cap.power_w == 5000.0


# -- the driver, on the fake ------------------------------------------------------------------------------------------


@pytest.fixture
def limits_w(fake_nvml, monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TESSERA_WATCHER", "0")
    fake_nvml.set(Scenario(gpus=2))
    nv.nvmlInit()
    yield lambda: [nv.nvmlDeviceGetPowerManagementLimit(nv.nvmlDeviceGetHandleByIndex(i)) / 1000 for i in range(2)]
    nv.nvmlShutdown()


def test_the_driver_holds_the_cap_and_is_restored(limits_w):
    before = limits_w()
    driver = DriverCap(host_w=200.0)
    driver.apply(1000.0, 300.0, 0.0)
    assert limits_w() == [400.0, 400.0]
    driver.apply(1200.0, 300.0, 0.0)
    assert limits_w() == [500.0, 500.0]
    driver.apply(210.0, 300.0, 0.0)  # less than the driver accepts: as low as it goes, and said
    assert limits_w()[0] >= 100.0 and driver.notes
    driver.close()
    assert limits_w() == before


def test_a_cap_that_the_driver_refuses_at_first_is_set_at_the_next_try(limits_w, fake_nvml):
    before = limits_w()
    driver = DriverCap(host_w=200.0)
    fake_nvml.change(control="denied")
    with pytest.raises(ActuatorPermission):
        driver.apply(1000.0, 300.0, 0.0)
    fake_nvml.change(control=None)
    driver.apply(1000.0, 300.0, 0.0)
    assert limits_w() == [400.0, 400.0]
    driver.close()
    assert limits_w() == before


@pytest.mark.parametrize(
    ("role", "share_w", "code"), [(Role.JOB, 1.0, "forbidden"), (Role.NODE, 20_000.0, "too_large")]
)
def test_a_first_join_that_is_refused_for_good_ends_the_daemon(governor, role, share_w, code):
    caps = Caps()
    daemon = NodeDaemon(governor=governor.client(role), node="n0", guaranteed_w=share_w, appliers=[caps])
    worker = threading.Thread(target=daemon.run, args=(stop := threading.Event(),), daemon=True)
    worker.start()
    worker.join(60.0)
    ended = not worker.is_alive()
    stop.set()
    assert ended
    assert daemon.refusal.code == code and daemon.refusal.fix
    assert caps.closed


def test_a_daemon_that_has_joined_stays_when_its_token_is_revoked(governor):
    daemon = make(governor, Caps(), Clock())
    step(daemon)
    governor.token_file.revoke("*")
    stop, seen = threading.Event(), threading.Event()
    daemon.on_change = lambda state: seen.set() if state.problem else None
    worker = threading.Thread(target=daemon.run, args=(stop,), daemon=True)
    worker.start()
    try:
        assert seen.wait(60.0)
        assert daemon.refusal is None and worker.is_alive()
    finally:
        stop.set()
        worker.join(60.0)
