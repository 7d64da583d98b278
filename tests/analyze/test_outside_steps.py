"""Joules in no step: setup, evaluation, what lies between steps. With the steps they are the traced joules."""

from __future__ import annotations

import math

import pytest

from analyze.test_rules_cpu import Program
from tessera.analyze.answer import Answer, answer
from tessera.analyze.outside_steps import NAME
from tessera.recording import EVALUATION
from tessera.report import run
from tessera.report.console import plain_console
from tessera.report.run import outside_steps_text
from tessera.report.run_tables import tables

WATTS = 20.0


def train(*, setup_ms: float = 500.0, evaluate_ms: float = 0.0, between_ms: float = 0.0) -> Program:
    """Setup, then ten steps of 50 ms; after the fifth evaluation and something else, which are part of no step."""
    program = Program().op("aten::empty", 1.0).pause(setup_ms - 1.0)
    program.began = program.now
    for i in range(10):
        program.op("aten::mm", 50.0).step()
        if i == 4:
            began = program.now
            if evaluate_ms:
                program.op("aten::addmm", evaluate_ms)
                program.build.add("region", EVALUATION, began, program.now, thread=1)
            program.pause(between_ms)
            program.began = program.now
    return program


def shown(program: Program, by: str | None = None) -> tuple[Answer, str]:
    recording = program.recording()
    said = answer(recording)
    return said, plain_console(100).text(run.text(recording, result=said, by=by, width=100))


def test_setup_in_the_traced_part_has_a_line() -> None:
    said, out = shown(train())
    found = said.outside_steps
    assert found is not None and found.evaluation is None
    assert found.rest.energy_j == pytest.approx(0.5 * WATTS, rel=0.05)
    assert found.places["before"] == pytest.approx(found.rest.energy_j)
    assert "no step" in out and "before the first step" in out


def test_steps_evaluation_and_the_rest_are_the_traced_joules() -> None:
    program = train(evaluate_ms=200.0, between_ms=300.0)
    table = program.recording().energy()
    said, out = shown(program, "steps")
    found = said.outside_steps
    assert found is not None and found.evaluation is not None
    parts = [*(s.energy_j for s in table.steps), found.evaluation.energy_j, found.rest.energy_j]
    assert math.fsum(parts) == pytest.approx(table.energy_j, rel=1e-12)
    assert math.fsum(found.places.values()) == pytest.approx(found.rest.energy_j, rel=1e-12)
    assert found.evaluation.energy_j == pytest.approx(0.2 * WATTS, rel=0.05)
    assert found.places["between"] == pytest.approx(0.3 * WATTS, rel=0.1)
    assert max(s.energy_j for s in table.steps) == pytest.approx(0.05 * WATTS, rel=0.05), "evaluation is in no step"
    below = out[out.index("\nstep") :]
    assert below.index("step_9") < below.index(f"\n{EVALUATION} ") < below.index(f"\n{NAME} ")
    assert NAME in tables(table, said)


def test_a_run_whose_steps_are_nearly_everything_has_no_such_line() -> None:
    said, out = shown(train(setup_ms=20.0))
    assert said.outside_steps is not None and "no step" not in out
    assert outside_steps_text(said) == ""


def test_evaluation_inside_a_step_stays_in_it() -> None:
    program = Program()
    for _ in range(4):
        program.op("aten::mm", 50.0)
        program.build.add("region", EVALUATION, program.began, program.now, thread=1)
        program.step()
    found = answer(program.recording()).outside_steps
    assert found is not None and found.evaluation is None and found.rest.energy_j == pytest.approx(0.0, abs=0.01)
