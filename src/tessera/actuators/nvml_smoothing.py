"""Reads and sets power smoothing and workload power profiles through NVML (nvidia-ml-py); keeps no state."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ..errors import ActuatorError
from ..sensors._nvml_power import number
from .smoothing import PARAMETERS, SmoothingLimits, SmoothingState

_MASK_WORDS, _WORD = 8, 32


class NvmlSmoothing:
    """The part of `NvmlActuator` for Blackwell; NVML answers "not supported" on other boards."""

    gpu: str
    _nvml: Any
    _handle: Any

    def _call(self, what: str, function: str, *args: Any) -> Any:
        raise NotImplementedError  # of NvmlActuator

    # -- power smoothing ------------------------------------------------------------------------------------

    def smoothing_limits(self) -> SmoothingLimits:
        nv = self._nvml
        low, high, presets, privilege = self._read_fields(
            (nv.NVML_FI_PWR_SMOOTHING_MIN_PERCENT_TMP_FLOOR_SETTING, 0),
            (nv.NVML_FI_PWR_SMOOTHING_MAX_PERCENT_TMP_FLOOR_SETTING, 0),
            (nv.NVML_FI_PWR_SMOOTHING_MAX_NUM_PRESET_PROFILES, 0),
            (nv.NVML_FI_PWR_SMOOTHING_PRIV_LVL, 0),
        )
        return SmoothingLimits(
            min_floor_percent=low, max_floor_percent=high, presets=int(presets), privilege=int(privilege)
        )

    def smoothing_state(self, profile: int) -> SmoothingState:
        nv = self._nvml
        enabled, active, floor, up_mw, down_mw, hysteresis_ms = self._read_fields(
            (nv.NVML_FI_PWR_SMOOTHING_ENABLED, 0),
            (nv.NVML_FI_PWR_SMOOTHING_ACTIVE_PRESET_PROFILE, 0),
            (nv.NVML_FI_PWR_SMOOTHING_PROFILE_PERCENT_TMP_FLOOR, profile),
            (nv.NVML_FI_PWR_SMOOTHING_PROFILE_RAMP_UP_RATE, profile),
            (nv.NVML_FI_PWR_SMOOTHING_PROFILE_RAMP_DOWN_RATE, profile),
            (nv.NVML_FI_PWR_SMOOTHING_PROFILE_RAMP_DOWN_HYST_VAL, profile),
        )
        return SmoothingState(
            enabled=bool(enabled),
            active=int(active),
            profile=profile,
            floor_percent=floor,
            ramp_up_w_per_s=up_mw / 1000,
            ramp_down_w_per_s=down_mw / 1000,
            hysteresis_ms=hysteresis_ms,
        )

    def set_smoothing(self, state: SmoothingState) -> None:
        """Set all of it. Smoothing is off meanwhile, so that a half-written preset is never active."""
        if not state.enabled:
            self._set_enabled(False)
        for place, name in enumerate(PARAMETERS):
            asked = self._nvml.c_nvmlPowerSmoothingProfile_v1_t()
            asked.profileId, asked.paramId, asked.value = state.profile, place, getattr(state, name)
            self._call(
                f"set {name} of its power smoothing", "nvmlDevicePowerSmoothingUpdatePresetProfileParam",
                ctypes.byref(asked),
            )  # fmt: skip
        asked = self._nvml.c_nvmlPowerSmoothingProfile_v1_t()
        asked.profileId = state.active
        self._call("choose a preset", "nvmlDevicePowerSmoothingActivatePresetProfile", ctypes.byref(asked))
        if state.enabled:
            self._set_enabled(True)

    def _set_enabled(self, enabled: bool) -> None:
        asked = self._nvml.c_nvmlPowerSmoothingState_v1_t()
        asked.state = int(enabled)
        self._call("switch its power smoothing", "nvmlDevicePowerSmoothingSetState", ctypes.byref(asked))

    def _read_fields(self, *fields: tuple[int, int]) -> list[float]:
        values = self._call("read its power smoothing", "nvmlDeviceGetFieldValues", list(fields))
        for value in values:
            if value.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise ActuatorError(
                    f"{self.gpu} cannot read its power smoothing",
                    why=f"NVML reports: {self._nvml.NVMLError(value.nvmlReturn)}",
                    fix="it needs a Blackwell GPU or a newer one, with a driver that offers it",
                )
        return [number(v.value, v.valueType) for v in values]

    # -- workload power profiles ----------------------------------------------------------------------------

    def power_profiles(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        now = self._nvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        self._call("read its power profiles", "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles", ctypes.byref(now))
        return _bits(now.perfProfilesMask), _bits(now.requestedProfilesMask)

    def request_profiles(self, profiles: Sequence[int]) -> None:
        self._ask("request power profiles", "nvmlDeviceWorkloadPowerProfileSetRequestedProfiles", profiles)

    def clear_profiles(self, profiles: Sequence[int]) -> None:
        self._ask("clear power profiles", "nvmlDeviceWorkloadPowerProfileClearRequestedProfiles", profiles)

    def _ask(self, what: str, function: str, profiles: Sequence[int]) -> None:
        asked = self._nvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
        for profile in profiles:
            asked.requestedProfilesMask.mask[profile // _WORD] |= 1 << profile % _WORD
        self._call(what, function, ctypes.byref(asked))


def _bits(mask: Any) -> tuple[int, ...]:
    return tuple(i for i in range(_MASK_WORDS * _WORD) if mask.mask[i // _WORD] >> i % _WORD & 1)
