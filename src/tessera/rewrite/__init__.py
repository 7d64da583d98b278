"""Make programs cheaper and explain how: `optimize` (torch.compile's passes and ours), checkpointing, reordering.

::

    optimize ─► variants ─► inductor (torch.compile, with `passes` before it) ─► compilation
                   │                                                                  │
         program, compare, state                                savings (kernel_times, program_cost)
      (run, check, put back), measure                                                 │
                                                                                   Rewrite
"""

from __future__ import annotations

from ..lazy_names import load_lazily

load_lazily(__name__, {}, modules="checkpoint fused_conv reorder")
