"""Which function of the user's own code launched a row, from the frames of torch's tracer (`with_stack=True`).

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
"""Packages whose frames are not the user's own. Frames of model libraries are shown: readers look for them."""
_PLACE = re.compile(r"(?:.*/(?:site-packages|dist-packages|lib/python3[.\d]*)/)?([^/(]+?)(?:\.py)?(?:/.*)?\(\d+\): ")


def is_own(name: str) -> bool:
    """Return whether a frame ("model.py(40): forward") is the user's code, not Python's, torch's or a module's."""
    place = _PLACE.match(name)
    if place is None or place[1].startswith("<"):
        return False
    return place[1] not in LIBRARIES and place[1] not in sys.stdlib_module_names


def find_own_frames(timeline: Timeline, rows: Ints) -> Ints:
    """Return for each row the innermost frame of the user's own code around its launch; `NONE` if there is none."""
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
