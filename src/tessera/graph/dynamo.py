"""Torch's compiler, told of the real functions.

It keeps some of torch's functions by identity in tables, made when it is first imported. A program that imports it
while it is captured would leave the capture's stand-ins in them, and torch.compile would no longer know the real ones
afterwards.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

# What `autocast.followed` and `intercept.patched` replace.
_REPLACED: tuple[tuple[Any, str], ...] = (
    (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"), (torch.amp, "is_autocast_available"),
    (torch.nn.functional, "scaled_dot_product_attention"), (torch.nn.functional, "dropout"),
    (torch.cuda, "synchronize"), (torch.cuda, "is_current_stream_capturing"),
)  # fmt: skip
_ROOT = "torch._dynamo"


@contextlib.contextmanager
def real_names() -> Iterator[contextlib.ExitStack]:
    """Yields a stack for what replaces names; if the compiler is first imported meanwhile, its tables are put right."""
    loaded = _ROOT in sys.modules
    real = [(where, name, getattr(where, name)) for where, name in _REPLACED]
    stand_ins: dict[int, Any] = {}

    def note() -> None:
        stand_ins.update({id(getattr(w, n)): f for w, n, f in real if getattr(w, n) is not f})

    with contextlib.ExitStack() as stack:
        try:
            yield stack
        finally:
            note()
            if not loaded and _ROOT in sys.modules:
                for name, module in list(sys.modules.items()):
                    if name.startswith(_ROOT) and isinstance(module, ModuleType):
                        _put_right(module, stand_ins)


def _put_right(module: ModuleType, stand_ins: dict[int, Any]) -> None:
    for key, value in list(vars(module).items()):
        if isinstance(value, (list, set, frozenset)) and any(id(v) in stand_ins for v in value):
            setattr(module, key, type(value)(stand_ins.get(id(v), v) for v in value))
        elif isinstance(value, dict) and any(id(k) in stand_ins for k in value):
            setattr(module, key, {stand_ins.get(id(k), k): v for k, v in value.items()})
        elif id(value) in stand_ins:
            setattr(module, key, stand_ins[id(value)])
