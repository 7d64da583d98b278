"""Quantities: what people write is read, what is written is read back, and a mistake is shown where it is."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera import units
from tessera.errors import UnitError
from tessera.units import ScopedPower, format_energy_error, format_error, parse_scoped_power

PARSERS = {
    "power": (units.parse_power, units._POWER),
    "energy": (units.parse_energy, units._ENERGY),
    "duration": (units.parse_duration, units._DURATION),
    "frequency": (units.parse_frequency, units._FREQUENCY),
    "size": (units.parse_bytes, units._BYTES),
    "temperature": (units.parse_temperature, units._TEMPERATURE),
    "fraction": (units.parse_fraction, units._FRACTION),
}
ROUND_TRIPS = {
    "power": (units.format_power, units.parse_power),
    "energy": (units.format_energy, units.parse_energy),
    "duration": (units.format_duration, units.parse_duration),
    "frequency": (units.format_frequency, units.parse_frequency),
    "temperature": (units.format_temperature, units.parse_temperature),
}
every_parser = pytest.mark.parametrize("parse", [p for p, _ in PARSERS.values()], ids=PARSERS)
sizes = st.floats(min_value=0.0, max_value=1e18, allow_subnormal=False)


def caret_column(error: UnitError) -> int:
    """Where the caret stands in the shown text, read off the message as a person does."""
    shown, caret = str(error).splitlines()[1:3]
    assert caret.strip() == "^"
    assert shown.startswith("    ")
    return caret.index("^") - 4


def refused(parse, text) -> UnitError:
    with pytest.raises(UnitError) as caught:
        parse(text)
    return caught.value


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_power, "275W", 275.0),
        (units.parse_power, "20 kW", 20_000.0),
        (units.parse_power, " 1.2kW ", 1200.0),
        (units.parse_power, "1_000W", 1000.0),
        (units.parse_power, "+.5e3mW", 0.5),
        (units.parse_power, "3MW", 3e6),
        (units.parse_power, "3mW", 3e-3),
        (units.parse_energy, "4.1J", 4.1),
        (units.parse_energy, "-12 mJ", -0.012),
        (units.parse_energy, "2kWh", 7.2e6),
        (units.parse_duration, "60s", 60.0),
        (units.parse_duration, "20ms", 0.02),
        (units.parse_duration, "5min", 300.0),
        (units.parse_duration, "2h", 7200.0),
        (units.parse_duration, "5\N{MICRO SIGN}s", 5e-6),
        (units.parse_duration, "5\N{GREEK SMALL LETTER MU}s", 5e-6),
        (units.parse_frequency, "200MHz", 2e8),
        (units.parse_bytes, "64MiB", 64 << 20),
        (units.parse_bytes, "2GB", 2_000_000_000),
        (units.parse_temperature, "85C", 85.0),
        (units.parse_temperature, "358.15K", 85.0),
        (units.parse_temperature, "185°F", 85.0),
        (units.parse_temperature, "0K", -273.15),
        (units.parse_fraction, "5%", 0.05),
        (units.parse_fraction, "0.05", 0.05),
    ],
)
def test_what_people_write(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("parse", "dimension"), PARSERS.values(), ids=PARSERS)
def test_every_unit_is_read_with_and_without_a_space(parse, dimension):
    for unit, factor in dimension.units.items():
        offset = (dimension.offsets or {}).get(unit, 0.0)
        for text in (f"300{unit}", f"300 {unit}", f"\t300 {unit}\n"):
            assert parse(text) == pytest.approx(300 * factor + offset, abs=0.5 if parse is units.parse_bytes else 0)


def test_bytes_are_whole():
    assert units.parse_bytes("1.5KiB") == 1536
    assert isinstance(units.parse_bytes(7.0), int)


@every_parser
def test_a_plain_number_is_already_si(parse):
    assert parse(42) == 42
    assert parse(42.0) == 42


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(value=sizes)
@example(999.96)
@example(0.9999999999999999)
@example(119.99999)
def test_seventeen_digits_come_back(name, value):
    write, read = ROUND_TRIPS[name]
    assert read(write(value, digits=17)) == pytest.approx(value, rel=1e-15, abs=0)


@given(value=st.integers(min_value=0, max_value=1 << 50))
def test_whole_bytes_come_back_exactly(value):
    assert units.parse_bytes(units.format_bytes(value, digits=17)) == value


@given(value=st.floats(min_value=-1e15, max_value=1e15))
def test_energy_of_either_sign_comes_back(value):
    again = units.parse_energy(units.format_energy(value, digits=17))
    assert again == pytest.approx(value, rel=1e-15, abs=1e-300)


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(value=st.floats(min_value=1e-9, max_value=110.0), digits=st.integers(min_value=2, max_value=8))
def test_fewer_digits_come_back_as_well_as_they_can(name, value, digits):
    write, read = ROUND_TRIPS[name]
    assert read(write(value, digits=digits)) == pytest.approx(value, rel=0.5001 * 10 ** (1 - digits))


@pytest.mark.parametrize("write", [units.format_power, units.format_energy, units.format_frequency])
@given(value=st.floats(min_value=1e-2, max_value=1e6), digits=st.integers(min_value=3, max_value=8))
@example(999.6, 4)
@example(999.96, 4)
@example(999_999.0, 3)
def test_the_number_shown_lies_between_1_and_1000(write, value, digits):
    number = float(write(value, digits=digits).split()[0])
    smallest_unit = 1.0 if write is units.format_frequency else 0.0
    assert number < 1000
    assert number >= 1 or value < smallest_unit


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (units.format_power(1200), "1.2 kW"),
        (units.format_power(999.6), "999.6 W"),
        (units.format_power(999.96), "1 kW"),
        (units.format_power(0), "0 W"),
        (units.format_power(995, digits=2), "995 W"),
        (units.format_energy(0.0123), "12.3 mJ"),
        (units.format_energy(-4100), "-4.1 kJ"),
        (units.format_duration(0.02), "20 ms"),
        (units.format_duration(0), "0 s"),
        (units.format_duration(119.4), "119.4 s"),
        (units.format_duration(150), "2 min 30 s"),
        (units.format_duration(3599.6), "1 h 00 min"),
        (units.format_duration(3 * 3600 + 65), "3 h 01 min"),
        (units.format_frequency(1.98e9), "1.98 GHz"),
        (units.format_bytes(64 << 20), "64 MiB"),
        (units.format_bytes(1000), "1000 B"),
        (units.format_temperature(85), "85 °C"),
        (units.format_power(math.nan), "nan"),
        (units.format_duration(math.inf), "inf"),
        (units.format_share(0.284), "28.4%"),
        (units.format_share(0.0), "0%"),
        (units.format_share(0.0004), "<0.1%"),
        (units.format_share(0.001), "0.1%"),
        (units.format_share(-0.0004, signed=True), "<0.1%"),
        (units.format_share(0.5, signed=True), "+50.0%"),
        (units.format_share(-0.967, signed=True), "-96.7%"),
        (units.format_share(0.9996), "100%"),
        (units.format_share(17.792, signed=True), "+1779%"),
        (units.format_share(math.nan), "nan"),
        (units.format_energy(-math.inf), "-inf"),
    ],
)
def test_for_people(text, shown):
    assert text == shown


@given(value=st.floats(min_value=1e-30, max_value=1e-12, exclude_max=True))
def test_little_is_not_nothing(value):
    assert units.parse_energy(units.format_energy(value)) == pytest.approx(value, rel=1e-3, abs=0)


# -- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "text", "column", "says"),
    [
        (units.parse_power, "", 0, "a number is expected"),
        (units.parse_power, "   ", 3, "a number is expected"),
        (units.parse_power, "abc", 0, "a number is expected"),
        (units.parse_power, "nan", 0, "a number is expected"),
        (units.parse_power, "inf W", 0, "a number is expected"),
        (units.parse_power, "275", 3, "a unit of power is missing"),
        (units.parse_power, "275 X", 4, "unknown unit 'X'"),
        (units.parse_power, "275 W W", 4, "unknown unit 'W W'"),
        (units.parse_power, "1,2kW", 1, "unknown unit ',2kW'"),
        (units.parse_power, "  -5W", 2, "not a possible power"),
        (units.parse_power, "1e400W", 0, "too large"),
        (units.parse_power, " 1e308MW", 1, "too large"),
        (units.parse_duration, "-1ms", 0, "not a possible duration"),
        (units.parse_temperature, "-300C", 0, "not a possible temperature"),
        (units.parse_power, "275\tkw", 4, "unknown unit 'kw'"),
        (units.parse_power, "275\nkw", 4, "unknown unit 'kw'"),
        (parse_scoped_power, "nod:1kW", 0, "unknown scope 'nod'; did you mean 'node'?"),
        (parse_scoped_power, " Rack: 1kW", 1, "did you mean 'rack'?"),
        (parse_scoped_power, "node:", 5, "a number is expected"),
        (parse_scoped_power, "node: kW", 6, "a number is expected"),
        (parse_scoped_power, "node: 1.2kw", 9, "did you mean 'kW'?"),
        (parse_scoped_power, "node: -3W", 6, "not a possible power"),
    ],
)
def test_the_caret_stands_under_the_mistake(parse, text, column, says):
    error = refused(parse, text)
    assert caret_column(error) == column == error.position
    assert says in error.what.splitlines()[0]
    assert "accepted: '" in error.fix or "accepted: gpu, node, rack" in error.fix


@every_parser
def test_the_error_names_examples_that_are_accepted(parse):
    accepted = refused(parse, "?").fix
    examples = accepted.split("'")[1::2]
    assert examples
    for text in examples:
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        (units.parse_power, "1kw", "'kW'"),
        (units.parse_power, "1KW", "'kW'"),
        (units.parse_frequency, "1mhz", "'MHz'"),
        (units.parse_bytes, "1KB", "'kB'"),
        (units.parse_bytes, "1mib", "'MiB'"),
        (units.parse_duration, "1S", "'s'"),
        (units.parse_temperature, "1c", "'C'"),
    ],
)
def test_wrong_case_is_answered_with_the_right_one(parse, text, meant):
    assert f"did you mean {meant}?" in refused(parse, text).what


def test_where_case_decides_both_are_offered():
    assert "did you mean 'mW' or 'MW'?" in refused(units.parse_power, "5mw").what
    assert "did you mean 'mJ' or 'MJ'?" in refused(units.parse_energy, "5mj").what


@every_parser
def test_what_is_no_quantity(parse):
    for value in (math.nan, math.inf, -math.inf, True, False, None, 10**400, -(10**5000), [1], b"5W", object()):
        assert "accepted" in refused(parse, value).fix


@pytest.mark.parametrize("name", ["power", "duration", "frequency", "size"])
def test_negative_numbers_where_there_are_none(name):
    refused(PARSERS[name][0], -1)
    refused(PARSERS[name][0], -1e-9)


def test_negative_numbers_where_they_make_sense():
    assert units.parse_energy(-3) == -3
    assert units.parse_temperature(-40) == -40
    refused(units.parse_temperature, -273.16)


# -- scopes and ranges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "scope", "power_w"),
    [
        ("node:1.2kW", "node", 1200.0),
        ("275W", "gpu", 275.0),
        ("gpu:275W", "gpu", 275.0),
        (" rack : 20 kW", "rack", 20_000.0),
        ("cluster:1MW", "cluster", 1e6),
        (300, "gpu", 300.0),
    ],
)
def test_scoped_power(text, scope, power_w):
    assert parse_scoped_power(text) == ScopedPower(scope, pytest.approx(power_w))


@given(scope=st.sampled_from(units.POWER_SCOPES), power_w=st.floats(min_value=1e-3, max_value=1e8))
def test_scoped_power_as_text_is_read_back(scope, power_w):
    again = parse_scoped_power(str(ScopedPower(scope, power_w)))
    assert again.scope == scope
    assert again.power_w == pytest.approx(power_w, rel=5.01e-4)


# -- anything at all ------------------------------------------------------------------------------------------------

SOUP = st.text(st.sampled_from("0123456789.eE+-_ \t:[],%°µμkKmMGJWhsCFHzBinode²٣\u3000\ud800"), max_size=14)


@settings(max_examples=150)
@given(text=st.one_of(st.text(max_size=20), SOUP))
@example("9" * 5000 + "W")
@example("1e-400W")
@example("²W")
@example("٣W")
def test_any_text_is_read_or_refused_with_a_position(text):
    for parse in (*(p for p, _ in PARSERS.values()), parse_scoped_power):
        try:
            value = parse(text)
        except UnitError as error:
            assert 0 <= error.position <= len(text)
            assert caret_column(error) == error.position
            assert error.fix
        else:
            assert math.isfinite(getattr(value, "power_w", value))


@settings(max_examples=100)
@given(value=st.one_of(st.floats(), st.integers(), st.none(), st.booleans(), st.binary(), st.lists(st.floats())))
def test_any_value_is_read_or_refused(value):
    for parse in (*(p for p, _ in PARSERS.values()), parse_scoped_power):
        try:
            parse(value)
        except UnitError as error:
            assert error.fix


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (3.5e6, "3.5 MJ"), (3.6e6, "1 kWh"), (4.32e9, "1.2 MWh"), (3.6e9, "1 MWh"), (-7.2e6, "-2 kWh"),
        (4.32e12, "1.2 GWh"),
    ],
)  # fmt: skip
def test_large_energies_are_kilowatt_hours_as_people_say(joules, text):
    assert units.format_energy(joules) == text
    assert units.parse_energy(text) == pytest.approx(joules)


def test_the_error_has_the_unit_of_its_energy():
    assert units.format_energy_error(4.32e9, 3.6e8) == "1.20 ± 0.10 MWh"


def test_figures_that_are_compared_are_joules_on_both_sides_of_a_kilowatt_hour():
    assert [units.format_joules(j, 3) for j in (3.31e6, 4.32e6, 1.2e9)] == ["3.31 MJ", "4.32 MJ", "1.2 GJ"]
    assert units.format_energy_error(4.32e6, 1e6, show=units.format_joules) == "4.3 ± 1.0 MJ"


def test_nothing_has_the_unit_without_a_prefix():
    assert (units.format_watt_hours(0.0), units.format_energy(0.0), units.format_watt_hours(1e-3)) == (
        "0 Wh", "0 J", "0.000278 mWh",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("energy_j", "error_j", "text"),
    [
        (0.516, 0.595, "0 to 1.1 J"),
        (0.0, 0.002, "0 to 2 mJ"),
        (1.0, 1.0, "1.0 ± 1.0 J"),
        (-0.5, 0.6, "-500 ± 600 mJ"),
    ],
)
def test_an_energy_is_not_below_zero(energy_j: float, error_j: float, text: str) -> None:
    assert format_energy_error(energy_j, error_j) == text
    assert "±" in format_energy_error(energy_j, error_j, signed=True)


def test_no_power_is_below_zero() -> None:
    assert format_error(4.2, 5.1, "W") == "0 to 9.3 W"
    assert format_error(4.2, 5.1, "W", signed=True) == "4.2 ± 5.1 W"
    assert format_error(400.0, 711.0, "W") == "0 to 1111 W"
    assert format_error(0.001, 0.002) == "0 to 0.0030"


@pytest.mark.parametrize("watts", [np.float32(275), np.int64(275), Fraction(275)])
def test_a_number_of_numpy_is_a_number(watts):
    assert units.parse_power(watts) == 275.0
