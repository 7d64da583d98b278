"""The tuner: what can be changed about a function, what each change saves in joules, and which ones stay.

::

    parts (modules, optimizers) ─► knobs (those that apply, after watching one call) ─► search ─► Plan (kept on disk)
                                                                                         │ ▲
                                     changes (apply, undo) ◄── tuner (time, joules, same result?)
                                        └─► compilation, cudagraph
"""
