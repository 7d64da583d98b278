"""A loop whose power comes in bursts: find the spikes, show what ran in them, and answer the power checklist.

    python examples/power_spike.py
    python examples/power_spike.py --bursts 40     # more spikes, more certain answers

Each round multiplies matrices for a while ("burst") and then waits ("calm"), as a pipeline that waits for its data
does. Where nothing measures, power is modelled from the CPU time of this process alone: other programs would hide the
bursts.
"""

from __future__ import annotations

import argparse
import time

import torch

from tessera import monitor, profile
from tessera.analyze.correlate import Correlation
from tessera.sensors.modelled import ModelledSensor


def model_this_process() -> bool:
    """Without a sensor, model the power of this process alone, as often as an H200 samples.

    Says whether it does.
    """
    if all(domain.basis == "modelled" for domain in monitor.default().sampler.domains):
        own = ModelledSensor(busy=lambda: (time.process_time(), time.monotonic()))
        own.period_s = 0.02
        monitor.use(monitor.Monitor([own]).start())
        return True
    return False


def burst(seconds: float, device: str) -> None:
    """Products until the time is over."""
    a = torch.randn(512, 512, device=device)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        a = torch.tanh(a @ a)
        if device == "cuda":
            torch.cuda.synchronize()  # otherwise the host runs ahead of the device


def hunt(rounds: int, burst_s: float, calm_s: float, device: str) -> Correlation:
    """Record the bursts, and correlate the power with what ran."""
    with profile.session(activities=["cpu", "gpu", "power"], record_shapes=False) as session:
        for _ in range(rounds):
            with profile.region("burst"):
                burst(burst_s, device)
            with profile.region("calm"):
                time.sleep(calm_s)
            session.step()
    power = session.power()
    low_w, high_w = power.percentile(5), power.percentile(95)
    # Find the bursts: the threshold is half-way up. For a flat trace the default threshold is used.
    half_w = (low_w + high_w) / 2 if low_w and high_w and high_w > 1.2 * low_w else None
    found: Correlation = session.timeline().correlate(power, threshold_w=half_w)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument("--burst-s", type=float, default=0.2)
    parser.add_argument("--calm-s", type=float, default=0.3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if model_this_process():
        print("MODELLED: watts are the CPU time of this process times a power curve")
    print(hunt(args.bursts, args.burst_s, args.calm_s, args.device))


if __name__ == "__main__":
    main()
