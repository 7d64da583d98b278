"""Random schedules against the fake NVML with faults injected: every GPU is as it was, every time, or it fails.

python benchmarks/measure/actuator_faults.py [TRIALS] [--seed N] [--only SEED]     (1,000 by default: 90 s of CPU, minutes of waiting)
python benchmarks/measure/actuator_faults.py --moments 200     random moments of one process, with its watcher, instead

A trial has one to three GPUs whose limits somebody set before, and one to four schedules at once, each a process with
one or two threads that hold caps and clocks, nested and on several GPUs. The driver refuses, fails half-way, or fails
and applies the change all the same. Schedules return, raise, exit, are signalled (with handlers of their own or without)
or are killed. Then, where one was killed or the driver kept failing, the watcher, the next schedule or `tessera doctor
--restore` comes. Checked: while a cap is held the limit is at most that cap; at the end limits and clocks are as they
were and no journal is left; where nothing was killed and the driver answered again, without any help.

A moment is a trial with one schedule, no faults and a watcher: at a random time it is killed or signalled, in two of
three trials after its journal or the whole runtime folder was removed. Nothing but the watcher helps.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS.parent / "tests"))

import tessera.actuators.amd
import tessera.actuators.nvml  # noqa: F401
from tessera import actuators
from tessera.errors import ActuatorError

from fakes.nvml import Scenario, build_fake, control_state, fake_env

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

LIMITS_W = (None, 700.0, 550.0, 420.5)  # what somebody set before; None: the default, 700 W
CODES = (999, 15, 4)  # NVML: unknown error, GPU is lost, no permission
SIGNALLED = ("term", "int", "hup", "kill")
WAYS = ("return", "return", "raise", "sys_exit", "thread", "os_exit", *SIGNALLED, *SIGNALLED)
PRIORS = ("default", "default", "flag", "raise")
LOG = "ACTUATOR_FAULTS_LOG"  # names the file that children's stderr goes to
BROKEN = 97  # exit status of a child that saw a promise broken


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one process does: holds as (gpus, cap_w, clocks), nested; how it leaves; the handler it had."""

    holds: tuple[tuple[tuple[str, ...], float | None, tuple[int, int] | None], ...]
    way: str
    prior: str
    rounds: int
    second_thread: bool


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One world: the boards, the faults and the schedules."""

    seed: int
    limits_w: tuple[float | None, ...]
    faults: dict[str, str]
    lasting: bool
    cost_us: int
    schedules: tuple[Schedule, ...]
    help: str
    foreign: bool = False
    removed: str = ""  # "journal" or "folder", before the signal


@dataclass
class Ran:
    """What came of a trial."""

    seed: int
    by: str
    ways: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def draw(seed: int) -> Trial:
    chance = random.Random(seed)
    gpus = chance.choice((1, 1, 2, 3))
    foreign = chance.random() < 0.08
    faults, lasting = _faults(chance, gpus) if chance.random() < 0.5 and not foreign else ({}, False)
    count = 1 if foreign else chance.choice((1, 1, 1, 2, 3, 4))
    return Trial(
        seed=seed,
        limits_w=tuple(chance.choice(LIMITS_W) for _ in range(gpus)),
        faults=faults,
        lasting=lasting,
        cost_us=chance.choice((0, 100, 500, 2000)),
        schedules=tuple(_schedule(chance, gpus, foreign) for _ in range(count)),
        help=chance.choices(("heal", "next", "watcher", "doctor"), (12, 6, 1, 1))[0],
        foreign=foreign,
    )


def draw_moment(seed: int) -> Trial:
    chance = random.Random(f"moment {seed}")
    gpus = chance.choice((1, 2))
    way = chance.choice(("kill", "kill", "term", "hup"))
    return Trial(
        seed=seed,
        limits_w=tuple(chance.choice(LIMITS_W) for _ in range(gpus)),
        faults={},
        lasting=False,
        cost_us=chance.choice((0, 500, 2000)),
        schedules=(dataclasses.replace(_schedule(chance, gpus, False), way=way, rounds=10_000),),
        help="only the watcher",
        removed=chance.choice(("", "journal", "folder")),
    )


def _faults(chance: random.Random, gpus: int) -> tuple[dict[str, str], bool]:
    """Faults by key of the scenario. A lasting one fails until it is taken away: restoring needs help then."""
    lasting = chance.random() < 0.3
    gpu, what = chance.randrange(gpus), chance.choice(("limit", "lock", "unlock"))
    code = chance.choice(CODES)
    applied = ":applied" if code == 999 and chance.random() < 0.5 else ""
    times = 10_000 if lasting else chance.randint(1, 3)
    return {f"gpu{gpu}.fault.{what}": f"{chance.randrange(4)}:{times}:{code}{applied}"}, lasting


def _schedule(chance: random.Random, gpus: int, foreign: bool) -> Schedule:
    holds = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        names = tuple(sorted(chance.sample([f"gpu{i}" for i in range(gpus)], chance.randint(1, gpus))))
        kind = "cap" if foreign else chance.choice(("cap", "cap", "clocks", "both"))
        cap_w = None if kind == "clocks" else float(chance.randint(200, 650))
        high = 345 + 15 * chance.randrange(10, 100)
        clocks = None if kind == "cap" else (345 if chance.random() < 0.5 else high, high)
        holds.append((names, cap_w, clocks))
    way = "return" if foreign else chance.choice(WAYS)
    prior = chance.choice(PRIORS)
    return Schedule(
        holds=tuple(holds),
        way=way,
        prior=prior,
        rounds=chance.choice((1, 1, 3)) if way not in SIGNALLED else 10_000,
        second_thread=chance.random() < 0.3 and not foreign,
    )


# ---------------------------------------------------------------- in the child: one schedule


class Broken(Exception):
    """A cap that did not hold while it was held."""


def _hold_all(schedule: Schedule, ready: Callable[[], None], stop: threading.Event, at: int = 0) -> None:
    if at == len(schedule.holds):
        ready()
        time.sleep(0.001)
        return
    gpus, cap_w, clocks = schedule.holds[at]
    with actuators.hold_gpus(gpus, cap_w=cap_w, clocks_mhz=clocks) as hold:
        _check_cap(hold, cap_w)
        _hold_all(schedule, ready, stop, at + 1)


def _check_cap(hold: actuators.GpuHold, cap_w: float | None) -> None:
    for actuator in hold.actuators if cap_w is not None else ():
        with contextlib.suppress(ActuatorError):  # a GPU that is lost for a moment has no limit to look at
            now_w = actuator.power_limit().now_w
            if cap_w is not None and now_w > cap_w + 1 and hold.is_active:  # it is not while a handler runs
                raise Broken(f"{actuator.gpu}: {now_w} W under a cap of {cap_w} W")


def _rounds(schedule: Schedule, ready: Callable[[], None], stop: threading.Event) -> None:
    for _ in range(schedule.rounds):
        if stop.is_set():
            return
        try:
            _hold_all(schedule, ready, stop)
        except ActuatorError:
            ready()  # refused: that is a way through, too


def _prior(schedule: Schedule, stop: threading.Event) -> None:
    def flag(signum: int, frame: object) -> None:
        stop.set()

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(3)

    if schedule.prior != "default" and schedule.way in ("term", "int", "hup"):
        signal.signal(_signal(schedule.way), flag if schedule.prior == "flag" else leave)


def _signal(way: str) -> signal.Signals:
    return {"term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP, "kill": signal.SIGKILL}[way]


def _act(schedule: Schedule, ready: Callable[[], None], foreign: bool) -> None:
    stop = threading.Event()
    _prior(schedule, stop)
    # Ready is what the main thread has begun: handlers are installed there, and before that only a watcher can help.
    second = threading.Thread(target=_rounds, args=(schedule, lambda: None, stop), daemon=True)
    if schedule.second_thread and schedule.way not in ("os_exit", "thread"):
        second.start()
    try:
        if schedule.way == "raise":
            with contextlib.suppress(RuntimeError), actuators.hold_gpus(schedule.holds[0][0], cap_w=300):
                raise RuntimeError("the body fails")
        if schedule.way == "thread":  # held on a daemon thread when the main one ends: atexit has to do it
            taken = threading.Event()
            threading.Thread(target=_hold_forever, args=(schedule, taken), daemon=True).start()
            taken.wait(5)
            return
        if schedule.way == "os_exit":
            with contextlib.suppress(ActuatorError), actuators.hold_gpus(schedule.holds[0][0], cap_w=250):
                os._exit(0)
        if foreign:
            with actuators.hold_gpus("gpu0", cap_w=300) as hold:
                hold.actuators[0].set_power_limit_w(333)
            return
        _rounds(schedule, ready, stop)
        if schedule.way == "sys_exit":
            with actuators.hold_gpus(schedule.holds[0][0], cap_w=schedule.holds[0][1] or 400):
                sys.exit(3)
    except ActuatorError:
        pass
    finally:
        stop.set()
        if second.is_alive():
            second.join()


def _hold_forever(schedule: Schedule, taken: threading.Event) -> None:
    gpus, cap_w, clocks = schedule.holds[0]
    with contextlib.suppress(ActuatorError), actuators.hold_gpus(gpus, cap_w=cap_w, clocks_mhz=clocks):
        taken.set()
        time.sleep(60)
    taken.set()


def fork(body: Callable[[Callable[[], None]], None], env: dict[str, str]) -> tuple[int, int]:
    """Run `body` in a fork that has the fake and ends as a Python process does; (pid, pipe that says it is ready)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    status = 0
    try:
        atexit._clear()
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for ended_by in (signal.SIGTERM, signal.SIGHUP):  # under nohup a child would not end by it
            signal.signal(ended_by, signal.SIG_DFL)
        threading.excepthook = lambda args: os._exit(BROKEN) if issubclass(args.exc_type, Broken) else None
        os.environ.clear()
        os.environ.update(env)
        os.dup2(os.open(env[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        ctypes.CDLL(str(build_fake()), mode=ctypes.RTLD_GLOBAL)
        said: list[int] = []

        def ready() -> None:
            if not said:
                said.append(os.write(write, b"r"))

        body(ready)
    except SystemExit as exc:
        status = int(exc.code or 0)
    except KeyboardInterrupt:
        status = 130
    except BaseException:  # noqa: BLE001  (whatever it is, the parent must hear of it)
        status = BROKEN
        os.write(2, traceback.format_exc().encode())
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(status)


# ---------------------------------------------------------------- the parent: the world around them


def scenario(trial: Trial, folder: Path, *, faults: bool) -> str:
    lines = Scenario(gpus=len(trial.limits_w), cost_control_us=trial.cost_us, state_file=str(folder / "state")).text()
    return "\n".join([lines, *(f"{k}={v}" for k, v in trial.faults.items() if faults)])


def run(trial: Trial) -> Ran:
    by = trial.help
    ran = Ran(trial.seed, "itself", [s.way for s in trial.schedules])
    # In memory where there is such a place: processes are killed, not machines, and a disk that is being written full
    # by others makes every fsync take seconds. Cleaning up may fail: a watcher may still be at it.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=memory) as name:
        folder = Path(name)
        env = fake_env(Scenario()) | {
            "TESSERA_RUNTIME_DIR": str(folder / "run"),
            "TESSERA_WATCHER": "1" if "watcher" in by else "0",
            "FAKE_NVML_SCENARIO": scenario(trial, folder, faults=False),
            LOG: str(folder / "log"),
        }
        _wait(*fork(lambda _: _set_limits(trial), env), ran, "setting up")
        start = _seen(trial, folder)
        env["FAKE_NVML_SCENARIO"] = scenario(trial, folder, faults=True)
        _run_schedules(trial, env, ran)
        killed = any(s.way in ("kill", "os_exit") for s in trial.schedules)
        env["FAKE_NVML_SCENARIO"] = scenario(trial, folder, faults=False)
        if (killed or trial.lasting) and not _restored(trial, folder, start):
            ran.by = by
            _help(by, env, ran, lambda: _restored(trial, folder, start))
        _judge(trial, folder, start, ran)
    return ran


def _set_limits(trial: Trial) -> None:
    actuators.list_gpus()  # which makes the state's file, if nothing else does
    for i, limit_w in enumerate(trial.limits_w):
        if limit_w is not None:
            actuators.find_gpu(i).set_power_limit_w(limit_w)


def _run_schedules(trial: Trial, env: dict[str, str], ran: Ran) -> None:
    chance = random.Random(-trial.seed)
    children = []
    for schedule in trial.schedules:
        pid, ready = fork(lambda said, s=schedule: _act(s, said, trial.foreign), env)
        children.append((schedule, pid, ready))
    for schedule, pid, ready in children:
        if schedule.way in SIGNALLED:
            os.read(ready, 1)  # it holds, was refused, or has ended
            time.sleep(chance.random() * 0.006)
            _remove(trial.removed, Path(env["TESSERA_RUNTIME_DIR"]))
            time.sleep(chance.choice((0, 0, 0.002)) * chance.random())
            os.kill(pid, _signal(schedule.way))
    for schedule, pid, ready in children:
        _wait(pid, ready, ran, schedule.way, schedule)


def _remove(what: str, folder: Path) -> None:
    if what == "folder":
        shutil.rmtree(folder, ignore_errors=True)
    for journal in folder.glob("*.json") if what == "journal" else ():
        journal.unlink(missing_ok=True)


def _wait(pid: int, ready: int, ran: Ran, what: str, schedule: Schedule | None = None) -> None:
    deadline = time.monotonic() + 30
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ran.problems.append(f"{what}: hung")
            break
        time.sleep(0.0005)
    os.close(ready)
    status = done[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == BROKEN:
        ran.problems.append(f"{what}: a promise was broken, or an unexpected error")
    if schedule is not None and schedule.prior == "default" and what in ("term", "hup"):
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == _signal(what)
        if not died:
            ran.problems.append(f"{what}: ended with status {status} instead of by the signal")


def _help(by: str, env: dict[str, str], ran: Ran, restored: Callable[[], bool]) -> None:
    if "watcher" in by:
        deadline = time.monotonic() + (10 if by == "watcher" else 60)
        while not restored() and time.monotonic() < deadline:
            time.sleep(0.02)
        if by == "watcher" and not restored():  # a lasting fault was in its way, too
            by = "heal"
    if by == "heal":
        _wait(*fork(lambda _: _heal(), env), ran, "heal")
    elif by == "next":  # schedules that come later, on every GPU
        _wait(*fork(lambda _: _next(), env), ran, "next schedule")
    elif by == "doctor":
        command = [sys.executable, "-m", "tessera", "doctor", "--restore", "--sensor", "modelled"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            ran.problems.append(f"doctor: {done.stdout} {done.stderr}")


def _heal() -> None:
    failed = [found.error for found in actuators.restore_outstanding() if found.error]
    if failed:
        raise Broken(failed[0])


def _next() -> None:
    for gpu in actuators.list_gpus():
        with actuators.cap_power(gpu, cap_w=200):
            pass


def _seen(trial: Trial, folder: Path) -> list[tuple[int, int, int]]:
    state = control_state(folder / "state")[: len(trial.limits_w)]
    return [(c.limit_mw or 700_000, c.lock_min_mhz, c.lock_max_mhz) for c in state]


def _restored(trial: Trial, folder: Path, start: list[tuple[int, int, int]]) -> bool:
    expected = [(333_000, 0, 0), *start[1:]] if trial.foreign else start
    return _seen(trial, folder) == expected and not list((folder / "run").glob("*.json"))


def _judge(trial: Trial, folder: Path, start: list[tuple[int, int, int]], ran: Ran) -> None:
    deadline = time.monotonic() + 1
    while not _restored(trial, folder, start) and time.monotonic() < deadline:
        time.sleep(0.01)  # a watcher may just be writing
    if not _restored(trial, folder, start):
        left = [p.read_text() for p in (folder / "run").glob("*.json")]
        ran.problems.append(f"not restored: {start} became {_seen(trial, folder)}; journals {left}")
    if ran.problems and (folder / "log").exists():
        ran.problems.append((folder / "log").read_text()[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trials", nargs="?", type=int, default=1000)
    parser.add_argument("--moments", type=int, help="random moments of one process instead of whole worlds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    make, count = (draw_moment, asked.moments) if asked.moments else (draw, asked.trials)
    seeds = range(asked.seed, asked.seed + count) if asked.only is None else [asked.only]
    build_fake()
    began = time.monotonic()
    trials = [make(seed) for seed in seeds]
    found = [run(trial) for trial in trials]
    bad = [ran for ran in found if ran.problems]
    result = {
        "trials": len(found),
        "schedules": sum(len(r.ways) for r in found),
        "restored": len(found) - len(bad),
        "restored_by": dict(collections.Counter(r.by for r in found)),
        "ways_out": dict(collections.Counter(w for r in found for w in r.ways)),
        "removed": dict(collections.Counter(t.removed or "nothing" for t in trials)),
        "with_faults": sum(bool(t.faults) for t in trials),
        "seconds": round(time.monotonic() - began, 1),
    }
    for ran, trial in zip(found, trials, strict=True):
        if ran.problems:
            what = f"{', '.join(ran.ways)}; {trial.faults or trial.removed}"
            print(f"seed {ran.seed} ({what}): {'; '.join(ran.problems)}")
    if len(found) >= 1000 or (asked.moments or 0) >= 200:
        name = "actuator_moments.json" if asked.moments else "actuator_faults.json"
        write_result(BENCHMARKS / "results" / name, result)
    print(f"limits and clocks restored {result['restored']} of {result['trials']}")
    print(json.dumps(result))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
