"""`Tracer`: the interface of whatever traces a session: Kineto alone (`Tracing`), or CUPTI too (`LightTracing`)."""

from __future__ import annotations

from typing import Protocol

from ..schema import Pause
from .options import Mode


class Tracer(Protocol):
    """Traces the program. All methods except `tick` are called on the thread that began; properties on any thread."""

    @property
    def mode(self) -> Mode:
        """The mode that is really used, which may record less than was asked for."""

    @property
    def has_begun(self) -> bool: ...

    @property
    def due_ns(self) -> int:
        """The epoch time before which `boundary` has no effect; a program's regions end far more often."""

    @property
    def tracing_s(self) -> float:
        """Seconds of the program's time that tracing has taken so far."""

    @property
    def pauses(self) -> list[Pause]:
        """The times at which the program stood still so that its operators could be collected."""

    @property
    def notes(self) -> list[str]: ...

    @property
    def collectors(self) -> dict[str, str | None]:
        """Which library recorded kernels and operators, and why CUPTI did not."""

    def begin(self, step: int = 0) -> None:
        """Start, in step `step` of the program."""

    def expect_steps(self) -> None:
        """Note that the program has an optimizer, so that its steps will be seen."""

    def work_begins(self) -> None:
        """Note that the work to trace begins now; what came before was preparation."""

    def step(self, step: int) -> None:
        """Note that a step has ended and `step` begins."""

    def boundary(self, now_ns: int, *, of_step: bool = False) -> None:
        """Start or stop tracing if that is due: this is a suitable moment."""

    def tick(self, now_ns: int) -> None:
        """Do what is due; the session's thread calls this a few times a second."""

    def finish(self, why: str | None = None) -> None:
        """Stop tracing operators; everything else is still recorded."""

    def end(self) -> None:
        """Stop, and wait until everything that was traced has been read."""
