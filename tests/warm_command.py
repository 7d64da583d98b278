"""The CLI as a process of its own, forked from an interpreter that has imported it: a third of a second less CPU."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MOST_BYTES = 100_000  # of what one message on the socket holds


def run_command(
    *args: str, env: dict[str, str] | None = None, cwd: Path | None = None, modules: tuple[str, ...] = ("cli.main",)
) -> Any:
    """As `python -m tessera ARGS`, in this environment and `env`: a CompletedProcess with what it printed.

    `modules` of tessera are imported once for all; the first has the `main` that is called.
    """
    environ = {**os.environ, **(env or {})}
    asked = json.dumps({"args": args, "env": environ, "cwd": str(cwd or Path.cwd())}).encode()
    assert len(asked) < MOST_BYTES, "so long a command needs a process of its own"
    server = _start_server(environ.get("LD_LIBRARY_PATH", ""), *modules)  # the path is read where a process starts
    with open(os.devnull, "rb") as empty, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        socket.send_fds(server, [asked], [empty.fileno(), out.fileno(), err.fileno()])
        code = json.loads(server.recv(MOST_BYTES))
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(args, code, *said)


@functools.cache
def _start_server(library_path: str, *modules: str) -> socket.socket:
    """An interpreter that waits for commands until this process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(600)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "LD_LIBRARY_PATH": library_path},
        )

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


def _serve(server: socket.socket) -> dict[str, Any]:
    """Fork at each request and send its exit code; what is asked of the fork, where this returns."""
    import gc

    gc.collect()
    gc.freeze()
    while True:
        asked, fds, _, _ = socket.recv_fds(server, MOST_BYTES, 3)
        if not asked:
            os._exit(0)
        child = os.fork()
        if not child:
            server.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            return json.loads(asked)
        for fd in fds:
            os.close(fd)
        server.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


if __name__ == "__main__":
    entry, *_ = [importlib.import_module(f"tessera.{name}") for name in sys.argv[2:]]
    given = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    entry.main(given["args"])
