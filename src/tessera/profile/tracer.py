"""`Tracer`: what a session asks of whatever traces it: Kineto alone (`Tracing`) or CUPTI too (`LightTracing`)."""

from __future__ import annotations

from typing import Protocol

from ..schema import Pause
from .options import Mode


class Tracer(Protocol):
    """Everything but `tick` and the properties is called on the thread that began."""

    @property
    def mode(self) -> Mode:
        """What is recorded in the end, which may be less than was asked for."""

    @property
    def has_begun(self) -> bool: ...

    @property
    def due_ns(self) -> int:
        """The epoch from which on a `boundary` is of use; a program's regions end far more often."""

    @property
    def tracing_s(self) -> float:
        """The program's time that was spent so far."""

    @property
    def pauses(self) -> list[Pause]:
        """When the program stood still so far, for its operators to be collected."""

    @property
    def notes(self) -> list[str]: ...

    @property
    def collectors(self) -> dict[str, str | None]:
        """What recorded kernels and operators, and why CUPTI did not."""

    def begin(self, step: int = 0) -> None:
        """Start, within a step of the program."""

    def expect_steps(self) -> None:
        """The program has an optimizer: its steps will be seen."""

    def work_begins(self) -> None:
        """What is to be traced begins now: what came before was preparation."""

    def step(self, step: int) -> None:
        """A step has ended and `step` begins."""

    def boundary(self, now_ns: int, *, of_step: bool = False) -> None:
        """A moment at which tracing may start or stop, where that is due."""

    def tick(self, now_ns: int) -> None:
        """Called by the session's thread a few times a second."""

    def finish(self, why: str | None = None) -> None:
        """Trace no more operators; all other recording goes on."""

    def end(self) -> None:
        """Stop, and wait until all that was traced has been read."""
