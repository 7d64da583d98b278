"""Public names of a package that are imported at their first use (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def find_lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. `homes`: the modules, each with the names that it has.

    To be used where no type checker looks: one that saw a `__getattr__` would accept every misspelt name.
    """
    where = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{where[name]}", package), name)

    return find, lambda: sorted(where)
