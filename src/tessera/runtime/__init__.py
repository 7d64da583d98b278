"""Acting on joules: `schedule` (caps, policies, hints), the token bucket and its pauses, limits and clocks.

::

    schedule ── options ──► control_loop (thread) ──► power_zone ── controller          monitor's samples ──► loop
                  │            │   └── node_bucket (one bucket for the node's processes)    cap_report ◄──────┘
                  │            ├── gpu_pacer (thread) ── pause_kernel (pauses of the whole GPU)
                  │            ├── cpu_points ── pacer (waits of a CPU between operators)
                  │            └── token_launches ── token_stream ── wait_kernel (waits for tokens in a stream)
                  ├──► driver_limits, dvfs (by the driver, with permission)
                  └──► tuning (choices by measured joules)
    shaping (pure decisions: phases, jitter, floor, ramp; the simulator has the same) ──► shaper (waits of a running
    job) ── shaper_validation (with and without);  ballast_control ──► ballast_loop (thread) ──► ballast, ballast_kernel
"""
