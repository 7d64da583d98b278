"""Acting on joules: `schedule` (caps, goals, hints), the token bucket and its pace points, tuner, limits and clocks.

::

    schedule ── options ──► held ──► loop (thread) ──► zone ── bucket (controller)      monitor's samples ──► loop
                  │                    │   └── node (one bucket for the node's processes)
                  │                    └── launches (where points go) ── pace ── pace_kernel (the wait in the stream)
                  ├──► limits, dvfs (the driver's, with permission)
                  └──► tuner, tuning (choices by measured joules)
"""
