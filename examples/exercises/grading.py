"""What the exercises' checks share: an answer is loaded and checked beside a sensor whose watts are known."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tessera import monitor

Checks = Sequence[tuple[str, Callable[[], str | None]]]


def load(path: Path) -> Any:
    """The answer as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name.partition('-')[0]}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def graded(path: Path, bench: Any, checks: Callable[[Any, Any], Checks]) -> int:
    """Check one answer; how many tasks are not done."""
    watching = monitor.Monitor([bench]).start()
    monitor.use(watching)
    failed = 0
    try:
        for title, check in checks(load(path), bench):
            try:
                wrong = check()
            except NotImplementedError as exc:
                wrong = f"not done yet ({exc})"
            except Exception as exc:  # noqa: BLE001  (a learner's code may raise anything)
                wrong = f"{type(exc).__name__}: {exc}"
            failed += wrong is not None
            print(f"{'pass' if wrong is None else 'FAIL'}  {title}" + (f": {wrong}" if wrong else ""))
    finally:
        monitor.use(None)
        watching.stop()
    return failed


def finish(run: Callable[[Path], int], starter: Path) -> None:
    """The command: the answer given, else the starter; exit code 1 where something is left to do."""
    failed = run(Path(sys.argv[1]) if len(sys.argv) > 1 else starter)
    print("all tasks are done" if not failed else f"{failed} to do")
    sys.exit(min(failed, 1))
