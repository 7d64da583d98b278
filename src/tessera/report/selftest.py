"""The self-test as text, to paste into an issue."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ..selftest import SelfCheck
from .narrow import Hanging

_MARK = {"pass": "pass", "fail": "FAIL", "skipped": "skip"}


def print_checks(found: Sequence[SelfCheck], machine: str, console: Console) -> None:
    """A line a check, and the sum of them."""
    width = max(len(c.what) for c in found)
    console.print(Hanging(machine, 2))
    for check in found:
        console.print(Hanging(_line(check, width), 6 + width + 2))
    failed, left_out = (sum(c.verdict == v for c in found) for v in ("fail", "skipped"))
    rest = f", {left_out} could not be made here" if left_out else ""
    console.print(Hanging(f"{len(found) - failed - left_out} passed, {failed} failed{rest}", 2))


def _line(check: SelfCheck, width: int) -> str:
    figure = "" if check.value is None else f"{check.value:.3g} {check.unit} (limit {check.limit:g})"
    return f"{_MARK[check.verdict]}  {check.what:<{width}}  {figure}{'  ' if figure else ''}{check.why}".rstrip()
