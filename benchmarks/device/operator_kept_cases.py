"""Single operators drawn as those of operator_cases.py, but others: kept apart, to judge the predictor by."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from operator_cases import SWEEP, draw

CASES = [
    draw(family, dtype, mode, "kept")
    for family, (dtypes, inferred, trained) in SWEEP.items()
    for dtype in dtypes.split()
    for mode, count in (("infer", inferred), ("train", trained))
    if count
]
