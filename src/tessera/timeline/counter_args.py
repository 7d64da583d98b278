"""Reads hardware counters from the arguments of a trace's kernels, under the names of `Record`.

Tessera writes percentages as 0 to 100. Other tools write the same fields as fractions (`"sm_occupancy": 0.71`,
`"tc_util_pct": 0.83`). So in a file that Tessera did not write, a percentage without any value above 1 is a fraction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ..record import COUNTERS

OURS = b'"tessera"'
"""What our exporter writes before the events."""
_PERCENTAGES = tuple(sorted(f for f in COUNTERS if f.endswith("_pct") or f in ("sm_occupancy", "l2_hit_rate")))
# Search from the first underscore on: including the quote before the name would take eight times as long.
_KEYS = re.compile(b'_(?:%b)"' % "|".join(sorted({f.partition("_")[2] for f in COUNTERS})).encode())


def may_have_counters(text: bytes) -> bool:
    """Return whether the name of a counter may be in this JSON."""
    return _KEYS.search(text) is not None


def read_counters(args: bytes) -> dict[str, Any]:
    """Return the counters among the arguments of one event."""
    if not may_have_counters(args):
        return {}
    return {k: v for k, v in msgspec.json.decode(args).items() if k in COUNTERS and _is_usable(k, v)}


def _is_usable(field: str, value: Any) -> bool:
    if field == "stall_reasons":
        return isinstance(value, dict) and all(_is_usable("", v) for v in value.values())
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fractions_to_percent(rows: Mapping[int, dict[str, Any]]) -> list[str]:
    """Convert fractions to percent in place; return the fields that were fractions."""
    fields = [f for f in _PERCENTAGES if max((own[f] for own in rows.values() if f in own), default=2.0) <= 1.0]
    for own in rows.values():
        own |= {f: 100.0 * own[f] for f in fields if f in own}
    return fields
