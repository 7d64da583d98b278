"""Blackwell's power smoothing and power profiles: the real nvidia-ml-py on the fake NVML, put back whatever happens."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pynvml as nv
import pytest

from tessera import actuators
from tessera.actuators import PowerSmoothing, journal
from tessera.actuators.nvml import NvmlActuator
from tessera.actuators.smoothing import PARAMETERS, POWER_PROFILES, SmoothingState
from tessera.errors import ActuatorError, ActuatorPermission, ArgumentError

from fakes.nvml import Scenario, fake_env

UUID = "GPU-00000000-0000-0000-0000-000000000000"
MASK = 1 << POWER_PROFILES.index("max_q") | 1 << POWER_PROFILES.index("llm_training")


@pytest.fixture(autouse=True)
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TESSERA_WATCHER", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "run"


@pytest.fixture
def fake(fake_nvml):
    fake_nvml.set(Scenario(gpus=1, name="NVIDIA B200", smoothing="on", profiles=MASK))
    nv.nvmlInit()
    yield fake_nvml
    nv.nvmlShutdown()


def state() -> SmoothingState:
    actuator = NvmlActuator(UUID)
    try:
        return actuator.smoothing_state(4)
    finally:
        actuator.close()


def requested() -> tuple[int, ...]:
    actuator = NvmlActuator(UUID)
    try:
        return actuator.power_profiles()[1]
    finally:
        actuator.close()


def test_the_structs_have_the_sizes_that_their_versions_say():
    for kind, version in (
        (nv.c_nvmlPowerSmoothingProfile_v1_t, nv.nvmlPowerSmoothingProfile_v1),
        (nv.c_nvmlPowerSmoothingState_v1_t, nv.nvmlPowerSmoothingState_v1),
        (nv.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t, nv.nvmlWorkloadPowerProfileCurrentProfiles_v1),
        (nv.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t, nv.nvmlWorkloadPowerProfileRequestedProfiles_v1),
    ):
        assert ctypes.sizeof(kind) == version & 0xFFFFFF
    for number, name in enumerate(("PERCENT_TMP_FLOOR", "RAMP_UP_RATE", "RAMP_DOWN_RATE", "RAMP_DOWN_HYSTERESIS")):
        assert getattr(nv, f"NVML_POWER_SMOOTHING_PROFILE_PARAM_{name}") == number
    assert len(PARAMETERS) == 4
    for number, name in enumerate(POWER_PROFILES):
        assert getattr(nv, f"NVML_POWER_PROFILE_{name.upper()}") == number
    assert len(POWER_PROFILES) == nv.NVML_POWER_PROFILE_MAX


def test_smoothing_holds_in_the_block_and_not_after(fake, run_dir):
    before = state()
    assert not before.enabled and before.active == 0
    with actuators.smooth_power("gpu0", floor_percent=60, ramp_down_w_per_s=200, hysteresis_ms=250) as hold:
        now = state()
        assert now.enabled and now.active == 4
        assert (now.floor_percent, now.ramp_down_w_per_s, now.hysteresis_ms) == (60, 200, 250)
        assert now.ramp_up_w_per_s == before.ramp_up_w_per_s  # not asked for: as the preset has it
        found = journal.read_journal(UUID)
        assert found is not None and found.smoothing is not None and found.smoothing.done
        assert hold.gpus == ("gpu0",)
    assert state() == before
    assert list(run_dir.glob("*.json")) == []


def test_of_two_holders_the_strictest_applies(fake):
    with actuators.smooth_power("gpu0", floor_percent=40, ramp_down_w_per_s=300):
        with actuators.smooth_power("gpu0", floor_percent=30, ramp_down_w_per_s=100):
            assert (state().floor_percent, state().ramp_down_w_per_s) == (40, 100)
        assert (state().floor_percent, state().ramp_down_w_per_s) == (40, 300)
    assert not state().enabled


def test_a_cap_beside_smoothing_is_its_own_claim(fake):
    with actuators.smooth_power("gpu0", floor_percent=40), actuators.cap_power("gpu0", cap_w=300):
        assert state().enabled
        assert nv.nvmlDeviceGetPowerManagementLimit(nv.nvmlDeviceGetHandleByIndex(0)) == 300_000
    assert nv.nvmlDeviceGetPowerManagementLimit(nv.nvmlDeviceGetHandleByIndex(0)) == 700_000


def test_without_permission_nothing_changes(fake, run_dir):
    fake.set(Scenario(gpus=1, smoothing="on", profiles=MASK, control="denied"))
    with pytest.raises(ActuatorPermission), actuators.smooth_power("gpu0", floor_percent=60):
        pass
    with pytest.raises(ActuatorPermission), actuators.use_power_profiles("gpu0", "max_q"):
        pass
    assert not state().enabled and requested() == ()
    assert list(run_dir.glob("*.json")) == []


@pytest.mark.parametrize("calls", range(6))
def test_a_driver_that_fails_half_way_leaves_what_was(fake, calls):
    before = state()
    fake.set(Scenario(gpus=1, smoothing="on", profiles=MASK, fault_smooth=f"{calls}:1:999:applied"))
    with pytest.raises(ActuatorError), actuators.smooth_power("gpu0", floor_percent=60):
        pass
    assert state() == before


def test_what_somebody_else_changed_meanwhile_stays(fake):
    with actuators.smooth_power("gpu0", floor_percent=60) as hold:
        other = NvmlActuator(UUID)
        other.set_smoothing(SmoothingState(enabled=True, active=1, profile=1, floor_percent=80, ramp_up_w_per_s=1,
                                           ramp_down_w_per_s=1, hysteresis_ms=0))  # fmt: skip
        other.close()
    assert state().active == 1
    assert any("somebody else" in note for note in hold.notes)


def test_power_profiles_are_added_to_what_is_requested_and_taken_back(fake):
    first, second = POWER_PROFILES.index("max_q"), POWER_PROFILES.index("llm_training")
    other = NvmlActuator(UUID)
    other.request_profiles([first])
    other.close()
    with actuators.use_power_profiles("gpu0", ["llm_training", "max_q"]):
        assert requested() == (first, second)
        with actuators.use_power_profiles("gpu0", "llm_training"):
            assert requested() == (first, second)
        assert requested() == (first, second)
    assert requested() == (first,)  # somebody's own, before us


def test_impossible_wishes_are_refused_with_what_is_possible(fake):
    with pytest.raises(ActuatorError, match="95%") as caught, actuators.smooth_power("gpu0", floor_percent=95):
        pass
    assert "10% to 90%" in str(caught.value)
    with pytest.raises(ArgumentError, match="did you mean 'llm_training'"):
        actuators.use_power_profiles("gpu0", "llm_trainin")
    with pytest.raises(ActuatorError, match="hpc") as caught, actuators.use_power_profiles("gpu0", "hpc"):
        pass
    assert "max_q, llm_training" in str(caught.value)
    with pytest.raises(ArgumentError):
        PowerSmoothing(ramp_up_w_per_s=-1.0)


def test_an_older_gpu_says_that_it_has_none(fake):
    fake.set(Scenario(gpus=1))
    with pytest.raises(ActuatorError, match="power smoothing"), actuators.smooth_power("gpu0", floor_percent=50):
        pass
    with pytest.raises(ActuatorError), actuators.use_power_profiles("gpu0", "max_q"):
        pass
    assert actuators.check_smoothing() == []


def test_doctor_lists_them_where_they_are(fake):
    smoothing, profiles = actuators.check_smoothing()
    assert smoothing.name == "gpu0 power smoothing" and "off of 5" in smoothing.detail
    assert "10 to 90%" in smoothing.detail and "not tested on hardware" in smoothing.detail
    assert "max_q, llm_training" in profiles.detail and "none" in profiles.detail


def test_after_a_kill_doctor_puts_back_what_was(fake_nvml, tmp_path: Path, run_dir: Path):
    scenario = Scenario(gpus=1, smoothing="on", profiles=MASK, state_file=str(tmp_path / "state"))
    code = (
        "import time\nfrom tessera import actuators\n"
        "with actuators.smooth_power('gpu0', floor_percent=60), actuators.use_power_profiles('gpu0', 'max_q'):\n"
        "    print('held', flush=True)\n    time.sleep(600)\n"
    )
    env = {**os.environ, **fake_env(scenario), "TESSERA_RUNTIME_DIR": str(run_dir), "TESSERA_WATCHER": "0"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    fake_nvml.set(scenario)
    nv.nvmlInit()
    try:
        assert state().enabled and requested()
        (outstanding,) = actuators.list_outstanding()
        assert "power smoothing as it was" in outstanding.action and "max_q" in outstanding.action
        deadline = time.monotonic() + 600.0
        while actuators.list_outstanding() and time.monotonic() < deadline:
            actuators.restore_outstanding()
        assert not state().enabled and requested() == ()
    finally:
        nv.nvmlShutdown()
