"""The fake NVML behaves as the recorded H200 does, as seen through the real nvidia-ml-py."""

from __future__ import annotations

import ctypes
import math
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import fields
from itertools import pairwise

import pynvml as nv
import pytest

from fakes.nvml import T0_US, FakeNvml, Scenario, build_fake, fake_env, missing_compiler

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

LOST, DENIED, UNSUPPORTED = nv.NVMLError_GpuIsLost, nv.NVMLError_NoPermission, nv.NVMLError_NotSupported


@pytest.fixture
def fake():
    with FakeNvml() as fake:
        fake.set_time_us(T0_US)
        yield fake


def start(fake, **scenario):
    """Set a scenario, initialise, and return the handle of the first GPU."""
    fake.set(Scenario(**scenario))
    nv.nvmlInit()
    return nv.nvmlDeviceGetHandleByIndex(0)


def ring(handle, since=0):
    kind, samples = nv.nvmlDeviceGetSamples(handle, nv.NVML_TOTAL_POWER_SAMPLES, since)
    assert kind == nv.NVML_VALUE_TYPE_UNSIGNED_INT
    return [(s.timeStamp, s.sampleValue.uiVal / 1e3) for s in samples]


def collect(fake, handle, seconds, every=1.0):
    """Read the ring again and again as a sampler does; ends `seconds` later."""
    samples = [ring(handle)[-1]]
    for _ in range(round(seconds / every)):
        fake.advance(every)
        samples += ring(handle, samples[-1][0])
    return samples


def joules(samples):
    return sum((b[0] - a[0]) / 1e6 * (a[1] + b[1]) / 2 for a, b in pairwise(samples))


def field(handle, *ids):
    return list(nv.nvmlDeviceGetFieldValues(handle, list(ids)))


# ---- library, devices


def test_the_loader_resolves_pynvml_to_the_fake_by_its_soname(fake):
    start(fake)
    assert nv.nvmlLib._name == "libnvidia-ml.so.1"  # pynvml opened it by itself, by name
    assert hasattr(nv.nvmlLib, "fake_nvml_scenario")
    assert nv.nvmlSystemGetDriverVersion() == "580.95.05"
    assert nv.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert nv.nvmlSystemGetCudaDriverVersion() == nv.nvmlSystemGetCudaDriverVersion_v2() == 13000


def test_after_close_there_is_no_nvml_in_this_process():
    with FakeNvml():
        nv.nvmlInit()
    with pytest.raises(nv.NVMLError_LibraryNotFound):
        nv.nvmlInit()


def test_build_is_cached(tmp_path):
    first = build_fake(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build_fake(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp


def test_in_a_subprocess_with_text_and_file(tmp_path):
    script = textwrap.dedent("""
        import pynvml as nv
        nv.nvmlInit()
        h = nv.nvmlDeviceGetHandleByIndex(1)
        _, samples = nv.nvmlDeviceGetSamples(h, 0, 0)
        print(nv.nvmlDeviceGetCount(), nv.nvmlDeviceGetPowerUsage(h), len(samples) > 100)
    """)
    scenario = Scenario(gpus=2, wave="const:100", gpu={1: {"wave": "const:321"}})
    (tmp_path / "scenario").write_text(scenario.text())
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=fake_env(s), stdout=subprocess.PIPE, text=True)
        for s in (scenario, tmp_path / "scenario")
    ]
    for p in processes:
        assert p.communicate(timeout=300)[0] == "2 321000 True\n"
        assert p.returncode == 0


def test_devices_and_their_names(fake):
    start(fake, gpus=3, gpu={1: {"name": "NVIDIA A100-SXM4-80GB"}})
    assert nv.nvmlDeviceGetCount() == 3
    for i in range(3):
        h = nv.nvmlDeviceGetHandleByIndex(i)
        uuid = f"GPU-00000000-0000-0000-0000-{i:012d}"
        bus = nv.nvmlDeviceGetPciInfo(h).busId
        assert nv.nvmlDeviceGetUUID(h) == uuid
        assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByUUID(uuid)) == i
        assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByPciBusId(bus)) == i
        assert nv.nvmlDeviceGetMinorNumber(h) == i
    assert nv.nvmlDeviceGetName(nv.nvmlDeviceGetHandleByIndex(0)) == "NVIDIA H200"
    assert nv.nvmlDeviceGetName(nv.nvmlDeviceGetHandleByIndex(1)) == "NVIDIA A100-SXM4-80GB"
    assert nv.nvmlDeviceGetCudaComputeCapability(h) == (9, 0)
    assert nv.nvmlDeviceGetPersistenceMode(h) == 1
    with pytest.raises(nv.NVMLError_InvalidArgument):
        nv.nvmlDeviceGetHandleByIndex(3)
    with pytest.raises(nv.NVMLError_NotFound):
        nv.nvmlDeviceGetHandleByUUID("GPU-12345678-0000-0000-0000-000000000000")
    with pytest.raises(nv.NVMLError_InvalidArgument):
        nv.nvmlDeviceGetName(ctypes.cast(ctypes.c_void_p(0x1000), nv.c_nvmlDevice_t))


def test_mig(fake):
    start(fake, gpus=2, gpu={1: {"mig": 2}})
    whole, cut = (nv.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
    assert nv.nvmlDeviceGetMigMode(whole) == [0, 0]
    assert nv.nvmlDeviceGetMaxMigDeviceCount(whole) == 0
    assert nv.nvmlDeviceGetMigMode(cut) == [1, 1]
    assert nv.nvmlDeviceGetMaxMigDeviceCount(cut) == 7
    slices = [nv.nvmlDeviceGetMigDeviceHandleByIndex(cut, j) for j in (0, 1)]
    with pytest.raises(nv.NVMLError_NotFound):
        nv.nvmlDeviceGetMigDeviceHandleByIndex(cut, 2)
    uuid = nv.nvmlDeviceGetUUID(slices[1])
    assert uuid == "MIG-00000000-0000-0000-0001-000000000001"
    by_uuid = nv.nvmlDeviceGetHandleByUUID(uuid)
    assert nv.nvmlDeviceIsMigDeviceHandle(by_uuid).value == 1
    assert nv.nvmlDeviceIsMigDeviceHandle(cut).value == 0
    assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(by_uuid)) == 1
    assert nv.nvmlDeviceGetMemoryInfo(by_uuid).total * 7 == pytest.approx(nv.nvmlDeviceGetMemoryInfo(cut).total)
    for read in (nv.nvmlDeviceGetPowerUsage, nv.nvmlDeviceGetTotalEnergyConsumption, ring):
        read(cut)
        with pytest.raises(UNSUPPORTED):
            read(by_uuid)
    with pytest.raises(UNSUPPORTED):
        nv.nvmlDeviceGetUtilizationRates(cut)
    fake.set(Scenario(mig="off"))
    with pytest.raises(UNSUPPORTED):
        nv.nvmlDeviceGetMigMode(whole)


# ---- the ring


def test_a_fresh_ring_has_history_and_no_more_than_it_holds(fake):
    h = start(fake)
    samples = ring(h)
    assert 110 <= len(samples) <= 119
    assert samples[0][0] >= T0_US - 2_400_000
    assert T0_US - 50_000 < samples[-1][0] <= T0_US
    fake.advance(10)
    later = ring(h, samples[-1][0])
    assert len(later) == 119
    assert later[0][0] > T0_US + 7_000_000  # the rest was overwritten
    fake.change(ring_len=10)
    assert ring(h) == later[-10:]


def test_only_newer_samples_else_not_found(fake):
    h = start(fake)
    last = ring(h)[-1][0]
    with pytest.raises(nv.NVMLError_NotFound):
        ring(h, last)
    fake.advance(0.1)
    newer = ring(h, last)
    assert 3 <= len(newer) <= 6
    assert all(stamp > last for stamp, _ in newer)
    assert fake.calls("nvmlDeviceGetSamples") == 5  # two calls a read, one for NotFound


def test_a_small_buffer_gets_the_oldest(fake):
    h = start(fake)
    get = nv._nvmlGetFunctionPointer("nvmlDeviceGetSamples")
    kind, count, buffer = ctypes.c_uint(), ctypes.c_uint(4), (nv.c_nvmlSample_t * 4)()
    assert get(h, 0, ctypes.c_ulonglong(0), ctypes.byref(kind), ctypes.byref(count), buffer) == nv.NVML_SUCCESS
    assert [s.timeStamp for s in buffer] == [stamp for stamp, _ in ring(h)[:4]]


def test_spacing_is_that_of_the_recording(fake):
    h = start(fake)
    stamps = [stamp for stamp, _ in collect(fake, h, 60.0)]
    spacing_ms = [(b - a) / 1e3 for a, b in pairwise(stamps)]
    # h200/waves.json: 7.8 to 46 ms, median 20.0, mean 20.24, a tenth below 15.3, a tenth above 24.7
    assert 7.9 <= min(spacing_ms) < 10
    assert 40 < max(spacing_ms) <= 46.1
    assert statistics.median(spacing_ms) == pytest.approx(20, abs=0.3)
    assert statistics.mean(spacing_ms) == pytest.approx(20.24, abs=0.15)
    tenths = statistics.quantiles(spacing_ms, n=10)
    assert 8 < tenths[0] < 17
    assert 23 < tenths[-1] < 33
    fake.change(jitter="off")
    assert {b[0] - a[0] for a, b in pairwise(ring(h))} == {20_000}


def test_reading_twice_gives_the_same_ring(fake):
    h = start(fake, wave="sine:400:200:0.3")
    fake.advance(3)
    before = ring(h)
    assert ring(h) == before
    fake.advance(0.5)
    still = [sample for sample in ring(h) if sample[0] <= before[-1][0]]
    assert len(still) > 90
    assert still == before[-len(still) :]


@pytest.mark.parametrize(
    "wave",
    ["const:690", "square:125:750:0.5", "square:125:750:0.1:0.25", "sine:400:200:0.25", "ramp:100:700:4"],
)
def test_ring_counter_and_truth_agree(fake, wave):
    h = start(fake, wave=wave)
    fake.advance(1)
    at, mj, last = fake.time_us(), nv.nvmlDeviceGetTotalEnergyConsumption(h), ring(h)[-1]
    samples = collect(fake, h, 5.0)
    assert samples[0] == last
    counted = (nv.nvmlDeviceGetTotalEnergyConsumption(h) - mj) / 1e3
    truth = fake.true_joules(at, fake.time_us())
    assert counted == pytest.approx(truth, rel=0.01)
    # the ring ends a little before the read at both ends: compare powers, not joules
    watts = joules(samples) / ((samples[-1][0] - samples[0][0]) / 1e6)
    assert watts == pytest.approx(counted / 5, rel=0.01)


def test_the_sensor_lags_a_step(fake):
    h = start(fake, wave="square:125:750:100", jitter="off")  # rises at T0
    fake.advance(0.1)
    after_ms = {(stamp - T0_US) // 1000: watts for stamp, watts in ring(h)}
    # boxcar of 20 ms, centred 15 ms back: nothing at +5 ms, all at +25 ms
    assert after_ms[0] == 125
    assert after_ms[20] == pytest.approx(125 + 625 * 0.75, abs=0.01)
    assert after_ms[40] == 750


def test_ring_off_denied_zero_frozen(fake):
    h = start(fake)
    for value, error in (("off", UNSUPPORTED), ("denied", DENIED)):
        fake.change(ring=value)
        with pytest.raises(error):
            ring(h)
    fake.change(ring="zero")
    assert {watts for _, watts in ring(h)} == {0}
    fake.change(ring=None, ring_freeze_at_s=1.0)
    fake.advance(2)
    last = ring(h)[-1][0]
    assert T0_US + 950_000 < last < T0_US + 1_000_000
    fake.advance(1)
    with pytest.raises(nv.NVMLError_NotFound):
        ring(h, last)
    with pytest.raises(UNSUPPORTED):
        nv.nvmlDeviceGetSamples(h, nv.NVML_GPU_UTILIZATION_SAMPLES, 0)


def test_a_step_of_the_wall_clock_moves_new_stamps_only(fake):
    h = start(fake, epoch_step_us_at="1:3600000000", jitter="off")
    fake.advance(0.99)
    before = ring(h)
    assert fake.epoch_ns() == fake.monotonic_ns()
    fake.advance(0.03)
    assert fake.epoch_ns() - fake.monotonic_ns() == 3600 * 10**9
    new = ring(h, before[-1][0])
    assert [stamp - T0_US for stamp, _ in new] == [1_000_000 + 3_600_000_000, 1_020_000 + 3_600_000_000]
    assert ring(h)[-len(before) :][: len(before) - 2] == before[2:]
    assert field(h, 186)[0].timestamp == T0_US + 1_020_000 + 3_600_000_000
    # stepped back, the new stamps are older than the last one seen: a reader that asks "since" sees none
    fake.change(epoch_step_us_at="1:-3600000000")
    with pytest.raises(nv.NVMLError_NotFound):
        ring(h, before[-1][0])
    assert [stamp - T0_US for stamp, _ in ring(h)[-2:]] == [
        1_000_000 - 3_600_000_000,
        1_020_000 - 3_600_000_000,
    ]


# ---- counter and polled power


def test_the_counter_ticks_and_lags(fake):
    h = start(fake, wave="const:500", counter_base_mj=1000, tick_phase_ms=30)
    read = nv.nvmlDeviceGetTotalEnergyConsumption
    fake.set_time_us(T0_US + 129_000)
    assert read(h) == 1000 + 500 * (30 - 9)
    fake.advance(0.001)
    assert read(h) == 1000 + 500 * (130 - 9)
    fake.advance(0.099)
    assert read(h) == 1000 + 500 * (130 - 9)
    assert field(h, 83)[0].value.ullVal == read(h)
    assert field(h, 83)[0].valueType == nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG


def test_the_counter_restarts_from_zero(fake):
    h = start(fake, wave="const:500", counter_reset_at_s=2.0)
    fake.advance(1.999)
    assert nv.nvmlDeviceGetTotalEnergyConsumption(h) > 9_000_000
    fake.advance(0.001)
    assert nv.nvmlDeviceGetTotalEnergyConsumption(h) == 0
    fake.advance(1)
    assert nv.nvmlDeviceGetTotalEnergyConsumption(h) == 500 * (1000 - 9)
    for value, error in (("off", UNSUPPORTED), ("denied", DENIED)):
        fake.change(energy=value)
        with pytest.raises(error):
            nv.nvmlDeviceGetTotalEnergyConsumption(h)


def test_calls_cost_time_with_the_real_clock_only(fake):
    def cost_ms(h):
        t = time.perf_counter()
        nv.nvmlDeviceGetTotalEnergyConsumption(h)
        return (time.perf_counter() - t) * 1e3

    h = start(fake)
    assert min(cost_ms(h) for _ in range(50)) < 3, "what it costs with the real clock"
    fake.change(cost_energy_us=5000)
    assert cost_ms(h) >= 5
    fake.set_time_us(0)
    fake.set(Scenario())
    assert cost_ms(h) >= 3
    before_us, newest_us, after_us = time.time() * 1e6, ring(h)[-1][0], time.time() * 1e6
    assert before_us - 200_000 < newest_us < after_us + 200_000


def test_power_usage_is_a_trailing_second_refreshed_at_ten_hertz(fake):
    h = start(fake, wave="square:100:700:100")
    seen = []
    for _ in range(120):
        fake.advance(0.01)
        seen.append(nv.nvmlDeviceGetPowerUsage(h))
    assert len(set(seen)) == 11  # 12 refreshes; the last two are both all of 700 W
    assert seen[49] == 100_000 + 300_000
    assert seen[-1] == 700_000
    fake.change(power="zero")
    assert nv.nvmlDeviceGetPowerUsage(h) == 0
    for value, error in (("off", UNSUPPORTED), ("denied", DENIED)):
        fake.change(power=value)
        with pytest.raises(error):
            nv.nvmlDeviceGetPowerUsage(h)


def test_power_fields(fake):
    h = start(fake, wave="square:100:700:100")
    fake.advance(0.25)
    average, module, memory, instant, unknown = field(h, 185, (185, 1), (185, 2), 186, 9999)
    assert average.value.uiVal == 100_000 + 120_000 == nv.nvmlDeviceGetPowerUsage(h)
    assert module.value.uiVal == pytest.approx(242_000, abs=1)
    assert memory.value.uiVal == pytest.approx(22_000, abs=1)
    assert instant.value.uiVal == 700_000
    assert unknown.nvmlReturn == nv.NVML_ERROR_NOT_SUPPORTED
    for f in (average, module, memory, instant):
        assert f.nvmlReturn == nv.NVML_SUCCESS
        assert f.valueType == nv.NVML_VALUE_TYPE_UNSIGNED_INT
        assert f.timestamp == fake.time_us()
    fake.change(instant="off", hbm="off")
    returns = [f.nvmlReturn for f in field(h, 185, (185, 2), 186)]
    assert returns == [nv.NVML_SUCCESS, nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_NOT_SUPPORTED]


# ---- telemetry and control


def test_telemetry(fake):
    h = start(
        fake,
        temperature_c=66,
        memory_temperature_c=77,
        clock_sm=1500,
        clock_mem=2619,
        reasons="0x24",
        utilization_pct=98,
        memory_utilization_pct=41,
        memory_used_mib=1024,
        processes="4711:500,4712:12",
    )
    assert nv.nvmlDeviceGetTemperature(h, nv.NVML_TEMPERATURE_GPU) == 66
    assert nv.nvmlDeviceGetTemperatureV(h, nv.NVML_TEMPERATURE_GPU) == 66
    assert field(h, nv.NVML_FI_DEV_MEMORY_TEMP)[0].value.uiVal == 77
    assert [nv.nvmlDeviceGetClockInfo(h, kind) for kind in range(4)] == [1980, 1500, 2619, 1545]
    assert nv.nvmlDeviceGetMaxClockInfo(h, nv.NVML_CLOCK_SM) == 1980
    capped = nv.nvmlClocksEventReasonSwPowerCap | nv.nvmlClocksEventReasonSwThermalSlowdown
    assert nv.nvmlDeviceGetCurrentClocksEventReasons(h) == capped
    assert nv.nvmlDeviceGetCurrentClocksThrottleReasons(h) == capped
    assert nv.nvmlDeviceGetSupportedClocksEventReasons(h) == nv.nvmlClocksEventReasonAll
    rates = nv.nvmlDeviceGetUtilizationRates(h)
    assert (rates.gpu, rates.memory) == (98, 41)
    one, two = nv.nvmlDeviceGetMemoryInfo(h), nv.nvmlDeviceGetMemoryInfo(h, nv.nvmlMemory_v2)
    assert one.total == two.total == 143771 * 2**20
    assert two.used == 2**30
    assert one.used == two.used + two.reserved
    assert two.used + two.free + two.reserved == two.total
    found = nv.nvmlDeviceGetComputeRunningProcesses(h)
    assert [(p.pid, p.usedGpuMemory) for p in found] == [(4711, 500 * 2**20), (4712, 12 * 2**20)]
    fake.change(processes=None)
    assert nv.nvmlDeviceGetComputeRunningProcesses(h) == []


@pytest.mark.parametrize(
    ("group", "read"),
    [
        ("temperature", lambda h: nv.nvmlDeviceGetTemperature(h, 0)),
        ("clocks", lambda h: nv.nvmlDeviceGetClockInfo(h, 1)),
        ("reasons", nv.nvmlDeviceGetCurrentClocksEventReasons),
        ("violation", lambda h: nv.nvmlDeviceGetViolationStatus(h, 0)),
        ("utilization", nv.nvmlDeviceGetUtilizationRates),
        ("memory", nv.nvmlDeviceGetMemoryInfo),
        ("processes", nv.nvmlDeviceGetComputeRunningProcesses),
        ("limit", nv.nvmlDeviceGetPowerManagementLimit),
        ("fields", lambda h: field(h, 185)),
    ],
)
def test_a_group_can_be_off_or_denied(fake, group, read):
    h = start(fake)
    read(h)
    for value, error in (("off", UNSUPPORTED), ("denied", DENIED)):
        fake.change(**{group: value})
        with pytest.raises(error):
            read(h)


def test_time_throttled(fake):
    h = start(fake, throttled={"power": 0.25, "hw_thermal": 0.5})
    fake.advance(8)
    status = nv.nvmlDeviceGetViolationStatus(h, nv.NVML_PERF_POLICY_POWER)
    assert (status.referenceTime, status.violationTime) == (fake.time_us(), 2 * 10**9)
    assert nv.nvmlDeviceGetViolationStatus(h, nv.NVML_PERF_POLICY_THERMAL).violationTime == 0
    reasons = (
        "SW_POWER_CAP",
        "SYNC_BOOST",
        "SW_THERM_SLOWDOWN",
        "HW_THERM_SLOWDOWN",
        "HW_POWER_BRAKE_SLOWDOWN",
    )
    values = field(h, *(getattr(nv, f"NVML_FI_DEV_CLOCKS_EVENT_REASON_{r}") for r in reasons))
    assert [v.value.ullVal for v in values] == [2 * 10**9, 0, 0, 4 * 10**9, 0]
    assert {v.valueType for v in values} == {nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG}


def test_power_limit(fake):
    h = start(fake, gpus=2, enforced_limit_w=600)
    other = nv.nvmlDeviceGetHandleByIndex(1)
    assert nv.nvmlDeviceGetPowerManagementLimitConstraints(h) == [200_000, 700_000]
    nv.nvmlDeviceSetPowerManagementLimit(h, 450_000)
    assert nv.nvmlDeviceGetPowerManagementLimit(h) == nv.nvmlDeviceGetEnforcedPowerLimit(h) == 450_000
    assert nv.nvmlDeviceGetPowerManagementDefaultLimit(h) == 700_000
    assert nv.nvmlDeviceGetPowerManagementLimit(other) == 700_000
    assert nv.nvmlDeviceGetEnforcedPowerLimit(other) == 600_000
    values = [f.value.uiVal for f in field(h, 187, 188, 189, 190, 192)]
    assert values == [200_000, 700_000, 700_000, 450_000, 450_000]
    for beyond in (199_999, 700_001):
        with pytest.raises(nv.NVMLError_InvalidArgument):
            nv.nvmlDeviceSetPowerManagementLimit(h, beyond)
    fake.change(control="denied")
    with pytest.raises(DENIED):
        nv.nvmlDeviceSetPowerManagementLimit(h, 300_000)
    assert nv.nvmlDeviceGetPowerManagementLimit(h) == 450_000


def test_locked_clocks(fake):
    h = start(fake)
    assert fake.locked_clocks(0) is None
    nv.nvmlDeviceSetGpuLockedClocks(h, 345, 1200)
    assert fake.locked_clocks(0) == (345, 1200)
    assert [nv.nvmlDeviceGetClockInfo(h, kind) for kind in range(3)] == [1200, 1200, 3201]
    nv.nvmlDeviceResetGpuLockedClocks(h)
    assert fake.locked_clocks(0) is None
    assert nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_SM) == 1980
    fake.change(control="denied")
    with pytest.raises(DENIED):
        nv.nvmlDeviceSetGpuLockedClocks(h, 345, 1200)
    with pytest.raises(DENIED):
        nv.nvmlDeviceResetGpuLockedClocks(h)


def test_gpm(fake):
    h = start(fake, gpm_values={"sm": 88.5, "nvlink_tx": 1000})
    assert nv.nvmlGpmQueryDeviceSupport(h).isSupportedDevice == 1
    first, second = nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()
    ids = (2, 3, 5, 10, 12, 20, 21, 60, 61, 52)

    def metrics(window_s):
        nv.nvmlGpmSampleGet(h, first)
        fake.advance(window_s)
        nv.nvmlGpmSampleGet(h, second)
        ask = nv.c_nvmlGpmMetricsGet_t()
        ask.version, ask.numMetrics = nv.NVML_GPM_METRICS_GET_VERSION, len(ids)
        ask.sample1, ask.sample2 = first, second
        for i, metric in enumerate(ids):
            ask.metrics[i].metricId = metric
        nv.nvmlGpmMetricsGet(ask)
        return ask.metrics[: len(ids)]

    try:
        long = metrics(0.1)
        assert [m.value for m in long[:-1]] == [88.5, 25, 60, 30, 4, 12, 34, 0, 1000]
        assert [m.nvmlReturn for m in long] == [0] * 9 + [nv.NVML_ERROR_NOT_SUPPORTED]
        assert long[0].metricInfo.unit == b"%"
        assert all(math.isnan(m.value) for m in metrics(0.049)[:-1])
        fake.change(gpm="off")
        assert nv.nvmlGpmQueryDeviceSupport(h).isSupportedDevice == 0
        with pytest.raises(UNSUPPORTED):
            nv.nvmlGpmSampleGet(h, first)
        fake.change(gpm="denied")
        with pytest.raises(DENIED):
            nv.nvmlGpmSampleGet(h, first)
    finally:
        nv.nvmlGpmSampleFree(first)
        nv.nvmlGpmSampleFree(second)


# ---- faults


@pytest.mark.parametrize(
    ("init", "error"),
    [
        ("driver_not_loaded", nv.NVMLError_DriverNotLoaded),
        ("lib_mismatch", nv.NVMLError_LibRmVersionMismatch),
        ("absent", nv.NVMLError_LibraryNotFound),
    ],
)
def test_init_fails(fake, init, error):
    fake.set(Scenario(init=init))
    with pytest.raises(error):
        nv.nvmlInit()


def test_uninitialised_after_the_last_shutdown(fake):
    h = start(fake)
    nv.nvmlInit()
    nv.nvmlShutdown()
    nv.nvmlDeviceGetPowerUsage(h)
    nv.nvmlShutdown()
    for call in (lambda: nv.nvmlDeviceGetPowerUsage(h), nv.nvmlDeviceGetCount, nv.nvmlShutdown):
        with pytest.raises(nv.NVMLError_Uninitialized):
            call()


def test_one_gpu_is_lost_and_comes_back(fake):
    start(fake, gpus=2, lost_at_s=1, lost_gpu=1, back_at_s=3)
    well, ill = (nv.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
    fake.advance(1)
    for read in (
        nv.nvmlDeviceGetPowerUsage,
        nv.nvmlDeviceGetName,
        nv.nvmlDeviceGetTotalEnergyConsumption,
        ring,
    ):
        read(well)
        with pytest.raises(LOST):
            read(ill)
    with pytest.raises(LOST):
        nv.nvmlDeviceGetHandleByIndex(1)
    assert nv.nvmlDeviceGetCount() == 2
    fake.advance(2.5)
    stamps = [stamp - T0_US for stamp, _ in ring(ill)]
    assert not any(1_000_000 <= s < 3_000_000 for s in stamps)
    assert stamps[-1] > 3_450_000


def test_all_lost(fake):
    start(fake, gpus=2, lost_at_s=1)
    fake.advance(1)
    for i in (0, 1):
        with pytest.raises(LOST):
            nv.nvmlDeviceGetHandleByIndex(i)


def test_permission_withdrawn(fake):
    h = start(fake, denied_at_s=1, back_at_s=2)
    ring(h)
    fake.advance(1)
    assert nv.nvmlDeviceGetName(h) == "NVIDIA H200"
    for read in (nv.nvmlDeviceGetPowerUsage, nv.nvmlDeviceGetTotalEnergyConsumption, ring):
        with pytest.raises(DENIED):
            read(h)
    fake.advance(1)
    ring(h)


def test_driver_restart(fake):
    h = start(fake, wave="const:500", restart_at_s=2, restart_s=1)
    nv.nvmlDeviceSetPowerManagementLimit(h, 300_000)
    fake.advance(2)
    for call in (lambda: nv.nvmlDeviceGetPowerUsage(h), nv.nvmlDeviceGetCount):
        with pytest.raises(nv.NVMLError_Uninitialized):
            call()
    nv.nvmlShutdown()
    with pytest.raises(nv.NVMLError_DriverNotLoaded):
        nv.nvmlInit()
    fake.advance(1)
    nv.nvmlInit()
    h = nv.nvmlDeviceGetHandleByIndex(0)
    assert nv.nvmlDeviceGetTotalEnergyConsumption(h) == 500 * (1000 - 9)
    assert ring(h)[0][0] >= T0_US + 2_000_000
    assert nv.nvmlDeviceGetPowerManagementLimit(h) == 700_000
    fake.advance(5)
    nv.nvmlDeviceGetPowerUsage(h)


# ---- the driver of the fake itself


def test_waves_are_per_gpu(fake):
    start(fake, gpus=3, wave="const:100", gpu={1: {"wave": "const:300"}, 2: {"ring": "off"}})
    handles = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(3)]
    assert [nv.nvmlDeviceGetPowerUsage(h) for h in handles] == [100_000, 300_000, 100_000]
    assert {watts for _, watts in ring(handles[1])} == {300}
    with pytest.raises(UNSUPPORTED):
        ring(handles[2])


def test_before_the_origin(fake):
    h = start(fake, wave="const:500", before_w=80)
    assert {watts for _, watts in ring(h)} == {80}
    fake.set(Scenario(wave="const:500", origin_us=T0_US + 10**6))
    fake.advance(1.5)
    assert fake.true_joules(T0_US + 10**6, fake.time_us()) == 250


@pytest.mark.parametrize(
    "wave",
    [
        "const",
        "square:1:2",
        "square:1:2:0",
        "square:1:2:3:4",
        "const:1W",
        "ramp:1:2:-3",
        "saw:1:2:3",
        "sine:a:b:c",
    ],
)
def test_a_wrong_wave_is_refused_and_changes_nothing(fake, wave):
    h = start(fake, wave="const:123")
    with pytest.raises(ValueError, match="does not understand"):
        fake.set(Scenario(wave=wave))
    assert nv.nvmlDeviceGetPowerUsage(h) == 123_000


def test_every_field_of_a_scenario_is_known_to_the_c_side(fake):
    special = {
        "wave": "const:1",
        "gpu": {0: {"wave": "const:2"}},
        "epoch_step_us_at": "1:2",
        "processes": "1:2",
    }
    reasons = "power thermal sync_boost board_limit low_utilization reliability sw_thermal hw_thermal power_brake"
    activity = "graphics sm occupancy integer tensor hmma dram fp64 fp32 fp16 pcie_tx pcie_rx nvlink_rx nvlink_tx"
    special |= {
        "throttled": dict.fromkeys(reasons.split(), 0.1),
        "gpm_values": dict.fromkeys(activity.split(), 1.0),
    }
    every = Scenario(**{f.name: special.get(f.name, 1) for f in fields(Scenario)})
    fake.set(every)
    lines = every.text().splitlines()
    assert len(lines) >= len(fields(Scenario))
    for line in lines:  # the fake takes each, and would not take it misspelt
        assert fake._library.fake_nvml_scenario(line.encode()) == 0
        assert fake._library.fake_nvml_scenario(f"not_{line}".encode()) == 1


def test_a_scenario_may_change_while_another_thread_reads(fake):
    h = start(fake, wave="const:100")
    done = threading.Event()
    seen = set()

    def read():
        while not done.is_set():
            seen.update(watts for _, watts in ring(h))

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(200):
        fake.set(Scenario(wave=f"const:{100 + i % 3}", lag_ms=i))
    done.set()
    thread.join()
    assert seen <= {100, 101, 102}


def test_calls_are_counted_and_reset(fake):
    h = start(fake)
    for _ in range(3):
        nv.nvmlDeviceGetPowerUsage(h)
    assert fake.calls("nvmlDeviceGetPowerUsage") == 3
    assert fake.calls("nvmlInitWithFlags") == 1
    assert fake.calls("nvmlDeviceGetName") == 0
    fake.reset()
    assert fake.calls("nvmlDeviceGetPowerUsage") == 0
    with pytest.raises(RuntimeError, match="virtual clock"):
        fake.advance(1)
