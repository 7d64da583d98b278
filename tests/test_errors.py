"""Errors say what, why and what to do; the tree in the module's docstring is the real one."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera
from tessera import errors
from tessera.errors import (
    ArgumentError,
    GovernorRefusal,
    MissingExtra,
    SensorLost,
    SensorPermission,
    TesseraError,
    UnitError,
    check_positive,
    did_you_mean,
)
from tessera.fleet.facility import Facility
from tessera.fleet.leases import BudgetPolicy, PowerRequest
from tessera.fleet.scenario import Scenario

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
}
EXAMPLES = [
    TesseraError("it broke", why="because", fix="mend it"),
    TesseraError("it broke"),
    UnitError("5 kw", 2, "unknown unit", "'5kW'"),
    MissingExtra("pandas", "frame", "to_frame"),
    SensorLost("gone", why="it fell off", fix="plug it in"),
]


def documented() -> dict[str, str]:
    """Child to parent, as the docstring draws them."""
    tree: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^ {4}((?:│ {3}| {4})*(?:[├└]── )?)([A-Z]\w+) ", line)
        if found:
            depth = len(found[1]) // 4
            path = [*path[:depth], found[2]]
            tree[found[2]] = path[-2] if depth else "Exception"
    return tree


def test_the_tree_in_the_docstring_is_the_real_one():
    real = {name: next(b.__name__ for b in kind.__bases__) for name, kind in CLASSES.items()}
    assert documented() == real


def test_the_builtin_parents_in_the_docstring_are_the_real_ones():
    for builtin, name in ((ValueError, "ArgumentError"), (ImportError, "MissingExtra")):
        assert issubclass(CLASSES[name], builtin)
        line = next(text for text in (errors.__doc__ or "").splitlines() if f" {name} " in text)
        assert f"also an {builtin.__name__}" in line or f"also a {builtin.__name__}" in line


def test_the_message_has_what_why_and_fix_in_this_order():
    error = SensorPermission("cannot read it", why="you may not", fix="ask")
    assert (error.what, error.why, error.fix) == ("cannot read it", "you may not", "ask")
    assert str(error) == "cannot read it\n  why: you may not\n  fix: ask"


def test_what_is_not_known_is_left_out():
    assert str(TesseraError("it broke")) == "it broke"
    assert str(TesseraError("it broke", fix="mend it")) == "it broke\n  fix: mend it"


def test_why_and_fix_cannot_be_mixed_up():
    with pytest.raises(TypeError):
        TesseraError("what", "why", "fix")  # type: ignore[misc]


@pytest.mark.parametrize("kind", [k for k in CLASSES.values() if k not in (UnitError, MissingExtra, GovernorRefusal)])
def test_each_is_caught_as_ours_and_carries_its_parts(kind):
    with pytest.raises(TesseraError) as caught:
        raise kind("what", why="why", fix="fix")
    assert (caught.value.what, caught.value.why, caught.value.fix) == ("what", "why", "fix")


def test_a_wrong_argument_is_a_value_error():
    with pytest.raises(ValueError, match="no such"):
        raise ArgumentError("no such thing")


def test_a_refusal_of_the_governor_has_a_code_for_programs():
    error = GovernorRefusal("busy", "what", why="why", fix="fix")
    assert (error.code, error.what, error.why, error.fix) == ("busy", "what", "why", "fix")


def test_a_missing_extra_says_what_to_install():
    error = MissingExtra("pandas", "frame", "PowerTrace.to_frame")
    assert isinstance(error, ImportError)
    assert "PowerTrace.to_frame" in error.what
    assert "'pandas'" in error.what
    assert error.fix == "pip install pandas, or in the clone: pip install '.[frame]'"
    assert "'.[models]' -c constraints.txt" in str(MissingExtra("torchvision", "models", "a model").fix)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_an_error_survives_the_way_from_a_worker_process(error, again):
    other = again(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
    assert other.args == error.args


@given(text=st.text(max_size=20), data=st.data())
def test_the_caret_is_on_the_line_below_the_text(text, data):
    position = data.draw(st.integers(min_value=0, max_value=len(text)))
    lines = str(UnitError(text, position, "wrong", "'5W'")).split("\n")
    assert len(lines) == 4, "no character of the text may begin a line of its own"
    assert len(lines[1]) == 4 + len(text)
    assert lines[2] == " " * (4 + position) + "^"
    assert lines[3] == "  fix: accepted: '5W'"


@pytest.mark.parametrize(
    ("word", "known", "answer"),
    [
        ("nvlm", ["nvml", "rapl"], "; did you mean 'nvml'?"),
        ("NVML", ["nvml", "rapl"], "; did you mean 'nvml'?"),
        ("raple", ["nvml", "rapl"], "; did you mean 'rapl'?"),
        ("kwh", ["kWh"], "; did you mean 'kWh'?"),
        ("zzz", ["nvml", "rapl"], ""),
        ("", ["nvml"], ""),
        ("nvml", [], ""),
        ("h201", ("h100", "h20", "h200"), "; did you mean 'h200'?"),  # one wrong letter, not one too many
        ("b20", ("h20", "b200"), "; did you mean 'b200'?"),
        ("rela", ("real", "rel"), "; did you mean 'rel'?"),
        ("--bogus", ("--out", "--runs"), ""),  # all that they have in common is their dashes
        ("--ouput", ("--out", "--output"), "; did you mean '--output'?"),
    ],
)
def test_did_you_mean(word, known, answer):
    assert did_you_mean(word, known) == answer


def test_did_you_mean_takes_any_iterable():
    assert did_you_mean("nvlm", (k for k in ("nvml",))) == "; did you mean 'nvml'?"


WRONG_TYPES: dict[str, Callable[[], object]] = {
    "budget_s='2min'": lambda: tessera.schedule(policy="energy", budget_s="2min"),
    "budget_s=None": lambda: tessera.schedule(policy="energy", budget_s=None),
    "dvfs=200": lambda: tessera.schedule(dvfs=200),
    "sample_interval_ms='5ms'": lambda: tessera.profile.session(sample_interval_ms="5ms"),
    "limit_s='1s'": lambda: tessera.profile.session(limit_s="1s"),
    "interval_ms='5ms'": lambda: tessera.monitor.power_trace(interval_ms="5ms"),
    "target='2%'": lambda: tessera.EnergyBenchmark(target="2%"),
    "budget_s='5s'": lambda: tessera.EnergyBenchmark(budget_s="5s"),
    "min_s='1s'": lambda: tessera.EnergyBenchmark(min_s="1s"),
    "sample='x'": lambda: tessera.EnergyBenchmark().measure(samples="x"),
    "cap_w='20kW'": lambda: BudgetPolicy(cap_w="20kW"),
    "watts['n1']='2kW'": lambda: PowerRequest(job="a", watts={"n1": "2kW"}),
    "duration_s='5s'": lambda: Scenario(facility=Facility(), duration_s="5s"),
}


@pytest.mark.parametrize("named", WRONG_TYPES)
def test_text_where_a_number_is_needed_is_an_error_that_names_the_argument(named):
    with pytest.raises(ArgumentError) as caught:
        WRONG_TYPES[named]()
    assert caught.value.what.startswith(named)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "5", None, 1j])
def test_what_is_not_a_positive_number(value):
    with pytest.raises(ArgumentError, match=r"^x="):
        check_positive("x", value)


@pytest.mark.parametrize("value", [1, 1e-9, Fraction(1, 3), np.float32(2.0), np.int64(3)])
def test_what_is_a_positive_number(value):
    check_positive("x", value)
