"""Imports the public names of a package at their first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .errors import MissingExtra, did_you_mean


class _Room(ModuleType):
    """A package whose submodules do not hide its public names: `analyze.roofline` stays the function.

    Importing a submodule sets an attribute of its package; here the public name wins.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in vars(self)["_homes"]):
            super().__setattr__(name, value)


def load_lazily(package: str, homes: Mapping[str, str], *, modules: str = "", needs: str = "") -> list[str]:
    """Import the public names of a package when they are first used; return the names, for its `__all__`.

    `homes` has the names of each module; "chrome=Chrome" makes the module's `Chrome` public as `chrome`. `modules` are
    themselves public. `needs` is an extra without which no name can be imported; the error then says so.

    For type checkers, import the names under `if TYPE_CHECKING`.
    """
    where = {}
    for home, names in homes.items():
        for word in names.split():
            name, _, own = word.partition("=")
            where[name] = (f".{home}", own or name)
    public = [*where, *modules.split()]
    room = sys.modules[package]

    def find(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{did_you_mean(name, public)}")
        home, own = where.get(name, (f".{name}", ""))
        try:
            module = importlib.import_module(home, package)
        except ModuleNotFoundError as exc:
            if not needs or exc.name != needs:
                raise
            raise MissingExtra(needs, needs, f"{package.removeprefix('tessera.')}.{name}") from exc
        value = vars(room)[name] = getattr(module, own) if own else module
        return value

    listed = {"__getattr__": find, "__dir__": lambda: sorted(vars(room).get("__all__", public)), "_homes": where}
    vars(room).update(listed)
    room.__class__ = _Room
    return public
