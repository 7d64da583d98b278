"""`tessera hardware add`: a chip or a calibration from somebody else."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tessera.cli.main import cli
from tessera.errors import ArgumentError, BadDevice
from tessera.estimate import calibration
from tessera.estimate.calibration import Calibration, Scale, Watts
from tessera.hardware import add_file, catalogue, lookup, user_folder

CHIP = """
id = "acme-900"
name = "ACME 900"
kind = "gpu"
vendor = "ACME"
aliases = ["acme"]

[memory]
bandwidth_bytes_per_s = { value = 1.6e12, source = "data sheet" }
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def make_calibration() -> Calibration:
    watts = Watts(value=None, how="no sensor")
    scale = Scale(factor=1.2, spread=0.1, points=4)
    return Calibration(
        device="a100", board="NVIDIA A100-SXM4-80GB", driver="580", torch="2.11", date="2026-11-18", host_cpu="a Xeon",
        host_scale=Scale(factor=2.0, spread=None, points=1), time_scale={"gemm.bf16": scale}, energy_scale={},
        idle_w=watts, idle_context_w=watts, static_w=watts, limit_w=watts,
    )  # fmt: skip


def test_a_chip(tmp_path: Path) -> None:
    file = tmp_path / "sent.toml"
    file.write_text(CHIP)
    result = CliRunner().invoke(cli, ["hardware", "add", str(file)])
    assert result.exit_code == 0, result.output
    assert "next  tessera predict resnet18 --on acme-900" in result.output
    assert lookup("acme").memory.bandwidth_bytes_per_s.value == 1.6e12
    with pytest.raises(ArgumentError, match="already exists"):
        add_file(file)
    add_file(file, force=True)


def test_a_figure_without_a_source_has_the_file_as_its_source(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(CHIP.replace(', source = "data sheet"', ""))
    add_file(file)
    assert lookup("acme").memory.bandwidth_bytes_per_s.source == f"given in {user_folder() / 'acme-900.toml'}"


@pytest.mark.parametrize("text", [CHIP.replace('"acme-900"', '"../evil"'), CHIP.replace("kind", "kin"), "id = 3"])
def test_a_wrong_chip_changes_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sent.toml"
    file.write_text(text)
    with pytest.raises(BadDevice):
        add_file(file)
    assert not list(user_folder().glob("*")) if user_folder().exists() else True
    assert catalogue()


def test_an_alias_of_another_chip_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sent.toml"
    file.write_text(CHIP.replace('["acme"]', '["h200"]'))
    with pytest.raises(BadDevice):
        add_file(file)
    assert "acme-900" not in catalogue()


def test_a_calibration_keeps_the_board_and_drops_the_host(tmp_path: Path) -> None:
    file = tmp_path / "my-a100.json"
    calibration.write_calibration(make_calibration(), file)
    result = CliRunner().invoke(cli, ["hardware", "add", str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["device"] == "a100"
    found = calibration.find("a100")
    assert found is not None
    assert found.host_scale is None
    assert found.time_scale["gemm.bf16"].factor == 1.2
    assert found.provenance == "calibrated on another NVIDIA A100-SXM4-80GB, 2026-11-18"


def test_a_calibration_of_this_machine_is_not_replaced_by_chance(tmp_path: Path) -> None:
    file = tmp_path / "my-a100.json"
    calibration.write_calibration(make_calibration(), file)
    calibration.save(make_calibration())
    with pytest.raises(ArgumentError, match="calibrated on this machine already"):
        calibration.receive(file)
    kept, _ = calibration.receive(file, replace_own=True)
    assert kept == msgspec.structs.replace(make_calibration(), received=True, host_scale=None)
