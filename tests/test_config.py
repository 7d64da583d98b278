"""Settings: where they may stand, which place is stronger, and what joules cost by them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tessera import EnergyBenchmark, config
from tessera.cli import main, report
from tessera.errors import ArgumentError
from tessera.monitor import Monitor
from tessera.report.predict import million_cost
from tessera.schema import Energy, EnergyReport, Work

import synthetic_run
from command_line import invoke
from fakes.sensor import ScriptSensor


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and a project below it as the current folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for key in config.KEYS:
        monkeypatch.delenv(f"TESSERA_{key.upper()}", raising=False)
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "config" / "tessera").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "src")
    return tmp_path


def write_user(home: Path, text: str) -> None:
    config.user_file().write_text(text)
    assert config.user_file().is_relative_to(home)


def test_nothing_is_assumed(home: Path) -> None:
    assert config.load() == config.Config()
    assert config.find_cost(3.6e6) is None


def test_each_key_comes_from_the_strongest_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user(home, 'price_per_kwh = 0.1\ncurrency = "EUR"\ngco2e_per_kwh = 100\npue = 1.1\n')
    (home / "project" / "pyproject.toml").write_text("[tool.tessera]\nprice_per_kwh = 0.2\ngco2e_per_kwh = 200\n")
    monkeypatch.setenv("TESSERA_GCO2E_PER_KWH", "300")
    expected = config.Config(price_per_kwh=0.2, currency="EUR", gco2e_per_kwh=300, pue=1.1)
    assert config.load() == expected
    invoke(main.cli, "--config", "gco2e_per_kwh=400", "completion", "bash")
    monkeypatch.setenv("TESSERA_GCO2E_PER_KWH", config.os.environ["TESSERA_GCO2E_PER_KWH"])  # restored afterwards
    assert config.load().gco2e_per_kwh == 400


def test_a_current_folder_that_was_removed_is_in_no_project(home: Path) -> None:
    write_user(home, "pue = 1.1\n")
    Path.cwd().rmdir()
    assert config.load() == config.Config(pue=1.1)


def test_a_cost_has_the_pue_and_the_error(home: Path) -> None:
    settings = config.Config(price_per_kwh=0.3, currency="EUR", gco2e_per_kwh=500, pue=1.5)
    cost = settings.cost_of(3.6e6, 3.6e5)
    assert cost is not None
    assert (cost.kwh, cost.kwh_error) == pytest.approx((1.5, 0.15))
    assert (cost.cost, cost.cost_error) == pytest.approx((0.45, 0.045))
    assert (cost.gco2e, cost.gco2e_error) == pytest.approx((750, 75))
    assert cost.text == "1.5 kWh   0.45 EUR   750 g CO2e   with a PUE of 1.5"
    assert settings.cost_of(math.nan) is None
    assert config.Config(pue=1.2).cost_of(1e3).cost is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (1e12, "278 MWh   83,333 EUR   106 t CO2e"),
        (36e6, "10 kWh   3.00 EUR   3.8 kg CO2e"),
        (1.0, "0.278 mWh   <0.0001 EUR   0.106 mg CO2e"),
        (0.0, "0 Wh   0 EUR   0 g CO2e"),
    ],
)
def test_costs_of_any_size_are_readable(joules: float, text: str) -> None:
    cost = config.Config(price_per_kwh=0.3, currency="EUR", gco2e_per_kwh=380).cost_of(joules)
    assert cost is not None and cost.text == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("price_per_kw = 1", "unknown key 'price_per_kw'; did you mean 'price_per_kwh'?"),
        ("pue = 0.5", "pue = 0.5 is not a number of at least 1"),
        ('gco2e_per_kwh = "many"', "is not a number"),
        ("currency = 3", "is not a short word"),
        ('currency = "\\u001b[31m"', "is not a short word"),
        ("pue = ", "cannot read"),
        ("price_per_kwh = true", "price_per_kwh = True is not a number"),
        ("price_per_kwh = " + "9" * 400, "is not a number of at least 0"),
        ("price_per_kwh = 0x" + "f" * 5000, "a number of thousands of digits is not a number"),
        ("price_per_kwh = " + "9" * 5000, "a number in it has thousands of digits"),
        ("price_per_kwh = nan", "is not a number"),
        ("price_per_kwh" + ".a" * 1500 + " = 1", "price_per_kwh = {'a': {'a': {"),
        ("a = " + "[" * 5000, "nested too deeply"),
        (".".join("a" * 20_000) + " = 1", "its keys have too many parts"),
        ("k" * 5000 + " = 1", "unknown key"),
        ("#" * (1 + (1 << 20)), "it is longer than"),
    ],
    ids=range(16),
)
def test_a_mistake_names_its_place(home: Path, text: str, words: str) -> None:
    write_user(home, text)
    with pytest.raises(ArgumentError, match=r"config\.toml") as caught:
        config.load()
    assert words in str(caught.value)
    with pytest.warns(UserWarning, match=r"config\.toml"):
        assert config.find_cost(1.0) is None
    assert isinstance(invoke(main.cli, "completion", "bash").code, ArgumentError)


def test_mistakes_in_the_environment_and_the_option(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_PUE", "x")
    with pytest.raises(ArgumentError, match="TESSERA_PUE='x' is not a number"):
        config.load()
    for text, words in (("puf=1", "is not a setting; did you mean 'pue'"), ("pue", "^--config 'pue' has no value")):
        with pytest.raises(ArgumentError, match=words):
            config.set_value(text)
    monkeypatch.delenv("TESSERA_PUE")
    for text, words in (("pue=0.5", "^--config: pue = 0.5 is not"), ("pue=x", "^--config pue='x' is not a number")):
        with pytest.raises(ArgumentError, match=words):
            config.set_value(text)
    assert config.load() == config.Config()


def test_another_tools_mistake_in_pyproject_is_not_ours(home: Path) -> None:
    (home / "project" / "src" / "pyproject.toml").write_text("[tool.other\n")
    (home / "project" / "pyproject.toml").write_text("[tool.tessera]\npue = 1.3\n")
    assert config.load().pue == 1.3


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000, "a = " + "9" * 5000, "\xff", "[tool.tessera]\npue = 9\n" + "#" * (1 << 20)],
    ids=range(4),
)
def test_a_strangers_pyproject_is_not_even_parsed(home: Path, text: str) -> None:
    (home / "project" / "src" / "pyproject.toml").write_text(text, encoding="latin-1")
    (home / "project" / "pyproject.toml").write_text("[tool.tessera]\npue = 1.3\n")
    assert config.load().pue == 1.3


@pytest.mark.parametrize(
    ("text", "words"),
    [("pue = " + "[" * 5000, "nested too deeply"), ("pue = 0", "pue = 0 is not a number"), ("puf = 2", "unknown key")],
    ids=range(3),
)
def test_a_broken_section_that_was_merely_found_is_one_line(home: Path, text: str, words: str) -> None:
    (home / "pyproject.toml").write_text("[tool.tessera]\npue = 1.3\n")
    (home / "project" / "pyproject.toml").write_text(f"[tool.tessera]\n{text}\n")
    config._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"(?s)project/pyproject\.toml is ignored: .*" + words) as said:
        assert config.load().pue == 1.3
        config.load()
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert str(said[0].message).count("[tool.tessera] of") == 1, "its place is said once"
    config._warn_once.cache_clear()
    assert invoke(main.cli, "completion", "bash").code in (0, None)


def test_the_pyproject_of_another_user_is_not_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "project" / "pyproject.toml").write_text("[tool.tessera]\npue = 1.3\n")
    assert config.load().pue == 1.3
    if os.geteuid() == 0:
        os.chown(home / "project" / "pyproject.toml", 12345, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert config.load().pue is None


def test_zero_has_no_sign() -> None:
    assert str(config.Config(price_per_kwh=-0.0).price_per_kwh) == "0.0"


def test_the_same_cost_on_the_screen_and_in_json(home: Path) -> None:
    write_user(home, 'price_per_kwh = 300\ncurrency = "EUR"\n')
    run = home / "x.tessera"
    synthetic_run.make(2, 2).write(run).close()
    printed = json.loads(invoke(report.command, run, "--json").stdout)["answer"]["cost"]
    cost = config.find_cost(
        *(json.loads(invoke(report.command, run, "--json").stdout)["run"][k] for k in ("energy_j",))
    )
    assert cost is not None and printed["cost"] == cost.cost
    assert cost.text in " ".join(invoke(report.command, run).stdout.splitlines())
    page = run.with_suffix(".html").read_text()
    assert all(part in page for part in cost.text.split("   "))


def test_measure_predict_and_benchmark_use_the_settings(home: Path) -> None:
    write_user(home, "price_per_kwh = 0.5\ngco2e_per_kwh = 100\n")
    total = Energy(energy_j=36.0, error_j=1.0, time_s=1.0, source="x")
    measured = EnergyReport(name="x", total=total, by_domain={}, work=[Work(amount=10, unit="sample")])
    assert "10 mWh   <0.0001   1 mg CO2e" in str(measured)
    assert million_cost(measured) == ("1M samples", "1 kWh   0.50   100 g CO2e")
    monitor = Monitor([ScriptSensor(clock=lambda: 0)])
    bench = EnergyBenchmark(gco2e_per_kwh=7.0, monitor=monitor)
    assert (bench.factors.price_per_kwh, bench.factors.gco2e_per_kwh) == (0.5, 7.0)
