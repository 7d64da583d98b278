"""The fake of CUDA's driver (fake_cuda.c), compiled once per content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .vendor_abi import FLAGS

SOURCE = Path(__file__).with_name("fake_cuda.c")


def missing_compiler() -> str | None:
    """Why the fake cannot be built here, or None."""
    return None if shutil.which("gcc") else "gcc is not installed: it compiles the fake libcuda.so.1"


@functools.cache
def load_fake() -> ctypes.CDLL:
    """The fake's library; not under the name of the real one, which must not be found by others."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"tessera-fake-cuda-{os.getuid()}" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", *FLAGS, str(SOURCE), "-o", str(draft), "-lpthread"], check=True, capture_output=True)
        draft.rename(library)
    fake = ctypes.CDLL(str(library))
    fake.fake_launched.restype = ctypes.c_long
    fake.fake_unpaused_s.restype = ctypes.c_double
    return fake
