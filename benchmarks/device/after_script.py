"""From a script's last line to the answer: where the seconds of `tessera run` go, part by part.

    PYTHONPATH=src:.carry/site python benchmarks/device/after_script.py RESULTS.json [--seconds 6] [--quick]

The GPT-2 training of `run_modes.py` under `tessera.profile.launch`, as `tessera run` starts it, with a clock around each
part of its end; then what `tessera run` itself does with the file. `torch` are the parts that are torch's own: Kineto's
stop, its export, and the freeing of its events when the process ends. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

os.environ["TESSERA_CONTROL"] = "0"
TORCH = ("stop", "export", "process goes")


class Clock:
    """Seconds of each part, wall and CPU of the process, in the order they ended."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.parts[name] = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}

    def around(self, owner: Any, method: str, name: str) -> None:
        """Have a method or function timed wherever it is called."""
        call: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        setattr(owner, method, timed)


def child(plan: str, out: Path) -> None:
    """`python -m tessera.profile.launch`, with clocks; writes them when all is done but the end of the process."""
    from tessera.profile import launch
    from tessera.profile.kineto_collector import KinetoCollector
    from tessera.profile.recorder import Session
    from tessera.profile.runfile import RunWriter
    from tessera.timeline import kineto

    clock = Clock()
    clock.around(KinetoCollector, "stop", "stop")
    clock.around(kineto, "read", "read")
    clock.around(RunWriter, "close", "write")
    clock.around(Session, "stop", "session ends")
    prepare, leave = KinetoCollector.prepare, launch._leave

    def prepared(self: KinetoCollector) -> None:
        import torch  # not before the script does

        if not hasattr(torch.profiler.profile.export_chrome_trace, "__wrapped__"):
            clock.around(torch.profiler.profile, "export_chrome_trace", "export")
        prepare(self)

    def leaving(outcome: BaseException | None) -> None:
        out.write_text(json.dumps({"parts": clock.parts, "left": time.time()}))
        leave(outcome)

    KinetoCollector.prepare = prepared  # type: ignore[method-assign]
    launch._leave = leaving
    sys.argv = [sys.argv[0], plan]
    launch.main()


def answered(path: Path) -> tuple[dict[str, dict[str, float]], int]:
    """What `tessera run --json` does when its child is gone."""
    clock = Clock()
    with clock.part("imports"):
        import msgspec

        from tessera.analyze.answer import answer
        from tessera.attribute import ledger, solve  # noqa: F401
        from tessera.profile.runfile import RunFile
    with RunFile(path) as run:
        recording = run.recording()
        with clock.part("read back"):
            timeline = recording.timeline
        with clock.part("link"):
            _ = timeline.linked
        with clock.part("attribute"):
            table = recording.energy()
        with clock.part("answer"):
            found = answer(recording)
        with clock.part("json"):
            msgspec.json.encode(table.to_json() | {"run": found.whole.to_dict()})
        return clock.parts, run.rows


def measured(folder: Path, device: str, seconds: float) -> dict[str, Any]:
    """One run, from its start to its answer."""
    import msgspec

    from run_modes import SCRIPT
    from tessera.profile.launch import LaunchPlan

    script, out, path = folder / "train.py", folder / "child.json", folder / "run.tessera"
    script.write_text(SCRIPT)
    plan = LaunchPlan(target=str(script), argv=[device, str(seconds)], path=str(path))
    command = [sys.executable, __file__, str(out), "--child", msgspec.json.encode(plan).decode()]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=300, check=False)
    gone = time.time()
    told = json.loads(out.read_text())
    parts = told["parts"] | {"process goes": {"s": gone - told["left"]}}
    ours, rows = answered(path)
    parts |= ours
    inside = ("stop", "export", "read", "write")  # of "session ends"
    total_s = sum(p["s"] for name, p in parts.items() if name not in inside)
    torch_s = sum(parts[name]["s"] for name in TORCH if name in parts)
    return {"returncode": done.returncode, "rows": rows, "parts": parts, "total_s": total_s, "torch_s": torch_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.out)
        return
    device, seconds = ("cpu", 1.0) if given.quick else ("cuda", given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        found = {"device": device} | measured(Path(folder), device, seconds)
    write_result(given.out, found)
    for name, part in found["parts"].items():
        of_torch = "torch" if name in TORCH else ""
        print(f"{name:14} {part['s']:7.2f} s {part.get('cpu_s', float('nan')):7.2f} s of CPU  {of_torch}")
    print(f"{found['rows']:,} rows: {found['total_s']:.1f} s, of which {found['torch_s']:.1f} s are torch's")


if __name__ == "__main__":
    main()
