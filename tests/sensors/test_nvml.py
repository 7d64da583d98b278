"""The NVML sensor with the real nvidia-ml-py against the fake library, in virtual time."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import SensorPermission, SensorUnavailable
from tessera.monitor.sampler import Sampler
from tessera.monitor.series import PowerSeries
from tessera.sensors import response_store
from tessera.sensors._nvml_power import OTHER_LAG_ERROR_S, RingReader
from tessera.sensors.base import Batch
from tessera.sensors.nvml import NvmlSensor
from tessera.sensors.response_store import ResponseFit

from fakes.nvml import FakeNvml, Scenario, clock_of


def start(fake: FakeNvml, scenario: Scenario, **kwargs: object) -> tuple[NvmlSensor, Sampler]:
    fake.set(scenario)
    sensor = NvmlSensor(environ=kwargs.pop("environ", {}), clock=clock_of(fake), **kwargs)  # type: ignore[arg-type]
    sensor.start()
    return sensor, Sampler([sensor], clock=clock_of(fake))


def run(fake: FakeNvml, sampler: Sampler, seconds: float, most_s: float = 1.0) -> None:
    """Drive the sampler as its thread would, sleeping in virtual time."""
    end = fake.monotonic_ns() + round(seconds * 1e9)
    while fake.monotonic_ns() < end:
        delay_s = sampler.read_due()
        left_s = (end - fake.monotonic_ns()) * 1e-9
        fake.advance(max(min(delay_s, most_s, left_s), 0.0005))
    sampler.read_due()


def joules(series: PowerSeries, start_ns: int, end_ns: int) -> float:
    return series.mark(end_ns).joules - series.mark(start_ns).joules


@pytest.mark.parametrize("wave", ["const:350", "square:125:700:0.5", "sine:400:200:0.7", "ramp:100:700:6"])
def test_joules_agree_with_the_truth(fake_nvml: FakeNvml, wave: str) -> None:
    _, sampler = start(fake_nvml, Scenario(wave=wave))
    begin = fake_nvml.monotonic_ns()
    offset_us = fake_nvml.time_us() - begin // 1000
    run(fake_nvml, sampler, 8.0)
    end = begin + 6_500_000_000
    truth = fake_nvml.true_joules(begin // 1000 + offset_us, end // 1000 + offset_us)
    assert joules(sampler.series["gpu0"], begin, end) == pytest.approx(truth, rel=0.012)


def test_no_sample_is_lost_and_none_comes_twice(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="square:100:700:0.3"))
    run(fake_nvml, sampler, 10.0)
    times = sampler.series["gpu0"].column(0, 1 << 62).times_ns
    spacing_ms = np.diff(times) * 1e-6
    assert np.all(spacing_ms > 0)
    assert spacing_ms.max() < 60, "a hole wider than the driver's own tail means lost samples"
    assert 18 < np.median(spacing_ms) < 22
    assert not sampler.gaps


def test_the_ring_is_read_about_once_a_second(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(energy="off"))
    run(fake_nvml, sampler, 10.0, most_s=5.0)
    assert fake_nvml.calls("nvmlDeviceGetSamples") <= 2 * 13 + 4  # two calls a read: size, then samples


def test_parts_are_read_together_so_that_the_thread_seldom_wakes(fake_nvml: FakeNvml) -> None:
    """Ring, HBM, telemetry and counter share a wake-up a second; the counter is read every five seconds."""
    sensor, sampler = start(fake_nvml, Scenario(wave="const:400"))
    run(fake_nvml, sampler, 20.0)  # the ticks are found, and the eager reads over
    wakes, counted = 0, fake_nvml.calls("nvmlDeviceGetTotalEnergyConsumption")
    rings, telemetry = (fake_nvml.calls(n) for n in ("nvmlDeviceGetSamples", "nvmlDeviceGetTemperature"))
    end_ns = fake_nvml.monotonic_ns() + 60_000_000_000
    while fake_nvml.monotonic_ns() < end_ns:
        wakes += 1
        fake_nvml.advance(max(sampler.read_due(), 0.0005))
    assert wakes <= 80
    assert fake_nvml.calls("nvmlDeviceGetTotalEnergyConsumption") - counted <= 18
    assert fake_nvml.calls("nvmlDeviceGetSamples") - rings <= 2 * wakes  # two calls a read: size, then samples
    assert fake_nvml.calls("nvmlDeviceGetTemperature") - telemetry >= 25
    assert not sampler.gaps
    assert np.diff(sampler.series["gpu0"].column(0, 1 << 62).times_ns).max() < 60_000_000, "no sample is lost"
    assert sensor.period_s <= 1.5, "the ring holds 2.4 s"


def test_the_samples_beside_a_read_of_the_counter_are_summed(fake_nvml: FakeNvml) -> None:
    sensor, sampler = start(fake_nvml, Scenario(wave="square:100:700:0.37"))
    run(fake_nvml, sampler, 5.0)
    ring = sensor._gpus[0].power
    assert isinstance(ring, RingReader)
    times = sampler.series["gpu0"].column(0, 1 << 62).times_ns[-60:]
    a, b = int(times[0]) + 1_000_000, int(times[-1]) - 1_000_000
    lag_ns = round(sampler.series["gpu0"].domain.lag_s * 1e9)
    found = [ring.joules_until(t) for t in (a, b)]
    assert None not in found
    assert found[1] - found[0] == pytest.approx(joules(sampler.series["gpu0"], a - lag_ns, b - lag_ns))
    assert ring.joules_until(int(times[-1]) + 10**9) is None


def test_whoever_waits_is_served_at_once(fake_nvml: FakeNvml) -> None:
    """A reader that needs data up to now does not wait for the next wake-up."""
    _, sampler = start(fake_nvml, Scenario(wave="const:400"))
    run(fake_nvml, sampler, 5.0)
    now = fake_nvml.monotonic_ns()
    sampler._wanted["gpu0"] = now
    for _ in range(10):
        fake_nvml.advance(0.01)
        sampler.read_due()
    assert sampler.covers(now, ["gpu0"])


def test_a_board_has_the_response_that_was_learnt_on_it(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    sensor, _ = start(fake_nvml, Scenario(name="NVIDIA L4"))
    (assumed,) = [d for d in sensor.domains() if d.counted]
    assert (assumed.driver, assumed.lag_error_s) == ("580.95.05", OTHER_LAG_ERROR_S)
    fit = ResponseFit(start_ns=1, seconds=20.0, lag_s=0.030, lag_error_s=0.001, blur_s=0.020, blur_error_s=0.001)
    response_store.keep(assumed, fit)
    sensor.stop()
    sensor.start()
    (learnt,) = [d for d in sensor.domains() if d.counted]
    assert (learnt.lag_s, learnt.blur_s) == (0.030, 0.020)
    assert learnt.lag_error_s < 0.002
    sensor.stop()
    fake_nvml.set(Scenario(name="NVIDIA L4", driver_version="590.1"))
    sensor.start()
    (other,) = [d for d in sensor.domains() if d.counted]
    assert other.lag_s == assumed.lag_s, "another driver may show it differently"


def test_a_blocked_sampler_leaves_a_gap_with_its_reason_and_the_counter_fills_it(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="const:400"))
    run(fake_nvml, sampler, 3.0)
    fake_nvml.advance(6.0)  # nobody reads: 119 samples are 2.4 s
    run(fake_nvml, sampler, 3.0)
    (gap,) = [g for g in sampler.gaps if g.domain == "gpu0"]
    assert "ring" in gap.reason
    gap_s = (gap.end_ns - gap.start_ns) * 1e-9
    assert 3.0 < gap_s < 4.5
    anchors = sampler.anchors["gpu0"].history
    assert len(anchors.anchors) > 4
    first, last = anchors.first_after(0), anchors.last_before(1 << 62)
    seconds = (last.time_ns - first.time_ns) * 1e-9
    assert last.joules - first.joules == pytest.approx(400 * seconds, rel=0.005)


def test_anchors_lie_at_the_true_energy(fake_nvml: FakeNvml) -> None:
    """Each anchor's (time, joules) pair is on the true energy curve: its tick and lag were found."""
    _, sampler = start(fake_nvml, Scenario(wave="square:100:700:0.37", tick_phase_ms=37, counter_base_mj=5_000_000))
    begin_ns = fake_nvml.monotonic_ns()
    begin_us = fake_nvml.time_us()
    run(fake_nvml, sampler, 12.0)
    kept = list(sampler.anchors["gpu0"].history.anchors)
    assert len(kept) > 8
    base = None
    for anchor in kept:
        truth = fake_nvml.true_joules(begin_us, begin_us + (anchor.time_ns - begin_ns) // 1000)
        base = anchor.joules - truth if base is None else base
        assert anchor.joules - truth == pytest.approx(base, abs=5.0)  # 5 J at 700 W is 7 ms


@pytest.mark.parametrize("stalls_s", [(2.6,), (0.25,) * 12, (6.0, 1.0)])
def test_stalls_while_the_ticks_are_sought_cost_no_more_than_their_time(
    fake_nvml: FakeNvml, stalls_s: tuple[float, ...]
) -> None:
    """While torch is imported and CUDA starts, the sampler's thread hardly runs: the counter was lost for a minute."""
    _, sampler = start(fake_nvml, Scenario(wave="const:400", before_w=400))
    for stall_s in stalls_s:
        run(fake_nvml, sampler, 0.08)
        fake_nvml.advance(stall_s)
    begun_ns = fake_nvml.monotonic_ns()
    run(fake_nvml, sampler, 8.0)
    anchors = sampler.anchors["gpu0"].history
    first, last = anchors.first_after(0), anchors.last_before(1 << 62)
    assert first is not None and last is not None and first.time_ns - begun_ns < 3_000_000_000
    seconds = (last.time_ns - first.time_ns) * 1e-9
    assert seconds > 4 and last.joules - first.joules == pytest.approx(400 * seconds, rel=0.005)


def test_counter_reset_starts_a_new_epoch(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="const:300", counter_reset_at_s=5))
    run(fake_nvml, sampler, 12.0)
    assert {a.epoch for a in sampler.anchors["gpu0"].history.anchors} == {0, 1}
    first, last = sampler.anchors["gpu0"].history.first_after(0), sampler.anchors["gpu0"].history.last_before(1 << 62)
    assert first.epoch != last.epoch


@pytest.mark.parametrize(
    ("scenario", "source", "resolution_s"),
    [
        (Scenario(ring="off"), "nvml-instant", 0.1),
        (Scenario(ring="denied"), "nvml-instant", 0.1),
        (Scenario(ring="off", instant="off"), "nvml-usage", 1.0),
    ],
)
def test_fall_backs(fake_nvml: FakeNvml, scenario: Scenario, source: str, resolution_s: float) -> None:
    fake_nvml.set_time_us(0)  # the probe for the refresh rate really waits
    fake_nvml.set(scenario)
    sensor = NvmlSensor(environ={})
    sensor.start()
    domain = sensor.domains()[0]
    assert domain.source == source
    assert domain.resolution_s == pytest.approx(resolution_s, rel=0.3)
    assert any("ring" in c.name and not c.available for c in sensor.capabilities())
    sensor.stop()


def test_repeats_of_a_polled_field_are_not_data(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(Scenario(ring="off", wave="sine:300:100:1.3"))
    import pynvml

    from tessera.sensors._nvml_power import FieldReader

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    ask, clock = functools.partial(pynvml.nvmlDeviceGetPowerUsage, handle), clock_of(fake_nvml)
    reader = FieldReader(ask, name="gpu0", source="x", averaged_s=0, probe=False, clock=clock)
    batch = Batch()
    for _ in range(400):
        reader.read(batch)
        fake_nvml.advance(0.005)
    assert 15 <= len(batch.samples["gpu0"]) <= 25  # 2 s at 10 Hz
    pynvml.nvmlShutdown()


def test_power_denied_everywhere_is_a_permission_error(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(Scenario(ring="denied", power="denied", fields="denied", energy="denied"))
    with pytest.raises(SensorPermission):
        NvmlSensor(environ={}, clock=clock_of(fake_nvml)).start()


@pytest.mark.parametrize(
    ("init", "words"), [("driver_not_loaded", "driver"), ("lib_mismatch", "version"), ("absent", "driver")]
)
def test_no_driver(fake_nvml: FakeNvml, init: str, words: str) -> None:
    fake_nvml.set(Scenario(init=init))
    with pytest.raises(SensorUnavailable) as caught:
        NvmlSensor(environ={}).start()
    assert words in str(caught.value)
    assert caught.value.fix


def test_lost_gpu_leaves_a_gap_and_comes_back(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(gpus=2, wave="const:200", lost_at_s=4, lost_gpu=1, back_at_s=9))
    run(fake_nvml, sampler, 14.0)
    by_domain = {g.domain: g for g in sampler.gaps}
    assert "gpu0" not in by_domain
    gap = by_domain["gpu1"]
    assert "lost" in gap.reason.lower()
    assert gap.end_ns is not None
    assert (gap.end_ns - gap.start_ns) * 1e-9 == pytest.approx(5.0, abs=1.6)
    for name, seen_s in (("gpu0", 13.5), ("gpu1", 8.0)):
        series = sampler.series[name]
        covered = series.mark(1 << 62).covered_s - series.mark(0).covered_s
        assert covered > seen_s
    one = sampler.series["gpu1"]
    assert one.mark(1 << 62).covered_s < 13


def test_every_gpu_lost_then_driver_restart(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="const:250", restart_at_s=4, restart_s=2))
    run(fake_nvml, sampler, 12.0)
    assert any(g.domain == "gpu0" and g.end_ns is not None for g in sampler.gaps)
    series = sampler.series["gpu0"]
    assert series.last_ns > fake_nvml.monotonic_ns() - 1_200_000_000, "it reads again after the restart"
    assert series.mark(1 << 62).joules > 250 * 8 * 0.9


def test_permission_taken_away_mid_run_keeps_what_was_measured(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="const:250", denied_at_s=5, before_w=250))
    run(fake_nvml, sampler, 10.0)
    assert sampler.gaps
    assert "permission" in sampler.gaps[0].reason.lower()
    assert sampler.series["gpu0"].mark(1 << 62).joules == pytest.approx(250 * 7.4, rel=0.12)


@pytest.mark.parametrize("delta_us", [3_600_000_000, -3_600_000_000, 700_000, -700_000])
def test_a_step_of_the_wall_clock_does_not_move_the_trace(fake_nvml: FakeNvml, delta_us: int) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="const:300", epoch_step_us_at=f"5.03:{delta_us}"))
    begin = fake_nvml.monotonic_ns()
    run(fake_nvml, sampler, 10.0)
    series = sampler.series["gpu0"]
    assert series.last_ns <= fake_nvml.monotonic_ns()
    assert series.last_ns > fake_nvml.monotonic_ns() - 1_200_000_000
    covered = series.mark(begin + 8_800_000_000).covered_s - series.mark(begin).covered_s
    assert covered == pytest.approx(8.8, abs=0.8)
    assert joules(series, begin, begin + 8_800_000_000) == pytest.approx(300 * covered, rel=0.01)


def test_a_frozen_ring_is_a_gap(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="const:300", ring_freeze_at_s=4))
    run(fake_nvml, sampler, 10.0)
    assert any("nothing new" in g.reason for g in sampler.gaps)


def test_a_zero_reading_is_a_gap_not_zero_watts(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(ring="zero"))
    run(fake_nvml, sampler, 3.0)
    assert any("0 W" in g.reason for g in sampler.gaps)
    assert sampler.series["gpu0"].mark(1 << 62).covered_s == 0


def test_telemetry(fake_nvml: FakeNvml) -> None:
    scenario = Scenario(reasons=0x4, temperature_c=61, clock_sm=1485, utilization_pct=99, throttled={"power": 0.25})
    sensor, sampler = start(fake_nvml, scenario)
    run(fake_nvml, sampler, 4.0)
    t = sampler.latest("gpu0")
    assert t is not None
    assert t.throttle == ("power cap",)
    assert t.temperature_c == 61
    assert t.clocks_mhz["sm"] == 1485
    assert set(t.clocks_mhz) == {"graphics", "sm", "memory", "video"}
    assert t.utilization_pct == 99
    assert t.throttled_s is not None and t.throttled_s["power cap"] > 0
    assert t.sm_activity_pct is not None
    assert t.voltage_v is None
    assert any(c.name == "rail voltages" and not c.available and c.fix for c in sensor.capabilities())
    assert "gpu0.memory" in sampler.series
    assert not sampler.series["gpu0.memory"].domain.counted


def test_what_is_not_supported_is_said_and_not_asked_again(fake_nvml: FakeNvml) -> None:
    sensor, sampler = start(fake_nvml, Scenario(temperature="off", clocks="denied", gpm="off", hbm="off"))
    run(fake_nvml, sampler, 5.0)
    t = sampler.latest("gpu0")
    assert t is not None and t.temperature_c is None and t.clocks_mhz == {}
    assert fake_nvml.calls("nvmlDeviceGetTemperature") == 1
    names = " ".join(c.name for c in sensor.capabilities())
    assert "temperature" in names and "sm clock" in names and "HBM" in names and "GPM" in names


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ["gpu0", "gpu1", "gpu2"]), ("1", ["gpu1"]), ("2,0", ["gpu2", "gpu0"]), ("0,9,1", ["gpu0"])],
)
def test_cuda_visible_devices(fake_nvml: FakeNvml, value: str | None, expected: list[str]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    sensor, _ = start(fake_nvml, Scenario(gpus=3, hbm="off"), environ=environ)
    assert [d.name for d in sensor.domains()] == expected


@pytest.mark.parametrize("value", ["", "-1", "GPU-nothing"])
def test_all_hidden(fake_nvml: FakeNvml, value: str) -> None:
    fake_nvml.set(Scenario(gpus=2))
    with pytest.raises(SensorUnavailable, match="no GPU"):
        NvmlSensor(environ={"CUDA_VISIBLE_DEVICES": value}).start()


def test_uuid_and_mig(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(Scenario(gpus=2, mig=2, hbm="off"))
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    mig = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0))
    pynvml.nvmlShutdown()
    sensor = NvmlSensor(environ={"CUDA_VISIBLE_DEVICES": uuid}, clock=clock_of(fake_nvml))
    sensor.start()
    assert [d.name for d in sensor.domains()] == ["gpu1"]
    sensor = NvmlSensor(environ={"CUDA_VISIBLE_DEVICES": mig}, clock=clock_of(fake_nvml))
    sensor.start()
    assert [d.name for d in sensor.domains()] == ["gpu1"]
    assert "whole board" in sensor.domains()[0].note


@pytest.mark.parametrize("name", ["nvmlDeviceGetTemperature", "nvmlDeviceGetTotalEnergyConsumption"])
def test_an_error_beside_power_does_not_cost_the_power(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import pynvml

    sensor, sampler = start(fake_nvml, Scenario(wave="const:300", before_w=300))
    run(fake_nvml, sampler, 2.0)
    real = getattr(pynvml, name)

    def broken(*args: object) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, name, broken)
    run(fake_nvml, sampler, 4.0)
    assert any("Unknown" in (c.reason or "") for c in sensor.capabilities())
    monkeypatch.setattr(pynvml, name, real)
    run(fake_nvml, sampler, 14.0)
    assert not sampler.gaps
    assert not any("Unknown" in (c.reason or "") for c in sensor.capabilities()), "it is asked again, and then forgiven"
    series = sampler.series["gpu0"]
    assert series.mark(1 << 62).covered_s > 18


def test_a_gpu_that_was_denied_for_a_while_is_read_from_the_ring_again(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(gpus=2, wave="const:300", gpu={1: {"denied_at_s": 3, "back_at_s": 7}}))
    run(fake_nvml, sampler, 12.0)
    series = sampler.series["gpu1"]
    assert series.domain.source == "nvml-samples"
    assert series.last_ns > fake_nvml.monotonic_ns() - 1_200_000_000
    assert any(g.domain == "gpu1" and g.end_ns is not None for g in sampler.gaps)


def test_a_polled_field_that_was_not_read_for_seconds_has_a_gap(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(Scenario(ring="off", wave="const:300"))
    from tessera.sensors._nvml_power import FieldReader

    clock = clock_of(fake_nvml)
    reader = FieldReader(lambda: 300_000, name="gpu0", source="x", averaged_s=0, probe=False, clock=clock)
    reader.read(Batch())
    fake_nvml.advance(5.0)
    batch = Batch()
    reader.read(batch)
    assert len(batch.gaps) == 1
    assert np.isnan(batch.samples["gpu0"][0][1])


def test_a_polled_field_that_reads_zero_is_one_gap_until_it_reads_again(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(ring="off", instant="off", wave="const:300", before_w=300))
    run(fake_nvml, sampler, 2.0)
    fake_nvml.change(power="zero")
    run(fake_nvml, sampler, 3.0)
    assert sampler.is_silent("gpu0")
    fake_nvml.change(power="ok")
    run(fake_nvml, sampler, 2.0)
    (gap,) = [g for g in sampler.gaps if g.domain == "gpu0"]
    assert "0 W" in gap.reason
    assert (gap.end_ns - gap.start_ns) * 1e-9 == pytest.approx(3.0, abs=0.3)
    series = sampler.series["gpu0"]
    covered_s = series.mark(1 << 62).covered_s
    assert covered_s == pytest.approx(4.0, abs=0.5)
    assert joules(series, 0, 1 << 62) == pytest.approx(300 * covered_s)


def test_a_gpu_with_a_counter_and_no_power_does_not_disturb_the_others(fake_nvml: FakeNvml) -> None:
    off = {"ring": "off", "power": "off", "fields": "off"}
    _, sampler = start(fake_nvml, Scenario(gpus=2, wave="const:300", before_w=300, gpu={1: off}))
    run(fake_nvml, sampler, 4.0)
    assert set(sampler.series) == {"gpu0", "gpu0.memory"}
    assert not sampler.gaps
    assert len(sampler.anchors["gpu0"]) > 1


def test_neighbouring_gaps_of_one_reason_are_one_gap(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(ring="zero"))
    run(fake_nvml, sampler, 6.0)
    assert len([g for g in sampler.gaps if g.domain == "gpu0"]) == 1


def test_hbm_power_that_stops_leaves_a_gap(fake_nvml: FakeNvml) -> None:
    _, sampler = start(fake_nvml, Scenario(wave="const:300"))
    run(fake_nvml, sampler, 2.0)
    fake_nvml.change(hbm="off")
    run(fake_nvml, sampler, 3.0)
    assert sampler.is_silent("gpu0.memory"), "nobody waits for it"
    assert not sampler.is_silent("gpu0")


def test_several_slow_counters_are_learnt_one_after_the_other(fake_nvml: FakeNvml) -> None:
    """A read of 6 ms (a busy H200's) on each of 8 GPUs would take half a tick if they all learnt at once."""
    fake_nvml.set(Scenario(gpus=8, wave="const:300", hbm="off", gpm="off"))
    sensor = NvmlSensor(environ={}, clock=clock_of(fake_nvml))
    sensor.start()
    import pynvml

    real = pynvml.nvmlDeviceGetTotalEnergyConsumption

    def slow(handle: object) -> int:
        fake_nvml.advance(0.003)
        value: int = real(handle)
        fake_nvml.advance(0.003)
        return value

    pynvml.nvmlDeviceGetTotalEnergyConsumption = slow
    try:
        sampler = Sampler([sensor], clock=clock_of(fake_nvml))
        run(fake_nvml, sampler, 12.0)
    finally:
        pynvml.nvmlDeviceGetTotalEnergyConsumption = real
    assert all(len(sampler.anchors[f"gpu{i}"]) >= 2 for i in range(8))
