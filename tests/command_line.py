"""Runs a command of the CLI inside the test process."""

from __future__ import annotations

from typing import Any

import click
from click.testing import CliRunner


def invoke(command: click.Command, *words: object) -> Any:
    """A command of the CLI run in this process; `code` is what it returned, or the exception it ended with."""
    result: Any = CliRunner().invoke(command, [str(w) for w in words], standalone_mode=False)
    result.code = result.return_value if result.exception is None else result.exception
    return result
