"""Kill the real governor (SIGKILL) at random moments under load: how fast it is back, what is lost, the cap held.

    python benchmarks/measure/governor_kills.py [--kills N] [--write FILE]

Node daemons (the real node's side, without sensors) and clients of jobs call it over HTTP all the time. At every moment
the nodes' caps must not exceed the limit, and whatever a client was told must still be true after the restart.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]
from result_file import write_result
from tessera.clock import read_boot_clock
from tessera.errors import GovernorError, GovernorRefusal
from tessera.fleet.governor.client import GovernorAddress, GovernorClient
from tessera.fleet.leases import JobState, JobStatus, PowerRequest
from tessera.fleet.node_cap import CapHolder

from governor_process import GovernorProcess

LIMIT_W = 8000.0
OPTIONS = ("--cap", "10kW", "--margin", "80%", "--soft-start", "1s", "--lease", "3s", "--heartbeat", "200ms")


class Load:
    """Nodes and clients that never stop calling."""

    def __init__(self, address: GovernorAddress, nodes: int, clients: int) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.holders = {f"n{i}": CapHolder() for i in range(nodes)}
        self.ends: dict[str, JobState] = {}  # what each job was last told
        self.answers = 0
        self.highest_w = 0.0
        self.problems: list[str] = []
        self.threads = [threading.Thread(target=self.node, args=(n,), daemon=True) for n in self.holders]
        self.threads += [threading.Thread(target=self.jobs, args=(i,), daemon=True) for i in range(clients)]
        self.threads.append(threading.Thread(target=self.watch, daemon=True))
        for thread in self.threads:
            thread.start()

    def node(self, name: str) -> None:
        client, session = GovernorClient(self.address, timeout_s=2.0), ""
        holder = self.holders[name]
        while not self.stop.wait(0.1):
            try:
                if not session:
                    wanted = f"{name}-{random.getrandbits(32)}"
                    if client.join(name, 200.0, session=wanted).joined:
                        with self.lock:
                            holder.guaranteed_w = 200.0
                    session = wanted
                with self.lock:
                    number, acked = holder.send(read_boot_clock()), holder.acked
                grant = client.heartbeat(name, session=session, acked=acked, measured_w=None)
                with self.lock:
                    holder.receive(number, grant)
                    holder.confirm()
                    self.check()
                self.answers += 1
            except GovernorRefusal as exc:
                self.problems.append(f"{name}: {exc.what}")
                session = ""
            except GovernorError:
                continue

    def check(self) -> None:
        now_s = read_boot_clock()
        total_w = sum(holder.cap_w(now_s) for holder in self.holders.values())
        self.highest_w = max(self.highest_w, total_w)
        if total_w > LIMIT_W:
            self.problems.append(f"nodes may draw {total_w} W")

    def watch(self) -> None:
        while not self.stop.wait(0.005):
            with self.lock:
                self.check()

    def jobs(self, number: int) -> None:
        while not all(holder.grant for holder in self.holders.values()):  # all nodes have joined
            time.sleep(0.05)
        client, rng, count = GovernorClient(self.address, timeout_s=2.0), random.Random(number), 0
        while not self.stop.is_set():
            count += 1
            name = f"c{number}-{count}"
            request = PowerRequest(
                job=name, watts={f"n{rng.randrange(len(self.holders))}": rng.choice([500.0, 2000.0])}, ttl_s=3600.0
            )
            self.call(name, functools.partial(client.request, request), None)
            if rng.random() < 0.9:  # else this one stays
                self.call(name, functools.partial(client.release, name), JobState.ENDED)

    def call(self, name: str, call: Callable[[], JobStatus], ends: JobState | None) -> None:
        while not self.stop.is_set():
            try:
                state = call().state
            except GovernorRefusal as exc:
                self.problems.append(f"{name}: {exc.what}")
                return
            except GovernorError:  # no answer: the same call again, which must do the same as once
                time.sleep(0.02)
                continue
            with self.lock:
                self.answers += 1
                if ends is not None and state is not ends:
                    self.problems.append(f"{name}: released, and {state}")
                self.ends[name] = state
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rng, back_s, cpu_s, checked = random.Random(args.seed), [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        governor = GovernorProcess(Path(folder) / "state", *OPTIONS)
        address = governor.start()
        load = Load(address, args.nodes, args.clients)
        look = GovernorClient(address, timeout_s=5.0)
        for i in range(args.kills):
            time.sleep(rng.uniform(0.05, 1.5))
            with load.lock:
                known = dict(load.ends)  # answered before the kill
            governor.kill()
            started_s = time.monotonic()
            governor.start()
            back_s.append(time.monotonic() - started_s)
            cpu_s.append(governor.cpu_s())
            sample = rng.sample(sorted(known), min(40, len(known)))
            for name in sample:
                with load.lock:
                    said = load.ends[name]
                state = look.show_job(name).state
                checked += 1
                if (said is JobState.ENDED) != (state is JobState.ENDED) and load.ends[name] is said:
                    load.problems.append(f"kill {i}: {name} was {said}, and is {state}")
            print(
                f"kill {i + 1}: back after {back_s[-1]:.2f} s, {load.answers} answers, {len(load.problems)} problems",
                flush=True,
            )
        load.stop.set()
        for thread in load.threads:
            thread.join(10.0)
        status = look.describe()
        waiting = {j.job for j in status.jobs}
        lost = [n for n, s in load.ends.items() if s is not JobState.ENDED and n not in waiting]
        governor.stop()
    back_s.sort()
    content = {
        "kills": args.kills,
        "answers": load.answers,
        "jobs": len(load.ends),
        "jobs_checked_after_restarts": checked,
        "jobs_lost": len(lost),
        "restart_s_median": back_s[len(back_s) // 2],
        "restart_s_max": back_s[-1],
        "restart_cpu_s_max": max(cpu_s),
        "load_average": os.getloadavg()[1],
        "highest_w": load.highest_w,
        "limit_w": LIMIT_W,
        "problems": load.problems[:20],
    }
    for name, value in content.items():
        print(f"{name:>28}  {value}")
    if args.write:
        write_result(args.write, content)
    sys.exit(bool(load.problems or lost))


if __name__ == "__main__":
    main()
