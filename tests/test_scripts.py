"""Benchmarks and examples name only what the package has: moving a module must not leave a script behind."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from models import declare_torchvision

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(p.relative_to(ROOT) for folder in ("benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_name_taken_from_tessera_exists(script: Path) -> None:
    declare_torchvision()  # the callbacks of frameworks import it
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tessera":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tessera":
                    importlib.import_module(alias.name)
