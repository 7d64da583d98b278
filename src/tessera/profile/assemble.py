"""Puts a session together: the run file, the power, the stacks and the tracing that its options ask for."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from typing import TYPE_CHECKING, Any

from ..errors import RecordingError
from ..job_rank import find_rank
from ..sensors.processes import find_owner
from .ending import wait_for_device
from .options import ON_DEVICE

if TYPE_CHECKING:
    from .recorder import Session
    from .runfile import RunWriter


def assemble(session: Session) -> None:
    """Start all parts of a session. If one part cannot start, stop those that have started."""
    options = session.options
    wait_for_device()  # work that was launched before does not belong to the session
    with contextlib.ExitStack() as undo:
        writer = _writer(session)
        undo.callback(_discard, writer)
        if "power" in options.enabled_activities:
            _power(session, writer)
        if options.mode == "summary":
            from .summary_mode import RunSummary

            session._summary = RunSummary()
        if options.traces:
            _tracing(session, undo)
        elif any(a in options.enabled_activities for a in ON_DEVICE):
            session.notes.append("sampling mode traces nothing: devices are seen by their power and telemetry only")
        if "stack" in options.enabled_activities or options.with_stack:
            from .sampling import StackSampler

            session._stacks = StackSampler(options.interval_ms * 1e-3)
        from .region import ranges

        session.push, session.pop = ranges()
        torch: Any = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "compiler"):
            session.compiling = torch.compiler.is_compiling
        undo.pop_all()
    # Last, so that the cost of starting is not counted as the program's.
    session._writer, session._step_ns = writer, time.time_ns()
    writer.set("start_ns", session._step_ns)
    if session._scope is not None:
        session._scope.__enter__()


def _writer(session: Session) -> RunWriter:
    from .runfile import RunWriter

    options = session.options
    me = find_rank()
    owner = find_owner(os.getpid())
    meta: dict[str, Any] = {
        "mode": options.mode,
        "activities": list(options.enabled_activities),
        "argv": list(sys.argv),
        "cwd": _cwd(),
        "python": platform.python_version(),
        "asked_ms": options.sample_interval_ms,
        "scheduled": True if session._schedule is not None and options.mode in ("light", "operators") else None,
        "rank": me.rank if me else None,
        "world_size": me.world_size if me else None,
        "local_rank": me.local_rank if me else None,
        "user": owner.user,
        "job": owner.job,
        "pod": owner.pod,
        **session._facts,
    }
    known = {k: v for k, v in meta.items() if v is not None}
    while True:
        try:
            return RunWriter(session.path, meta=known, mode="claimed" if session.claimed else "new")
        except RecordingError as exc:  # another process was faster: take the next name
            if session.next_path is None or not isinstance(exc.__cause__, FileExistsError):
                raise
            session.path = session.next_path()


def _cwd() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109  (a string, whatever it holds)
    except OSError:  # deleted under us
        return None


def _discard(writer: RunWriter) -> None:
    """Remove the file of a session that could not be started."""
    writer.close()
    writer.path.unlink(missing_ok=True)


def _power(session: Session, writer: RunWriter) -> None:
    from ..monitor import EnergyScope, default
    from .power_feed import PowerFeed

    session._monitor = monitor = default()
    options = session.options
    session._scope = EnergyScope(str(session.path.stem), monitor=monitor)
    session._feed = PowerFeed(writer, monitor.sampler, thin=options.mode == "summary")
    session._feed.pull()
    session.note_edge = monitor.sampler.note_cpu_edge
    asked_ms = options.sample_interval_ms
    if asked_ms is not None and options.mode in ("light", "operators") and "stack" not in options.enabled_activities:
        session.notes.append(
            f"sample_interval_ms={asked_ms:g} has no effect without stacks: power is recorded "
            "whenever its sensor has a new value"
        )
    for domain in monitor.sampler.domains:
        true_ms = domain.resolution_s * 1e3
        if domain.counted and asked_ms is not None and asked_ms < 0.75 * true_ms:
            session.notes.append(
                f"{domain.name}: asked for {asked_ms:g} ms, but {domain.source} has a new value "
                f"every {true_ms:.3g} ms; those are recorded"
            )


def _tracing(session: Session, undo: contextlib.ExitStack) -> None:
    from .kineto_collector import KinetoCollector, torch_installed
    from .torch_hooks import ModuleRanges
    from .tracing import Tracing

    if not torch_installed():
        session.notes.append("torch is not installed: there are no operators or kernels to trace")
        return
    options = session.options
    before_stall = session._feed.catch_up if session._feed is not None else lambda: None
    if options.mode == "light":
        from .light_tracing import LightTracing

        session._tracing = LightTracing(
            options,
            session,
            schedule=session._schedule,
            lead=not session._begin_tracing,
            before_stall=before_stall,
        )
    else:
        collector = KinetoCollector(options)
        session._tracing = tracing = Tracing(
            collector,
            session.deliver,
            schedule=session._schedule,
            paced=options.mode == "summary",
            flush_s=options.flush_s,
            limit_s=options.limit_s,
            lead=not session._begin_tracing,
            before_stall=before_stall,
            forget=session.forget_windows,
        )
        if session._summary is not None:
            session._summary.count_traced_steps = lambda: tracing.traced_steps
        if options.with_modules and not options.with_stack:  # the Python tracer lists them itself
            session._modules = ModuleRanges(lambda: collector.recording)
    if session._begin_tracing:
        try:
            session.begin_tracing()
        except BaseException:
            session._tracing = session._modules = None
            raise
        undo.callback(session._tracing.end)
