"""What a served language model takes: seconds to the first token and to each further one, joules, watts, memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .deployment import Deployment as Deployment
    from .estimate import Quantity as Quantity
    from .estimate import ServingReport as ServingReport
    from .estimate import estimate_serving as estimate_serving
    from .served_model import ServedModel as ServedModel
    from .served_model import read_served_model as read_served_model

_LAZY = {
    "ServedModel": "served_model",
    "Deployment": "deployment",
    "Quantity": "estimate",
    "ServingReport": "estimate",
    "estimate_serving": "estimate",
    "read_served_model": "served_model",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module 'tessera.serving' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_LAZY)
