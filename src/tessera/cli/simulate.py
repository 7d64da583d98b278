"""`tessera simulate`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from ..errors import ArgumentError
from .options import (
    FILE,
    ExistingPath,
    check_writable,
    choice_option,
    duration_option,
    json_option,
    print_json,
    retype_command,
    write_page,
)


@click.command("simulate")
@click.argument("file", type=ExistingPath())
@duration_option("--duration", "Simulate for this long instead of the file's duration.")
@click.option("--seed", type=click.IntRange(min=1), help="Another seed than the file's.")
@click.option("--distinct", is_flag=True, help="Simulate every GPU by itself, even those that are alike.")
@choice_option("--engine", ("auto", "numba", "numpy"), "How to compute: auto takes numba where it is installed.")
@click.option("--check", is_flag=True, help="End with exit code 1 where the utility's spec is not met.")
@json_option
@click.option("--html", type=FILE, help="Write a self-contained page to this file.")
@click.option("--power", type=FILE, help="Write the power of the feed as CSV, for `tessera analyze power`.")
def command(file: Path, check: bool, as_json: bool, html: Path | None, power: Path | None, **options: Any) -> int:
    """Simulate the power of a data centre: jobs, racks, breakers, heat, policies, against a utility's spec.

    \b
    Examples:
      tessera simulate examples/fleet/row.yaml
      tessera simulate examples/fleet/row.yaml --html row.html --power row.csv
      tessera simulate cluster.yaml --seed 7 --duration 10min --json --check

    FILE (YAML) describes GPUs, nodes, racks, rows and the feed, the jobs, faults and policies: docs/fleet.md. All
    numbers are simulated: no sensor is read and nothing is changed.
    """
    for path in (html, power):
        if path:
            check_writable(path)
    from ..fleet.scenario import load_scenario
    from ..fleet.simulator import simulate
    from ..report.console import Console

    scenario = load_scenario(file)
    if check and scenario.policies.utility_spec is None:
        raise ArgumentError(
            f"--check has nothing to check: {file} has no utility_spec",
            fix="policies: {utility_spec: {dynamic_range_mw: 15, ramp_mw_per_s: 10}}, or leave --check out",
        )
    result = simulate(scenario, **options)
    if html:
        from ..report.simulate_html import simulation_page

        write_page(html, simulation_page(result))
    if power:
        result.feed_power.to_csv(power)
    code = 1 if check and result.passed is False else 0
    if as_json:
        print_json(result.to_dict())
        return code
    from ..report.simulate import simulation_screen

    following = (
        retype_command("simulate", power="power.csv") if html else retype_command("simulate", html="simulation.html")
    )
    if power:
        following = shlex.join(["tessera", "analyze", "power", str(power)])
    Console(highlight=False).print(simulation_screen(result, next_command=following), crop=False)
    return code
