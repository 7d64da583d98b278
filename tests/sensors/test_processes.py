"""CPU time of process trees, and whose a process is, on made-up /proc folders and on real children."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tessera.errors import SensorUnavailable
from tessera.sensors import processes
from tessera.sensors.processes import LOOK_S, SHORT_LIVED, TICK_S, ProcessTree, find_owner, list_processes, read_stat

ROOT = 100


class Machine:
    """A /proc of processes: `(parent, name, own ticks, children's ticks)` by their number."""

    def __init__(self, folder):
        self.proc = folder
        self.now_s = 0.0
        self.processes = {}

    def run(self, pid, parent, own=0, waited=0, name="python", began=7):
        self.processes[pid] = parent
        fields = ["S", parent, *[0] * 9, own, 0, waited, 0, *[0] * 4, began]
        folder = self.proc / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{pid} ({name}) " + " ".join(map(str, fields)))
        self._list_children()

    def end(self, pid):
        del self.processes[pid]
        (self.proc / str(pid) / "stat").unlink()
        self._list_children()

    def _list_children(self):
        for pid in self.processes:
            children = " ".join(str(c) for c, parent in self.processes.items() if parent == pid)
            (self.proc / str(pid) / "task" / str(pid) / "children").write_text(children)

    def forget_children(self):
        for file in self.proc.glob("*/task/*/children"):
            file.unlink()

    def tree(self, **options):
        return ProcessTree(ROOT, proc=self.proc, clock=lambda: self.now_s, **options)

    def look(self, tree):
        """Ticks counted so far, later by as much as a look for new children needs."""
        self.now_s += 1.0
        return round(tree.poll() / TICK_S)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.run(ROOT, 1, own=50, waited=30)
    return machine


def test_only_what_runs_from_now_on_is_counted(machine):
    tree = machine.tree()
    assert machine.look(tree) == 0
    machine.run(ROOT, 1, own=60, waited=30)
    assert machine.look(tree) == 10


def test_children_and_their_children_are_in_it_and_neighbours_are_not(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    machine.run(102, 101, own=7)
    machine.run(900, 1, own=1000)
    assert machine.look(tree) == 12


def test_a_child_that_ends_is_counted_once(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5, name="worker")
    assert machine.look(tree) == 5
    machine.end(101)
    machine.run(ROOT, 1, own=50, waited=30 + 8)  # it ran for 3 ticks more
    assert machine.look(tree) == 8


def test_a_child_is_found_by_the_next_poll_however_soon(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    assert round(tree.poll() / TICK_S) == 5


def test_children_of_other_threads_than_the_first_are_looked_for_twice_a_second(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    (machine.proc / str(ROOT) / "task" / "105").mkdir()
    (machine.proc / str(ROOT) / "task" / "105" / "children").write_text("101")
    (machine.proc / str(ROOT) / "task" / str(ROOT) / "children").write_text("")
    machine.now_s += LOOK_S - 0.01
    assert tree.poll() == 0.0
    machine.now_s += 0.02
    assert round(tree.poll() / TICK_S) == 5


def test_a_poll_that_finds_nothing_new_reads_two_files_for_each_process(machine, monkeypatch):
    for thread in range(900, 1000):
        (machine.proc / str(ROOT) / "task" / str(thread)).mkdir(parents=True)
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    tree.poll()
    files = []
    read = processes._read_bytes
    monkeypatch.setattr(processes, "_read_bytes", lambda path: files.append(path) or read(path))
    tree.poll()
    assert len(files) == 4  # of each of the two processes its times, and what its main thread started


def test_a_child_between_two_looks_is_counted_when_its_parent_has_waited_for_it(machine):
    tree = machine.tree()
    machine.run(ROOT, 1, own=50, waited=30 + 9)
    assert machine.look(tree) == 9
    assert tree.children() == {SHORT_LIVED: (0, pytest.approx(9 * TICK_S))}


def test_a_child_that_its_parent_was_read_too_early_for_is_not_counted_twice(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    machine.look(tree)
    machine.end(101)  # the parent's time was read just before it waited
    assert machine.look(tree) == 5
    machine.run(ROOT, 1, own=50, waited=30 + 5)
    assert machine.look(tree) == 5


def test_what_nobody_waited_for_is_not_taken_away_again(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    machine.look(tree)
    machine.end(101)  # SIGCHLD is ignored: its time is lost to its parent
    machine.look(tree)
    machine.run(ROOT, 1, own=54, waited=30)
    assert machine.look(tree) == 9


def test_a_process_whose_parent_has_ended_stays(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    machine.run(102, 101, own=1)
    machine.look(tree)
    machine.end(101)
    machine.run(102, 1, own=11)
    machine.run(ROOT, 1, own=50, waited=30 + 5)
    assert machine.look(tree) == 16


def test_a_number_that_is_used_again_is_another_process(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    machine.look(tree)
    machine.run(101, 1, own=500, began=99)
    assert machine.look(tree) == 5


def test_without_its_root_a_tree_is_what_the_root_started(machine):
    tree = machine.tree(with_root=False)
    machine.run(ROOT, 1, own=80, waited=30)
    machine.run(101, ROOT, own=5)
    assert machine.look(tree) == 5


def test_a_kernel_that_lists_no_children_is_scanned(machine):
    machine.forget_children()
    tree = machine.tree()
    machine.run(101, ROOT, own=5)
    machine.run(102, 101, own=7)
    machine.forget_children()
    assert machine.look(tree) == 12


def test_children_are_told_apart_by_name(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=5, name="pt_data_worker")
    machine.run(102, ROOT, own=7, name="pt_data_worker")
    machine.run(103, ROOT, own=2, name="a (b) c")
    machine.look(tree)
    machine.end(102)
    machine.run(ROOT, 1, own=50, waited=30 + 7)
    machine.look(tree)
    ticks = {name: (count, round(s / TICK_S)) for name, (count, s) in tree.children().items()}
    assert ticks == {"pt_data_worker": (2, 12), "a (b) c": (1, 2)}


def test_what_a_child_used_after_its_last_look_is_said_by_its_name(machine):
    tree = machine.tree()
    machine.run(101, ROOT, own=0, name="pt_data_worker")
    machine.look(tree)
    machine.end(101)
    machine.run(ROOT, 1, own=50, waited=30 + 8)
    machine.look(tree)
    machine.run(102, ROOT, own=1, name="late")
    machine.look(tree)
    machine.end(102)  # its parent waits for it after the look
    machine.look(tree)
    machine.run(ROOT, 1, own=50, waited=30 + 8 + 4)
    assert machine.look(tree) == 12
    ticks = {name: (count, round(s / TICK_S)) for name, (count, s) in tree.children().items()}
    assert ticks == {"pt_data_worker": (1, 8), "late": (1, 4)}


def test_a_process_that_is_not_there_is_said(tmp_path):
    with pytest.raises(SensorUnavailable, match="CPU time of process 7"):
        ProcessTree(7, proc=tmp_path)


def test_children_that_replace_others_are_not_more_at_once(machine):
    tree = machine.tree()
    for pid in (101, 102, 103, 104):  # the last two at once
        machine.run(pid, ROOT, name="worker")
        if pid in (102, 103):
            machine.end(pid - 1)
        machine.look(tree)
    assert tree.children()["worker"][0] == 4
    assert tree.alive() == {"worker": (2, 5.0)}


def test_a_real_child_that_has_ended_is_in_its_tree():
    tree = ProcessTree(with_root=False)
    busy = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.2: pass\nprint(time.process_time())"
    spent = subprocess.run([sys.executable, "-S", "-c", busy], check=True, capture_output=True, text=True)
    assert tree.poll() == pytest.approx(float(spent.stdout), abs=0.1)


def test_this_process_is_listed():
    own = read_stat(os.getpid())
    assert own is not None
    assert own.parent == os.getppid()
    assert os.getpid() in {stat.pid for stat in list_processes()}


POD = "0f1e2d3c-aaaa-bbbb-cccc-0123456789ab"


@pytest.mark.parametrize(
    ("cgroup", "environ", "job", "pod"),
    [
        ("0::/user.slice/session-1.scope", "", None, None),
        ("0::/user.slice", "A=1\0SLURM_JOB_ID=4711\0B=2", "4711", None),
        ("5:memory:/slurm/uid_1000/job_4712/step_0", "", "4712", None),
        ("0::/system.slice/slurmstepd.scope/job_4713/step_0/user", "", "4713", None),
        (f"0::/kubepods/besteffort/pod{POD}/abc", "", None, POD),
        (f"0::/kubepods.slice/kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-abc.scope", "", None, POD),
        (f"0::/elsewhere/pod{POD}", "XSLURM_JOB_ID=1", None, None),
    ],
)
def test_whose_a_process_is(tmp_path, cgroup, environ, job, pod):
    folder = tmp_path / "42"
    folder.mkdir()
    (folder / "status").write_text("Name:\tpython\nUid:\t0\t0\t0\t0\n")
    (folder / "cgroup").write_text(cgroup)
    (folder / "environ").write_text(environ)
    owner = find_owner(42, tmp_path)
    assert (owner.user, owner.job, owner.pod) == ("root", job, pod)


def test_whose_a_process_is_that_has_ended_is_not_known(tmp_path):
    owner = find_owner(42, tmp_path)
    assert (owner.user, owner.job, owner.pod) == (None, None, None)
