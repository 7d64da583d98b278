"""AmdActuator and holds on it, with the real amdsmi package on a fake libamd_smi.so; untested on hardware.

The `check_*` functions run in a child process (fakes/vendor_abi.py) so that the library does not stay in this one.
"""

from __future__ import annotations

import ctypes

import pytest

from tessera import actuators
from tessera.errors import ActuatorError, ActuatorPermission

from fakes import vendor_abi
from fakes.vendor_abi import Fake

NO_PERM, NOT_SUPPORTED, BUSY = 10, 2, 30


def stored(fake: Fake, key: str) -> float:
    return fake._library.fake_get(key.encode())


def check_layout(fake: Fake) -> None:
    from amdsmi import amdsmi_wrapper as w

    assert fake.layout("frequencies") == ctypes.sizeof(w.amdsmi_frequencies_t)


def check_reads(fake: Fake) -> None:
    fake.set(gpus=2, gpu1_cap=500e6)
    assert list(actuators.list_gpus()) == ["gpu0", "gpu1"]
    limit = actuators.find_gpu("gpu1").power_limit()
    assert (limit.now_w, limit.default_w, limit.min_w, limit.max_w) == (500, 750, 0, 750)
    found = actuators.find_gpu(0)
    assert isinstance(found, actuators.Actuator)
    clocks = found.supported_clocks_mhz()
    assert (clocks[0], clocks[-1]) == (2100, 132)
    assert found.locked_clocks_mhz() is None


def check_holds_are_put_back(fake: Fake) -> None:
    fake.set(gpu0_cap=600e6)
    with actuators.hold_gpus("gpu0", cap_w=300, clocks_mhz=(132, 900)):
        assert stored(fake, "0.cap") == 300e6
        assert (stored(fake, "0.min_mhz"), stored(fake, "0.max_mhz")) == (132, 900)
        with actuators.lock_clocks("gpu0", sm_mhz=800):
            assert stored(fake, "0.max_mhz") == 800
    assert (stored(fake, "0.cap"), stored(fake, "0.perf"), stored(fake, "0.max_mhz")) == (600e6, 0, 2100)
    assert actuators.list_outstanding() == []


def check_clocks_that_were_limited_are_limited_again(fake: Fake) -> None:
    fake.set(gpu0_perf=3, gpu0_min_mhz=500, gpu0_max_mhz=1500)
    with actuators.lock_clocks("gpu0", sm_mhz=900):
        assert stored(fake, "0.max_mhz") == 900
    assert (stored(fake, "0.min_mhz"), stored(fake, "0.max_mhz"), stored(fake, "0.perf")) == (500, 1500, 3)


def check_refusals(fake: Fake) -> None:
    fake.set(fail_set_cap=NO_PERM)
    with (
        pytest.raises(ActuatorPermission, match="may not set its power cap") as caught,
        actuators.cap_power(0, cap_w=300),
    ):
        pass
    assert "amd-smi" in caught.value.fix
    fake.set(fail_set_cap=0, fail_clk_limit=NOT_SUPPORTED, fail_set_perf=NOT_SUPPORTED)
    with (
        pytest.raises(ActuatorError, match="gpu0 cannot lock"),
        actuators.hold_gpus(0, cap_w=300, clocks_mhz=(132, 900)),
    ):
        pass
    assert stored(fake, "0.cap") == 750e6
    with pytest.raises(ActuatorError, match="0 W to 750 W"), actuators.cap_power(0, cap_w=800):
        pass
    with pytest.raises(ActuatorError, match="132 to 2100 MHz"), actuators.lock_clocks(0, sm_mhz=2500):
        pass
    assert actuators.list_outstanding() == []


CHECKS = [name for name in dict(globals()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    root = tmp_path_factory.mktemp("rocm")
    return vendor_abi.run_amdsmi(__file__, root, TESSERA_RUNTIME_DIR=str(root / "run"), TESSERA_WATCHER="0")


@pytest.mark.parametrize("check", CHECKS)
def test_on_fake_library(check, outcome):
    assert outcome[check] == "", outcome[check]
