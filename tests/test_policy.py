"""The YAML policies: the seeds' files load as they are, and what is wrong is named with its key and its fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import PolicyError
from tessera.policy import Policies, PowerShaper, RackPowerGovernor, load_policies, parse_policies
from tessera.read_limits import YAML_BYTES, parse_yaml

GUIDE = """
thermal_policy:
  hotspot_threshold: 85C
  redistribute: true
  prefer_cool_nodes: true
  migration_on_overheat: true
---
power_shaper:
  jitter_ms: [1,5]
  phase_shift:
    dp_groups: "auto"          # stagger all-reduce across groups
    pp_stages: "round_robin"
  cap_rate: 0.85               # target 85% of PSU OCP
---
rack_power_governor:
  rack_cap_kw: 20
  soft_start: 60s
  per_rack_jitter_ms: [10,50]
"""
ALL = """
power_shaper: {jitter_ms: [1, 5], phase_shift: {dp_groups: auto, pp_stages: round_robin}, cap_rate: 0.85}
rack_power_governor: {rack_cap_kw: 20, soft_start: 60s, per_rack_jitter_ms: [10, 50], breaker_margin: 0.8}
thermal_policy: {hotspot_threshold: 85C, redistribute: true, prefer_cool_nodes: true, migration_on_overheat: true,
                 cooling_budget_kw: {aisle1: 120}}
utility_spec: {ramp_mw_per_s: 10, dynamic_range_mw: 15, band_hz: [0.1, 20], band_share: 0.2, crest_factor: 1.3}
"""


def load(tmp_path: Path, text: str) -> Policies:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return load_policies(path)


def test_one_file_holds_all_policies_in_si(tmp_path: Path) -> None:
    policies = load(tmp_path, ALL)
    shaper, governor = policies.power_shaper, policies.rack_power_governor
    thermal, utility = policies.thermal_policy, policies.utility_spec
    assert shaper is not None and governor is not None and thermal is not None and utility is not None
    assert shaper.jitter_s == (0.001, 0.005)
    assert (shaper.phase_shift.dp_groups, shaper.phase_shift.pp_stages) == ("auto", "round_robin")
    assert shaper.phase_shift.tp_groups is None
    assert (governor.rack_cap_w, governor.soft_start_s, governor.per_rack_jitter_s) == (20e3, 60.0, (0.01, 0.05))
    assert governor.usable_w == pytest.approx(16e3)
    assert thermal.hotspot_threshold_c == 85.0 and dict(thermal.cooling_budget_w) == {"aisle1": 120e3}
    assert (utility.ramp_w_per_s, utility.dynamic_range_w, utility.band_hz) == (10e6, 15e6, (0.1, 20.0))
    assert json.loads(json.dumps(policies.to_dict()))["utility_spec"]["crest_factor"] == 1.3


@pytest.mark.parametrize("part", GUIDE.split("---"))
def test_the_guides_own_files_load(tmp_path: Path, part: str) -> None:
    policies = load(tmp_path, part)
    assert sum(value is not None for value in policies.to_dict().values()) == 1


def test_units_in_the_key_or_in_the_text_are_the_same() -> None:
    by_key = parse_policies({"power_shaper": {"max_ramp_kw_per_s": 0.2, "power_floor_w": 400, "jitter_s": [0, 1e-3]}})
    by_text = parse_policies({"power_shaper": {"max_ramp": "200W/s", "power_floor": "0.4kW", "jitter": ["0ms", "1ms"]}})
    assert by_key == by_text
    assert by_key.power_shaper is not None and by_key.power_shaper.max_ramp_w_per_s == pytest.approx(200.0)


def test_groups_may_be_shifted_by_a_time_or_not_at_all() -> None:
    table = parse_yaml(b"power_shaper: {phase_shift: {dp_groups: 2ms, tp_groups: off, pp_stages: 'off'}}")
    shaper = parse_policies(table).power_shaper
    assert shaper is not None and shaper.phase_shift.dp_groups == pytest.approx(0.002)
    assert shaper.phase_shift.tp_groups is None and shaper.phase_shift.pp_stages is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("power_sharper: {}", "did you mean 'power_shaper'"),
        ("power_shaper: {jiter_ms: [1, 5]}", "did you mean 'jitter_ms'"),
        ("power_shaper: {phase_shift: {dp_group: auto}}", "did you mean 'dp_groups'"),
        ("power_shaper: {phase_shift: {dp_groups: autos}}", "did you mean 'auto'"),
        ("power_shaper: {jitter_ms: [5, 1]}", "5 ms to 1 ms begins above its end"),
        ("power_shaper: {jitter_ms: [-1, 5]}", "jitter_ms: -1 ms is not from 0 s to 60 s"),
        ("power_shaper: {jitter_ms: 5}", "is not a pair"),
        ("power_shaper: {jitter: [1, 5]}", "has no unit"),
        ("power_shaper: {cap_rate: 1.2}", "is not from"),
        ("power_shaper: {cap_rate: 0}", "is not from"),
        ("power_shaper: {cap_rate: true}", "is not a share"),
        ("power_shaper: {cap_rate: .nan}", "not a possible fraction"),
        ("power_shaper: {max_ramp: 20W}", "unknown unit"),
        ("rack_power_governor: {soft_start: 60s}", "rack_cap is missing"),
        ("rack_power_governor: {rack_cap_kw: 20, soft_start: 60}", "has no unit"),
        ("rack_power_governor: {rack_cap_kw: 20kW}", "the key already has the unit"),
        ("rack_power_governor: {rack_cap_kw: 20, rack_cap: 20kW}", "say the same thing"),
        ("rack_power_governor: {rack_cap_kw: .inf}", "is not a number"),
        ("rack_power_governor: {rack_cap_kw: -20}", "rack_cap_kw: -20 kW is not from 1 W to"),
        ("rack_power_governor: {rack_cap: 20mw}", "'mW' or 'MW'"),
        ("thermal_policy: {hotspot_threshold: 85}", "has no unit"),
        ("thermal_policy: {redistribute: 1}", "is not true or false"),
        ("thermal_policy: {cooling_budget_kw: 120}", "is not a value for each aisle"),
        ("utility_spec: {crest_factor: 0.9}", "is not from 1"),
        ("utility_spec:", "is not a table of settings"),
        ("[1, 2]", "has no policies"),
        ("", "has no policies"),
    ],
)
def test_a_wrong_file_names_the_key_and_the_mistake(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert "policy.yaml" in caught.value.what


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\n" + "".join(f"c{i}: &c{i} [*b, *b]\n" for i in range(3)), ""),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
            "more than 100,000 values",
        ),
        ("a: &a [*a]", "contains itself"),
        ("a: 1\na: 2", "stands twice"),
        ("[" * 5000, "nested too deeply"),
        ("x" * (YAML_BYTES + 1), "longer than"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("? {a: 1}\n: 2", "unhashable"),
        ("a: " + "9" * 5000, ""),
        ("a: 2001-99-99", "month must be"),
        ("a: [1", "expected"),
    ],
)
def test_hostile_yaml_is_refused_within_bounds(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)


def test_a_missing_file_and_bytes_that_are_not_text(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot read the policy"):
        load_policies(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\xfa\x00")
    with pytest.raises(PolicyError):
        load_policies(tmp_path / "b.yaml")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(["jitter_ms", "jitter", "phase_shift", "cap_rate", "power_floor", "rack_cap_kw", "soft_start"])


@given(st.dictionaries(st.sampled_from(["power_shaper", "rack_power_governor", "x"]), st.dictionaries(_KEYS, _VALUES)))
def test_whatever_the_table_holds_it_loads_or_is_a_policy_error(table: object) -> None:
    try:
        policies = parse_policies(table)
    except PolicyError:
        return
    assert isinstance(policies, Policies)


def test_policies_are_checked_when_made_in_python() -> None:
    with pytest.raises(PolicyError, match="cap_rate"):
        PowerShaper(cap_rate=85)
    assert PowerShaper(cap_rate=0.85, psu_limit_w=10e3).node_cap_w == pytest.approx(8500.0)
    assert PowerShaper(cap_rate=0.85).node_cap_w is None
    with pytest.raises(PolicyError, match="rack_cap_w"):
        RackPowerGovernor(rack_cap_w=-1)


def test_all_mistakes_of_a_file_are_shown() -> None:
    table = {"power_shaper": {"jiter_ms": [1, 5], "cap_rate": 3}, "rack_power_governor": {}, "utility": {}}
    with pytest.raises(PolicyError) as said:
        parse_policies(table, "p.yaml")
    assert said.value.what.startswith("p.yaml has 4 mistakes:")
    for part in ("did you mean 'jitter_ms'", "cap_rate: 3 is not from", "rack_cap is missing", "utility_spec"):
        assert part in said.value.what


def test_a_value_that_is_no_number_is_not_told_to_have_a_unit(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as said:
        load(tmp_path, "rack_power_governor: {rack_cap_kw: .nan}")
    assert "nan is not a number" in said.value.what and said.value.why is None
