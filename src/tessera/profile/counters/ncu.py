"""Runs a command again under Nsight Compute and reads the counters of each kernel.

Never replay in the pass that measures energy: ncu runs each kernel several times, restores memory between the passes
and flushes the caches, all of which costs joules. `TESSERA_REPLAY=1` tells a session inside the command to record
nothing. Clocks are not changed (`--clock-control none`), since others may use the GPU. Before 2026.1, ncu's default was
`base`: it locks the base clock while it profiles. Repeated runs then agree better and percentages of peak stay about
the same, but everything per second of the SMs and L2 falls with the clock, unlike in any real run. Caches are flushed
before each pass (`--cache-control all`, ncu's default), so a small kernel that finds its data in L2 in the real run
shows more DRAM reads here.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ...errors import ArgumentError, MeasurementError, RecordingError, SensorPermission, SensorUnavailable
from ..demangle import demangle
from . import nvidia
from .names import KernelCounters, dimensions, number, unit_factor

REPLAY_ENV = "TESSERA_REPLAY"
NOT_REPLAYED = r"nccl|nvshmem"
"""Kernels that wait for other GPUs. Replayed alone, they would wait forever (ncu's manual, "Multi-process")."""
PERMISSION_LINK = "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
POLL_S, GRACE_S, QUERY_S = 0.25, 20.0, 60.0
_USUAL = "unmodified GPU clocks"  # ncu always gives this warning with --clock-control none

_BASE_NAME = re.compile(r'^"?([a-z0-9]+__\w+)"?(?:[,\s]|$)', re.MULTILINE)
_ERROR = re.compile(r"^==ERROR== (.*)$", re.MULTILINE)
_WARNING = re.compile(r"^==WARNING== (.*)$", re.MULTILINE)

Progress = Callable[[float], None]
"""Called every `POLL_S` with the seconds so far. ncu does not say before the end how many launches are done."""


class Replay(list[KernelCounters]):
    """The launches that were replayed; `notes` has what a reader should know about them."""

    notes: list[str]
    passes: int
    seconds: float

    def __init__(self, kernels: Iterable[KernelCounters]) -> None:
        super().__init__(kernels)
        self.notes = []
        self.passes, self.seconds = 0, 0.0


def find_ncu() -> str:
    """Return the path of ncu: on PATH, in CUDA's folders, or the newest of its own packages."""
    homes = [os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    path = shutil.which("ncu") or next((p for h in homes if (p := shutil.which("ncu", path=f"{h}/bin"))), None)
    if path:
        return path
    for root, pattern in (("/usr/local", "cuda*/bin/ncu"), ("/opt/nvidia/nsight-compute", "*/ncu")):
        there = sorted(Path(root).glob(pattern), key=_version)
        if there:
            return str(there[-1])
    raise SensorUnavailable(
        "hardware counters of single kernels need Nsight Compute, and ncu is not installed",
        why="not on PATH, nor in CUDA_HOME/bin, /usr/local/cuda*/bin or /opt/nvidia/nsight-compute",
        fix="install it (apt install nsight-compute, or from developer.nvidia.com/nsight-compute) and put ncu on PATH",
    )


def _version(path: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", str(path))]


@lru_cache(maxsize=4)
def chip_metrics(ncu: str) -> frozenset[str]:
    """Return the base names of the metrics that this GPU has; empty if ncu cannot say."""
    try:
        done = subprocess.run(
            [ncu, "--query-metrics"], capture_output=True, text=True, timeout=QUERY_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(_BASE_NAME.findall(done.stdout))


def _options(
    metrics: Sequence[str], log: Path, kernels: int | None, match: str | None, nvtx: str | None
) -> dict[str, str | None]:
    """Return the options of ncu; see `replay` for the arguments."""
    options: dict[str, str | None] = {
        "--csv": None,
        "--page": "raw",
        "--print-units": "base",
        "--print-kernel-base": "mangled",
        "--log-file": str(log),
        "--metrics": ",".join(metrics),
        "--target-processes": "all",
        "--replay-mode": "kernel",
        "--clock-control": "none",
        "--cache-control": "all",
        # The mangled name makes each instance of a template a kernel of its own. By "function" all instances are one
        # kernel; by the demangled name, ncu 2025.3.1 gave some kernels one launch more than asked for.
        "--kernel-name-base": "mangled",
        "--kernel-name": f"regex:^(?!.*({NOT_REPLAYED}))" + (f".*({match})" if match else ""),
        "--rename-kernels": "no",
        "--disable-extra-suffixes": None,
    }
    if kernels is not None:
        options |= {"--filter-mode": "per-launch-config", "--launch-count": str(kernels)}
    if nvtx is not None:
        options |= {"--nvtx": None, "--nvtx-include": nvtx}
    return options


def replay(
    argv: Sequence[str],
    *,
    kernels: int | None = 2,
    match: str | None = None,
    nvtx: str | None = None,
    flops: bool = False,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Run a command again under ncu, and return the counters of the launches it replayed.

    A training script launches the same few kernels a million times. By default each kernel of each launch size is
    replayed `kernels` times at most (None: every launch). `match` is a regular expression for mangled kernel names,
    which contain the function's own name. `nvtx` is an expression of ncu for the NVTX range in which launches must lie,
    for example "step 3/". `flops` also counts floating point operations, which needs more passes. The command runs to
    its end, or for `timeout_s`; then the launches replayed so far are returned if ncu still prints them, with a note.
    """
    if not argv:
        raise ArgumentError("there is no command to replay", fix="replay([sys.executable, 'train.py'])")
    ncu, wanted = find_ncu(), nvidia.metrics(flops)
    chip = chip_metrics(ncu)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera-replay-") as folder:
        log, output = Path(folder, "ncu.log"), Path(folder, "output.txt")
        options = _options(nvidia.available(wanted, chip) if chip else wanted, log, kernels, match, nvtx)
        line = [ncu, *(part for pair in options.items() for part in pair if part is not None), *argv]
        code = _run(line, {**os.environ, REPLAY_ENV: "1"}, output, timeout_s, progress)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        printed = output.read_text(encoding="utf-8", errors="replace")
    replayed = Replay(parse(text))
    replayed.seconds = time.monotonic() - started
    replayed.passes = round(sum(raw.get("profiler__replayer_passes", 0.0) for _, raw in _rows(text)))
    _check(text, printed, code, argv, replayed, timeout_s)
    if not chip:
        replayed.notes.append("ncu did not list the metrics of this chip; all were requested")
    return replayed


def _run(
    line: list[str], env: Mapping[str, str], output: Path, timeout_s: float | None, progress: Progress | None
) -> int | None:
    """Run ncu; return its exit status, or None if the time ran out. Keep the command's output for error messages."""
    started = time.monotonic()
    with output.open("wb") as out:
        child = subprocess.Popen(
            line, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(POLL_S)
                seconds = time.monotonic() - started
                if progress is not None:
                    progress(seconds)
                if timeout_s is not None and seconds > timeout_s:
                    return None
        finally:
            _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End ncu and the processes it started; first in a way that lets ncu print what it has."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signum)  # its own group: start_new_session
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


def _check(
    text: str, printed: str, code: int | None, argv: Sequence[str], replayed: Replay, timeout_s: float | None
) -> None:
    """Raise an error for what went wrong; only note it if there are counters nevertheless."""
    both = text + printed
    errors = _ERROR.findall(both)
    if "ERR_NVGPUCTRPERM" in both:
        raise SensorPermission(
            "this user may not read the GPU's performance counters",
            why=next((e for e in errors if "ERR_NVGPUCTRPERM" in e), "ERR_NVGPUCTRPERM"),
            fix=f"run as root, or let everybody: see {PERMISSION_LINK} (Linux: options nvidia "
            "NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reload the driver; a container needs "
            "--cap-add SYS_ADMIN)",
        )
    if "driver resource was unavailable" in both:
        raise SensorUnavailable(
            "another tool holds the GPU's performance counters", why=next(iter(errors), None),
            fix="stop it while this runs: dcgmi profile --pause, then --resume; only one profiler can read them",
        )  # fmt: skip
    tail = "\n".join(printed.strip().splitlines()[-8:])
    if code is None:
        what = f"the replay was stopped after {timeout_s:g} s"
        if not replayed:
            fix = "give it longer (timeout_s), fewer kernels (kernels=1, match=...) or a run of fewer steps"
            raise MeasurementError(what, why="ncu had printed nothing by then", fix=fix)
        replayed.notes.append(f"{what}: kernels that come later in the run have no counters")
    elif code != 0:
        raise MeasurementError(
            f"the command failed under ncu with exit status {code}: {' '.join(argv)}",
            why="; ".join(errors[:3]) or tail or None,
            fix=f"run it with {REPLAY_ENV}=1 and without ncu first; its last lines were:\n{tail}" if tail else None,
        )
    elif not replayed:
        raise MeasurementError(
            "ncu replayed no kernel", why="; ".join([*errors, *_WARNING.findall(both)][:3]) or "it named none",
            fix="does the command use the GPU? Do match= and nvtx= leave anything?",
        )  # fmt: skip
    replayed.notes.extend(f"ncu: {w}" for w in dict.fromkeys(_WARNING.findall(text)) if _USUAL not in w)


def parse(text: str) -> list[KernelCounters]:
    """Read the launches in ncu's CSV output (`--page raw` or `details`); other lines are skipped."""
    try:
        return [_launch(row, raw) for row, raw in _rows(text)]
    except csv.Error as exc:
        raise RecordingError("ncu's table cannot be read", why=str(exc), fix="is it what ncu --csv printed?") from exc


def _rows(text: str) -> Iterator[tuple[dict[str, str], dict[str, float]]]:
    """Yield each launch: its attributes, and its metrics in SI units."""
    header: list[str] = []
    units: list[str] = []
    long: dict[tuple[str, str], tuple[dict[str, str], dict[str, float]]] = {}
    table = (line for line in text.splitlines() if line.startswith('"'))
    for cells in csv.reader(table):
        if cells[0] == "ID" and "Kernel Name" in cells:
            header, units = cells, [""] * len(cells)
        elif not header or len(cells) != len(header):
            continue
        elif not cells[0]:
            units = cells
        elif cells[0].isdigit():
            row = dict(zip(header, cells, strict=True))
            if "Metric Name" in row:  # details: a row for each metric
                _, metrics = long.setdefault((row.get("Process ID", ""), row["ID"]), (row, {}))
                _put(
                    metrics,
                    row["Metric Name"],
                    row.get("Metric Value", ""),
                    row.get("Metric Unit", ""),
                )
                continue
            raw: dict[str, float] = {}
            for name, cell, unit in zip(header, cells, units, strict=True):
                if "__" in name:
                    _put(raw, name, cell, unit)
            yield row, raw
    yield from long.values()


def _put(raw: dict[str, float], name: str, text: str, unit: str) -> None:
    value = number(text)
    if value is not None:
        raw[name] = value * unit_factor(unit)


def _launch(row: Mapping[str, str], raw: Mapping[str, float]) -> KernelCounters:
    result = nvidia.normalise(raw)
    device = number(row.get("Device", ""))
    return KernelCounters(
        name=demangle(row["Kernel Name"]), grid=dimensions(row.get("Grid Size", "")),
        block=dimensions(row.get("Block Size", "")), values=result.values, figures=result.figures,
        missing=result.missing, device=None if device is None else round(device),
    )  # fmt: skip
