"""The self-test as text, to paste into an issue."""

from __future__ import annotations

from collections.abc import Sequence

from ..selftest.checks import Check

_MARK = {"pass": "pass", "fail": "FAIL", "skipped": "skip"}


def text(found: Sequence[Check], machine: str) -> str:
    """A line a check, and the sum of them."""
    width = max(len(c.what) for c in found)
    lines = [machine, *(_line(c, width) for c in found)]
    failed, left_out = (sum(c.verdict == v for c in found) for v in ("fail", "skipped"))
    rest = f", {left_out} could not be made here" if left_out else ""
    lines.append(f"{len(found) - failed - left_out} passed, {failed} failed{rest}")
    return "\n".join(lines)


def _line(check: Check, width: int) -> str:
    figure = "" if check.value is None else f"{check.value:.3g} {check.unit} (limit {check.limit:g})"
    return f"{_MARK[check.verdict]}  {check.what:<{width}}  {figure}{'  ' if figure else ''}{check.why}".rstrip()
