"""`tessera run`: an unchanged script in a child process, whatever way it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tessera.cli.run import _parse_steps, command
from tessera.errors import ArgumentError
from tessera.profile import RunFile, optimizer_steps
from tessera.profile.launch import LaunchPlan, exit_code
from tessera.profile.optimizer_steps import OptimizerSteps
from tessera.profile.script_steps import AfterImport, GradlessBlocks, RecurringCalls
from tessera.profile.torch_hooks import ModeChanges, ModuleCalls, NoGradBlocks, model_runs
from warm_command import run_command

CLI = "import sys; from tessera.cli import main as m; m.COMMANDS.setdefault('run', ('run', '')); m.main(sys.argv[1:])"
# What `tessera run` imports before and after the script.
MODULES = (
    "cli.main", "cli.run", "profile.launch", "profile.runfile", "profile.cpu_use", "analyze.answer", "report.run",
    "report.run_html",
)  # fmt: skip

TRAIN = """
    import torch
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
"""

FUNCTIONS = TRAIN.replace("model(torch.ones(4, 8)).sum()", "helper(model(torch.ones(4, 8)))").replace(
    "import torch\n", "import torch\n    def helper(x): return x.sum()\n"
)


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write


def run(tmp_path, *arguments, env=None):
    """The command line; (exit code, stdout, stderr)."""
    done = run_command("run", *arguments, env=env, cwd=tmp_path, modules=MODULES)
    return done.returncode, done.stdout, done.stderr


def launch(tmp_path, target, *argv, module=False, **plan):
    """The child alone, as a process."""
    given = LaunchPlan(target=target, argv=list(argv), module=module, path="run.tessera", **plan)
    return subprocess.Popen(given.start(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_script_finds_its_world_as_python_makes_it(tmp_path, script):
    (tmp_path / "folder").mkdir()
    name = script(
        """
        import multiprocessing, pickle, sys, threading, time
        from beside import VALUE

        class Thing:
            pass

        def double(x):
            return 2 * x, __name__

        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            assert sys.modules["__main__"].Thing is Thing and __spec__ is None and __package__ is None
            print(sys.argv, __file__, VALUE, sys.path[0])
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [4]))
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print(pool.map(double, [5]))
            threading.Thread(target=lambda: (time.sleep(0.3), print("thread done"))).start()
        """,
        "folder/script.py",
    )
    script("VALUE = 7", "folder/beside.py")
    child = launch(tmp_path, name, "--flag", "x")
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert out.splitlines() == [
        f"['folder/script.py', '--flag', 'x'] {tmp_path / 'folder/script.py'} 7 {tmp_path / 'folder'}",
        "[(8, '__mp_main__')]",
        "[(10, '__main__')]",
        "thread done",
    ]
    with RunFile(tmp_path / "run.tessera") as found:
        assert not found.crashed and found.get("returncode") == 0


def test_a_module_runs_as_with_python_m(tmp_path, script):
    (tmp_path / "package").mkdir()
    script("", "package/__init__.py")
    script("import sys; from . import other; print(__name__, __package__, __spec__.name, sys.argv[1:])",
           "package/__main__.py")  # fmt: skip
    script("", "package/other.py")
    child = launch(tmp_path, "package", "a", module=True)
    out, err = child.communicate(timeout=300)
    assert out == "__main__ package package.__main__ ['a']\n", err
    child = launch(tmp_path, "no.such.module", module=True)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 2 and "cannot run the module 'no.such.module'" in err


def test_nothing_is_imported_from_the_working_folder(tmp_path, script):
    (tmp_path / "here").mkdir()
    for name in ("msgspec", "numpy", "logging", "tessera"):
        script(f"raise SystemExit('{name} of the working folder')", f"here/{name}.py")
    script("VALUE = 7", "beside.py")
    script("import sys; from beside import VALUE; print(sys.path[0], VALUE)", "x.py")
    code, out, err = run(tmp_path / "here", "--out", str(tmp_path / "run.tessera"), "../x.py")
    assert (code, out) == (0, f"{tmp_path} 7\n"), err
    (tmp_path / "here" / "tessera.py").unlink()  # -m would find no other, whatever we do
    typed = [sys.executable, "-m", "tessera", "run", "--mode", "sampling", "--out", "m.tessera", "../x.py"]
    done = subprocess.run(typed, cwd=tmp_path / "here", capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path} 7\n"), done.stderr


def test_a_script_may_change_its_directory(tmp_path, script):
    name = script("import os; os.chdir('/'); print(open(__file__).read()[:9]); raise KeyError('mine')")
    child = launch(tmp_path, name)
    out, err = child.communicate(timeout=300)
    assert out == "import os\n" and "raise KeyError('mine')" in err, "the traceback has the script's lines"
    name = script("import os; os.makedirs('made'); os.chdir('made')", "hydra.py")
    code, out, err = run(tmp_path, name)
    assert code == 0 and "could not be written" not in err and "No such file" not in err, err
    with RunFile(tmp_path / "runs" / "hydra.tessera") as recorded:
        assert not recorded.crashed
    assert not (tmp_path / "made" / "runs").exists()


def test_six_runs_at_once_all_run(tmp_path, script):
    name = script("print('ran')")
    words = [sys.executable, "-c", CLI, "run", "--mode", "sampling", name]
    children = [
        subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(6)
    ]
    assert [child.communicate(timeout=600)[0] for child in children] == [b"ran\n"] * 6
    assert len(list((tmp_path / "runs").glob("*.tessera"))) == 6


def test_a_command_of_half_a_megabyte_is_run_and_told_in_a_line(tmp_path, script):
    """Linux takes 128 KiB for one argument: what we pass on must not be one."""
    name = script("import sys; print(len(sys.argv), len(sys.argv[1]))")
    words = [sys.executable, "-P", "-c", CLI, "run", "--mode", "sampling", name, "é" * 60_000, *["word"] * 60_000]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0 and done.stdout.split()[:2] == ["60002", "60000"], done.stderr
    assert max(map(len, done.stderr.splitlines())) < 300


def test_a_script_that_never_began_leaves_no_file(tmp_path, script):
    code, _, err = run(tmp_path, script("def f(:"))
    assert code == 1 and "SyntaxError" in err and not list((tmp_path / "runs").iterdir())


def test_a_script_runs_where_its_run_cannot_be_written(tmp_path, script):
    name = script("print('trained'); raise SystemExit(3)")
    limit = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (16384, 16384)); "  # as a disk that is nearly full
    words = [sys.executable, "-P", "-c", limit + CLI, "run", name]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (3, "trained\n"), done.stderr
    assert "the script runs, and nothing is recorded" in done.stderr and done.stderr.count("\n") == 1
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_script_outlives_a_killed_tessera_run(tmp_path, script):
    name = script(
        """
        import os, time
        from tessera import profile
        os.kill(os.getppid(), 9)
        while os.getppid() == int(os.environ["OBSERVER"]):
            time.sleep(0.01)
        with profile.region("later"):
            time.sleep(0.05)
        print("trained", flush=True)
        """
    )
    words = [sys.executable, "-P", "-c", "import os; os.environ['OBSERVER'] = str(os.getpid()); " + CLI, "run", name]
    env = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (-9, "trained\n"), done.stderr
    with RunFile(tmp_path / "runs" / "script.tessera") as found:
        assert not found.crashed and found.get("returncode") == 0 and found.rows == 1


def test_its_exit_code_and_traceback_are_its_own(tmp_path, script):
    child = launch(tmp_path, script("import sys; sys.exit(3)"))
    child.communicate(timeout=300)
    assert child.returncode == 3
    (tmp_path / "run.tessera").unlink()
    child = launch(tmp_path, script("def f():\n    raise KeyError('mine')\nf()", "b.py"))
    _, err = child.communicate(timeout=300)
    assert child.returncode == 1 and "KeyError: 'mine'" in err and "launch.py" not in err
    child = launch(tmp_path, script("def f(:", "c.py"))
    _, err = child.communicate(timeout=300)
    assert child.returncode == 1 and "SyntaxError" in err and "launch.py" not in err
    with RunFile(tmp_path / "run.tessera") as found:
        assert found.get("returncode") == 1


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise KeyError('mine')", 1)])
def test_threads_that_outlive_the_scripts_end_are_in_the_run(tmp_path, script, end, code):
    text = f"""
        import sys, threading, time
        threading.Thread(target=lambda: (time.sleep(0.5), print("thread done"))).start()
        {end}
    """
    child = launch(tmp_path, script(text))
    out, err = child.communicate(timeout=300)
    assert (child.returncode, out) == (code, "thread done\n") and err.count("KeyError: 'mine'") == (code == 1)
    with RunFile(tmp_path / "run.tessera") as found:
        start_ns, end_ns = found.span_ns
        assert end_ns - start_ns >= 500_000_000 and found.get("returncode") == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_and_the_run_is_written(tmp_path, script, number, code):
    name = script(
        """
        import time
        from tessera import profile
        with profile.region("waiting"):
            print("ready", flush=True)
            time.sleep(600)
        """
    )
    child = launch(tmp_path, name)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.send_signal(number)
    _, err = child.communicate(timeout=300)
    assert child.returncode == -number, err
    with RunFile(tmp_path / "run.tessera") as found:
        assert not found.crashed and found.get("returncode") == code
        rows = found.timeline()
        assert [rows.name(i) for i in range(len(rows))] == ["waiting"]
        notes = " ".join(map(str, found.get("notes")))
        assert "ended before it had imported torch" in notes and "did not import" not in notes


def test_training_is_traced_by_its_optimizers_steps_and_not_by_the_calls_whose_gradients_add_up(tmp_path, script):
    calls = "for _ in range(3): model(torch.ones(4, 8)).sum().backward()"
    train = TRAIN.replace("model(torch.ones(4, 8)).sum().backward()", calls)
    code, out, err = run(tmp_path, "--steps", "3:5", "--json", script(train))
    assert code == 0, err
    said = json.loads(out)
    assert said["returncode"] == 0 and said["path"] == "runs/script.tessera" and "trained" in err
    assert said["tracing"]["basis"] == "events" and "too few" in said["tracing"]["reason"]  # 2 steps were traced
    with RunFile(tmp_path / "runs/script.tessera") as found:
        rows = found.timeline()
        assert found.get("command") == ["python", "script.py"]
    steps = {rows.name(i): (rows["start_ns"][i], rows["end_ns"][i]) for i in rows.rows("region")}
    mine = {n: t for n, t in steps.items() if n.startswith("step_")}
    assert set(mine) == {f"step_{i}" for i in range(8)}
    traced = {
        n for i in rows.rows("op") if rows.name(i) == "aten::addmm"
        for n, (start, end) in mine.items() if start <= rows["start_ns"][i] < end
    }  # fmt: skip
    assert traced == {"step_3", "step_4"}


def test_stacks_have_functions_and_each_module_once_and_not_what_an_optimizer_imports(tmp_path, script):
    code, out, err = run(tmp_path, "--stack", "--modules", "--json", script(FUNCTIONS))
    assert code == 0, err
    modules = [row["name"] for row in json.loads(out)["modules"]]
    assert len(modules) == 1 and "Linear" in modules[0]
    with RunFile(tmp_path / "runs/script.tessera") as found:
        rows = found.timeline()
    assert any(rows.names[i].endswith("helper") for i in rows.meta["frames"])
    assert any("script.py" in name for name in rows.names)
    assert not [name for name in rows.names if "_dynamo" in name and "<module>" in name and ";" not in name]


def test_a_script_that_leaves_at_once_is_still_reported(tmp_path, script):
    name = script("import os, time; time.sleep(1.2); os._exit(5)")
    code, _, err = run(tmp_path, "--out", "here.tessera", "--html", "page.html", name)
    assert code == 5 and "never closed" in err and "tessera report here.tessera" in err, err
    assert "the program failed with exit code 5" in err
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_ranks_write_their_own_files_and_one_prints(tmp_path, script):
    name = script("import time; time.sleep(0.6)")
    code, out, err = run(tmp_path, name, env={"RANK": "1", "WORLD_SIZE": "2"})
    assert code == 0 and out == "" and "tessera report" not in err
    assert "tessera: rank 1 wrote runs/script/rank1.tessera" in err
    with RunFile(tmp_path / "runs/script/rank1.tessera") as found:
        assert found.get("rank") == 1 and found.get("world_size") == 2


def test_wrong_arguments_are_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("")
    Path("folder").mkdir()
    done = CliRunner().invoke(command, ["folder"])
    assert isinstance(done.exception, ArgumentError) and "is a folder without a __main__.py" in str(done.exception)
    for steps in ("5:5", "a:b", "7:3", ""):
        done = CliRunner().invoke(command, ["--steps", steps, "x.py"])
        assert isinstance(done.exception, ArgumentError) and "such as 10:20" in str(done.exception)
    done = CliRunner().invoke(command, ["nothing.py"])
    assert "there is no script 'nothing.py'" in str(done.exception)
    done = CliRunner().invoke(command, ["--html", "x.py/page.html", "x.py"])
    assert "cannot write" in str(done.exception) and not Path("runs").exists()


def test_steps_are_read_as_the_help_says():
    context = click.Context(command)
    (option,) = (p for p in command.params if p.name == "steps")
    assert [_parse_steps(context, option, text) for text in ("10:20", ":20", "10")] == [(10, 20), (0, 20), (0, 10)]
    said = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "--steps [FIRST:]END" in said and "10 means 0:10" in said


def test_exit_codes():
    assert [exit_code(e) for e in (None, SystemExit(), SystemExit(4), SystemExit("no"), KeyboardInterrupt(), OSError())
            ] == [0, 0, 4, 1, 130, 1]  # fmt: skip


# -- what a script does not say --------------------------------------------------------------------------------------


def test_optimizers_that_take_turns_make_one_step():
    import torch

    seen = []
    steps = OptimizerSteps(lambda: seen.append(1))
    steps.install()
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    first, second = (torch.optim.SGD([p], lr=0.1) for p in parameters)
    for _ in range(3):
        first.step()
        second.step()
    assert len(seen) == 3
    del first
    second.step()
    assert len(seen) == 4
    steps.remove()
    second.step()
    assert len(seen) == 4


def test_every_replay_of_a_captured_step_is_a_step(monkeypatch):
    import torch

    class Graph:
        def replay(self):
            ran.append("replay")

    ran, seen, capturing = [], [], [False]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(optimizer_steps, "is_capturing", lambda: capturing[0])
    original = Graph.replay
    steps = OptimizerSteps(lambda: seen.append(len(ran)))
    steps.install()
    optimizer, inference, step = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), Graph(), Graph()
    inference.replay()
    optimizer.step()  # before the capture, as torch asks for
    capturing[0] = True
    optimizer.step()  # only captured
    capturing[0] = False
    for _ in range(3):
        step.replay()
        inference.replay()
    steps.remove()
    step.replay()
    assert seen == [1, 2, 4, 6] and Graph.replay is original


@pytest.mark.parametrize(
    ("stepped", "ended"),
    [
        ("c c a " * 5, "c c c c a a a a"),  # an actor and its critic, a policy that is delayed
        ("d g " * 4, "d d d d"),
        ("x x x x y y z " * 4, "x x x x x x x x z z z"),
        ("m " * 20 + "r " + "m " * 20 + "r", "m " * 40),  # too rare to be a part of every iteration
        ("c c c a c c a c a " * 2, "c " * 12),  # no pattern
        ("p p " + "t " * 20, "p p t t t t"),  # the first has learnt all it was to
    ],
)
def test_the_optimizer_that_steps_least_often_ends_the_step(stepped, ended):
    import torch

    optimizers = {n: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for n in set(stepped.split())}
    seen, now, changes = [], [], []
    steps = OptimizerSteps(lambda: seen.append(now[-1]), changed=lambda: changes.append(now[-1]))
    steps.install()
    for name in stepped.split():
        now.append(name)
        optimizers[name].step()
    steps.remove()
    assert seen == ended.split()
    assert changes == [b for a, b in pairwise(dict.fromkeys(seen))]


ACTOR_CRITIC = """
    import torch
    actor, critic = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    a_opt, c_opt = (torch.optim.Adam(m.parameters()) for m in (actor, critic))
    for iteration in range(30):
        for _ in range(16):
            with torch.no_grad():
                x = actor(torch.ones(4, 3)).expand(4, 3)
        for _ in range(2):
            critic(x).sum().backward()
            c_opt.step()
        with torch.no_grad():
            critic(x)
        actor(x).sum().backward()
        a_opt.step()
    """


def test_the_steps_of_an_actor_and_its_critic_are_its_iterations(tmp_path, script):
    code, out, err = run(tmp_path, "--mode", "operators", "--json", script(ACTOR_CRITIC))
    assert code == 0, err
    said = json.loads(out)
    assert said["run"]["steps"] == 33  # 4 of the critic until the pattern is known, and 29 iterations
    assert "evaluation" not in {row["name"] for row in said["regions"]}


def test_a_script_without_torch_is_told_how_to_see_its_lines(tmp_path, script):
    name = script("import time; time.sleep(0.6)")
    code, _, err = run(tmp_path, name)
    assert code == 0 and "regions and power" in err
    said = " ".join(err.split())
    assert "the script did not import torch; `tessera run --mode sampling` shows which of its functions" in said
    assert "next tessera run --mode sampling script.py" in said
    code, _, err = run(tmp_path, "--mode", "sampling", name)
    assert code == 0 and "did not import torch" not in err


EVALUATED = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()  # before the first step it says nothing
    for epoch in range(3):
        model.train()
        model[1].eval()  # frozen, while the rest learns
        for step in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        if epoch < 2:
            model.eval()
            model(torch.ones(64, 8)).argmax(1)
    """


@pytest.mark.parametrize("mode", ["operators", "summary"])
def test_evaluation_between_steps_is_a_region_and_part_of_no_step(tmp_path, script, mode):
    code, out, err = run(tmp_path, "--mode", mode, "--json", script(EVALUATED))
    assert code == 0, err
    said = json.loads(out)
    assert said["run"]["steps"] == 6
    assert {row["name"]: row["calls"] for row in said["regions"]}["evaluation"] == 2
    if mode == "summary":
        assert {row["name"] for row in said["ops"]}.isdisjoint({"aten::uniform_"})  # the first weights are in no step
        return
    with RunFile(tmp_path / "runs/script.tessera") as found:
        rows = found.timeline()
    spans = {rows.name(i): (rows["start_ns"][i], rows["end_ns"][i]) for i in rows.rows("region")}
    evaluated = [(rows["start_ns"][i], rows["end_ns"][i]) for i in rows.rows("region") if rows.name(i) == "evaluation"]
    for (begin, end), before, after in zip(evaluated, ("step_1", "step_3"), ("step_2", "step_4"), strict=True):
        assert spans[before][1] <= begin < end == spans[after][0]
        inside = {rows.name(i) for i in rows.rows("op") if begin <= rows["start_ns"][i] < end}
        assert "aten::argmax" in inside and "aten::mm" not in inside


def test_the_step_of_an_optimizer_is_no_evaluation(tmp_path, script):
    """L-BFGS's has `@torch.no_grad()` around it, and may take as long as all steps before."""
    text = """
        import torch
        model = torch.nn.Linear(8, 8)
        first, last = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())
        def closure():
            loss = model(torch.ones(4, 8)).square().sum()
            loss.backward()
            return loss
        for step in range(10):
            closure()
            first.step()
        last.step(closure)
        """
    code, out, err = run(tmp_path, "--mode", "operators", "--json", script(text))
    assert code == 0, err
    said = json.loads(out)
    names = {row["name"] for row in said["regions"]}
    assert said["run"]["steps"] == 10 and "Optimizer.step#LBFGS.step" in names and "evaluation" not in names


def test_evaluation_without_a_change_of_mode_is_found_by_its_missing_gradients(tmp_path, script):
    text = """
        import time, torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        @torch.no_grad()
        def evaluate():
            model(torch.ones(64, 8)).argmax(1)
            time.sleep(0.2)
        for epoch in range(2):
            for step in range(4):
                model(torch.ones(4, 8)).sum().backward()
                with torch.no_grad():
                    torch.ones(3).mean()
                optimizer.step()
            evaluate()
        """
    code, out, err = run(tmp_path, "--mode", "operators", "--json", script(text))
    assert code == 0, err
    said = json.loads(out)
    assert said["run"]["steps"] == 8
    assert {row["name"]: row["calls"] for row in said["regions"]}["evaluation"] == 2
    with RunFile(tmp_path / "runs/script.tessera") as found:
        rows = found.timeline()
    spans = {rows.name(i): (rows["start_ns"][i], rows["end_ns"][i]) for i in rows.rows("region")}
    (first, *_) = [
        (rows["start_ns"][i], rows["end_ns"][i]) for i in rows.rows("region") if rows.name(i) == "evaluation"
    ]
    assert spans["step_3"][1] <= first[0] < first[1] - 200_000_000 and first[1] <= spans["step_4"][0], "in no step"
    inside = {rows.name(i) for i in rows.rows("op") if spans["step_4"][0] <= rows["start_ns"][i] < spans["step_4"][1]}
    assert "aten::argmax" not in inside and "aten::mean" in inside


def test_compilation_is_a_region(tmp_path, script):
    """29 of 33 s of a run on an H200 were torch.compile's, and the advice was to feed the device."""
    text = TRAIN.replace("for _ in", "model = torch.compile(model, backend='eager')\n    for _ in")
    code, out, err = run(tmp_path, "--mode", "operators", "--json", script(text))
    assert code == 0, err
    said = json.loads(out)
    assert said["run"]["steps"] == 8
    assert {row["name"]: row["calls"] for row in said["regions"]}["compilation"] == 1


@pytest.mark.parametrize(
    ("blocks_ms", "evaluated"),
    [
        ([[], [], [], [(1, 9)], []], [None, None, None, (1, 9), None]),  # between two epochs
        ([[], [], [], [(1, 3), (4, 6), (7, 9)]], [None, None, None, (1, 9)]),  # one block for each batch
        ([[(8, 9)], [(8, 9)], [(8, 9)], [(1, 6), (8, 9)]], [None, None, None, (1, 6)]),  # and an accuracy in every step
        ([[(1, 9)]] * 6, [None] * 6),  # a teacher
        ([[(1, 2)], [(1, 2)], [(1, 2)], [(1, 2), (3, 9)]], [None] * 3 + [(3, 9)]),  # after a mean of the weights
        ([[(1, 2), (8, 9)]] * 3 + [[(1, 2), (3, 5), (5, 8), (8, 9)]], [None] * 3 + [(3, 8)]),  # before clipping, too
        ([[], [(1, 9)]] * 8, [None] * 3 + [(1, 9), None, (1, 9)] + [None] * 10),  # a rollout before two updates
        ([[], []] + [[(1, 9)]] * 20, [None] * 2 + [(1, 9)] * 2 + [None] * 18),  # as of now every step has one
        ([[], [], [], [(1, 2)]], [None] * 4),  # short
        ([[], [(1, 9)]], [None, None]),  # nobody knows yet how long a step is
    ],
)
def test_blocks_without_gradients_that_only_some_steps_have_are_evaluation(blocks_ms, evaluated):
    blocks, found = GradlessBlocks(), []
    blocks.end_step(1_000_000_000)
    for step, in_step in enumerate(blocks_ms, 1):
        for start_ms, end_ms in in_step:
            blocks.add(*(round((step * 1000 + 100 * at) * 1e6) for at in (start_ms, end_ms)))
        found.append(blocks.end_step((step + 1) * 1_000_000_000))
    truth = [span and tuple((k * 1000 + 100 * at) * 10**6 for at in span) for k, span in enumerate(evaluated, 1)]
    assert found == truth


def test_outermost_blocks_without_gradients_are_told_and_torch_left_as_it_was():
    import torch

    seen, originals = [], [(b.__enter__, b.__exit__) for b in (torch.no_grad, torch.inference_mode)]
    blocks = NoGradBlocks(lambda start_ns, end_ns: seen.append(end_ns >= start_ns > 0))
    blocks.install()
    with torch.no_grad(), torch.inference_mode():
        assert not torch.is_grad_enabled()

    @torch.no_grad()
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    thread = threading.Thread(target=torch.no_grad().__enter__)
    thread.start()
    thread.join()
    blocks.remove()
    with torch.no_grad():
        pass
    assert seen == [True, True] and torch.is_grad_enabled()
    assert originals == [(b.__enter__, b.__exit__) for b in (torch.no_grad, torch.inference_mode)]


def test_a_change_of_mode_is_told_and_the_module_left_as_it_was():
    import torch

    seen, original = [], torch.nn.Module.train
    modes = ModeChanges(seen.append)
    modes.install()
    model = torch.nn.Linear(2, 2)
    assert model.eval() is model and not model.training and model.train() is model
    modes.remove()
    model.eval()
    assert seen == [False, True] and torch.nn.Module.train is original


def test_outermost_module_calls_are_counted_also_when_they_fail():
    import torch

    seen = []
    calls = ModuleCalls(lambda module: seen.append("start"), lambda: seen.append("end"))
    calls.install()
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        model(torch.ones(1, 2))
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
        model(torch.ones(1, 2))
    finally:
        calls.remove()
    model(torch.ones(1, 2))
    assert seen == ["start", "end"] * 3


@pytest.mark.parametrize(
    ("called", "steps"),
    [
        ("e m e m e m", "e e"),  # an embedding and an encoder: two requests have ended
        ("s m m m", "m m"),  # what is called once is no step
        ("a r b r a r b r a", "a a"),  # a ReLU has no parameters
        ("w w w m m m m m", "w w m m m"),  # a warm-up of another model
        ("r r r", "r r"),
        ("e d d d e d d", "d d d d"),  # a decoder's tokens
    ],
)
def test_a_step_without_an_optimizer_is_the_call_of_one_module(called, steps):
    import torch

    modules = {name: torch.nn.ReLU() if name == "r" else torch.nn.Linear(1, 1) for name in called.split()}
    calls = RecurringCalls()
    ended = [name for at, name in enumerate(called.split(), 1) if calls.add(modules[name], at) is not None]
    assert " ".join(ended) == steps


SERVE = """
    import time, torch
    embed, encode = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)
    with torch.inference_mode():
        for _ in range(8):
            encode(embed(torch.ones(2, dtype=torch.long)))
            time.sleep(0.01)
"""


def test_steps_of_a_server_are_its_requests(tmp_path, script):
    code, _, err = run(tmp_path, "--steps", "2:5", "--out", "serve.tessera", "--json", script(SERVE))
    assert code == 0, err
    with RunFile(tmp_path / "serve.tessera") as recorded:
        rows = recorded.timeline()
        spans = {rows.name(i): (rows["start_ns"][i], rows["end_ns"][i]) for i in rows.rows("region")}
        started = [rows["start_ns"][i] for i in rows.rows("op") if rows.name(i) == "aten::embedding"]
    assert [n for n in spans if n.startswith("step_")] == [f"step_{k}" for k in range(8)]
    for step in ("step_2", "step_3", "step_4"):
        assert sum(spans[step][0] <= t < spans[step][1] for t in started) == 1
    assert len(started) == 3


def test_a_running_model_is_seen_on_the_stack():
    import torch

    found = []

    class Model(torch.nn.Module):
        def forward(self, x):
            found.append(model_runs(sys._getframe()))
            return x

    Model()(torch.ones(1))
    assert found == [True] and not model_runs(sys._getframe())


def test_a_module_is_announced_after_its_import(tmp_path, monkeypatch):
    (tmp_path / "announced_module.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    finder = AfterImport("announced_module", lambda m: seen.append(m.VALUE))
    sys.meta_path.insert(0, finder)
    assert importlib.util.find_spec("announced_module") is not None and not seen  # asking is not importing
    import announced_module

    assert seen == [3] and announced_module.VALUE == 3 and finder not in sys.meta_path
    del sys.modules["announced_module"]


def test_a_pool_that_nobody_ends_does_not_hang_the_script(tmp_path, script):
    target = script("""
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        print(pool.submit(lambda: 3).result())
    """)
    process = launch(tmp_path, target)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and out == "3\n"


def test_a_run_file_in_the_default_folder_needs_no_mkdir(tmp_path):
    (tmp_path / "x.py").write_text("print(1)\n")
    code, _, err = run(tmp_path, "--mode", "sampling", "--out", "runs/x.tessera", "x.py")
    assert code == 0, err
    assert (tmp_path / "runs" / "x.tessera").is_file()
