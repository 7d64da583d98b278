"""One bucket for the processes of a node: real ones, each with a device that is a sleep, and one that is killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from tessera.errors import ScheduleError
from tessera.runtime.controller import PaceCommand
from tessera.runtime.node_bucket import STALE_NS, NodeBucket, NodeMember, NodeView, job_key

from places import TESTS

WORKER = """
import sys, time
sys.path.insert(0, {here!r})
from fakes.busy import BusySensor
from tessera import monitor, schedule
from tessera.monitor import Monitor

name, cap, seconds, scope = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
device = BusySensor("cpu0" if scope == "process" else name, scope=scope)
device.start()
monitor.use(Monitor([device]).start())

@schedule(power_cap=cap)
def step():
    device.work(0.002)

began = time.monotonic()
end, mark, was = began + seconds, began, 0.0
while time.monotonic() < end:
    step()
    now = time.monotonic()
    if now - mark >= 0.1:
        print(f"{{now:.4f}} {{100.0 + 800.0 * (device.worked_s - was) / (now - mark):.1f}}", flush=True)
        mark, was = now, device.worked_s
        if now - began > 2.0:
            print(step.report().zones[0].mean_w, file=sys.stderr, flush=True)
            began = now
"""


class Worker:
    """A process under a cap, and the file it writes its power to."""

    def __init__(self, tmp_path, name, cap, seconds, scope="machine", **env):
        self._path, self._reports = tmp_path / name, tmp_path / f"{name}.reports"
        with self._path.open("w") as out, self._reports.open("w") as reports:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER.format(here=str(TESTS)), name, cap, str(seconds), scope],
                stdout=out,
                stderr=reports,
                env={**os.environ, "TESSERA_RUNTIME_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1", **env},
            )

    def rows(self):
        lines = self._path.read_text().split("\n")[:-1]
        return [(float(t), float(w)) for t, w in (line.split() for line in lines)]

    def reported(self):
        """The node's mean power in the newest report; 0 before the first."""
        lines = self._reports.read_text().split("\n")[:-1]
        watts = [float(line) for line in lines if line.replace(".", "", 1).isdigit()]  # a busy process has notes, too
        return watts[-1] if watts else 0.0


def wait_for(workers, holds, *, rows=10, deadline_s=600.0):
    """Wait until `holds` of the mean power of each worker's newest rows, which are new; these means.

    How soon that is, and how long the machine's load keeps it from being so, is not what is tested.
    """
    skipped = [len(w.rows()) for w in workers]
    deadline = time.monotonic() + deadline_s
    means: list[float] = []
    while time.monotonic() < deadline:
        newest = [[watts for _, watts in w.rows()[skip:]][-rows:] for w, skip in zip(workers, skipped, strict=True)]
        means = [sum(each) / rows for each in newest]
        if all(len(each) == rows for each in newest) and holds(*means):
            return means
        assert all(w.process.poll() is None for w in workers)
        time.sleep(0.05)
    pytest.fail(f"{means} W after {deadline_s} s")


@pytest.mark.parametrize("scope", ["machine", "process"])
def test_two_processes_share_a_cap_and_one_takes_over_when_the_other_is_killed(tmp_path, scope):
    """900 W each if free; 900 W for both, each slowed by the same share. When one is killed the other has all of it.

    Each sees a device of its own, or its own watts of one CPU under the same name. Both report the node's power.
    """
    one, two = workers = [Worker(tmp_path, f"cpu{i}", "node:900W", 1800.0, scope) for i in range(2)]
    try:
        shares = wait_for(workers, lambda a, b: 0.8 * 900.0 <= a + b <= 1.05 * 900.0 and max(a, b) <= 1.2 * min(a, b))
        wait_for(workers, lambda *_: all(abs(w.reported() - 900.0) <= 0.2 * 900.0 for w in workers))
        one.process.kill()
        wait_for([two], lambda after: 1.5 * shares[1] <= after <= 1.05 * 900.0)
    finally:
        for each in workers:
            each.process.kill()
            each.process.wait()


def test_ranks_of_one_job_wait_together(tmp_path):
    """One rank may draw 300 W, the other 850 W: both work by the tighter one's duty."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
    ranks = [Worker(tmp_path, f"cpu{r}", cap, 1800.0, RANK=str(r), **job) for r, cap in enumerate(("300W", "850W"))]
    try:
        wait_for(ranks, lambda tight, loose: abs(tight - 300.0) <= 60.0 and abs(loose - tight) <= 0.25 * tight)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()


# -- the file ---------------------------------------------------------------------------------------------------


def member(cap_w=900.0, *, ratio=0.0, job="", power_w=None):
    return NodeMember(os.getpid(), cap_w, 0.2, ratio, job, power_w or {})


def test_the_first_to_look_leads_and_its_command_is_everybodys(tmp_path):
    bucket = NodeBucket(tmp_path / "b")
    now = time.monotonic_ns()
    view = bucket.look(member(), now)
    assert view is not None and view.leads
    assert view.cap is not None and view.cap.power_w == 900.0
    bucket.set_command(PaceCommand(1.5, 0.002), now)
    again = bucket.look(member(), now + 1)
    assert again is not None and again.command == PaceCommand(1.5, 0.002)
    bucket.close()


HOLDER = """
import sys, time
from pathlib import Path
from tessera.runtime.controller import PaceCommand
from tessera.runtime.node_bucket import NodeMember, NodeBucket
import os, fcntl
bucket = NodeBucket(Path(sys.argv[1]))
while True:
    now = time.monotonic_ns()
    bucket.look(NodeMember(os.getpid(), 700.0, 0.1, 0.0, "", {"gpu5": (300.0, now)}), now)
    bucket.set_command(PaceCommand(2.5, 0.003), time.monotonic_ns())
    if sys.argv[2] == "locked":
        fcntl.flock(bucket._fd, fcntl.LOCK_EX)
        print("locked", flush=True)
        time.sleep(600)
    print("beat", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process in the bucket; `locked` keeps the lock for ever."""
    started = []

    def start(how):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "b"), how], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def follow(bucket):
    """What the bucket says once another process leads; one that a busy machine keeps silent does not at first."""
    deadline = time.monotonic() + 600.0
    while (view := bucket.look(member(), time.monotonic_ns())) is None or view.leads:
        assert time.monotonic() < deadline
        bucket.leave()  # whoever looks first leads
    return view


def test_a_leader_that_is_killed_is_followed_within_a_tick_from_its_own_ratio(tmp_path, holder):
    other = holder("beats")
    bucket = NodeBucket(tmp_path / "b")
    view = follow(bucket)
    assert view.command == PaceCommand(2.5, 0.003)
    assert view.cap is not None and view.cap.power_w == 700.0  # the tightest of both
    assert {m.pid for m in view.members} == {os.getpid(), other.pid}
    assert view.power_w(time.monotonic_ns()) == 300.0
    other.kill()
    other.wait()
    view = bucket.look(member(), time.monotonic_ns())
    assert view is not None and view.leads  # at the next look, not after a timeout
    assert view.command == PaceCommand(2.5, 0.003)
    assert [m.pid for m in view.members] == [os.getpid()]


def test_a_leader_that_is_stopped_is_followed_after_a_silence(tmp_path, holder):
    other = holder("beats")
    bucket = NodeBucket(tmp_path / "b")
    os.kill(other.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 600.0
    leads = False
    while not leads and time.monotonic() < deadline:
        time.sleep(0.02)
        view = bucket.look(member(), time.monotonic_ns())
        leads = view is not None and view.leads
    assert leads


def test_a_lock_that_is_kept_stops_nobody(tmp_path, holder):
    holder("locked")
    bucket = NodeBucket(tmp_path / "b")
    began = time.monotonic()
    assert bucket.look(member(), time.monotonic_ns()) is None
    assert time.monotonic() - began < 60.0  # of the 600 s for which it is kept


def test_a_lock_goes_with_its_killed_holder(tmp_path, holder):
    other = holder("locked")
    other.kill()
    other.wait()
    assert NodeBucket(tmp_path / "b").look(member(), time.monotonic_ns()) is not None


def test_a_file_of_before_a_reboot_is_begun_anew(tmp_path):
    bucket = NodeBucket(tmp_path / "b")
    now = time.monotonic_ns()
    bucket.look(member(), now + 10**15)  # the clock of a machine that had run for long
    bucket.set_command(PaceCommand(9.0, 0.001), now + 10**15)
    view = bucket.look(member(), now)
    assert view is not None and view.leads and view.command.ratio == 0.0


def test_garbage_in_the_file_is_begun_anew(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(b"\xff" * 100)
    path.chmod(0o600)
    view = NodeBucket(path).look(member(), time.monotonic_ns())
    assert view is not None and view.leads and len(view.members) == 1


CUT = """
import os, sys, time
from pathlib import Path
from tessera.runtime.node_bucket import NodeBucket, NodeMember
path, what = Path(sys.argv[1]), sys.argv[2]
bucket = NodeBucket(path)
me = NodeMember(os.getpid(), 700.0, 0.1, 0.0, "", {})
bucket.look(me, time.monotonic_ns())
path.unlink() if what == "removed" else os.truncate(path, 0 if what == "emptied" else 10)
view = bucket.look(me, time.monotonic_ns())
assert view.leads and [m.pid for m in view.members] == [os.getpid()] and path.exists(), view
bucket.close()
"""


@pytest.mark.parametrize("what", ["emptied", "truncated", "removed"])
def test_a_file_cut_while_it_is_in_use_is_begun_anew(tmp_path, what):
    """In a process of its own: a mapped file that is cut ends it with SIGBUS."""
    done = subprocess.run([sys.executable, "-c", CUT, str(tmp_path / "b"), what], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_removed_file_is_begun_anew_by_a_thread_that_has_no_core_meanwhile(tmp_path, monkeypatch):
    bucket, now_ns = NodeBucket(tmp_path / "b"), time.monotonic_ns()
    bucket.look(member(), now_ns)
    (tmp_path / "b").unlink()
    seconds = itertools.count()
    monkeypatch.setattr("tessera.runtime.node_bucket.time.monotonic", lambda: float(next(seconds)))
    view = bucket.look(member(), now_ns)
    assert view is not None and view.leads


def test_a_file_others_may_write_or_a_link_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.touch(mode=0o666)
    open_to_all.chmod(0o666)
    with pytest.raises(ScheduleError, match="open to other users"):
        NodeBucket(open_to_all)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ScheduleError, match="opened"):
        NodeBucket(link)


def test_leaving_gives_the_slot_and_the_lead_back(tmp_path, holder):
    bucket = NodeBucket(tmp_path / "b")
    bucket.look(member(), time.monotonic_ns())
    bucket.leave()
    holder("beats")
    assert not follow(bucket).leads


def test_a_domain_seen_by_two_counts_once_and_a_stale_one_not_at_all():
    now = 10**12
    key = "gpu0"
    members = (
        NodeMember(1, 900.0, 0.2, 0.0, "", {key: (300.0, now - 50), "gpu1": (200.0, now - 10)}),
        NodeMember(2, 800.0, 0.1, 0.0, "", {key: (310.0, now - 20), "gpu2": (999.0, now - 2 * STALE_NS)}),
    )
    view = NodeView(True, members, PaceCommand(), 0.0)
    assert view.power_w(now) == 510.0
    assert view.power_w(now, {key: (290.0, now - 60)}) == 490.0  # our own span, not a newer one of another's
    assert view.power_w(now, {key: (290.0, now - 2 * STALE_NS)}) == 510.0
    assert view.cap is not None and (view.cap.power_w, view.cap.window_s) == (800.0, 0.1)
    assert NodeView(True, (), PaceCommand(), 0.0).power_w(now) is None


def test_ranks_know_their_job_by_the_launchers_variables():
    rank = {"WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "29500", "RANK": "3"}
    assert job_key(rank) == job_key({**rank, "RANK": "5"}) != ""
    assert job_key(rank) != job_key({**rank, "MASTER_PORT": "29501"})
    assert job_key({"WORLD_SIZE": "1"}) == job_key({}) == ""
