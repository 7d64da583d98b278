"""All-reduces over slow links between nodes: flat, two_step, hierarchical and compressed, in network namespaces.

    python benchmarks/measure/dist_links.py [--nodes 2] [--ranks 2] [--mbit 100] [--mib 8]        (needs root)

Every "node" is a network namespace with some ranks; inside they talk over its own loopback, which is not slowed down.
Nodes hang on a bridge by links that tc's token bucket holds at `--mbit` in each direction. Gloo connects each pair of
ranks by one address of each rank, the node's, which is routed over loopback inside the node. Bytes between nodes are
read from the counters of the links. The ranks are forked, so that torch is imported once.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

from tessera import dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

OUT = Path(__file__).parents[1] / "results" / "dist_links.json"
NEW_NET, NEW_MOUNT = 0x40000000, 0x00020000  # CLONE_NEWNET and CLONE_NEWNS of sched.h
WAYS: dict[str, dict[str, Any]] = {
    "flat": {},
    "two_step": {"algorithm": "two_step"},
    "hierarchical": {"algorithm": "hierarchical"},
    "fp16": {"compress": "fp16"},
    "fp8": {"compress": "fp8"},
}
REPEATS = 5
LIBC = ctypes.CDLL(None, use_errno=True)


def run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"not permitted here: `{command}`: {done.stderr.strip()}")


def make_links(nodes: int, mbit: float) -> None:
    """Namespaces node0, node1 ... on a bridge of this process's own namespace, which nobody else sees."""
    if LIBC.unshare(NEW_NET | NEW_MOUNT):
        raise SystemExit(f"not permitted here: a network namespace ({os.strerror(ctypes.get_errno())}); run it as root")
    run("mount --make-rprivate /")
    run("mount -t tmpfs none /run")
    run("ip link add bridge0 type bridge")
    run("ip addr add 10.7.0.254/24 dev bridge0")
    run("ip link set dev bridge0 up")
    run("ip link set dev lo up")
    for node in range(nodes):
        run(f"ip netns add node{node}")
        run(f"ip link add link{node} type veth peer name eth0 netns node{node}")
        run(f"ip link set dev link{node} master bridge0")
        run(f"ip link set dev link{node} up")
        run(f"ip -n node{node} addr add 10.7.0.{node + 1}/24 dev eth0")
        run(f"ip -n node{node} link set dev lo up")
        run(f"ip -n node{node} link set dev eth0 up")
        shape = f"root tbf rate {mbit}mbit burst 256kb latency 400ms"
        run(f"tc qdisc add dev link{node} {shape}")
        run(f"tc -n node{node} qdisc add dev eth0 {shape}")


def count_bytes(nodes: int) -> int:
    """Bytes that came out of all nodes so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    received = {line.split(":")[0].strip(): int(line.split(":")[1].split()[0]) for line in lines if ":" in line}
    return sum(received[f"link{node}"] for node in range(nodes))


def serve(rank: int, args: argparse.Namespace, begin: int, end: int) -> None:
    """A rank in its node; each line that is read on `begin` is a way to go, each result a line on `end`."""
    node = rank // args.ranks
    with open(f"/run/netns/node{node}") as namespace:
        if LIBC.setns(namespace.fileno(), NEW_NET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", LOCAL_WORLD_SIZE=str(args.ranks))
    world = args.nodes * args.ranks
    store = c10d.TCPStore("10.7.0.1", 29500, world, is_master=rank == 0)
    timeout = datetime.timedelta(seconds=60)
    c10d.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    x = torch.ones(args.mib * 2**18)
    for name in os.fdopen(begin):
        with dist.record_collectives() as records:
            seconds = time.perf_counter()
            dist.all_reduce(x.fill_(1.0), **WAYS[name.strip()])
            seconds = time.perf_counter() - seconds
        error = float((x - world).abs().max())
        between = records[-1].between_nodes
        os.write(end, f"{seconds} {error} {records[-1].error_bound} {-1 if between is None else between}\n".encode())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    _ = dist.all_reduce  # imported here, not by every rank
    pids, begins, ends = [], [], []
    world = args.nodes * args.ranks
    for rank in range(world):
        (read, write), (read_result, write_end) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in [f.fileno() for f in begins]:
                os.close(fd)
            os.close(write)
            serve(rank, args, read, write_end)
            os._exit(0)
        os.close(read)
        os.close(write_end)
        pids.append(pid)
        begins.append(os.fdopen(write, "w", buffering=1))
        ends.append(os.fdopen(read_result))
    rows: dict[str, Any] = {}
    try:
        for name in WAYS:
            seconds, moved = [], []
            for number in range(REPEATS + 1):  # the first one makes connections and groups
                before = count_bytes(args.nodes)
                for begin in begins:
                    begin.write(f"{name}\n")
                results = [[float(n) for n in end.readline().split()] for end in ends]
                if number:
                    seconds.append(max(r[0] for r in results))
                    moved.append(count_bytes(args.nodes) - before)
                assert all(r[1] <= r[2] * (1 + 1e-5) + 1e-6 for r in results), (name, results)
            told = sum(r[3] for r in results) if results[0][3] >= 0 else None
            rows[name] = {
                "seconds": statistics.median(seconds), "slowest_s": max(seconds),
                "between_nodes_bytes": statistics.median(moved), "told_bytes": told,
            }  # fmt: skip
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_links(args.nodes, args.mbit)
    rows = measure(args)
    print(f"{args.nodes} nodes of {args.ranks} ranks, {args.mbit:g} Mbit/s between them, {args.mib} MiB a rank")
    for name, row in rows.items():
        ratio = rows["flat"]["seconds"] / row["seconds"]
        print(f"  {name:14} {row['seconds']:7.3f} s  {ratio:5.2f} times as fast as flat   "
              f"{row['between_nodes_bytes'] / 2**20:8.1f} MiB between nodes")  # fmt: skip
    given = {"nodes": args.nodes, "ranks_per_node": args.ranks, "mbit_per_s": args.mbit, "mib": args.mib}
    write_result(args.out, {**given, "repeats": REPEATS, "ways": rows})


if __name__ == "__main__":
    main()
