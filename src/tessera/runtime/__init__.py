"""Acting on joules: `schedule` (caps, policies, hints), the token bucket and its pace points, limits and clocks.

::

    schedule ── options ──► control_loop (thread) ──► power_zone ── controller          monitor's samples ──► loop
                  │            │   └── node_bucket (one bucket for the node's processes)    cap_report ◄──────┘
                  │            └── launches (where points go) ── pacer ── wait_kernel (the wait in the stream)
                  ├──► driver_limits, dvfs (by the driver, with permission)
                  └──► tuning (choices by measured joules)
    shaping (pure decisions: phases, jitter, floor, ramp; the simulator has the same) ──► shaper (waits of a running
    job) ── shaper_validation (with and without);  ballast_control ──► ballast_loop (thread) ──► ballast, ballast_kernel
"""
