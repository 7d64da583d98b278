"""Every kind of sensor is a `Sensor`, and says nothing before it is started."""

from __future__ import annotations

import pytest

from tessera.sensors.base import Sensor
from tessera.sensors.discover import KINDS, make


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_a_sensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"URL": "https://127.0.0.1:1", "USER": "u", "PASSWORD": "p"}.items():
        monkeypatch.setenv(f"TESSERA_REDFISH_{key}", value)
    sensor = make(name)
    assert isinstance(sensor, Sensor)
    assert sensor.name
    assert list(sensor.domains()) == []
    sensor.stop()
    sensor.stop()  # may be called twice, and before any start
