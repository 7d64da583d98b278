"""A governor for tests: in a thread of this process, or as a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tessera.fleet.governor.client import GovernorAddress, GovernorClient
from tessera.fleet.governor.serve import bind_listener, make_tls, serve_governor
from tessera.fleet.governor.service import GovernorService, open_service
from tessera.fleet.governor.tokens import Role, TokenFile
from tessera.fleet.leases import BudgetPolicy

from waiting import LONGEST_S


class LocalGovernor:
    """Serves in a thread until the end of the `with`. `tokens` has one of each role: "*" for nodes."""

    def __init__(self, folder: Path, policy: BudgetPolicy, *, chain_file: Path | None = None) -> None:
        self.service: GovernorService = open_service(policy, folder / "leases.db")
        self.token_file = TokenFile(folder / "tokens.json")
        known = {t.role for t in self.token_file.read()}
        names = {Role.NODE: "*", Role.JOB: "jobs", Role.READ: "screen", Role.OPERATOR: "op"}
        self.tokens = {role: self.token_file.create(name, role) for role, name in names.items() if role not in known}
        tls = make_tls(chain_file, chain_file) if chain_file else None
        self._listener = bind_listener(socket.AF_INET, ("127.0.0.1", 0), tls=tls is not None)
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._started = threading.Event()
        self._clients: list[GovernorClient] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(tls,), daemon=True)

    def _run(self, tls) -> None:
        try:
            self._loop.run_until_complete(
                serve_governor(
                    self.service, self.token_file, self._listener, tls=tls, started=self._started.set, stop=self._stop
                )
            )
        except Exception as exc:
            self.error = exc
        finally:
            self._loop.close()

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(LONGEST_S)
        return self

    def __exit__(self, *_) -> None:
        for client in self._clients:
            client.close()
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONGEST_S)
        assert not self._thread.is_alive()

    def client(self, role: Role = Role.OPERATOR, **more) -> GovernorClient:
        """A client with the token of a role, closed at the end."""
        address = GovernorAddress(**{"url": self.url, "token": self.tokens.get(role, ""), **more})
        self._clients.append(GovernorClient(address, timeout_s=LONGEST_S))
        return self._clients[-1]


class GovernorProcess:
    """`tessera governor serve` as a process: start it, kill it, start it again with the same state."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.folder, self._options, self.port = folder, options, port
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> GovernorAddress:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", "tessera", "governor", "serve", "--json", "--state", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{self.port}", *self._options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the governor ended with {self.process.wait()}"
        url = json.loads(line)["url"]
        self.port = int(url.rpartition(":")[2])
        return GovernorAddress(url=url, token=(self.folder / "operator.token").read_text().strip())

    def cpu_s(self) -> float:
        """The CPU time it has used."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """SIGKILL, at once."""
        self.stop(signal.SIGKILL)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """End it; its exit code."""
        assert self.process is not None
        self.process.send_signal(signum)
        code = self.process.wait(timeout=600)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code
