"""What a launch costs the host while it is recorded, and after: a loop of small kernels that reads a value back.

    PYTHONPATH=src:.carry/site python benchmarks/device/launch_cost.py RESULTS.json [--turns 3]

Two measures, each in processes of their own, since what once used CUPTI stays slower:

ways  microseconds of a small addition and milliseconds of an iteration (an actor-critic of tiny networks, about 800
      launches and 17 reads): in a process that nobody has traced, then with CUPTI alone, with its records of calls, after
      Kineto's operators, after Kineto's kernels, in sessions of both modes.
runs  the same loop as a script: plain, under `tessera run`, and under `tessera run --operator-steps 0`, in turns.

No clock, limit or mode is changed. A shared host's speed drifts by a third within minutes: read ratios beside each other.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics as st
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera.profile.cupti_library import find_loaded

WAYS = ("cupti", "operators", "kernels", "session", "session_kernels")
ITERATIONS = 450
DEVICE = "cuda"


def make_iteration() -> Callable[[], float]:
    """An actor that acts 16 times in 256 pendulums, a critic that learns twice, the actor once."""
    layers = lambda: (nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))  # noqa: E731
    actor, critic = (nn.Sequential(*layers()).to(DEVICE) for _ in range(2))
    rates = ((actor, 3e-4), (critic, 1e-3))
    learn_actor, learn_critic = (torch.optim.Adam(net.parameters(), rate) for net, rate in rates)
    angle, speed = torch.rand(256, device=DEVICE) * 6.28, torch.zeros(256, device=DEVICE)

    def improve(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def iteration() -> float:
        seen, acted, earned = [], [], []
        for _ in range(16):
            state = torch.stack([angle.cos(), angle.sin(), speed / 8], 1)
            with torch.no_grad():
                action = actor(state).squeeze(1) + 0.3 * torch.randn(256, device=DEVICE)
            force = action.clamp(-2, 2)
            cost = (
                torch.remainder(angle + 3.14, 6.28).sub(3.14).square() + 0.1 * speed.square() + 0.001 * force.square()
            )
            speed.add_((15 * angle.sin() + 3 * force) * 0.05).clamp_(-8, 8)
            angle.add_(speed * 0.05)
            if (-cost).mean().item() < -1e9:
                break
            seen.append(state), acted.append(action), earned.append(-cost)
        states, actions, gain = torch.cat(seen), torch.cat(acted), torch.cat(earned)
        for _ in range(2):
            improve(learn_critic, (critic(states).squeeze(1) - gain).square().mean())
        with torch.no_grad():
            better = gain - critic(states).squeeze(1)
        likelihood = -((actions - actor(states).squeeze(1)) / 0.3).square() / 2
        loss = -(likelihood * better).mean()
        improve(learn_actor, loss)
        return loss.item()

    return iteration


def took(call: Callable[[], Any], times: int, rounds: int = 5) -> float:
    """Seconds of a call: the median of some rounds."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun_s) / times)
    return st.median(found)


def look_at(way: str) -> Iterator[tuple[str, dict[str, float]]]:
    """A process: measured before, in, and after one way of recording."""
    iteration, small = make_iteration(), torch.randn(64, 64, device=DEVICE)
    for _ in range(5):
        iteration()

    def look(when: str) -> tuple[str, dict[str, float]]:
        return when, {"add_us": 1e6 * took(lambda: small + 1, 4000), "iteration_ms": 1e3 * took(iteration, 8, 7)}

    yield look("before")
    if way == "cupti":
        from tessera.profile.cupti_collector import CuptiCollector

        collector = CuptiCollector()
        for calls in (False, True):
            collector.start(calls=calls)
            yield look("kernels and calls recorded" if calls else "kernels recorded")
            collector.stop()
            collector.take()
            yield look("after calls" if calls else "after")
    elif way in ("operators", "kernels"):
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (way == "kernels")
        with profile(activities=kinds, record_shapes=True):
            for _ in range(3):
                iteration()
        yield look("after")
        if way == "kernels":
            loaded = find_loaded("libcupti")
            assert loaded is not None
            ctypes.CDLL(loaded).cuptiFinalize()  # nothing else runs here: beside launches of other threads it ends them
            yield look("after cuptiFinalize")
    else:
        from tessera import profile as tessera_profile

        path = Path(tempfile.mkdtemp()) / "run.tessera"
        mode = {"mode": "kernels"} if way == "session_kernels" else {}
        session = tessera_profile.session(path=path, **mode).start()
        for _ in range(10):
            iteration()
            session.step()
        time.sleep(1.0)  # the operators are read
        yield look("in the session")
        session.stop()
        yield look("after")


def run_script(turns: int) -> dict[str, list[float]]:
    """Milliseconds of an iteration of the script, by how it was started."""
    folder = Path(tempfile.mkdtemp())
    tessera = [sys.executable, "-m", "tessera", "run", "--out", str(folder / "run.tessera")]
    starts = {"plain": [sys.executable], "light": tessera, "kernels": [*tessera, "--operator-steps", "0"]}
    found: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(turns):
        for name, start in starts.items():
            done = subprocess.run(
                [*start, __file__, os.devnull, "--script"], capture_output=True, text=True, check=True
            )
            line = next(line for line in done.stdout.splitlines() if line.startswith("iteration_ms "))
            found[name].append(float(line.split()[1]))
            print(f"{name:8s} {found[name][-1]:.2f} ms an iteration", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--script", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    if args.script:
        iteration = make_iteration()
        times = []
        for _ in range(ITERATIONS):
            begun_s = time.perf_counter()
            iteration()
            times.append(time.perf_counter() - begun_s)
        print(f"iteration_ms {1e3 * st.median(times[3:]):.3f}")
        return
    if args.way:
        print(json.dumps(dict(look_at(args.way))))
        return
    ways = {}
    for way in WAYS:
        call = [sys.executable, __file__, os.devnull, "--way", way]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        ways[way] = json.loads(done.stdout.splitlines()[-1])
        for when, row in ways[way].items():
            print(f"{way:16s} {when:28s} {row['add_us']:6.2f} us {row['iteration_ms']:7.2f} ms", flush=True)
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ways": ways,
        "runs": run_script(args.turns),
    }
    write_result(args.out, found)


if __name__ == "__main__":
    main()
