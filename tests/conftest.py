"""Fixtures for every test: fixed random numbers, the fake NVML on a virtual clock."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from fakes.nvml import T0_US, FakeNvml, missing_compiler

# Every machine tries the same cases; `make search` tries new ones. No deadline, and no check of how long inputs take to
# make: a busy machine is not an error.
ANY_SPEED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, max_examples=50, **ANY_SPEED)
hypothesis.settings.register_profile("search", print_blob=True, **ANY_SPEED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

STARTUP = str(Path(__file__).with_name("startup"))


def pytest_configure() -> None:
    """Programs that tests start find startup/sitecustomize.py. And under nohup, or as a shell's background job, signals
    are ignored, and every child would inherit that. One thread for torch, also without make: on a busy machine two that
    wait for each other took 14 s for a call of 60 ms, and a search had no time left."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])])
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, usual)


_frozen_modules = 0


def _freeze() -> None:
    global _frozen_modules  # noqa: PLW0603
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """What exists once all tests are collected stays: torch's classes, the tests themselves. A collection of garbage,
    which much of what is tested asks for, then takes a tenth of the time."""
    _freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So does what a test imported: torch's compiler is as large as the rest."""
    if nextitem is not None and nextitem.path != item.path and len(sys.modules) > _frozen_modules + 100:
        _freeze()


@pytest.fixture(autouse=True)
def same_random_numbers():
    """A test that draws without a seed draws the same on every machine; torch is seeded where the test imported it."""
    random.seed(0)
    for library, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if library in sys.modules:
            getattr(sys.modules[library], seed)(0)


@pytest.fixture
def fake_nvml() -> Iterator[FakeNvml]:
    """The fake NVML in this process, on a virtual clock."""
    reason = missing_compiler()
    if reason:
        pytest.skip(reason)
    with FakeNvml() as fake:
        fake.set_time_us(T0_US)
        yield fake


@pytest.fixture(autouse=True, scope="session")
def nothing_of_this_machine(tmp_path_factory):
    """Tests must not see what a developer calibrated or catalogued here, plans that another suite has just stored, its
    caps, nor the lease that a power governor of this machine has left."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "no-config"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("TESSERA_RUNTIME_DIR", str(folder / "run"))
        patch.setenv("TESSERA_GOVERNOR_LEASE", str(folder / "no-lease.json"))
        yield


@pytest.fixture(scope="module")
def formula_only():
    """What a tile fits is tested in op/test_tile.py: elsewhere nothing need be compiled."""
    from tessera.op import tile

    patch = pytest.MonkeyPatch()
    patch.setattr(tile, "_why_not_compiled", lambda: "not in these tests")
    yield
    patch.undo()
    tile._fit.cache_clear()
