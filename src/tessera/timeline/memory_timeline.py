"""Reads torch's memory timeline (`export_memory_timeline("x.raw.json.gz")`) as counters of a `Timeline`.

Its rows are [time in ns, action, bytes, category]. Bytes are signed, so that their running sum is what is allocated.
What existed before has the time -1. Categories have torch's numbers.
"""

from __future__ import annotations

import itertools

import msgspec

from ..errors import RecordingError
from .columns import Builder, Timeline

CATEGORIES = (
    "parameters", "optimizer state", "inputs", "temporaries", "activations", "gradients", "autograd detail", "unknown",
)  # fmt: skip
ALLOCATED = "memory allocated"
_MOST = 2**62  # bytes; their sums fit 64 bits


def is_memory_timeline(start: bytes) -> bool:
    """Return whether a file that begins like this is one: a list of lists, while a trace is a list of objects."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    return text[:1] == b"[" and text[1:].lstrip()[:1] == b"["


def read_memory_timeline(text: bytes, where: str) -> Timeline:
    """Return counters of allocated bytes, in total and by category."""
    try:
        rows = msgspec.json.decode(text, type=list[tuple[int, int, int, int]])
    except msgspec.DecodeError as error:
        raise RecordingError(
            f"{where} is a list of lists, but not torch's memory timeline",
            why=str(error),
            fix='give a trace, or what export_memory_timeline("x.raw.json.gz") wrote',
        ) from error
    if any(abs(size) > _MOST // max(len(rows), 1) for _, _, size, _ in rows):
        raise RecordingError(f"{where} has sizes that cannot be", why="its sums do not fit", fix="record again")
    first = min((t for t, *_ in rows if t >= 0), default=0)
    builder = Builder()
    allocated = 0
    by_category = dict.fromkeys(range(len(CATEGORIES)), 0)
    unit = builder.intern("B")
    for time_ns, group in itertools.groupby(sorted(rows, key=lambda r: r[0]), key=lambda r: max(r[0], first)):
        touched = set()
        for _, _, size, category in group:
            allocated += size
            number = category if category in by_category else len(CATEGORIES) - 1
            by_category[number] += size
            touched.add(number)
        builder.add("counter", ALLOCATED, time_ns, time_ns, value=float(allocated), unit=unit, device=0)
        for number in sorted(touched):
            name = f"memory of {CATEGORIES[number]}"
            builder.add("counter", name, time_ns, time_ns, value=float(by_category[number]), unit=unit, device=0)
    builder.meta["memory_timeline"] = True
    return builder.build()
