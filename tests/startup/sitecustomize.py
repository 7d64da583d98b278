"""Interpreters that tests start collect garbage less often, and not at their end.

Nothing that torch imports is garbage: a third of the CPU time of a program with an optimizer was spent on finding that.
"""

import atexit
import gc

gc.set_threshold(50_000)
atexit.register(gc.freeze)
