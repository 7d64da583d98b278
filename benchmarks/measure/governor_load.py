"""Measure the real governor under load and under attack: requests a second, p99, and who is kept out.

    python benchmarks/measure/governor_load.py [--seconds S] [--write FILE]

Nodes send heartbeats, each of which is on disk before it is answered. The attack: more connections than the server keeps,
each sending a byte now and then, and a stream of malformed requests, while nodes go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]
from result_file import write_result
from tessera.fleet.governor.client import GovernorAddress, GovernorClient
from tessera.fleet.leases import PowerRequest

from governor_process import GovernorProcess


def ask(sock: socket.socket, data: bytes) -> bytes:
    """One request and its answer, without a client library: this process shares two cores with the server."""
    sock.sendall(data)
    answer = b""
    while b"\r\n\r\n" not in answer:
        chunk = sock.recv(65536)
        if not chunk:
            raise ConnectionError("the server closed the connection")
        answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head.split(b" ", 2)[1]


def beat(port: int, token: str, first: int, count: int, seconds: float) -> None:
    """Run as a process: heartbeats of `count` nodes, a connection each; prints the seconds of every one."""
    took: list[float] = []
    failed, reconnects = 0, list[int]()
    lock = threading.Lock()

    def node(name: str) -> None:
        nonlocal failed
        head = f"POST /v1/nodes/{name}/heartbeat HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        body = b'{"session": "s", "acked": 0, "measured_w": 100.0}'
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        end_s, own, wrong = time.monotonic() + seconds, [], 0
        again = -1
        started = time.perf_counter()
        while time.monotonic() < end_s:
            again += 1
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=5.0) as sock,
            ):
                while time.monotonic() < end_s:
                    wrong += ask(sock, data) != b"200"
                    own.append(time.perf_counter() - started)  # with the time to connect again, where that was needed
                    started = time.perf_counter()
        with lock:
            took.extend(own)
            failed += wrong
            reconnects.append(again)

    threads = [threading.Thread(target=node, args=(f"n{first + i}",)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"took": took, "failed": failed, "reconnects": sum(reconnects)}))


def measure(address: GovernorAddress, nodes: int, seconds: float) -> dict[str, float]:
    """Heartbeats of all nodes from one process."""
    port = int(address.url.rpartition(":")[2])
    words = ["--beat", str(port), address.token, "0", str(nodes), str(seconds)]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    took = sorted(found["took"])
    return {
        "nodes": nodes,
        "requests_per_s": len(took) / seconds,
        "p50_ms": 1e3 * took[len(took) // 2],
        "p99_ms": 1e3 * took[int(len(took) * 0.99)],
        "max_ms": 1e3 * took[-1],
        "failed": found["failed"],
        "reconnects": found["reconnects"],
        "requests": len(took),
    }


class Attack:
    """Slow connections and malformed requests from this process until `stop`."""

    def __init__(self, port: int, slow: int) -> None:
        self.port, self.stop, self.sent, self.opened = port, threading.Event(), 0, 0
        self.threads = [threading.Thread(target=self.drip, args=(slow,)), threading.Thread(target=self.spoil)]
        for thread in self.threads:
            thread.start()

    def drip(self, slow: int) -> None:
        socks: list[socket.socket] = []
        while not self.stop.wait(0.01):
            for sock in list(socks):
                try:
                    sock.send(b"a")
                except OSError:
                    socks.remove(sock)
                    sock.close()
            while len(socks) < slow and not self.stop.is_set():
                try:
                    sock = socket.create_connection(("127.0.0.1", self.port), timeout=1.0)
                except OSError:
                    break
                sock.setblocking(False)
                with contextlib.suppress(OSError):
                    sock.send(b"POST /v1/jobs HTTP/1.1\r\nX: ")
                socks.append(sock)
                self.opened += 1
        for sock in socks:
            sock.close()

    def spoil(self) -> None:
        rng = random.Random(1)
        good = b'POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 36\r\n\r\n{"job": "evil", "watts": {"n0": 100}}'
        while not self.stop.is_set():
            data = bytearray(good)
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as sock:
                sock.sendall(bytes(data))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            self.sent += 1

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def main() -> None:
    if sys.argv[1:2] == ["--beat"]:
        port, token, first, count, seconds = sys.argv[2:]
        beat(int(port), token, int(first), int(count), float(seconds))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--slow", type=int, default=700)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        governor = GovernorProcess(Path(folder) / "state", "--cap", "1MW", "--soft-start", "1s")
        address = governor.start()
        client = GovernorClient(address, timeout_s=60.0)
        for i in range(args.nodes):
            client.join(f"n{i}", 100.0, session="s")
            client.request(PowerRequest(job=f"j{i}", watts={f"n{i}": 5000.0}, ttl_s=3600.0))
        content: dict[str, object] = {"seconds": args.seconds}
        content["one_client"] = measure(address, 1, args.seconds / 3)
        content["load"] = measure(address, args.nodes, args.seconds)
        attack = Attack(int(address.url.rpartition(":")[2]), args.slow)
        time.sleep(2.0)
        content["attack"] = measure(address, args.nodes, args.seconds)
        attack.end()
        jobs = {j.job for j in client.describe().jobs}
        content |= {
            "slow_connections": args.slow,
            "connections_opened_by_attack": attack.opened,
            "malformed_requests": attack.sent,
            "jobs_changed_by_attack": len(jobs ^ {f"j{i}" for i in range(args.nodes)}),
        }
        governor.stop()
    for name, value in content.items():
        print(f"{name:>28}  {value}")
    if args.write:
        write_result(args.write, content)


if __name__ == "__main__":
    main()
