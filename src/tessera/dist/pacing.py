"""When a collective starts: groups take turns, chunks leave gaps, and random waits keep racks out of step."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, is_integer, is_number
from ..units import parse_duration
from .mesh import Mesh, find_mesh

DEFAULT_SLOT_S = 1e-3
"""Seconds by which each group starts later: the least of the 1 to 5 ms that smooth a rack's current
(docs/guides/energy.md).
"""
Jitter = float | Sequence[float]
_PHASE = re.compile(r"group_offset\(\s*(\w+)\s*(?:,\s*([^)]+))?\)")


@dataclass(frozen=True, slots=True)
class Phase:
    """Groups along `axis` start one after the other, `slot_s` apart; "node" is the node of the rank."""

    axis: str
    slot_s: float = DEFAULT_SLOT_S

    @classmethod
    def parse(cls, text: str) -> Phase:
        """Parse `group_offset(tp)`, or `group_offset(tp, 2ms)` with the time between two groups."""
        match = _PHASE.fullmatch(text.strip())
        if match is None:
            raise ArgumentError(
                f"phase={text!r} is not known", fix='phase="group_offset(tp)" or "group_offset(tp, 2ms)"'
            )
        return cls(match[1], parse_duration(match[2]) if match[2] else DEFAULT_SLOT_S)

    def delay_s(self, mesh: Mesh | None, rank: int, node_size: int) -> float:
        """Return how long a rank waits: its group's number times the slot."""
        if self.axis == "node":
            return rank // node_size * self.slot_s
        return find_mesh(mesh, self.axis).group_number(self.axis, rank) * self.slot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a collective is spread in time: an offset by group, jitter (least, most), and chunks with gaps between."""

    phase: Phase | None = None
    jitter_s: tuple[float, float] = (0.0, 0.0)
    chunks: int = 1
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        if not (
            is_integer(self.chunks)
            and self.chunks > 0
            and 0 <= self.jitter_s[0] <= self.jitter_s[1]
            and self.gap_s >= 0
        ):
            raise ArgumentError(
                "chunks must be 1 or more, and jitter and gap not negative", fix="jitter_ms=5, or jitter_ms=(1, 5)"
            )

    @classmethod
    def make(cls, phase: str | Phase | None, jitter_ms: Jitter, chunks: int, gap_ms: float) -> Pace:
        """Make a pace from the arguments of `all_reduce`; jitter is up to a number, or between the two of a pair."""
        parsed = Phase.parse(phase) if isinstance(phase, str) else phase
        pair = tuple(jitter_ms) if isinstance(jitter_ms, (list, tuple)) else (0.0, jitter_ms)
        if len(pair) != 2 or not all(map(is_number, pair)):
            raise ArgumentError(f"jitter_ms={jitter_ms!r}", fix="jitter_ms=5, or jitter_ms=(1, 5)")
        if not is_number(gap_ms):
            raise ArgumentError(f"gap_ms={gap_ms!r}", fix="milliseconds between two chunks: gap_ms=1")
        jitter_s = (pair[0] * 1e-3, pair[1] * 1e-3)
        return cls(phase=parsed, jitter_s=jitter_s, chunks=chunks, gap_s=gap_ms * 1e-3)

    def wait_to_start(self, mesh: Mesh | None, rank: int, node_size: int, seed: str) -> float:
        """Sleep until it is this rank's turn.

        Ranks of a group wait equally long: `seed` is for the group and the call.
        """
        delay_s = self.phase.delay_s(mesh, rank, node_size) if self.phase is not None else 0.0
        if self.jitter_s[1]:
            delay_s += random.Random(seed).uniform(*self.jitter_s)
        if delay_s:
            time.sleep(delay_s)
        return delay_s
