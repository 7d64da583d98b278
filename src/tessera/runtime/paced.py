"""The context in which a cap is held: what `schedule` enters around a call or a block."""

from __future__ import annotations

from typing import Any

from .held import Held
from .launches import Launches, OwnCall
from .loop import loop


class Paced:
    """A context in which a schedule's cap is held."""

    __slots__ = ("_engine", "_held", "_launches")
    _launches: Launches | OwnCall

    def __init__(self, held: Held, *, each_call: bool) -> None:
        self._engine, self._held = loop(), held
        here = self._engine.here
        self._launches = (
            Launches(here, self._engine.countdown, each_call=each_call) if held.tokens == "joules" else OwnCall(here)
        )

    def __enter__(self) -> None:
        self._engine.enter(self._held)
        try:
            self._launches.__enter__()
        except BaseException:
            self._engine.leave(self._held)
            raise

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        try:
            self._launches.__exit__(kind, exc, trace)
        finally:
            self._engine.leave(self._held)
