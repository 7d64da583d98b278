"""What `tessera doctor` knows: the state of each sensor, and the checks beside them."""

from __future__ import annotations

import ctypes

import pytest

from tessera.errors import ArgumentError, SensorPermission, SensorUnavailable
from tessera.schema import Capability, Domain
from tessera.sensors import discover, health
from tessera.sensors.health import (
    Health,
    SensorHealth,
    clock_synchronised,
    examine,
    examine_sensor,
    performance_counters,
)

from fakes.nvml import FakeNvml, Scenario


class Stub:
    name, period_s = "stub", 1.0

    def __init__(self, error=None):
        self.error = error
        self.stopped = 0

    def start(self):
        if self.error:
            raise self.error

    def domains(self):
        return [Domain(name="gpu0", source="stub", resolution_s=0.02)]

    def capabilities(self):
        return [Capability(name="HBM", available=False, reason="no"), Capability(name="clocks", available=True)]

    def stop(self):
        self.stopped += 1


@pytest.fixture
def kinds(monkeypatch):
    table: dict[str, object] = {}
    monkeypatch.setattr(discover, "KINDS", table)
    monkeypatch.setattr(health, "KINDS", table)
    return table


def put(kinds, name, error=None):
    stub = Stub(error)
    kinds[name] = lambda: stub
    return stub


def test_a_sensor_that_works(kinds):
    stub = put(kinds, "rapl")
    found = examine_sensor("rapl")
    assert (found.name, found.state, found.reason, found.fix) == ("rapl", "ok", None, None)
    assert [d.name for d in found.domains] == ["gpu0"]
    assert [c.name for c in found.lacks] == ["HBM"]
    assert stub.stopped == 1


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (SensorPermission("for root", why="0400", fix="chmod"), "no permission", "for root (0400)"),
        (SensorUnavailable("not there", why="no file", fix="modprobe"), "missing", "not there (no file)"),
        (SensorUnavailable("not there", fix="modprobe"), "missing", "not there"),
    ],
)
def test_a_sensor_that_does_not(kinds, error, state, reason):
    stub = put(kinds, "rapl", error)
    found = examine_sensor("rapl")
    assert (found.state, found.reason, found.fix) == (state, reason, error.fix)
    assert not found.domains
    assert stub.stopped == 1, "what a failed start took is released"


def test_a_sensor_that_cannot_be_made(kinds):
    def make():
        raise SensorUnavailable("no address", fix="set it")

    kinds["redfish"] = make
    assert examine_sensor("redfish").state == "missing"


def test_an_unknown_name(kinds):
    put(kinds, "rapl")
    with pytest.raises(ArgumentError, match="did you mean 'rapl'"):
        examine_sensor("rapll")


def test_all_of_them(kinds):
    put(kinds, "nvml", SensorUnavailable("none"))
    put(kinds, "modelled")
    found = examine()
    assert [(s.name, s.state) for s in found.sensors] == [("nvml", "missing"), ("modelled", "ok")]
    assert len(found.checks) >= 2
    assert all(c.name and c.detail for c in found.checks)
    assert not found.measures, "the model does not measure"
    assert [s.name for s in examine(["modelled"]).sensors] == ["modelled"]


@pytest.mark.parametrize(
    ("states", "measures"),
    [
        ({"nvml": "ok"}, True),
        ({"modelled": "ok"}, False),
        ({"nvml": "missing", "rapl": "no permission"}, False),
        ({"modelled": "ok", "rapl": "ok"}, True),
        ({}, False),
    ],
)
def test_whether_anything_measures(states, measures):
    found = Health(sensors=[SensorHealth(name=n, state=s) for n, s in states.items()])
    assert found.measures is measures


def test_nvidia_gpus(fake_nvml: FakeNvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvml.set(Scenario(hbm="off"))
    found = examine_sensor("nvml")
    assert found.state == "ok"
    assert any("HBM" in c.name for c in found.lacks)
    fake_nvml.set(Scenario(init="driver_not_loaded"))
    assert examine_sensor("nvml").state == "missing"


# -- performance counters -------------------------------------------------------------------------------------------

USER, ADMIN = "CapEff:\t0000000000000000", "CapEff:\t0000000000200000"


def counters(tmp_path, params, status):
    for name, text in (("params", params), ("status", status)):
        if text is not None:
            (tmp_path / name).write_text(text)
    return performance_counters(tmp_path / "params", tmp_path / "status")


@pytest.mark.parametrize(
    ("params", "status", "ok"),
    [
        ("ResmanDebugLevel: 4\nRmProfilingAdminOnly: 0\n", USER, True),
        ("RmProfilingAdminOnly: 1\n", USER, False),
        ("RmProfilingAdminOnly: 1\n", f"Name:\tpython\n{ADMIN}\nCapBnd:\t0\n", True),
        ("RmProfilingAdminOnly: 1\n", "CapEff:\t000001ffffffffff\n", True),
        ("RmProfilingAdminOnly: 1\n", "CapEff:\t000001ffffdfffff\n", False),
        ("no such line\n", USER, False),
        (None, ADMIN, None),
    ],
)
def test_performance_counters(tmp_path, params, status, ok):
    check = counters(tmp_path, params, status)
    assert check.ok is ok
    assert check.detail
    assert bool(check.fix) is (ok is False)
    if ok is False:
        assert "NVreg_RestrictProfilingToAdminUsers=0" in check.fix


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("status", [None, "Name:\tpython\n"])
def test_without_capabilities_the_user_counts(tmp_path, monkeypatch, uid, status):
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert counters(tmp_path, "RmProfilingAdminOnly: 1\n", status).ok is (uid == 0)


# -- the clock --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    """An adjtimex that answers what the test says."""

    def answer(*, state=0, status=0, maxerror_us=0, error=None):
        class Libc:
            @staticmethod
            def adjtimex(pointer):
                pointer._obj.status = status
                pointer._obj.maxerror = maxerror_us
                assert pointer._obj.modes == 0, "only read, never set"
                ctypes.set_errno(1)
                return state

        def load(*args, **kwargs):
            if error:
                raise error
            return Libc

        monkeypatch.setattr(ctypes, "CDLL", load)

    return answer


def test_a_synchronised_clock(kernel):
    kernel(maxerror_us=1500)
    check = clock_synchronised()
    assert check.ok is True
    assert "1.5 ms" in check.detail
    assert check.fix is None


def test_a_clock_that_is_not(kernel):
    kernel(state=5, status=0x40, maxerror_us=16_000_000)
    check = clock_synchronised()
    assert check.ok is False
    assert "chrony" in check.fix


def test_a_clock_whose_error_has_grown(kernel):
    kernel(maxerror_us=500_000)
    assert clock_synchronised().ok is False


@pytest.mark.parametrize("answer", [{"state": -1}, {"error": OSError("no libc")}])
def test_a_kernel_that_does_not_say(kernel, answer):
    kernel(**answer)
    check = clock_synchronised()
    assert check.ok is None
    assert "adjtimex" in check.detail


def test_the_real_kernel_answers():
    check = clock_synchronised()
    assert check.ok in (True, False, None)
    assert check.detail
