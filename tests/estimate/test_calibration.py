"""A calibration: its file, and how it changes predictions."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")


from tessera.errors import ArgumentError, RecordingError
from tessera.estimate import calibration
from tessera.estimate.calibration import Scale
from tessera.estimate.host import HostModel
from tessera.estimate.iteration import Iteration
from tessera.estimate.power import PowerModel
from tessera.hardware import lookup

from fakes.calibration import HOST_FACTOR, LIMIT_W, STATIC_W, TIME, a_kernel, make_calibration, scales, watts
from fakes.calibration import config as config

pytestmark = pytest.mark.usefixtures("config")


def altered(key: str, value: Any) -> bytes:
    """A file in which one value is wrong."""
    return msgspec.json.encode({**msgspec.to_builtins(make_calibration()), key: value})


# -- the file -----------------------------------------------------------------------------------------------------


def test_round_trip_in_the_config_folder(config: Path) -> None:
    path = calibration.save(make_calibration())
    assert path == config / "tessera" / "calibration" / "h200.json"
    assert calibration.find("h200") == make_calibration()
    assert list(path.parent.iterdir()) == [path], "no half-written file is left"
    assert json.loads(path.read_text())["schema_version"] == 1


def test_home_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.path_of("h200") == tmp_path / ".config" / "tessera" / "calibration" / "h200.json"


def test_none_where_nothing_was_calibrated() -> None:
    assert calibration.find("h200") is None
    calibration.save(make_calibration())
    assert calibration.find("a100") is None


def test_found_again_without_reading_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    path = calibration.save(make_calibration())
    first = calibration.find("h200")
    reads: list[Path] = []
    real = calibration.read_bytes
    monkeypatch.setattr(calibration, "read_bytes", lambda p: (reads.append(p), real(p))[1])
    assert calibration.find("h200") is first
    assert reads == []
    calibration.save(make_calibration(board="another"))
    found = calibration.find("h200")
    assert found is not None and found.board == "another"
    assert reads == [path]
    path.unlink()
    assert calibration.find("h200") is None


def test_a_newer_schema_is_refused() -> None:
    path = calibration.save(make_calibration())
    data = json.loads(path.read_text())
    path.write_text(json.dumps({"schema_version": data["schema_version"] + 1, "other": True}))
    with pytest.raises(RecordingError, match="newer Tessera") as error:
        calibration.find("h200")
    assert "upgrade" in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"schema_version": 1}',
        b'{"schema_version": "one"}',
        altered("time_scale", {"copy": {"factor": -1, "spread": 0.1, "points": 3}}),
        altered("limit_w", {"value": 0, "how": "x"}),
        altered("board", 3),
    ],
)
def test_a_file_that_makes_no_sense_names_the_fix(text: bytes) -> None:
    path = calibration.save(make_calibration())
    path.write_bytes(text)
    with pytest.raises(RecordingError, match="cannot be read") as error:
        calibration.find("h200")
    assert str(path) in str(error.value)
    assert "tessera calibrate" in str(error.value) and "delete" in str(error.value)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(blocked))
    with pytest.raises(RecordingError, match="could not be written"):
        calibration.save(make_calibration())
    assert calibration.find("h200") is None


@pytest.mark.parametrize("name", ["../h200", "a/b", "", ".hidden"])
def test_a_device_id_never_leaves_the_folder(name: str) -> None:
    with pytest.raises(ArgumentError):
        calibration.path_of(name)


def test_calibration_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, tessera.estimate.calibration; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- laying it over -----------------------------------------------------------------------------------------------


def test_apply_scales_time_and_says_so() -> None:
    kernel = a_kernel()
    found = make_calibration().scale_kernel(kernel, "gemm", "bf16")
    assert found.seconds == pytest.approx(1.1 * kernel.seconds)
    assert found.clock_s == pytest.approx(1.1 * kernel.clock_s)
    assert found.relative_error == 0.05
    assert found.provenance == "calibrated on this machine, 2026-10-01"
    same = {"seconds": kernel.seconds, "clock_s": kernel.clock_s, "relative_error": kernel.relative_error}
    assert dataclasses.replace(found, **same, provenance=kernel.provenance) == kernel


def test_apply_leaves_alone_what_was_not_measured() -> None:
    kernel = a_kernel()
    assert make_calibration().scale_kernel(kernel, "gemm", "int8") is kernel
    assert make_calibration().scale_kernel(kernel, "fft", "fp32") is kernel


def test_kinds_like_a_group_take_its_factor_but_not_its_interval() -> None:
    kernel = a_kernel()
    found = make_calibration().scale_kernel(kernel, "softmax", "bf16")
    assert found.seconds == pytest.approx(TIME["norm"] * kernel.seconds)
    assert found.relative_error == kernel.relative_error
    assert "like norm" in found.provenance and "2026-10-01" in found.provenance


def test_a_spread_replaces_the_interval_and_none_keeps_it() -> None:
    assert Scale(factor=1.0, spread=0.5, points=4).error(0.1) == 0.5
    assert Scale(factor=1.0, spread=0.05, points=3).error(0.1) == 0.05
    assert Scale(factor=1.0, spread=None, points=5).error(0.1) == 0.1


def test_groups_whose_energy_interval_stays_count_with_it() -> None:
    model = PowerModel.from_device(lookup("h200"))
    mixed = {**scales({"copy": 1.0, "norm": 1.0}, spread=0.6), **scales({"conv": 1.0, "reduce": 1.0}, spread=None)}
    expected = math.sqrt((2 * 0.6**2 + 2 * model.relative_error**2) / 4)
    assert make_calibration(energy_scale=mixed).scale_power(model).relative_error == pytest.approx(expected)


def test_charge_scales_dynamic_energy_only() -> None:
    kernel, power = a_kernel(), PowerModel.from_device(lookup("h200"))
    plain, scaled = (Iteration([kernel, kernel], [0.0, 0.0], power) for _ in range(2))
    make_calibration().scale_energy(scaled, [("gemm", "bf16"), ("fft", "fp32")])
    before, then = plain.solve(None, burst=True), scaled.solve(None, burst=True)
    for name in ("compute_j", "memory_j"):
        assert list(getattr(then, name)) == pytest.approx([0.9 * getattr(before, name)[0], getattr(before, name)[1]])
    assert list(then.static_j) == pytest.approx(list(before.static_j))


def test_power_takes_the_measured_watts() -> None:
    model = PowerModel.from_device(lookup("h200"))
    found = make_calibration().scale_power(model)
    assert (found.limit_w, found.static_w) == (LIMIT_W, STATIC_W)
    assert found.relative_error == pytest.approx(0.05)
    assert "2026-10-01" in found.provenance
    empty = make_calibration(limit_w=watts(), static_w=watts(), energy_scale={})
    assert empty.scale_power(model) is model
    assert make_calibration(static_w=watts(900.0)).scale_power(model).static_w < LIMIT_W


def test_host_scales_every_time() -> None:
    default = HostModel.default()
    found = make_calibration().scale_host(default)
    assert found.kernel_s == pytest.approx(HOST_FACTOR * default.kernel_s)
    assert found.extra_s["conv"] == pytest.approx(HOST_FACTOR * default.extra_s["conv"])
    assert found.relative_error == 0.15
    assert "calibrated on this machine, 2026-10-01" in found.provenance
    assert make_calibration(host_scale=None).scale_host(default) is default
