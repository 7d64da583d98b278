"""Runs a script or module unchanged, with a session around it, in the child process of `tessera run`.

    python -c LAUNCH FD PLAN_JSON...

`python -m` is not used, since it would import from the working directory. `FD` is a pipe of `tessera run`, or "-". The
child writes the byte `ENDED` when the script has ended, and `CLOSED` when the run file is complete.

The script finds `__main__`, `sys.argv` and `sys.path` as Python would have made them, also in what it pickles and
spawns. Its exit code, its traceback and the signal that ends it are unchanged. We import torch or touch CUDA only after
the script does, so the script may still set CUDA_VISIBLE_DEVICES or OMP_NUM_THREADS.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import msgspec

from ..errors import ArgumentError, RecordingError, TesseraError
from ..job_rank import find_rank
from ..schema import Scope
from ..sensors.discover import SCOPE_VARIABLE
from . import flight_record
from .ending import DROPPED, Patience, end_with_parent
from .options import DEFAULT, OPERATOR_STEPS, Mode, SessionOptions
from .recorder import Session
from .runfile_store import remove_run
from .script_steps import ScriptSteps
from .session import rank_path
from .tracing_schedule import between

LAUNCH = """import sys
if not sys.flags.safe_path:
    del sys.path[0]
from tessera.profile.launch import main
main()"""
"""The code that the child runs. It first drops the working directory from `sys.path`: anybody may put files there."""
ENDED, CLOSED = b"e", b"c"
MISSING = 2
"""Python's exit code for a script that is not there."""
_PIECE = 30_000  # characters: Linux takes 128 KiB for one argument, and two megabytes for all


class LaunchPlan(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What `tessera run` asks for. With `ranks`, `path` is a folder in which each rank writes its own file."""

    target: str
    module: bool = False
    argv: list[str] = []
    path: str
    claimed: bool = False
    ranks: bool = False
    command: list[str] = []
    mode: Mode = "light"
    operator_steps: int = OPERATOR_STEPS
    shapes: bool = True
    stack: bool = False
    modules: bool = False
    memory: bool = False
    steps: tuple[int, int] | None = None
    flush_s: float | None = None
    limit_s: float | None = None
    scope: Scope | None = None

    def start(self, fd: int | None = None) -> list[str]:
        """Return the command that runs this plan; the plan's text is split into as many arguments as it needs."""
        text = msgspec.json.encode(self).decode()
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        return [sys.executable, "-c", LAUNCH, "-" if fd is None else str(fd), *pieces]

    @property
    def environment(self) -> dict[str, str] | None:
        """The environment of the script's process: ours, plus whose power is to be measured; None means just ours."""
        return {**os.environ, SCOPE_VARIABLE: self.scope} if self.scope else None


class Terminated(SystemExit):
    """SIGTERM or SIGHUP as an exception, so that `finally` blocks run and the session writes what it has."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def main() -> None:
    """Run the plan that is given in the arguments."""
    plan = msgspec.json.decode("".join(sys.argv[2:]), type=LaunchPlan)
    tell = _teller(None if sys.argv[1] == "-" else int(sys.argv[1]))
    me = find_rank()
    if me is not None:  # without ranks the script may outlive `tessera run`; its run is written nevertheless
        end_with_parent()
        flight_record.enable()
    is_first = me is None or me.rank == 0
    code, program = load(plan)
    session = _start_session(plan)
    steps = None if session is None else ScriptSteps(session, by_modules=plan.steps is not None)
    if steps is not None:
        steps.install()
    sys.modules["__main__"] = program
    outcome: BaseException | None = None
    notes = [] if session is None else session.notes
    patience = Patience(lambda: notes.append(DROPPED), say=is_first)
    try:
        try:
            with _terminable():
                outcome = _execute(code, program.__dict__)
        finally:  # a second Ctrl-C before this line still belongs to the script and is caught below
            patience.hold()
    except BaseException as exc:  # noqa: BLE001  (however the script ends, what was recorded is written)
        patience.hold()
        outcome = exc
        if isinstance(exc, KeyboardInterrupt):
            patience.is_new_interrupt()
        _show(outcome)
    if session is not None and steps is not None:
        tell(ENDED)
        interrupted = isinstance(outcome, (KeyboardInterrupt, Terminated))
        show = is_first and sys.stderr.isatty()
        _finish(session, steps, exit_code(outcome), patience, interrupted=interrupted, show=show)
        tell(CLOSED)
    if not isinstance(outcome, KeyboardInterrupt):
        patience.release()
    _leave(outcome)


def _teller(pipe: int | None) -> Callable[[bytes], None]:
    """Return a function that writes a byte to `tessera run`, if that has started us and still runs.

    The function does nothing in a child that the script has forked and that also reaches the script's end. It also does
    nothing if the script has closed the pipe: its number may then belong to a file of the script.
    """
    if pipe is None:
        return lambda what: None
    os.set_inheritable(pipe, False)  # programs that the script starts must not hold the pipe open
    process, opened = os.getpid(), os.fstat(pipe)

    def tell(what: bytes) -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == process and os.path.samestat(os.fstat(pipe), opened):
                os.write(pipe, what)

    return tell


def _start_session(plan: LaunchPlan) -> Session | None:
    """Start the session. If its file cannot be written, print why and return None: the script runs anyway."""
    options = SessionOptions(
        mode=plan.mode, operator_steps=plan.operator_steps,
        activities=(*DEFAULT[plan.mode], "memory") if plan.memory else None,
        record_shapes=plan.shapes, with_stack=plan.stack, with_modules=plan.modules,
        flush_s=plan.flush_s, limit_s=plan.limit_s,
    )  # fmt: skip
    schedule = between(*plan.steps) if plan.steps else None
    facts = {"command": plan.command, "steps": plan.steps}
    path = rank_path(Path(plan.path)) if plan.ranks else Path(plan.path)
    try:
        return Session(
            options, path=path, claimed=plan.claimed, schedule=schedule, facts=facts, begin_tracing=False
        ).start()
    except RecordingError as exc:
        sys.stderr.write(f"tessera: {exc.what}: {exc.why or exc.fix}; the script runs, and nothing is recorded\n")
        remove_run(path)  # what was written so far is not a run
        return None
    except TesseraError as exc:
        sys.stderr.write(f"error: {exc}\n")
        sys.exit(1)


def _execute(code: CodeType, names: dict[str, Any]) -> BaseException | None:
    """Run the script and its threads to their end, and return how it ended: Python waits after an exception, too."""
    outcome: BaseException | None = None
    try:
        exec(code, names)
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as exc:  # noqa: BLE001  (SystemExit, too)
        _show(exc)
        outcome = exc
    _join_threads()
    return outcome


# -- the script as Python would have run it --------------------------------------------------------------------------


def load(plan: LaunchPlan) -> tuple[CodeType, ModuleType]:
    """Compile the program; return it with its `__main__`. Sets `sys.argv` and `sys.path[0]`; fails as Python would."""
    sys.argv = [plan.target, *plan.argv]
    program = ModuleType("__main__")
    try:
        return (_module if plan.module else _script)(plan.target, program), program
    except ArgumentError as exc:
        sys.stderr.write(f"error: {exc}\n")
        sys.exit(MISSING)
    except SyntaxError as exc:
        exc.__traceback__ = None  # its frames are ours; the error itself names the script's line
        sys.excepthook(type(exc), exc, None)
        sys.exit(1)


def _script(target: str, program: ModuleType) -> CodeType:
    path = Path.cwd() / target  # absolute, as Python's own: a script may change its directory
    if path.is_dir():  # like `python folder`
        _put_first(str(path.resolve()))
        path = path / "__main__.py"
    else:
        _put_first(str(path.resolve().parent))
    name = str(path)
    try:
        with io.open_code(name) as file:
            source = file.read()
    except OSError as exc:
        raise ArgumentError(f"cannot open {target!r}", why=exc.strerror, fix="give a Python script") from exc
    program.__dict__.update(
        __file__=name, __builtins__=__builtins__, __cached__=None, __loader__=SourceFileLoader("__main__", name)
    )
    return compile(source, name, "exec", dont_inherit=True)


def _module(target: str, program: ModuleType) -> CodeType:
    _put_first(os.getcwd())  # noqa: PTH109  (as Python does: a string, whatever it holds)
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except (ImportError, ValueError, AttributeError) as exc:
        raise ArgumentError(f"cannot run the module {target!r}", why=str(exc), fix="give an importable name") from exc
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ArgumentError(f"no module named {target!r} can be run", fix="a module, or a package with __main__.py")
    program.__dict__.update(
        __file__=spec.origin, __builtins__=__builtins__, __cached__=spec.cached, __loader__=loader,
        __package__=spec.parent, __spec__=spec,
    )  # fmt: skip
    sys.argv[0] = spec.origin or target
    return code  # type: ignore[no-any-return]


def _put_first(folder: str) -> None:
    """Make `folder` the first place for imports, as Python does for a script's folder."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _join_threads() -> None:
    """Wait for all threads that are not daemons, as Python does at exit, so that the session includes them.

    First tell the pools of `concurrent.futures` to end their workers, as Python does: otherwise they wait for ever.
    """
    for call in reversed(getattr(threading, "_threading_atexits", ())):  # called again at exit, which does no harm
        call()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


# -- endings ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the script by an exception, unless the script handles them itself."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        handle_with(signal.SIG_IGN)  # a second signal must not interrupt the writing of the file
        raise Terminated(signum)

    def handle_with(handler: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is terminate:
                signal.signal(number, handler)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, terminate)
    os.register_at_fork(after_in_child=lambda: handle_with(signal.SIG_DFL))  # a pool ends its workers by SIGTERM
    try:
        yield
    finally:
        handle_with(signal.SIG_IGN)


def exit_code(outcome: BaseException | None) -> int:
    """Return the exit code that the shell will see."""
    if outcome is None:
        return 0
    if isinstance(outcome, SystemExit):
        return outcome.code if isinstance(outcome.code, int) else int(outcome.code is not None)
    return 128 + signal.SIGINT if isinstance(outcome, KeyboardInterrupt) else 1


def _show(outcome: BaseException) -> None:
    """Print the script's traceback without our frames; at once, since writing the run may take a while."""
    if isinstance(outcome, SystemExit):
        return
    trace = outcome.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(outcome), outcome.with_traceback(trace), trace)


def _finish(
    session: Session, steps: ScriptSteps, code: int, patience: Patience, *, interrupted: bool, show: bool
) -> None:
    """End the session. The user may drop its trace by Ctrl-C (`Patience`)."""
    if "torch" in sys.modules:
        from .kineto_collector import Finished

        Finished.process_ends = True
    line = "tessera: reading the trace"
    if show:
        sys.stderr.write(line)
        sys.stderr.flush()
    try:
        try:
            steps.remove(interrupted=interrupted)
            session.set("returncode", code)
        finally:
            session.stop()
    except KeyboardInterrupt:
        with contextlib.suppress(TesseraError):  # the disk is full: what was committed can be read
            session.drop()
        patience.tell(DROPPED)
    except Exception as exc:  # noqa: BLE001  (we must not change the script's exit code)
        sys.stderr.write(f"\ntessera: the run could not be written whole: {exc}\n")
    finally:
        if show:
            sys.stderr.write("\r" + " " * len(line) + "\r")


def _leave(outcome: BaseException | None) -> None:
    """End the process as the script ended: by its exit code, or by the signal."""
    if isinstance(outcome, (KeyboardInterrupt, Terminated)):
        number = outcome.number if isinstance(outcome, Terminated) else signal.SIGINT
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if isinstance(outcome, SystemExit):
        raise outcome
    sys.exit(exit_code(outcome))


if __name__ == "__main__":
    main()
