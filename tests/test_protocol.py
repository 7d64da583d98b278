"""Every kind of sensor is a `Sensor`, and says nothing before it is started."""

from __future__ import annotations

import pytest

from tessera.sensors.base import Sensor
from tessera.sensors.discover import KINDS, make


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_a_sensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_REDFISH_URL", "https://127.0.0.1:1")
    sensor = make(name)
    assert isinstance(sensor, Sensor)
    assert sensor.name
    assert list(sensor.domains()) == []
    sensor.stop()
    sensor.stop()  # may be called twice, and before any start
