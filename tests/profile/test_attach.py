"""`tessera-prof`: against a fake libkineto that speaks the protocol, and against a real PyTorch process."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import ArgumentError, MeasurementError, RecordingError
from tessera.profile.attach import (
    AttachOptions,
    NoProcess,
    NotYours,
    TraceFigures,
    What,
    attach,
    process,
    request,
    session,
    stacks,
)
from tessera.profile.attach import process as kineto_module
from tessera.profile.attach.daemon import (
    BadMessage,
    Datagram,
    Endpoint,
    SocketTaken,
    TraceDaemon,
    address,
    decode,
    decode_request,
    encode,
    encode_context,
    encode_request,
)
from tessera.profile.attach.process import Kineto, Target, find, kineto
from tessera.profile.attach.request import Folder, config, figures
from tessera.profile.attach.sampling import ProcessUse
from tessera.profile.attach.tracks import Track, counters, split, write_summary, write_trace
from tessera.sensors.gpu_processes import GpuProcess, GpuProcessReader
from warm_command import run_command

from waiting import wait_until

LOOP = """
import sys, time, torch
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if "optimizer" in sys.argv else None
x = torch.randn(16, 32)
print("ready", flush=True)
while True:
    loss = model(x).sum()
    if optimizer is not None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.005)
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


# -- helpers ------------------------------------------------------------------------------------------------


@pytest.fixture
def me() -> Iterator[Target]:
    target = find(os.getpid())
    yield target
    target.close()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short enough for a socket."""
    with contextlib.ExitStack() as stack:
        import tempfile

        yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t-", dir="/tmp")))


def in_folder(target: Target, folder: Path, **changes: object) -> Target:
    """The target as if it had been started with KINETO_IPC_SOCKET_DIR."""
    from dataclasses import replace

    environ = {**target.environ, "KINETO_IPC_SOCKET_DIR": str(folder)}
    return replace(target, environ=environ, **changes)  # type: ignore[arg-type]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


class FakeLibkineto:
    """Asks as libkineto does, from this process: through its own bound socket, in the daemon's folder."""

    def __init__(self, folder: Path, name: str = "dynoconfigclient-test") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address(name, str(folder)))
        self.daemon = address("dynolog", str(folder))

    def __enter__(self) -> FakeLibkineto:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, kind: int = 3, message: str = "req", wait_s: float = 600.0) -> str:
        """The configuration that comes back."""
        body = encode_request(kind, 0, (os.getpid(), os.getppid()))
        if message == "ctxt":
            body = encode_context(0, os.getpid(), 0)
        self.socket.sendto(encode(message, body), self.daemon)
        self.socket.settimeout(wait_s)
        data, sender = self.socket.recvfrom(1 << 16)
        assert sender == self.daemon, "libkineto ends its process when an answer comes from elsewhere"
        size, kind_name = struct.unpack_from("@Q32s", data)
        assert size == len(data) - 40
        assert kind_name.rstrip(b"\0").decode() == message
        return data[40:].decode()

    def is_not_answered(self, kind: int = 3) -> bool:
        try:
            self.ask(kind, wait_s=0.2)
        except TimeoutError:
            return True
        return False


# -- the protocol -------------------------------------------------------------------------------------------


def test_messages_have_libkinetos_layout():
    data = encode("req", encode_request(3, 7, (11, 12)))
    assert data[:8] == struct.pack("@Q", 24)
    assert data[8:40] == b"req" + bytes(29)
    assert struct.unpack("@iiq2i", data[40:]) == (3, 2, 7, 11, 12)
    kind, body = decode(data)
    request = decode_request(body)
    assert (kind, request.job, request.pids, request.free) == ("req", 7, (11, 12), True)
    assert not decode_request(encode_request(0, 0, (1,))).free
    assert not decode_request(encode_request(1, 0, (1,))).free, "events only: the activity profiler is busy"


@pytest.mark.parametrize("data", [b"", b"x" * 39, encode("req", b"abc")[:-1], encode("req", b"abc") + b"d"])
def test_a_datagram_of_the_wrong_size_is_refused(data):
    with pytest.raises(BadMessage):
        decode(data)


@pytest.mark.parametrize(
    "body",
    [b"", bytes(15), struct.pack("@iiq", 3, 5, 0), struct.pack("@iiq", 3, -1, 0), struct.pack("@iiq", 3, 2**30, 0)],
)
def test_a_request_that_lies_about_its_length_is_refused(body):
    with pytest.raises(BadMessage):
        decode_request(body)


def test_the_abstract_name_counts_the_nul_behind_it():
    assert address("dynolog", None) == "\0dynolog\0"
    assert address("dynolog", "/run/x/") == "/run/x//dynolog", "libkineto compares the folder's text"
    with pytest.raises(ArgumentError, match="too long"):
        address("dynolog", "/" + "x" * 120)


def test_an_abstract_endpoint_answers_and_knows_the_sender():
    name = f"tessera-test-{os.getpid()}"
    with Endpoint(name) as daemon, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind(f"\0{name}-client\0")
        client.settimeout(600)
        client.sendto(encode("req", b"hello"), f"\0{name}\0")
        message = daemon.receive(600.0)
        assert message is not None
        assert (message.kind, message.body, message.pid, message.uid) == ("req", b"hello", os.getpid(), os.getuid())
        assert daemon.answer(message, b"world")
        data, sender = client.recvfrom(100)
        assert decode(data) == ("req", b"world")
        assert sender == f"\0{name}\0".encode()
        with pytest.raises(SocketTaken):
            Endpoint(name)


def test_what_has_no_sender_or_no_header_is_dropped():
    name = f"tessera-test-{os.getpid()}"
    with Endpoint(name) as daemon, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(encode("req", b""), f"\0{name}\0")  # unbound: there is nowhere to answer to
        assert daemon.receive(0.5) is None
        client.bind(f"\0{name}-client\0")
        client.sendto(b"short", f"\0{name}\0")
        assert daemon.receive(0.5) is None
        assert daemon.receive(0.01) is None


def test_a_file_socket_is_the_owners_only_and_goes_at_the_end(short):
    with Endpoint(folder=str(short)) as daemon:
        path = short / "dynolog"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(SocketTaken):
            Endpoint(folder=str(short))
        assert path.exists(), "a living daemon's file is left alone"
    daemon.close()
    assert not path.exists()


def test_a_dead_daemons_file_is_cleared_but_nothing_else_is(short):
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(str(short / "dynolog"))
    dead.close()
    Endpoint(folder=str(short)).close()
    (short / "dynolog").write_text("mine")
    with pytest.raises(MeasurementError, match="not a socket"):
        Endpoint(folder=str(short))
    assert (short / "dynolog").read_text() == "mine"


# -- the daemon ---------------------------------------------------------------------------------------------


def test_the_order_has_both_kinds_of_request():
    text = config(What(), "/tmp/x/trace.json", now_s=1000.0)
    lines = dict(line.split("=") for line in text.splitlines())
    assert lines["ACTIVITIES_LOG_FILE"] == "/tmp/x/trace.json"
    assert lines["PROFILE_START_ITERATION"] == "0"
    assert lines["ACTIVITIES_ITERATIONS"] == "3"
    assert lines["ACTIVITIES_DURATION_MSECS"] == "250"
    assert lines["PROFILE_REPORT_INPUT_SHAPES"] == "true"
    assert 1_001_000 < int(lines["PROFILE_START_TIME"]) < 1_002_000
    assert "ITERATION" not in config(What(steps=0), "/tmp/t.json")
    second = config(What(), "/tmp/t.json", attempt=2)
    assert "ITERATION" not in second
    assert "START_TIME" not in second, "libkineto's own start is late, but never too early"


def test_a_process_that_asks_is_told_what_to_record_once(me, short, monkeypatch):
    monkeypatch.setattr("tessera.profile.attach.daemon.SETTLE_S", 600.0)  # of 2 s, which a busy machine may take
    target = in_folder(me, short)
    with Folder(target) as folder, FakeLibkineto(short) as client, TraceDaemon(target, folder, What()) as daemon:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert client.ask(message="ctxt") == "\1\0\0\0"
        assert client.is_not_answered(kind=1), "its profiler is busy"
        wait_until(lambda: daemon.busy)
        assert "another profiler" in daemon.state
        told = client.ask()
        assert f"ACTIVITIES_LOG_FILE={folder.file}\n" in told
        wait_until(lambda: daemon.answered_pid == os.getpid())
        assert client.is_not_answered(), "the request after one that was taken for failed must stay unanswered"
        assert daemon.attempts == 1


def test_an_order_that_was_refused_is_given_again_by_time(me, short, monkeypatch):
    monkeypatch.setattr("tessera.profile.attach.daemon.SETTLE_S", 0.0)
    target = in_folder(me, short)
    with Folder(target) as folder, FakeLibkineto(short) as client, TraceDaemon(target, folder, What()) as daemon:
        assert "ITERATION" in client.ask()
        assert "ITERATION" not in client.ask()
        (folder.path / "trace_1.json.tmp").write_text("{")
        assert client.is_not_answered(), "it records: nothing more to say"
        assert daemon.attempts == 2
        assert daemon.state == "the process records"


def test_other_processes_and_other_users_get_no_answer(me, short):
    target = in_folder(me, short)
    answers: list[Datagram] = []
    with Folder(target) as folder:
        daemon = TraceDaemon(target, folder, What())
        daemon._endpoint.answer = lambda to, body: answers.append(to) or True  # type: ignore[method-assign]
        body = encode_request(3, 0, (os.getpid(),))
        ours = Datagram(kind="req", body=body, pid=me.pid, uid=me.uid, sender="/x")
        from dataclasses import replace

        daemon.handle(replace(ours, uid=me.uid + 1))
        assert daemon.strangers == {me.uid + 1}
        daemon.handle(replace(ours, pid=1))
        daemon.handle(replace(ours, body=b"short"))
        daemon.handle(replace(ours, kind="what"))
        assert answers == []
        daemon.handle(ours)
        assert answers == [ours]
        daemon._endpoint.close()


def test_a_launchers_child_is_answered_for_it(me, short):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process.descends(child.pid, me.pid)
        assert child.pid in process.descendants(me.pid)
        assert not process.descends(me.pid, child.pid)
        with Folder(me) as folder:
            launcher = TraceDaemon(in_folder(me, short, torch=False), folder, What())
            assert launcher._is_wanted(child.pid)
            launcher._endpoint.close()
            itself = TraceDaemon(in_folder(me, short, torch=True), folder, What())
            assert not itself._is_wanted(child.pid)
            itself._endpoint.close()
    finally:
        child.communicate()


@needs_root
def test_another_users_datagram_is_refused_by_the_kernels_word(me):
    """It says it is us, in the message; SCM_CREDENTIALS says who it is. The abstract namespace has no permissions."""
    name = f"tessera-test-{os.getpid()}"
    ask = f"""
import socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind("\\0{name}-stranger\\0")
s.sendto({encode("req", encode_request(3, 0, (os.getpid(),)))!r}, "\\0{name}\\0")
"""
    with Folder(me) as folder, Endpoint(name) as endpoint:
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        child = subprocess.run(
            [python, "-c", ask], user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if child.returncode:
            pytest.skip(f"another user cannot run Python here: {child.stderr[-200:]}")
        message = endpoint.receive(2.0)
        assert message is not None
        assert message.uid == 65534
        daemon = TraceDaemon.__new__(TraceDaemon)
        daemon._target, daemon._folder, daemon.strangers = me, folder, set()
        daemon.handle(message)
        assert daemon.strangers == {65534}


@needs_root
def test_another_users_process_is_refused():
    os.seteuid(65534)
    try:
        with pytest.raises(NotYours, match="belongs to root, not to you"):
            find(1)
    finally:
        os.seteuid(0)


def test_not_yours_names_the_way(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    with pytest.raises(NotYours) as error:
        find(os.getpid())
    assert "sudo -u" in (error.value.fix or "")


# -- the folder ---------------------------------------------------------------------------------------------


def test_a_trace_is_taken_when_it_is_complete(me):
    with Folder(me) as folder:
        assert not folder.has_begun
        assert folder.take() is None
        part = folder.path / "trace_1.json.tmp"
        part.write_text('{"traceEvents": [')
        assert folder.has_begun
        assert folder.take() is None
        whole = folder.path / "trace_1.json"
        whole.write_text('{"traceEvents": [')
        assert folder.take() is None, "an old libkineto writes in place"
        whole.write_text('{"traceEvents": []}\n')
        assert folder.take() == b'{"traceEvents": []}\n'
    assert not folder.path.exists()


def test_a_trace_that_no_memory_holds_is_not_read(me, monkeypatch):
    monkeypatch.setattr(session, "kineto", lambda _target: Kineto(state="ready"))
    with Folder(me) as folder:
        with (folder.path / "trace_1.json").open("wb") as file:
            file.truncate(40 << 30)  # takes no room on the disk
            file.seek(0, os.SEEK_END)
            file.write(b"}")
        with pytest.raises(RecordingError, match="the trace is not read to its end") as caught:
            folder.take()
        assert "1,073,741,824 are the most" in str(caught.value.why)
        run = session._Session(me, session.AttachOptions(), lambda _s: False, print, 0.0)
        assert not run._take(folder)
    why_not = run._why_not(None, ended=False)
    assert "are the most that is read" in why_not.reason
    assert "--steps 1" in why_not.fix


def test_root_is_not_led_to_another_file(me, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    with Folder(me) as folder:
        (folder.path / "a.json").symlink_to(secret)
        os.link(secret, folder.path / "b.json")
        os.mkfifo(folder.path / "c.json")
        assert folder.take() is None


NOBODY = 65534


@pytest.fixture
def theirs(me, short):
    """A process of another user, whose environment names a folder of its own."""
    from dataclasses import replace

    os.chown(short, NOBODY, NOBODY)
    environ = {"KINETO_ONDEMAND_TRACE_DIR": str(short), "KINETO_IPC_SOCKET_DIR": str(short)}
    return replace(me, uid=NOBODY, gid=NOBODY, user="nobody", environ=environ)


@needs_root
def test_root_gives_no_file_away(theirs, short, tmp_path, monkeypatch):
    """The target puts a link in the place of the folder that root has just made."""
    victim = tmp_path / "victim"
    victim.write_text("root's")

    def swap(prefix, dir):
        made = Path(dir) / prefix
        made.symlink_to(victim)
        return str(made)

    monkeypatch.setattr("tempfile.mkdtemp", swap)
    with pytest.raises(MeasurementError):
        Folder(theirs)
    assert victim.stat().st_uid == 0 and victim.read_text() == "root's"


@needs_root
def test_root_makes_nothing_where_the_target_could_not(theirs, tmp_path):
    from dataclasses import replace

    tmp_path.chmod(0o755)
    places = {"KINETO_ONDEMAND_TRACE_DIR": str(tmp_path), "KINETO_IPC_SOCKET_DIR": str(tmp_path)}
    led = replace(theirs, environ=places)
    with pytest.raises(MeasurementError):
        Folder(led)
    with pytest.raises(MeasurementError):
        Endpoint(folder=str(tmp_path), owner=led)
    assert not list(tmp_path.iterdir())


@needs_root
def test_what_root_makes_for_the_target_is_the_targets(theirs, short):
    with Folder(theirs) as folder, Endpoint(folder=str(short), owner=theirs):
        assert {p.stat().st_uid for p in short.iterdir()} == {NOBODY}
        assert stat.S_IMODE((short / "dynolog").stat().st_mode) == 0o600
        (folder.path / "trace_1.json").write_text('{"traceEvents": []}')
        assert folder.take() is None, "a file of root's in it is not the process's"
        os.chown(folder.path / "trace_1.json", NOBODY, NOBODY)
        assert folder.take() == b'{"traceEvents": []}'
    assert not list(short.iterdir())
    (short / "mine").touch()
    assert (short / "mine").stat().st_uid == 0, "root is root again"


def test_the_process_may_name_its_own_folder_for_traces(me, tmp_path):
    from dataclasses import replace

    own = replace(me, environ={"KINETO_ONDEMAND_TRACE_DIR": f"{tmp_path}/"})
    with Folder(own) as folder:
        assert folder.path.parent == tmp_path
        assert folder.file == f"{folder.path}/trace.json"
    with pytest.raises(ArgumentError):
        Folder(replace(me, environ={"KINETO_ONDEMAND_TRACE_DIR": "/tmp/a=b"}))
    with Folder(me) as folder:
        assert folder.path.parent == Path("/tmp"), "a new libkineto writes nowhere else"


# -- the process --------------------------------------------------------------------------------------------


def test_wrong_pids():
    with pytest.raises(ArgumentError, match="not a PID"):
        find(0)
    with pytest.raises(NoProcess, match="no process"):
        find(2**22 + 1)
    child = subprocess.Popen(["true"])
    wait_until(lambda: process.status(child.pid).get("State", "").startswith("Z"))
    with pytest.raises(NoProcess, match="has ended"):
        find(child.pid)
    child.wait()
    ids: list[int] = []
    done = threading.Event()
    thread = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), done.wait()))
    thread.start()
    wait_until(lambda: ids)
    with pytest.raises(ArgumentError, match=f"is a thread of process {os.getpid()}"):
        find(ids[0])
    done.set()
    thread.join()


def test_a_process_without_pidfds_is_followed_by_its_start_time(monkeypatch):
    def refused(_pid: int) -> int:
        raise OSError(38, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    child = subprocess.Popen(["sleep", "30"])
    target = find(child.pid)
    assert target.pid_fd is None
    assert target.alive
    child.kill()
    child.wait()
    assert not target.alive
    with pytest.raises(NoProcess):
        find(child.pid)


def test_cpu_time_is_the_same_from_both_sources(me, monkeypatch):
    fine = process.CpuReader(me.pid)
    assert fine.read() == pytest.approx(time.process_time(), abs=0.05)
    monkeypatch.setattr(time, "clock_gettime", lambda _: (_ for _ in ()).throw(OSError(22, "no")))
    coarse = process.CpuReader(me.pid)
    assert coarse.read() == pytest.approx(time.process_time(), abs=0.1)


@pytest.mark.parametrize(
    ("torch", "variable", "endpoint", "state"),
    [
        (True, True, True, "ready"),
        (True, False, True, "ready"),
        (True, True, False, "starting"),
        (True, False, False, "off"),
        (False, False, False, "not torch"),
    ],
)
def test_what_can_be_traced_and_what_to_do_otherwise(me, monkeypatch, torch, variable, endpoint, state):
    from dataclasses import replace

    monkeypatch.setattr(kineto_module, "has_endpoint", lambda _pid: endpoint)
    monkeypatch.setattr(kineto_module, "descendants", lambda _pid: [])
    target = replace(me, torch=torch, environ={"KINETO_USE_DAEMON": "1"} if variable else {}, command="python a.py")
    found = kineto(target)
    assert found.state == state
    assert found.possible == (state in ("ready", "starting"))
    if state == "off":
        assert found.fix == "KINETO_USE_DAEMON=1 python a.py"
    if state == "not torch":
        assert "KINETO_USE_DAEMON=1" in found.fix


def test_the_owner_of_a_socket_is_found():
    name = f"tessera-test-{os.getpid()}"
    with Endpoint(name):
        assert f"(PID {os.getpid()})" in (kineto_module.owner_of(f"\0{name}\0") or "")
    assert kineto_module.owner_of(f"\0{name}\0") is None


def test_a_libkineto_endpoint_is_seen(short):
    assert not kineto_module.has_endpoint(os.getpid())
    with FakeLibkineto(short):
        assert kineto_module.has_endpoint(os.getpid())


# -- NVML's word on a process ----------------------------------------------------------------------------------


class FakeProcessNvml:
    """As much of NVML as is asked about processes."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    NVMLError_FunctionNotFound = NVMLError_NoPermission = NVMLError_InvalidArgument = NVMLError_NotSupported

    def __init__(self, running, samples):
        self.running, self.samples, self.open = running, samples, 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.running)

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetComputeRunningProcesses(self, i):
        return [types.SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in self.running[i].items()]

    def nvmlDeviceGetProcessUtilization(self, i, seen_us):
        found = [s for s in self.samples[i] if s.timeStamp > seen_us]
        if not found:
            raise self.NVMLError_NotFound
        return found


def sample(pid, at_us, sm, mem=0):
    return types.SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=sm, memUtil=mem)


def test_a_processs_use_of_each_gpu():
    later_us = int(time.time() * 1e6) + 10_000_000
    nvml = FakeProcessNvml([{7: 1000, 8: 50}, {8: 5}], [[sample(7, later_us, 60, 20), sample(8, later_us, 9)], []])
    use = ProcessUse(GpuProcessReader(nvml), [7])
    assert use.read() == {"gpu0": GpuProcess(memory_bytes=1000, sm_pct=60.0, memory_pct=20.0)}
    assert use.read()["gpu0"].sm_pct is None, "no new sample is not 0 %"
    assert use.others
    assert use.found
    use.close()
    assert nvml.open == 0


def test_what_nvml_does_not_support_is_said_once():
    nvml = FakeProcessNvml([{}], [[]])
    calls = []

    def refused(*_: object) -> None:
        calls.append(1)
        raise FakeProcessNvml.NVMLError_NotSupported("Not Supported")

    nvml.nvmlDeviceGetProcessUtilization = refused  # type: ignore[method-assign]
    use = ProcessUse(GpuProcessReader(nvml), [7])
    assert use.read() == use.read() == {}
    assert use.missing == {"utilisation per process": "Not Supported"}
    assert len(calls) == 1


# -- files ---------------------------------------------------------------------------------------------------

KINETO = b"""{
  "schemaVersion": 1,
  "displayTimeUnit": "ms", "baseTimeNanoseconds": 1000000000,
  "traceEvents": [
  {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10.5, "dur": 40,
   "args": {"External id": 5, "Input Dims": [[2, 3], [3, 4]]}},
  {"ph": "X", "cat": "cpu_op", "name": "aten::empty", "pid": 1, "ts": 11, "dur": 1, "args": {"Input Dims": []}},
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 20, "dur": 3},
  {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 60, "dur": 100, "args": {"External id": 5}},
  {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7, "ts": 160, "dur": 50,
   "args": {"External id": 6, "Collective name": "allreduce"}},
  {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#SGD.step", "pid": 1, "tid": 1, "ts": 0, "dur": 5},
  {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Traces", "tid": "x", "ts": 0, "dur": 9999999},
  {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 210}
  ], "traceName": "x" }"""


def power_track(start_ns, name="gpu0.power", basis="measured"):
    times = np.array([start_ns, start_ns + 20_000_000], np.int64)
    return Track(
        name=name,
        unit="W",
        scope="device",
        section="always",
        times_ns=times,
        values=np.array([100.0, 300.0]),
        basis=basis,
    )


def test_figures_of_a_trace():
    found = figures(KINETO)
    assert (found.ops, found.ops_with_shapes, found.kernels, found.kernels_with_shapes) == (2, 1, 2, 1)
    assert (found.collectives, found.steps, found.launches, found.events) == (1, 1, 1, 7)
    assert found.collective_s == pytest.approx(50e-6)
    assert found.time_s == pytest.approx(210e-6)
    assert [h.name for h in found.heaviest] == ["gemm", "ncclDevKernel_AllReduce"]
    with pytest.raises(RecordingError):
        figures(b"not a trace")


def test_the_heaviest_names_are_found_in_one_pass(monkeypatch):
    event = '{{"ph": "X", "cat": "kernel", "name": "k{}", "pid": 0, "tid": 7, "ts": {}, "dur": {}}}'
    events = [event.format(i % 40, 10 * i, 1 + (i % 40) / 10) for i in range(80)]
    asked = []
    monkeypatch.setattr(request, "_time_s", lambda _timeline, rows: asked.append(len(rows)) or 0.0)
    found = figures(f'{{"traceEvents": [{",".join(events)}]}}'.encode()).heaviest
    assert [(h.name, h.calls) for h in found] == [(f"k{i}", 2) for i in (39, 38, 37, 36, 35)]
    assert found[0].time_s == pytest.approx(2 * 4.9e-6)
    assert len(asked) == 2, "of kernels and collectives, not of every name"


def test_figures_of_a_trace_with_a_time_that_is_no_number():
    """The one reader of traces takes what the weaker one of attach refused."""
    odd = KINETO.replace(b'"ts": 60, "dur": 100', b'"ts": 60, "dur": Infinity')
    assert figures(odd).collectives == 1
    assert figures(KINETO.replace(b'"dur": 40', b'"dur": "inf"')).kernels == 2


def test_a_trace_that_lost_its_kernels_says_so():
    from tessera.profile.attach.session import _lost_kernels

    assert _lost_kernels(figures(KINETO)) == []
    assert _lost_kernels(TraceFigures(base_ns=0)) == []
    (note,) = _lost_kernels(TraceFigures(base_ns=0, launches=5000, kernels=3))
    assert "5000 launches and 3 kernels" in note


def test_counters_lie_on_kinetos_time_line(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, KINETO, [power_track(1_000_100_000)])  # 100 us after Kineto's base
    trace = json.loads(path.read_text())
    counted = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert [e["ts"] for e in counted] == [100.0, 20_100.0]
    assert counted[0]["args"] == {"W": 100.0}
    assert counted[0]["name"] == "gpu0.power (W)"
    assert counted[0]["pid"] == "tessera: device"
    plain = json.loads(KINETO)
    kept = [e for e in trace["traceEvents"] if e["ph"] != "C" and not str(e.get("pid")).startswith("tessera")]
    assert kept == plain["traceEvents"], "the process's own events stay as they are"
    assert [p for p in tmp_path.iterdir() if p != path] == []


def test_a_trace_is_compressed_by_its_name(tmp_path):
    path = tmp_path / "trace.json.gz"
    write_trace(path, KINETO, [])
    assert json.loads(gzip.decompress(path.read_bytes())) == json.loads(KINETO)


def test_without_a_kineto_trace_the_file_has_the_counters(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, None, [power_track(7_500_000_000, basis="modelled")])
    trace = json.loads(path.read_text())
    counted = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    epoch_us = [trace["baseTimeNanoseconds"] / 1e3 + e["ts"] for e in counted]
    assert epoch_us == [7_500_000.0, 7_520_000.0]
    assert "modelled" in counted[0]["name"]
    write_trace(path, None, [])
    assert json.loads(path.read_text())["traceEvents"] == []


def test_an_empty_trace_and_one_without_a_list():
    base_ns, head, tail = split(b'{"baseTimeNanoseconds": 5, "traceEvents": []}')
    assert (base_ns, head[-1:], tail) == (5, b"[", b"]}")
    assert list(counters([], 0)) == []
    with pytest.raises(RecordingError):
        split(b"{}")


def test_the_summary_says_whose_each_figure_is(tmp_path):
    path = tmp_path / "perf.csv"
    write_summary(path, [power_track(0).metric()])
    (row,) = read_rows(path)
    assert row == {
        "metric": "gpu0.power", "unit": "W", "scope": "device", "mean": "200", "min": "100", "max": "300",
        "samples": "2", "basis": "measured",
    }  # fmt: skip


# -- the whole, on this machine ---------------------------------------------------------------------------------


def prof(*args: str) -> subprocess.CompletedProcess[str]:
    modules = ("cli.prof", "monitor", "report.prof", "timeline")
    return run_command(*args, env={"COLUMNS": "110", "TESSERA_SENSORS": "modelled"}, modules=modules)


@contextlib.contextmanager
def running(*words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("KINETO")}
    child = subprocess.Popen(
        [sys.executable, "-c", LOOP, *words], env={**plain, **env, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_real_process_with_an_optimizer_is_traced(short, tmp_path):
    """PyTorch's own libkineto, asking every second: by a configuration file, and in a folder so as to fail at once."""
    fast = short / "kineto.conf"
    fast.write_text("ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n")
    with running(
        "optimizer", KINETO_USE_DAEMON="1", KINETO_CONFIG=str(fast), KINETO_IPC_SOCKET_DIR=str(short)
    ) as child:
        trace, perf = tmp_path / "trace.json", tmp_path / "perf.csv"
        out = prof("--pid", str(child.pid), "--export", str(trace), "--summary", str(perf), "--json")
        assert out.returncode == 0, out.stderr + out.stdout
        assert child.poll() is None, "the process goes on"
    answer = json.loads(out.stdout)
    kineto = answer["kineto"]
    assert kineto["traced"]
    assert kineto["pid"] == child.pid
    assert kineto["figures"]["steps"] >= 3  # as asked; on a busy machine Kineto's thread stops some steps late
    assert kineto["figures"]["ops_with_shapes"] > 20
    events = json.loads(trace.read_text())["traceEvents"]
    dims = [e["args"]["Input Dims"] for e in events if e.get("name") == "aten::addmm"]
    assert dims[0][:3] == [[64], [16, 32], [32, 64]]
    power = [e["ts"] for e in events if e["ph"] == "C" and e["name"].startswith("cpu0.power")]
    ops = [e["ts"] for e in events if e.get("cat") == "cpu_op"]
    assert min(power) < min(ops) < max(ops) < max(power), "power and operators are on one time line"
    rows = {r["metric"]: r for r in read_rows(perf)}
    assert float(rows["process.cpu"]["mean"]) > 0  # how much of a core it gets is up to the machine
    assert rows["process.rss"]["scope"] == "process"
    assert rows["cpu0.power"]["scope"] == rows["cpu0.utilization"]["scope"] == "process", "from its CPU time"
    assert rows["cpu0.power"]["basis"] == "modelled"
    assert (tmp_path / "trace.power.csv").read_text().startswith("epoch_us,domain,watts")
    assert not list(Path("/tmp").glob(f"tessera-prof-*/trace_{child.pid}.json"))


@pytest.mark.slow
def test_a_real_process_without_steps_on_the_abstract_socket(tmp_path):
    with running(KINETO_USE_DAEMON="1") as child:
        out = prof("--pid", str(child.pid), "--export", str(tmp_path / "trace.json.gz"), "--json")
    answer = json.loads(out.stdout)
    if "belongs to" in (answer["kineto"]["reason"] or ""):
        pytest.skip(answer["kineto"]["reason"])
    assert out.returncode == 0, out.stdout
    assert answer["kineto"]["figures"]["time_s"] >= 0.13  # 0.25 s was asked; on a busy machine Kineto ends later
    assert answer["kineto"]["figures"]["ops_with_shapes"] > 20


def test_a_process_without_the_variable_is_sampled_and_told_how(tmp_path):
    with running() as child:
        out = prof("--pid", str(child.pid), "--export", str(tmp_path / "t.json"), "--duration", "500ms", "--mem")
    assert out.returncode == 1, "a trace was asked for, and there is none"
    assert "KINETO_USE_DAEMON=1 " + sys.executable in out.stdout.replace("\n", "")
    assert "rss" in out.stdout
    assert re.search(r"cpu0\.power .* process", out.stdout), "it is modelled from the CPU time of the process"
    assert "utilization" not in out.stdout, "--mem alone was asked"
    assert len(out.stdout.splitlines()) <= 24
    assert any(e["ph"] == "C" for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"])


def test_a_process_without_the_variable_shows_its_python_functions():
    with running() as child:
        out = prof("--pid", str(child.pid), "--duration", "2s", "--json")
    answer = json.loads(out.stdout)
    refused = [note for note in answer["notes"] if "py-spy" in note]
    if refused:
        pytest.skip(refused[0])
    assert answer["functions"], answer
    assert sum(f["share"] for f in answer["functions"]) == pytest.approx(1.0)
    spent_j = sum(e["energy_j"] for e in answer["energy"].values())
    assert sum(f["energy_j"] for f in answer["functions"]) == pytest.approx(spent_j)


def test_a_python_process_without_torch_shows_its_functions_too_and_another_program_has_none():
    code = "import time\ndef hot():\n    while True: sum(range(1000))\nprint('ready', flush=True)\nhot()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        try:
            answer = json.loads(prof("--pid", str(child.pid), "--duration", "2s", "--json").stdout)
        finally:
            child.kill()
    if refused := [note for note in answer["notes"] if "py-spy" in note]:
        pytest.skip(refused[0])
    assert any(f["name"].endswith(" hot") for f in answer["functions"]), answer
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            answer = json.loads(prof("--pid", str(child.pid), "--duration", "200ms", "--json").stdout)
        finally:
            child.kill()
    assert not answer["functions"] and not any("py-spy" in note for note in answer["notes"])


def test_without_py_spy_the_answer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    with stacks.PySpy(os.getpid()) as spy:
        pass
    assert spy.stacks == []
    assert "in the clone: pip install '.[attach]'" in (spy.why_not or "")


def test_a_py_spy_that_cannot_be_started_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(tmp_path))  # a folder
    with stacks.PySpy(os.getpid()) as spy:
        pass
    assert "py-spy cannot be started" in (spy.why_not or "")


def test_a_py_spy_that_fails_is_quoted(monkeypatch, tmp_path):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Permission Denied: Try running again as root' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(program))
    with stacks.PySpy(os.getpid()) as spy:
        assert spy._process is not None
        spy._process.wait(60)
    assert spy.why_not is not None
    assert spy.why_not.endswith("Permission Denied: Try running again as root")


def test_samples_of_py_spy_end_when_its_file_was_written():
    frames = [
        {"name": "main", "file": "/a/b/train.py", "line": 9},
        {"name": "step", "file": "/a/b/train.py", "line": 3},
    ]
    thread = {
        "name": 'Thread 12 "MainThread"',
        "endValue": 0.15,
        "samples": [[0], [0, 1], [0, 1]],
        "weights": [0.05] * 3,
    }
    rows = stacks.parse_speedscope({"shared": {"frames": frames}, "profiles": [thread]}, 10**9)
    assert [row.epoch_ns for row in rows] == [850_000_000, 900_000_000, 950_000_000]
    assert rows[-1] == (950_000_000, 12, "/a/b/train.py:9 main;/a/b/train.py:3 step", 1)


def test_a_process_that_ends_meanwhile():
    for life_s in (0.8, 4, 12, 25):  # on a slow machine it may be over before anybody looks: then one that lives longer
        child = subprocess.Popen(["sleep", str(life_s)])
        reaper = threading.Thread(target=child.wait)
        reaper.start()
        out = prof("--pid", str(child.pid), "--duration", "30s", "--json")
        reaper.join()
        if out.returncode == 0:
            break
    answer = json.loads(out.stdout)
    assert out.returncode == 0
    assert answer["ended"]
    assert answer["time_s"] < 29


def interrupted(pid: int, after_s: float) -> tuple[int, str, str]:
    """`tessera-prof` of a process, given Ctrl-C after a while."""
    looking = subprocess.Popen(
        [sys.executable, "-m", "tessera.cli.prof", "--pid", str(pid), "--duration", "100s"],
        env={**os.environ, "TESSERA_SENSORS": "modelled"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(after_s)
    looking.send_signal(signal.SIGINT)
    out, err = looking.communicate(timeout=300)
    return looking.returncode, out, err


def test_ctrl_c_ends_it_with_what_there_is():
    child = subprocess.Popen(["sleep", "120"])
    try:
        for after_s in (1.5, 6, 20, 50):  # on a slow machine it may still be importing
            code, out, err = interrupted(child.pid, after_s)
            if "stopped" in out:
                break
    finally:
        child.kill()
        child.wait()
    assert code == 0, err
    assert "stopped" in out
    assert "Traceback" not in err


def test_an_owned_socket_is_named(short, tmp_path):
    with running(KINETO_USE_DAEMON="1", KINETO_IPC_SOCKET_DIR=str(short)) as child, Endpoint(folder=str(short)):
        out = prof("--pid", str(child.pid), "--export", str(tmp_path / "t.json"), "--duration", "300ms", "--json")
    assert out.returncode == 1
    answer = json.loads(out.stdout)
    assert f"(PID {os.getpid()})" in answer["kineto"]["reason"]
    assert "dyno gputrace" in answer["kineto"]["fix"]
    assert answer["metrics"], "the sampling part is still given"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--pid", "4194999"), 1, "there is no process"),
        (("--pid", "-1"), 2, "not a PID"),
        (("--pid", "x"), 2, "'x' is not a valid integer"),
        ((), 2, "needs --pid"),
        (("--pid", "1", "--sample-ms", "0"), 2, "too often"),
        (("--pid", "1", "--export", "/nowhere/t.json"), 2, "cannot write /nowhere/t.json"),
        (("--pid", "1", "--export", "a.json", "--summary", "a.json"), 2, "name the same file"),
        (("--pid", "1", "--duration", "5 parsecs"), 2, "unknown unit"),
    ],
)
def test_wrong_options(args, code, said, monkeypatch, capsys):
    from tessera.cli.prof import main

    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == code
    assert said in capsys.readouterr().err


def test_the_api_looks_at_this_process():
    seen = attach(os.getpid(), AttachOptions(duration_s=0.3, trace=False, sensors=["modelled"], sections=["mem"]))
    names = {m.metric: m for m in seen.metrics}
    assert names["process.rss"].mean > 1e6
    assert names["process.cpu"].samples >= 10
    assert names["cpu0.power"].min <= names["cpu0.power"].mean <= names["cpu0.power"].max
    assert seen.kineto is None
