"""Which function of the user's own code launched a row: the frames that torch's tracer recorded (`with_stack=True`).

::

    thread   [train.py(12): main                                   ]
                [model.py(40): forward                        ]          the innermost own frame: model.py(40): forward
                   [torch/nn/modules/linear.py(114): forward ]
                      [<built-in function linear>  ]

Backward work has no frame of its own: it belongs to the function that called its forward operator.
"""

from __future__ import annotations

import re
import sys

import numpy as np

from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.intervals import Nesting

LIBRARIES = frozenset({"torch", "torchvision", "torchaudio", "functorch", "triton", "numpy", "tqdm", "tessera"})
"""Packages whose frames are nobody's own. Those of model libraries are told: they are what a reader looks for."""
_PLACE = re.compile(r"(?:.*/(?:site-packages|dist-packages|lib/python3[.\d]*)/)?([^/(]+?)(?:\.py)?(?:/.*)?\(\d+\): ")


def is_own(name: str) -> bool:
    """Whether a frame ("model.py(40): forward") is of the user's code, not of Python, torch or a module's shadow."""
    place = _PLACE.match(name)
    if place is None or place[1].startswith("<"):
        return False
    return place[1] not in LIBRARIES and place[1] not in sys.stdlib_module_names


def find_own_frames(timeline: Timeline, rows: Ints) -> Ints:
    """For each row the innermost frame of the user's own code around its launch; `NONE` where there is none."""
    frames = np.flatnonzero(np.isin(timeline["name"], timeline.meta.get("frames", ())))
    own_names = np.array([is_own(name) for name in timeline.names] or [False])
    frames = frames[own_names[timeline["name"][frames]]]
    if not len(frames):
        return np.full(len(rows), NONE, np.int64)
    links = timeline.linked
    nested = Nesting(frames, timeline["thread"][frames], timeline["start_ns"][frames], timeline["end_ns"][frames])
    found = nested.at(links.launch_thread[rows], links.launch_ns[rows])
    forward = links.forward_op[rows]
    lost = (found == NONE) & (forward != NONE)
    origin = forward[lost]
    found[lost] = nested.at(timeline["thread"][origin], timeline["start_ns"][origin])
    return found
