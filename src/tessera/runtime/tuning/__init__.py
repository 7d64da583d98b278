"""The tuner: what can be changed about a function, what each change is worth in joules, and which ones stay.

::

    found (modules, optimizers) ─► seen (one call) ─► space (knobs that apply) ─► search ──► Plan ─► store
                                                        │                           │ ▲
                  changes (apply, undo) ◄───────────────┘                           └─► trial (seconds, joules, same?)
                     └─► layers, arithmetic, compiling, cudagraph: one lever each; copies: weights that were copied
"""
