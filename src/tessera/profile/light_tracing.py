"""The default way to trace: all kernels of the whole run by CUPTI, and operators of a few steady steps by Kineto.

::

    CUPTI    |<------- kernels, copies, sets ----->|<- and calls ->|<----------------------------->|
    Kineto                                         |<- operators ->| stop, read
    steps    |  |  |  |  |  |  |  |  |  |  |  |  | |   |   |   |   |   |  |  |  |  |  |  |  |  |  ||

What is recorded is decided when tracing begins. On a machine without an accelerator there are no kernels: operators are
traced as long as `limit_s` allows. Without CUPTI, Kineto records kernels too, in the same few steps. Kineto also runs
while the program captures a CUDA graph (`graph_capture`), since replays of the graph show no operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..schema import Pause
from ..timeline.columns import Timeline
from .graph_capture import GraphCaptures
from .kernel_tracing import KernelTracing
from .kineto_collector import KinetoCollector, OperatorCollector
from .options import Mode, SessionOptions
from .torch_hooks import ModuleRanges, OtherProfilers
from .tracing import NEVER, Tracing
from .tracing_schedule import SteadySteps, TracingSchedule


class Receiver(Protocol):
    """Takes what was recorded: the session."""

    def deliver(self, timeline: Timeline, start_ns: int, end_ns: int) -> None: ...
    def add_rows(self, timeline: Timeline) -> None: ...
    def set(self, key: str, value: Any) -> None: ...
    def flush(self) -> None: ...


class LightTracing:
    """A `Tracer` that passes its calls on to CUPTI and Kineto."""

    def __init__(
        self,
        options: SessionOptions,
        receiver: Receiver,
        *,
        schedule: TracingSchedule | None,
        lead: bool,
        before_stall: Callable[[], None],
    ) -> None:
        self._options = options
        self._receiver = receiver
        self._schedule = schedule
        self._lead = lead
        self._before_stall = before_stall
        self._steady = SteadySteps(options.operator_steps)
        self._notes: list[str] = []
        self.kernels = KernelTracing(options, receiver.deliver, is_taken=lambda: self.recording_operators)
        self._others: OtherProfilers | None = None
        self._modules = ModuleRanges(lambda: self.recording_operators)
        self._captures: GraphCaptures | None = None
        self.operators: Tracing | None = None
        self.mode: Mode = options.mode
        """The mode that is used in the end: `operators` if there is no accelerator."""
        self._windows: list[tuple[int, int]] = []  # times in which operators were recorded
        self._begun = False

    @property
    def has_begun(self) -> bool:
        return self._begun

    @property
    def due_ns(self) -> int:
        return NEVER if self.operators is None else self.operators.due_ns

    @property
    def tracing_s(self) -> float:
        others = (self.operators, self._captures)
        return self.kernels.tracing_s + sum(other.tracing_s for other in others if other is not None)

    @property
    def pauses(self) -> list[Pause]:
        return [] if self.operators is None else self.operators.pauses

    @property
    def notes(self) -> list[str]:
        others = (self.kernels, self.operators, self._captures)
        return [*self._notes, *(note for other in others if other is not None for note in other.notes)]

    @property
    def recording_operators(self) -> bool:
        """Whether Kineto records at this moment."""
        capturing = self._captures is not None and self._captures.recording
        return capturing or (self.operators is not None and self.operators.collector.recording)

    @property
    def collectors(self) -> dict[str, str | None]:
        """Which library recorded kernels and operators, and why CUPTI did not."""
        by_kineto = "kineto" if self._has_operators else None
        if self.mode == "operators":
            return {"kernels": None, "operators": by_kineto, "why": None}
        by_cupti = "cupti" if self.kernels.kept else None
        return {"kernels": by_cupti or by_kineto, "operators": by_kineto, "why": self.kernels.why_nothing}

    @property
    def _has_operators(self) -> bool:
        return bool(self._windows) or (self._captures is not None and bool(self._captures.captured))

    def expect_steps(self) -> None:
        """Note that the program has an optimizer, so that its steps will be seen."""
        self._steady.steps_expected = True

    def begin(self, step: int = 0) -> None:
        """Start the kinds of tracing that this machine and program allow."""
        import torch

        self._begun = True
        if not has_accelerator():
            self.mode = "operators"
            self.operators = self._make_operators(KinetoCollector(self._options), limited=True)
            self.operators.begin(step)
            if self._options.with_modules:
                self._modules.install()
            return
        self.kernels.begin()
        self._others = OtherProfilers(torch, self.kernels.pause, lambda: KinetoCollector.starting, self.kernels.resume)
        self._others.install()
        if self._options.operator_steps or self._schedule is not None:
            steady, captures = (
                OperatorCollector(self._options, self.kernels, self._modules, self._receiver.flush) for _ in range(2)
            )
            self._captures = GraphCaptures(
                torch, captures, self.kernels, self._deliver_capture, is_traced=lambda: steady.recording
            )
            self._captures.install()
            self.operators = self._make_operators(steady, lead=self._lead or not torch.cuda.is_initialized())
            self.operators.begin(step)

    def _make_operators(
        self, collector: KinetoCollector, *, lead: bool | None = None, limited: bool = False
    ) -> Tracing:
        options = self._options
        return Tracing(
            collector,
            self._deliver if limited else self._deliver_few,
            schedule=self._schedule,
            steady=None if limited else self._steady,
            flush_s=options.flush_s if limited else None,
            limit_s=options.limit_s if limited else None,
            lead=self._lead if lead is None else lead,
            before_stall=self._before_stall,
            count_kernels=lambda: self.kernels.kept,
        )

    def _deliver(self, timeline: Timeline, start_ns: int, end_ns: int) -> None:
        self._windows.append((start_ns, end_ns))
        self._receiver.deliver(timeline, start_ns, end_ns)
        self._receiver.add_rows(self._modules.take())

    def _deliver_few(self, timeline: Timeline, start_ns: int, end_ns: int) -> None:
        """Deliver the operators of a few steps; without CUPTI they come with the only kernels there are."""
        if self.kernels.kept:
            self._receiver.add_rows(timeline)
            self._receiver.add_rows(self._modules.take())
            self._windows.append((start_ns, end_ns))
            self._receiver.set("operator_windows", self._windows)
        else:
            self._receiver.set("scheduled", True)
            self._deliver(timeline, start_ns, end_ns)

    def _deliver_capture(self, timeline: Timeline) -> None:
        """Deliver the operators of a CUDA graph's capture. They are not a step, so there is no window for them."""
        self._receiver.add_rows(timeline)
        self._receiver.add_rows(self._modules.take())

    def work_begins(self) -> None:
        if self.operators is not None:
            self.operators.work_begins()

    def step(self, step: int) -> None:
        if self.operators is not None:
            self.operators.step(step)

    def boundary(self, now_ns: int, *, of_step: bool = False) -> None:
        if self.operators is not None:
            self.operators.boundary(now_ns, of_step=of_step)

    def tick(self, now_ns: int) -> None:
        """Pass on what is due; the session's thread calls this a few times a second."""
        self.kernels.tick()
        if self.operators is not None:
            self.operators.tick(now_ns)

    def finish(self, why: str | None = None) -> None:
        """Stop tracing operators; kernels and everything else are still recorded."""
        if self.operators is not None:
            self.operators.finish(why)

    def end(self) -> None:
        """Stop everything."""
        if self._captures is not None:
            self._captures.remove()
        if self.operators is not None:
            self.operators.end()
        self.kernels.end()
        self._modules.remove()
        if self._others is not None:
            self._others.remove()
        if not self._begun or self.mode == "operators":
            return
        if not self.kernels.kept and self.kernels.why_nothing is not None:
            few = "; operators and kernels of a few steps are by Kineto" if self._windows else ""
            self._notes.append(f"no kernels were recorded by CUPTI: {self.kernels.why_nothing}{few}")
        if self.kernels.kept and self.operators is not None and not self._has_operators:
            fix = "--steps 0:10 and --mode operators do not wait for that"
            self._notes.append(f"there are no operators: the program ended before its steps were steady; {fix}")


def has_accelerator() -> bool:
    """Return whether torch sees a GPU. Asks NVML if possible: after asking CUDA itself the program could not fork."""
    import torch

    return bool(torch.cuda.device_count()) or bool(hasattr(torch, "xpu") and torch.xpu.is_available())
