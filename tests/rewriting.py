"""Fixtures of the tests of `tessera.optimize`: a fresh compiler, and ways without Inductor."""

from __future__ import annotations

import pytest
import torch

from tessera.rewrite import ways
from tessera.rewrite.inductor import recorder


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(name="uncompiled")
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that run our passes and then the graph as it is: everything but Inductor, in a tenth of the time."""
    monkeypatch.setattr(ways, "backend", lambda watch, passes, options: recorder(watch, passes))
