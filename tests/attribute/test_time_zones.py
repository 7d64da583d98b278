"""A power log that was written in another time zone than the one it is read in."""

from __future__ import annotations

import time

import pytest

from tessera.attribute.time_zones import find_other_zone
from tessera.errors import MeasurementError
from tessera.profile.open_recording import load

from power_logs import smi, write_trace

S = 1_000_000_000


@pytest.mark.parametrize(("hours", "variable"), [(-5.0, "LOG+5"), (5.5, "LOG-5:30")])
def test_a_log_of_another_time_zone_is_named(tmp_path, monkeypatch, hours, variable):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        log = smi(tmp_path / "p.csv", "power.draw.instant",
                  [(hours * 3600 - 1.0 + 0.1 * i, 0, f"{400 + i % 3}.00 W") for i in range(60)])  # fmt: skip
        trace = write_trace(tmp_path / "t.json")
        with pytest.raises(MeasurementError, match="do not overlap") as refused:
            load(trace, power=log).energy()
        assert f" {hours:+g} h" in refused.value.why and "time zone" in refused.value.why
        assert f"TZ={variable}" in refused.value.fix
        monkeypatch.setenv("TZ", variable)
        time.tzset()
        assert load(trace, power=log).energy().energy_j == pytest.approx(401.0 * 2.0, rel=0.05)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("log_s", [(-20, -10), (7200 + 400, 7200 + 420), (90_000, 90_100)])
def test_a_log_of_another_run_is_of_no_other_zone(log_s):
    begin_s = 1_790_000_000
    trace_ns = begin_s * S, (begin_s + 10) * S
    assert find_other_zone(trace_ns, ((begin_s + log_s[0]) * S, (begin_s + log_s[1]) * S)) is None
