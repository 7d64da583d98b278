"""Sessions that nobody ends, and traces that somebody will not wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from tessera.profile.ending import DROPPED, SAME_S, Patience
from tessera.profile.launch import LaunchPlan
from tessera.profile.runfile import RunFile, RunWriter
from tessera.profile.tracing import Tracing
from tessera.timeline.columns import Builder, Timeline

CLI = "from tessera.cli.main import main; main()"


def python(tmp_path, text):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def names(run, kind):
    rows = run.timeline()
    return [rows.name(i) for i in rows.rows(kind)]


# -- nobody ends it ------------------------------------------------------------------------------------------------


def test_a_session_left_open_is_ended_with_the_interpreter(tmp_path):
    """It was a segmentation fault: Kineto recorded while torch was taken down. A forked child leaves it alone."""
    code, out, err = python(
        tmp_path,
        """
        import atexit, os, sys, torch
        from tessera import profile
        session = profile.session(["cpu"], path="run.tessera").start()
        torch.ones(3) @ torch.ones(3)
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        with profile.region("after the child"):
            torch.ones(3) @ torch.ones(3)
        sys.exit(0)
        """,
    )
    assert (code, out) == (0, "0\n"), err
    with RunFile(tmp_path / "run.tessera") as run:
        assert not run.crashed
        assert names(run, "region") == ["after the child"]
        assert names(run, "op").count("aten::dot") == 2


def test_a_session_of_a_daemon_thread_and_an_exception_that_escapes(tmp_path):
    code, _, err = python(
        tmp_path,
        """
        import threading
        from tessera import profile
        begun = threading.Event()
        def work():
            with profile.session([], path="run.tessera"):
                with profile.region("there"):
                    pass
                begun.set()
                threading.Event().wait()
        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        raise ValueError("the program's own")
        """,
    )
    assert code == 1 and err.endswith("ValueError: the program's own\n")
    with RunFile(tmp_path / "run.tessera") as run:
        assert not run.crashed and names(run, "region") == ["there"]


def test_what_cannot_be_written_at_exit_is_said_and_changes_no_exit_code(tmp_path):
    code, _, err = python(
        tmp_path,
        """
        from tessera import profile
        class Bad:
            def write(self, run, table=None):
                raise RuntimeError("no such place")
        profile.session([], path="run.tessera", exporters=[Bad()]).start()
        """,
    )
    assert code == 0 and "no such place" in err and "Traceback" not in err


class FakeCollector:
    recording = starting = False

    def __init__(self):
        self.notes = []

    def start(self):
        self.recording = True

    def stop(self):
        self.recording = False
        return self

    def timeline(self):
        return Builder().build()

    def discard(self):
        pass

    def cancel(self):
        pass


def test_a_window_is_read_where_no_thread_can_be_started(monkeypatch):
    """Python 3.12 starts none once the interpreter ends."""

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    read = []
    tracing = Tracing(FakeCollector(), lambda *window: read.append(window))  # type: ignore[arg-type]
    tracing.begin()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    tracing.end()
    assert len(read) == 1 and isinstance(read[0][0], Timeline) and tracing.notes == []


def test_a_program_pauses_where_a_window_closes_within_it_and_not_after_it():
    windows = []
    within, after = (Tracing(FakeCollector(), lambda *window: windows.append(window)) for _ in range(2))  # type: ignore[arg-type]
    within.begin()
    within.finish()
    within.end()
    after.begin()
    after.end()
    assert [pause.start_ns for pause in within.pauses] == [windows[0][2]] and within.pauses[0].seconds > 0
    assert after.pauses == []


def test_steps_count_as_traced_whole_or_by_the_time_of_their_part(monkeypatch):
    """The second one's window was closed after one second of four; the next one opens with the third."""
    now_s = [0]
    clock = types.SimpleNamespace(time_ns=lambda: now_s[0] * 10**9, perf_counter_ns=lambda: now_s[0] * 10**9)
    monkeypatch.setattr("tessera.profile.tracing.time", clock)
    tracing = Tracing(FakeCollector(), lambda *window: None, paced=True)  # type: ignore[arg-type]
    tracing.begin()
    now_s[0] = 1
    tracing.step(1)
    now_s[0] = 2
    tracing.boundary(clock.time_ns(), of_step=True)
    for reader in tracing._readers:
        reader.join()
    now_s[0] = 5
    tracing.step(2)
    now_s[0] = 6
    tracing.step(3)
    tracing.end()
    assert tracing.traced_steps == 2.25


def test_windows_of_a_summary_show_none_of_a_scripts_setup():
    """Imports and the first step, which compiles and allocates, were in the window that stood for all steps."""
    read, forgotten = [], []
    tracing = Tracing(
        FakeCollector(),  # type: ignore[arg-type]
        lambda *window: read.append(window),
        paced=True,
        lead=True,
        forget=lambda: forgotten.append(time.time_ns()),
    )
    tracing.begin()
    tracing.work_begins()  # the session's thread has seen the model run
    tracing.boundary(time.time_ns())
    tracing.step(1)
    assert len(forgotten) == 2 and read == [] and tracing.traced_steps == 0.0
    tracing.work_begins()  # seen only now: nothing starts over within the steps
    for step in range(2, 5):
        tracing.step(step)
    tracing.end()
    assert len(forgotten) == 2 and tracing.traced_steps == 3.0
    ((_, start_ns, _),) = read
    assert start_ns >= forgotten[-1]


# -- somebody will not wait ----------------------------------------------------------------------------------------


@pytest.fixture
def sigint():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_is_answered_and_the_next_drops(sigint, capfd):
    dropped, now_s = [], [100.0]
    patience = Patience(lambda: dropped.append(1), say=True, clock=lambda: now_s[0])
    patience.hold()
    patience.hold()
    patience.is_new_interrupt()  # what ended the script
    signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "", "the same wish, by another way"
    now_s[0] += 1.0
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert not dropped and "one moment" in capfd.readouterr().err
    now_s[0] += 1.0
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert dropped == [1]
    signal.raise_signal(signal.SIGINT)  # it is being dropped: deaf
    patience.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr().err == ""


def test_an_ignored_interrupt_stays_ignored(sigint):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    patience = Patience(lambda: None, say=True)
    patience.hold()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    patience.release()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


SLOW = """
    import os, torch
    from tessera import profile
    from tessera.profile.kineto_collector import Finished
    read = Finished.timeline
    def slowly(self):
        print("reading", flush=True)
        os.read(0, 1)
        return read(self)
    Finished.timeline = slowly
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile.region("training"):
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
"""


@pytest.mark.parametrize("drop", [False, True])
def test_a_trace_outlives_one_interrupt_and_is_dropped_by_the_next(tmp_path, drop):
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    plan = LaunchPlan(target="slow.py", path="run.tessera")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(plan.start(), cwd=tmp_path, text=True, **pipes) as child:
        watchdog = threading.Timer(300.0, child.kill)  # a word that does not come must not stop the suite
        watchdog.start()
        assert child.stdout.readline() == "reading\n"
        child.send_signal(signal.SIGINT)
        while "one moment, writing the trace (Ctrl-C again to drop it)" not in (line := child.stderr.readline()):
            assert line, "it ended without a word"
        if drop:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(2 * SAME_S)  # sooner it would be the same wish
            child.send_signal(signal.SIGINT)
            err = child.stderr.read()
        else:
            _, err = child.communicate("go on\n", timeout=300)
    watchdog.cancel()
    assert child.wait(300) == 0, "the script's own"
    assert (DROPPED in err) is drop
    with RunFile(tmp_path / "run.tessera") as run:
        assert not run.crashed and run.get("returncode") == 0
        assert (DROPPED in run.notes) is drop
        assert "training" in names(run, "region")
        assert bool(names(run, "op")) is not drop


def test_an_interrupt_that_another_thread_is_handed_is_heard_while_a_trace_is_read():
    """The kernel may give a signal to any thread; Python answers on the main one, once that runs."""
    heard, answered, reading = [], [], threading.Event()
    main = threading.main_thread().ident

    def read():
        time.sleep(0.3)  # by then the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        answered.append(reading.wait(120))

    def answer(*_):
        heard.append(threading.get_ident())
        reading.set()

    before = signal.signal(signal.SIGUSR1, answer)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        Tracing.end(_Ended([reader]))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [main] and answered == [True]


class _Ended:
    """A tracing that is over but for its readers."""

    has_begun = False

    def __init__(self, readers):
        self._readers = readers


def test_an_interrupt_of_the_whole_group_keeps_the_trace(tmp_path):
    """No terminal: the child has the group's signal, and the one that `tessera run` passes on."""
    (tmp_path / "long.py").write_text(
        textwrap.dedent(
            """
            import torch
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            step = 0
            while True:
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                step += 1
                if step == 3:
                    print("ready", flush=True)
            """
        )
    )
    command = [sys.executable, "-c", CLI, "run", "--out", "run.tessera", "long.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, text=True, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=600)
    assert child.returncode == 130, err
    with RunFile(tmp_path / "run.tessera") as run:
        assert names(run, "op"), err
        assert not run.crashed and DROPPED not in run.notes


# -- the file ------------------------------------------------------------------------------------------------------


def test_timelines_that_are_dropped_leave_all_else(tmp_path):
    built = Builder()
    built.add("op", "aten::mm", start_ns=1, end_ns=2)
    with RunWriter(tmp_path / "run.tessera") as writer, writer._lock:  # its thread writes nothing meanwhile
        writer.add_timeline(built.build())
        writer.add_row("region", "kept", 1, 2)
        writer.set("key", "kept")
        writer._store.db.execute("BEGIN")  # as an interrupt in the middle of a job leaves it
        writer._store.intern("half")
        writer.drop_timelines()
        writer.add_row("region", "later", 3, 4)
    writer.drop_timelines()
    with RunFile(tmp_path / "run.tessera") as run:
        assert not run.crashed and run.get("key") == "kept"
        assert names(run, "op") == [] and names(run, "region") == ["kept", "later"]


def test_an_interrupt_while_a_window_closes_waits_until_it_is_closed():
    class Interrupted(FakeCollector):
        def stop(self):
            signal.raise_signal(signal.SIGINT)
            return super().stop()

    windows = []
    tracing = Tracing(Interrupted(), lambda *window: windows.append(window))  # type: ignore[arg-type]
    tracing.begin()
    with pytest.raises(KeyboardInterrupt):
        tracing.finish()
    tracing.end()
    assert len(windows) == 1 and not tracing.collector.recording
