"""`tessera fleet`: place and move jobs, tie power events to what ran, watch a whole fleet."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError
from ..units import parse_temperature
from .main import NearestGroup
from .options import ExistingPath, WordChoice, duration_option, json_option, parse_option, power_option, print_json

if TYPE_CHECKING:
    from ..fleet.status import FleetPoller, FleetStatus
    from ..policy import ThermalPolicy

FLEET = click.argument("fleet", type=ExistingPath())
LISTEN = "127.0.0.1:9420"
POLL = "5s"


@click.group("fleet", cls=NearestGroup)
def command() -> None:
    """Place and move jobs by temperature, tie power events to what ran, watch racks and nodes.

    \b
    Examples:
      tessera fleet place fleet.yaml --policy policy.yaml
      tessera fleet watch fleet.yaml
      tessera fleet incidents runs/job7/ --events pdu.log
    """


def _load_policy(path: Path | None) -> ThermalPolicy:
    """Return the thermal policy of a file; without one, cool nodes come first."""
    from ..policy import ThermalPolicy, load_policies

    if path is None:
        return ThermalPolicy(prefer_cool_nodes=True)
    policy = load_policies(path).thermal_policy
    if policy is None:
        raise ArgumentError(f"{path} has no thermal_policy", fix="thermal_policy: {hotspot_threshold: 85C}")
    return policy


@command.command("place")
@FLEET
@click.option("--policy", type=ExistingPath(), metavar="FILE", help="A file with a thermal_policy.")
@click.option(
    "--order",
    type=WordChoice(["cool", "pack", "spread"]),
    default="cool",
    show_default=True,
    help="Coolest nodes first; moderate jobs packed on fewer nodes; or emptiest nodes first.",
)
@click.option("--compare", is_flag=True, help="Model what packing saves against spreading, in joules and cooling.")
@click.option(
    "--supply",
    "supply_c",
    metavar="TEMPERATURE",
    default="20C",
    show_default=True,
    callback=parse_option(parse_temperature),
    help="Of the air that the cooling supplies, for --compare.",
)
@click.option(
    "--slowdown",
    type=click.FloatRange(0, 10),
    default=0.0,
    help="For --compare: a job takes this share longer for each other on its node.",
)
@json_option
def place(
    fleet: Path, policy: Path | None, order: Any, compare: bool, supply_c: float, slowdown: float, as_json: bool
) -> int:
    """Choose nodes for queued jobs, and moves away from hot spots: where, why, and why not elsewhere.

    \b
    Examples:
      tessera fleet place fleet.yaml --policy policy.yaml
      tessera fleet place fleet.yaml --order pack --compare --json

    FLEET is a YAML file of nodes and jobs (docs/howto/place-jobs.md). Nodes with `metrics:` are asked for their
    temperature now. Nothing is started or moved: this prints decisions. Exit code 1: a job waits.
    """
    from ..fleet.node_metrics import fill_nodes
    from ..fleet.packing import compare_packing
    from ..fleet.placement import place_jobs
    from ..fleet.placement_file import load_fleet
    from ..fleet.relief import plan_moves, settle_moves
    from ..report.fleet_place import place_data, place_screen

    given = load_fleet(fleet)
    thermal = _load_policy(policy)
    nodes, notes = fill_nodes(given.nodes, given.metrics)
    relief = plan_moves(nodes, given.jobs, thermal, rack_limits_w=given.rack_limits_w)
    nodes, jobs = settle_moves(nodes, given.jobs, relief)  # hot nodes are relieved before anything is added
    placement = place_jobs(nodes, jobs, thermal, order=order, rack_limits_w=given.rack_limits_w)
    savings = None
    if compare:
        savings = compare_packing(
            nodes,
            jobs,
            thermal,
            supply_c=supply_c,
            sharing_slowdown=slowdown,
            rack_limits_w=given.rack_limits_w,
        )
    if as_json:
        print_json(place_data(placement, relief, savings, notes))
    else:
        from ..report.console import open_console

        of = [str(fleet), *(["--policy", str(policy)] if policy else [])]
        following = ["watch", *of] if compare else ["place", *of, "--order", "pack", "--compare"]
        open_console().show(
            place_screen(placement, relief, savings, notes, shlex.join(["tessera", "fleet", *following]))
        )
    return 1 if placement.waiting else 0


@command.command("migrate")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(1), help="Go on with so many ranks.")
@click.option("--node", help="Go on there: {node} of the command that `tessera fleet run` starts.")
@json_option
def migrate(folder: Path, ranks: int | None, node: str | None, as_json: bool) -> int:
    """Order a job to save itself and go on elsewhere; it leaves within a second and two steps.

    \b
    Example:
      tessera fleet migrate /shared/job7 --node n12

    FOLDER is the one that the job gave to `fleet.migratable`.
    """
    from ..fleet.job_checkpoint import read_json
    from ..fleet.migration_order import OrderFile

    status = read_json(folder / "status.json")
    if status is None:
        raise ArgumentError(
            f"{folder} is not the folder of a migratable job",
            why="it has no status.json",
            fix="give the folder that the job gave to fleet.migratable(..., folder=...)",
        )
    if status.get("phase") != "running":
        raise ArgumentError(
            f"the job is {status.get('phase')}, not running", fix="start it again: it goes on by itself"
        )
    OrderFile(folder).write(ranks=ranks, node=node)
    if as_json:
        print_json({"folder": str(folder), "step": status.get("step"), "ranks": ranks, "node": node})
    else:
        print(f"ordered: the job (at step {status.get('step')} when it began) saves itself and ends")
    return 0


@command.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True)
@click.option("--ranks", type=click.IntRange(1), help="The first value of {ranks} in the command.")
@click.option("--node", help="The first value of {node} in the command.")
@click.option("--fleet", type=ExistingPath(), metavar="FILE", help="Choose {node} from these nodes, the coolest first.")
@click.option("--policy", type=ExistingPath(), metavar="FILE", help="A file with a thermal_policy, for --fleet.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="GPUs of the job, for --fleet.")
@power_option("--power", "What the job draws above idle, for --fleet.", "0W")
@click.option("--json", "as_json", is_flag=True, help="Print each start as JSON, one object per line.")
def run(
    folder: Path,
    words: tuple[str, ...],
    ranks: int | None,
    node: str | None,
    fleet: Path | None,
    policy: Path | None,
    gpus: int,
    power_w: float,
    as_json: bool,
) -> int:
    """Start a migratable job, and start it again wherever it is moved to, until it is done.

    \b
    Examples:
      tessera fleet run /shared/job7 --ranks 4 -- torchrun --nproc-per-node {ranks} train.py
      tessera fleet run /shared/job7 --node n1 -- ssh {node} torchrun --nproc-per-node 8 train.py
      tessera fleet run /shared/job7 --fleet fleet.yaml --power 5kW -- ssh {node} torchrun train.py

    The job trains with `fleet.migratable(..., folder=FOLDER)`. `tessera fleet migrate FOLDER` moves it.
    """
    from ..fleet.migration_order import OrderFile
    from ..fleet.relaunch import CoolNodeChooser, run_until_done

    choose = None
    if fleet is not None:
        from ..fleet.placement_file import load_fleet

        choose = CoolNodeChooser(load_fleet(fleet), _load_policy(policy), gpus=gpus, power_w=power_w)
        node = node or choose(None)
    OrderFile(folder).take()  # an order from before the start is old
    # The job's own output makes room for ours.
    options: dict[str, Any] = {"run": lambda words: subprocess.run(words, check=False, stdout=2).returncode}
    options = options if as_json else {}
    for launch in run_until_done(words, folder, node=node, ranks=ranks, choose_node=choose, **options):
        if as_json:
            print_json({"start": launch.number, "command": launch.command})
            sys.stdout.flush()
        else:
            print(f"start {launch.number}: {' '.join(launch.command)}", file=sys.stderr, flush=True)
    return 0


@command.command("incidents")
@click.argument("runs", nargs=-1, required=True, type=ExistingPath(folder=True))
@click.option(
    "--events",
    "logs",
    multiple=True,
    type=ExistingPath(),
    metavar="LOG",
    help="A log of power events; may be repeated.",
)
@duration_option("--within", "How far from an event what ran may still be its cause.", "50ms")
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="How many events to show.")
@json_option
def incidents(runs: tuple[Path, ...], logs: tuple[Path, ...], within_s: float, top: int, as_json: bool) -> int:
    """Tie over-current, near-trip and supply events to the kernels and collectives that ran on each node then.

    \b
    Examples:
      tessera fleet incidents runs/job7/
      tessera fleet incidents run-rank0.tessera run-rank1.tessera --events pdu.log --events sel.log

    RUNS are run files or a folder of them; several are put on one clock. Events come from the runs' own sensors
    (Redfish, IPMI) and from logs: `ipmitool sel elist`, a Redfish log as JSON, or JSON lines.
    """
    from ..fleet.event_log import read_event_log
    from ..fleet.incidents import find_incidents

    read = {log: read_event_log(log) for log in logs}
    found = find_incidents(list(runs), [e for some in read.values() for e in some.events], within_s=within_s)
    said = [
        f"{log} has no power event that is understood (its keys: docs/howto/fleet-watch.md)"
        for log, some in read.items()
        if not some.events
    ]
    for log, some in read.items():
        if some.wrong_lines:
            number, why = some.wrong_lines[0]
            more = f" and {len(some.wrong_lines) - 1} more" if len(some.wrong_lines) > 1 else ""
            said.append(f"{log}: line {number}{more} left out: {why}")
    found = dataclasses.replace(found, notes=(*found.notes, *said))
    if as_json:
        click.echo(found.to_json())
        return 0
    from ..report.console import open_console
    from ..report.fleet_incidents import incidents_screen

    one, merged = ["analyze", "power", str(runs[0])], ["merge", str(runs[0].parent), "-o", "all.tessera"]
    following = shlex.join(["tessera", *(one if len(runs) == 1 else merged)])
    open_console().show(incidents_screen(found, next_command=following, top=top))
    return 0


# -- watching ---------------------------------------------------------------------------------------------------------


def _governor_options(function: Any) -> Any:
    options = (
        click.option("--governor", metavar="URL", help="Ask this governor for leases, such as https://rack1:9410."),
        click.option("--token-file", type=ExistingPath(), metavar="FILE", help="The token for the governor."),
        click.option("--ca", type=ExistingPath(), metavar="FILE", help="The governor's certificate."),
        click.option("--policy", type=ExistingPath(), metavar="FILE", help="A thermal_policy says what is hot."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _open_poller(fleet: Path, governor: str | None, token_file: Path | None, ca: Path | None) -> FleetPoller:
    from ..fleet.placement_file import load_fleet
    from ..fleet.status import FleetPoller
    from ..report.metrics import import_client

    given = load_fleet(fleet)
    if given.metrics:
        import_client()  # fails at once if the package is not installed
    client = None
    if governor is not None:
        from ..fleet.governor.client import GovernorAddress, GovernorClient

        client = GovernorClient(GovernorAddress.find(governor, token_file, ca))
    return FleetPoller(given, client)


def _find_hot(policy: Path | None) -> float:
    from ..report.fleet_watch import HOT_C

    threshold_c = None if policy is None else _load_policy(policy).hotspot_threshold_c
    return HOT_C if threshold_c is None else threshold_c


@command.command("watch")
@FLEET
@duration_option("--interval", "Time between two polls.", POLL)
@duration_option("--duration", "Stop after this time, e.g. 5min.")
@click.option("--once", is_flag=True, help="Print one status and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line, instead of a screen.")
@_governor_options
def watch(
    fleet: Path,
    interval_s: float,
    duration_s: float | None,
    once: bool,
    as_json: bool,
    governor: str | None,
    token_file: Path | None,
    ca: Path | None,
    policy: Path | None,
) -> int:
    """Show racks, nodes, watts, caps, temperatures, leases and events live; q or Ctrl-C quits.

    \b
    Examples:
      tessera fleet watch fleet.yaml
      tessera fleet watch fleet.yaml --governor https://rack1:9410 --token-file token --ca governor.pem
      tessera fleet watch fleet.yaml --json --once

    Nodes with `metrics:` in FLEET are asked: run `tessera metrics --listen HOST:9400` on each. If the output is not a
    terminal, prints lines of name=value pairs: racks, nodes that do not answer and why, leases and jobs. Exit code 1,
    with --once: the governor does not answer, or refuses the token.
    """
    import math

    from ..report.fleet_watch import fleet_screen
    from .watch import Quit, show_live, wait_intervals

    poller, hot_c = _open_poller(fleet, governor, token_file, ca), _find_hot(policy)
    live = sys.stdout.isatty() and not (once or as_json)
    with Quit(keys=live) as quit_:
        if live:
            show_live(
                lambda console: fleet_screen(poller.poll(), height=console.height, hot_c=hot_c, keys=True),
                wait_intervals(quit_, interval_s, duration_s or math.inf),
            )
            return 0
        status = _print_status(poller, as_json, hot_c)
        if not once:
            for _ in wait_intervals(quit_, interval_s, duration_s or math.inf):
                _print_status(poller, as_json, hot_c)
        return 1 if once and status.problems else 0


def _print_status(poller: FleetPoller, as_json: bool, hot_c: float) -> FleetStatus:
    from ..output import remove_controls
    from ..report import fleet_watch as report

    status = poller.poll()
    if as_json:
        click.echo(report.json_line(status))
    elif sys.stdout.isatty():
        from ..report.console import Console

        Console(highlight=False).print(report.fleet_screen(status, hot_c=hot_c))
    else:
        for line in report.plain_lines(status):
            print(remove_controls(line), flush=True)
    return status


@command.command("serve")
@click.argument("fleet", type=ExistingPath(), required=False)
@click.option("--listen", default=LISTEN, show_default=True, metavar="HOST:PORT", help="Address to serve on.")
@duration_option("--interval", "Time between two polls.", POLL)
@click.option("--dashboard", is_flag=True, help="Print a Grafana board for the fleet's metrics (JSON) and exit.")
@click.option("--alerts", is_flag=True, help="Print alert rules for Prometheus (YAML) and exit.")
@_governor_options
@json_option
def serve(
    fleet: Path | None,
    listen: str,
    interval_s: float,
    as_json: bool,
    dashboard: bool,
    alerts: bool,
    governor: str | None,
    token_file: Path | None,
    ca: Path | None,
    policy: Path | None,
) -> int:
    """Serve a live page of the fleet, and its Prometheus metrics at /metrics.

    \b
    Examples:
      tessera fleet serve fleet.yaml                     then open http://127.0.0.1:9420
      tessera fleet serve --alerts > tessera.rules.yml   for rule_files of Prometheus
      tessera fleet serve --dashboard > fleet.json       import it in Grafana

    Only this machine can read them unless --listen names another address.
    """
    from ..report import fleet_metrics, metrics

    if dashboard or alerts:
        click.echo(fleet_metrics.fleet_dashboard() if dashboard else fleet_metrics.alert_rules(), nl=False)
        return 0
    if fleet is None:
        raise ArgumentError("the fleet's file is missing", fix="tessera fleet serve fleet.yaml")
    from ..report.fleet_page import StatusFeed, fleet_app, fleet_page
    from .metrics import Address, bind_server
    from .watch import Quit

    metrics.import_client()
    poller, hot_c = _open_poller(fleet, governor, token_file, ca), _find_hot(policy)
    with bind_server(Address.parse(listen)) as server, Quit() as quit_, StatusFeed(poller, interval_s) as feed:
        collector = fleet_metrics.FleetCollector(feed.newest, has_governor=governor is not None)
        scrape = metrics.import_client().make_wsgi_app(metrics.registry(collector))
        with metrics.serve_app(server, fleet_app(feed, fleet_page(interval_s, hot_c), scrape)):
            host = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
            url = f"http://{host}:{server.server_port}"
            print_json({"url": url}) if as_json else click.echo(f"serving {url} (Ctrl-C stops)")
            sys.stdout.flush()
            quit_.wait()
    return 0
