"""The host's activity: each moment belongs to the innermost operator that runs, on each thread."""

from __future__ import annotations

import numpy as np

from ..timeline import Timeline
from ..timeline.link import Links
from .activity import Activity, distinct, shares


def host_activity(timeline: Timeline, links: Links) -> Activity:
    """Self time of the host's operators as intervals; classes are operators of one name and one set of shapes."""
    assert links.ops is not None, "what ran on a device has the joules"
    rows, start, end = links.ops.stretches()
    order = np.argsort(start, kind="stable")
    rows, start, end = rows[order], start[order], end[order]
    first, cls = distinct(timeline["name"][rows], timeline["shapes"][rows])
    return Activity(
        rows=rows, start_ns=start, end_ns=end, share_s=shares(start, end), weight=np.ones(len(rows)),
        cls=cls, names=[timeline.name(int(rows[i])) for i in first], first=rows[first],
    )  # fmt: skip
