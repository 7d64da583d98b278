r"""Help texts as Markdown for the reference of the commands.

Click keeps a block as it is where it begins with `\b`: the examples. Markdown keeps one that is indented.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import click

from tessera.cli.main import COMMANDS, cli
from tessera.cli.prof import command as prof

_KEPT = re.compile(r"^\x08\n((?:.+\n?)+)", re.MULTILINE)


def on_pre_build(config: Any) -> None:
    """Rewrite the help of every command, in this process only, before mkdocs-click reads it."""
    context = click.Context(cli)
    todo = [prof, *(cli.get_command(context, name) for name in COMMANDS)]
    while todo:
        command = todo.pop()
        if command is not None:
            command.help = _KEPT.sub(_indented, inspect.cleandoc(command.help or "") + "\n")
            todo += command.commands.values() if isinstance(command, click.Group) else []


def _indented(found: re.Match[str]) -> str:
    lines = found[1].rstrip("\n").split("\n")
    title = f"{lines.pop(0)}\n\n" if lines[0].endswith(":") else ""
    return title + "\n".join(f"    {line}" for line in lines) + "\n\n"
