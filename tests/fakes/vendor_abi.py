"""Runs checks of a vendor's real Python binding against a fake of its C library, in a process of their own.

A library, once loaded, stays in its process, and these bindings load theirs when imported. So a test
module's `check_*` functions all run in one child process (`run_checks`), which loads the fake first; the
test module then reports each as a test. A check gets a `Fake`, reset before it, and says by exception what
went wrong.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import pytest

from tessera.schema import Capability
from tessera.sensors.base import Batch

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")


class Fake:
    """The test's side of fake_store.h."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self._library.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self._library.fake_get.argtypes = [ctypes.c_char_p]
        self._library.fake_get.restype = ctypes.c_double
        self._library.fake_layout.argtypes = [ctypes.c_char_p]
        self._library.fake_layout.restype = ctypes.c_size_t

    def reset(self) -> None:
        """Forget everything that was set."""
        self._library.fake_reset()

    def set(self, **values: float) -> None:
        """Set values for all devices; a leading `gpuN_` sets it for one, `fail_X` is "fail.X"."""
        for key, value in values.items():
            device = re.match(r"gpu(\d+)_", key)
            name = key[device.end() :] if device else key
            name = re.sub(r"^(fail|calls)_", r"\1.", name)
            self._library.fake_set((f"{device[1]}.{name}" if device else name).encode(), float(value))

    def calls(self, function: str) -> int:
        """How often a function was called since the reset."""
        return max(int(self._library.fake_get(f"calls.{function}".encode())), 0)

    def layout(self, what: str) -> int:
        """A size or an offset, in bytes, as the C compiler has it."""
        return int(self._library.fake_layout(what.encode()))


def by_name(capabilities: Iterable[Capability]) -> dict[str, Capability]:
    return {c.name: c for c in capabilities}


def watts(batch: Batch, domain: str = "gpu0") -> list[float]:
    return [w for _, w in batch.samples.get(domain, [])]


def why_not(package: str) -> str | None:
    """Why these tests cannot run here, or None."""
    if shutil.which("gcc") is None:
        return "gcc is not installed: the fake library cannot be compiled"
    if importlib.util.find_spec(package) is None:
        return f"the Python package {package} is not installed"
    return None


def build_amdsmi(root: Path) -> Path:
    """Compile the fake to where the binding looks: lib/libamd_smi.so under ROCM_PATH."""
    spec = importlib.util.find_spec("amdsmi")
    assert spec is not None and spec.origin is not None
    wrapper = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text()
    names = sorted(set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper)))
    stubs = root / "stubs.c"
    # 2 is AMDSMI_STATUS_NOT_SUPPORTED; weak, so that what fake_amdsmi.c defines takes precedence.
    stubs.write_text("".join(f"__attribute__((weak)) int {n}(void) {{ return 2; }}\n" for n in names))
    library = root / "lib" / "libamd_smi.so"
    library.parent.mkdir()
    _compile(library, str(HERE / "fake_amdsmi.c"), str(stubs))
    return library


def build_zes(root: Path) -> Path:
    """Compile the fake with the very path pyzes opens as its SONAME.

    The dynamic linker takes a library that is already loaded for the one asked for when its SONAME is the
    same string, slashes and all.
    """
    library = root / "libze_loader_fake.so"
    _compile(library, str(HERE / "fake_zes.c"), "-Wl,-soname,/usr/lib/x86_64-linux-gnu/libze_loader.so.1")
    return library


def _compile(library: Path, *arguments: str) -> None:
    command = ["gcc", *FLAGS, "-o", str(library), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run_amdsmi(module: str, root: Path, **env: str) -> dict[str, str]:
    """The checks of a module with amdsmi on its fake; skipped where there is none."""
    skip_without("amdsmi")
    library = build_amdsmi(root)
    inherited = {k: v for k, v in os.environ.items() if k != "ROCM_HOME"}
    return run_checks(module, library, inherited | {"ROCM_PATH": str(root)} | env)


def run_zes(module: str, root: Path) -> dict[str, str]:
    """The checks of a module with pyzes on its fake; skipped where there is none."""
    skip_without("pyzes")
    return run_checks(module, build_zes(root), dict(os.environ))


def skip_without(package: str) -> None:
    if why := why_not(package):
        pytest.skip(why)


def run_checks(module: str, library: Path, env: dict[str, str]) -> dict[str, str]:
    """Run a module's checks in a child process; what went wrong, by name of the check ("": nothing)."""
    command = [sys.executable, "-W", "error", str(HERE / "vendor_abi.py"), module, str(library)]
    child = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stdout + child.stderr
    outcome: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return outcome


def _child(module: str, library: str) -> None:
    sys.path.insert(0, str(HERE.parent))
    spec = importlib.util.spec_from_file_location("checks", module)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    fake = Fake(library)
    outcome = {}
    for name in [n for n in vars(loaded) if n.startswith("check_")]:
        fake.reset()
        try:
            getattr(loaded, name)(fake)
            outcome[name] = ""
        except Exception:
            outcome[name] = traceback.format_exc()
    print(json.dumps(outcome))


if __name__ == "__main__":
    _child(*sys.argv[1:])
