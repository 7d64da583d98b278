"""Programs made cheaper and explained: `optimize` (torch.compile's passes and ours), checkpointing, reordering.

::

    patterns, spectral ─► inductor (torch.compile) ─► watch ─► savings ─► Rewrite
                              ways ─► candidates (check, measure, choose) ─► Optimized
"""
