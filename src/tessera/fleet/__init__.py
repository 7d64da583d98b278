"""Power of many jobs, nodes and racks: simulate it, shape it, govern it."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module 'tessera.fleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_LAZY)
