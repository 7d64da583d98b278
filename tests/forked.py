"""A program in a fork of the test's process: torch is imported already, and what the program changes ends with it."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

KERNELS = ("triton", "tessera.op.kernels", "tessera.runtime.wait_kernel", "tessera.runtime.token_stream")


def run_forked(code: str, *, interpreted: bool = False) -> str:
    """What a program prints; `interpreted` runs Triton's kernels in its interpreter. It must end well."""
    import torch  # noqa: F401  (once, by the test's process)

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
                if interpreted:
                    _interpret_triton()
                exec(compile(code, "forked", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)  # without the end of pytest
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        assert status == 0, err.read().decode()[-3000:]
        return out.read().decode()


def _interpret_triton() -> None:
    """Import Triton and our kernels again: functions are made for the interpreter where they are decorated."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.startswith(KERNELS) and not name.startswith("triton._C"):
            del sys.modules[name]
            package, _, module = name.rpartition(".")
            if package in sys.modules:  # where `from package import module` would find it
                vars(sys.modules[package]).pop(module, None)
