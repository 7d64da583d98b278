"""What collectives did: `with dist.record_collectives() as records:`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from .reduction import Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective of this rank. Bytes are those the rank sent; `error_bound` is for every element.

    A dry run has no values, so `error_bound` is None there. `between_nodes` are the bytes that left the node if that is
    known, `delay_s` is how long the rank waited for its turn. `time_s` is the host's: on CUDA, the collective may still
    run.
    """

    kind: str
    algorithm: str
    ranks: int
    tensor_bytes: int
    sent_bytes: float
    between_nodes: float | None
    error_bound: float | None
    time_s: float
    delay_s: float

    def to_sent(self, *, divide_by: int) -> Sent:
        """Return what was sent, with the error of a sum that was divided."""
        bound = None if self.error_bound is None else self.error_bound / divide_by
        return Sent(self.sent_bytes, error_bound=bound)


_records: ContextVar[list[CollectiveRecord] | None] = ContextVar("tessera_collectives", default=None)


@contextlib.contextmanager
def record_collectives() -> Iterator[list[CollectiveRecord]]:
    """Record what collectives of `tessera.dist` do inside the block: `with dist.record_collectives() as records:`."""
    records: list[CollectiveRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def note(
    kind: str, algorithm: str, ranks: int, x: torch.Tensor, sent: Sent, *, time_s: float, delay_s: float = 0.0
) -> None:
    """Append a record, if anything records."""
    records = _records.get()
    if records is not None:
        records.append(
            CollectiveRecord(
                kind=kind,
                algorithm=algorithm,
                ranks=ranks,
                tensor_bytes=x.numel() * x.element_size(),
                sent_bytes=sent.bytes,
                between_nodes=sent.between_nodes,
                error_bound=sent.error_bound,
                time_s=time_s,
                delay_s=delay_s,
            )
        )
