"""Fixtures every test may use: the fake NVML on a virtual clock, and sensors that play a script."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
import hypothesis
import pytest
from click.testing import CliRunner

from tessera.clock import Clock
from tessera.schema import Capability, Domain
from tessera.sensors.base import Batch

from fakes.nvml import T0_US, FakeNvml, missing_compiler

# What lands is decided by the same cases everywhere; `make search` looks for others, new ones each time.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("search", print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_configure() -> None:
    """Under nohup, or as a shell's background job, signals are ignored, and every child would inherit that."""
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs against the real clock or other processes may meet a busy machine: there a failure must repeat."""
    for item in items:
        if {"time", "subprocess"} & vars(getattr(item, "module", None) or item).keys():
            item.add_marker(pytest.mark.flaky(reruns=2))


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


def invoked(command: click.Command, *words: object) -> Any:
    """A command of the CLI run in this process; `code` is what it returned, or the exception it ended with."""
    result: Any = CliRunner().invoke(command, [str(w) for w in words], standalone_mode=False)
    result.code = result.return_value if result.exception is None else result.exception
    return result


def clock_of(fake: FakeNvml) -> Clock:
    return Clock(fake.monotonic_ns, fake.epoch_ns)


class ScriptSensor:
    """A sensor whose power is a function of (monotonic) time: one sample every `step_ms` up to now."""

    name = "script"

    def __init__(
        self,
        power_w: Callable[[float], float] = lambda t: 100.0,
        *,
        clock: Callable[[], int],
        step_ms: float = 20.0,
        period_s: float = 0.05,
        domain: Domain | None = None,
        anchors: bool = False,
    ) -> None:
        self.power_w = power_w
        self.clock = clock
        self.step_ns = round(step_ms * 1e6)
        self.period_s = period_s
        self._domain = domain or Domain(name="gpu0", source="script", resolution_s=step_ms * 1e-3)
        self._next_ns: int | None = None
        self.fail: Exception | None = None
        self.reads = 0
        self.anchors = anchors

    def start(self) -> None:
        if self.fail:
            raise self.fail
        self._next_ns = None

    def domains(self) -> list[Domain]:
        return [self._domain]

    def capabilities(self) -> list[Capability]:
        return []

    def read(self) -> Batch:
        self.reads += 1
        if self.fail:
            raise self.fail
        batch = Batch()
        now = self.clock()
        if self._next_ns is None:
            self._next_ns = now - now % self.step_ns
        while self._next_ns <= now:
            power = self.power_w(self._next_ns * 1e-9)
            batch.add(self._domain.name, self._next_ns, power if power else math.nan)
            self._next_ns += self.step_ns
        return batch

    def stop(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_calibration_of_this_machine(monkeypatch, tmp_path_factory):
    """Tests must not see what a developer calibrated or catalogued on this machine."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))


@pytest.fixture(scope="module")
def formula_only():
    """What a tile fits is tested in test_op_tile: elsewhere nothing need be compiled."""
    from tessera.op import tile

    patch = pytest.MonkeyPatch()
    patch.setattr(tile, "_uncompiled", lambda: "not in these tests")
    yield
    patch.undo()
    tile._fit.cache_clear()
