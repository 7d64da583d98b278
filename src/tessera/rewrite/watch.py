"""What was seen of a compilation, as plain data: the program before, the kernels after, what our passes found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .pieces import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One place a pass of ours changed: what eager torch would have launched there, and what it launches now.

    With `by="inductor"` nothing was changed: a pass of torch's is expected to do it.
    """

    rule: str
    before: str
    after: str
    by: str = "tessera"
    graph: int = 0
    where: str = ""
    why: str = ""
    pieces_before: tuple[Piece, ...] = ()
    pieces_after: tuple[Piece, ...] = ()
    saved_s: float | None = None
    saved_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel Inductor made or calls: the aten nodes it computes and the buffers it reads and writes (bytes).

    `origins` are all nodes it stems from, `nodes` those that no kernel before it computed; `call` is a library's.
    """

    name: str
    nodes: tuple[str, ...]
    origins: tuple[str, ...]
    reads: Mapping[str, float]
    writes: Mapping[str, float]
    dtype: str
    backward: bool
    graph: int = 0
    reduction: bool = False
    call: Piece | None = None


@dataclass(slots=True)
class Watch:
    """What was seen of one program's compilation, graph by graph; `looks` off notes only what our passes found.

    A program is several of Dynamo's graphs, counted in `graphs`; each is an aten graph with a number of its own, which
    stands before the names of its nodes ("0/addmm"). `ran` are the graphs of Dynamo's that ran since it was cleared.
    """

    looks: bool = True
    pieces: list[Piece] = field(default_factory=list)
    nodes: list[frozenset[str]] = field(default_factory=list)
    graph_of: list[int] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    found: list[Found] = field(default_factory=list)
    left: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    lowered: list[tuple[int, Any]] = field(default_factory=list)
    reused: list[tuple[int, float]] = field(default_factory=list)
    graphs: int = 0
    ran: set[int] = field(default_factory=set)
    closed: bool = False
    unsaid: list[str] = field(default_factory=list)
    torn: bool = False

    @property
    def complete(self) -> bool:
        """Whether all graphs were seen before and after: half a program cannot be priced."""
        return bool(self.pieces and self.kernels) and not self.torn

    def of_those_that_ran(self) -> Watch:
        """Without graphs that were compiled for a first iteration only: an optimizer's before it has any state."""
        numbers = {str(n) for n, graph in enumerate(self.graph_of) if graph in self.ran}
        return replace(
            self,
            pieces=[p for p in self.pieces if p.nodes[0].partition("/")[0] in numbers],
            kernels=[k for k in self.kernels if k.graph in self.ran],
            found=[f for f in self.found if f.graph in self.ran],
            reused=[r for r in self.reused if str(r[0]) in numbers],
        )

    def say_not(self, what: str, why: BaseException | str) -> None:
        """Note something Inductor did not tell."""
        reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        line = f"Inductor did not say {what} ({reason})"
        if line not in self.unsaid:
            self.unsaid.append(line)
