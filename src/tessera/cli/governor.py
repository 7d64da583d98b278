"""`tessera governor`: the service that owns the power budget of a rack, its node daemons, and calls to it."""

from __future__ import annotations

import functools
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError
from ..output import remove_controls
from ..units import parse_fraction, parse_power
from .governor_token import command as token_command
from .governor_token import default_state, state_option
from .main import NearestGroup
from .options import FILE, duration_option, json_option, parse_option, power_option, print_json, sensor_option

if TYPE_CHECKING:
    from ..fleet.governor.client import GovernorClient
    from ..fleet.governor.daemon import NodeDaemon
    from ..fleet.governor.journal import GovernorEvent
    from ..fleet.leases import BudgetPolicy
    from .watch import Quit

Connect = Callable[..., "GovernorClient"]
OPERATOR_FILE = "operator.token"
_POLL_S = 2.0


def connect_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --url, --token-file and --ca: where the governor is, and who we are; `connect()` makes the client."""

    @click.option("--url", help="The governor's address.  [default: http://127.0.0.1:9410]")
    @click.option("--token-file", type=FILE, help="File with our token.")
    @click.option("--ca", "ca_file", type=FILE, help="The governor's certificate, where it has TLS.")
    @functools.wraps(function)
    def run(url: str | None, token_file: Path | None, ca_file: Path | None, **arguments: Any) -> Any:
        return function(connect=functools.partial(_connect, url, token_file, ca_file), **arguments)

    return run


def _connect(url: str | None, token_file: Path | None, ca_file: Path | None, **more: Any) -> GovernorClient:
    from ..fleet.governor.client import FILE_VARIABLE, TOKEN_VARIABLE, GovernorAddress, GovernorClient

    own = default_state() / OPERATOR_FILE
    if token_file is None and not os.environ.get(FILE_VARIABLE) and not os.environ.get(TOKEN_VARIABLE):
        token_file = own if own.exists() else None  # on the governor's own machine, by the same user
    return GovernorClient(GovernorAddress.find(url, token_file, ca_file), **more)


@click.group("governor", cls=NearestGroup)
def command() -> None:
    """Own the power budget of a rack: jobs ask for watts and get leases, nodes keep to them.

    \b
    Example:
      tessera governor serve --cap 20kW                       on one machine
      tessera governor join --guaranteed 800W                 on every node
      tessera governor request train-7 --watts node1=6kW      for a job
      tessera governor status

    Calls find the governor by --url and --token-file, or by TESSERA_GOVERNOR_URL and TESSERA_GOVERNOR_TOKEN_FILE.
    """


command.add_command(token_command, "token")


@command.command("serve")
@power_option("--cap", "The rating of the rack's breaker or feed.")
@click.option("--policy", "policy_file", type=FILE, help="Take the cap and more from a rack_power_governor: section.")
@click.option(
    "--margin", callback=parse_option(parse_fraction), help="The share of the cap that is given out.  [default: 80%]"
)
@duration_option("--soft-start", "How long a job's watts rise.  [default: 60s]")
@duration_option("--lease", "How long a node's lease lasts without a heartbeat.", "20s")
@duration_option("--heartbeat", "How often nodes report.", "2s")
@click.option("--listen", default="127.0.0.1:9410", show_default=True, metavar="HOST:PORT", help="Address to serve on.")
@click.option("--tls-cert", type=FILE, help="Certificate (PEM); needed to listen for other machines.")
@click.option("--tls-key", type=FILE, help="Its key (PEM).")
@state_option
@json_option
def serve(
    cap_w: float | None,
    policy_file: Path | None,
    margin: float | None,
    soft_start_s: float | None,
    lease_s: float,
    heartbeat_s: float,
    listen: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Serve the budget of a rack or row until Ctrl-C. A restart keeps all leases.

    \b
    Example:
      tessera governor serve --cap 20kW
      tessera governor serve --policy rack.yaml --listen 0.0.0.0:9410 --tls-cert cert.pem --tls-key key.pem

    The first start writes a token of an operator to operator.token in the state folder. Jobs, nodes, emergencies and
    refused tokens are logged on standard error, one line each; /metrics has them for Prometheus.
    """
    import asyncio

    from ..fleet.governor.serve import bind_listener, make_tls, serve_governor
    from ..fleet.governor.service import open_service
    from ..report.governor import describe_policy
    from .listen_address import Address

    if (tls_cert is None) != (tls_key is None):
        raise ArgumentError("--tls-cert and --tls-key belong together", fix="give both, or none on 127.0.0.1")
    more = {"breaker_margin": margin, "soft_start_s": soft_start_s, "lease_s": lease_s, "heartbeat_s": heartbeat_s}
    policy = _find_policy(cap_w, policy_file, {k: v for k, v in more.items() if v is not None})
    folder = state or default_state()
    tls = make_tls(tls_cert, tls_key) if tls_cert and tls_key else None
    address = Address.parse(listen)
    listener = bind_listener(address.family, address.sockaddr, tls=tls is not None)
    service = open_service(policy, folder / "leases.db")
    service.journal.on_event = _log_event
    tokens = _first_token(folder)
    host, port = listener.getsockname()[:2]
    url = f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"

    def say_started() -> None:
        if as_json:
            print_json({"url": url, "state": str(folder), "policy": policy, "limit_w": policy.limit_w})
        else:
            click.echo(f"{describe_policy(policy)}\nserving {url} (Ctrl-C stops), state in {folder}")
            click.echo(f"next, on each node: {_join_command(url, folder, tls_cert)}")
        sys.stdout.flush()

    asyncio.run(serve_governor(service, tokens, listener, tls=tls, started=say_started))


def _join_command(url: str, folder: Path, ca_file: Path | None) -> str:
    """Return what joins a node to this governor, with all that a call does not find by itself."""
    from ..fleet.governor.client import DEFAULT_URL

    words = ["tessera", "governor", "join", "--guaranteed", "300W"]
    words += ["--url", url] if url != DEFAULT_URL else []
    words += ["--token-file", str(folder / OPERATOR_FILE)] if folder != default_state() else []
    return shlex.join([*words, *(["--ca", str(ca_file)] if ca_file else [])])


def _log_event(event: GovernorEvent) -> None:
    """Print one line per event on standard error, which systemd keeps in its journal."""
    from ..report.governor import describe_event

    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    print(f"{when} {remove_controls(describe_event(event))}", file=sys.stderr, flush=True)


def _find_policy(cap_w: float | None, policy_file: Path | None, more: dict[str, Any]) -> BudgetPolicy:
    from dataclasses import replace

    from ..fleet.leases import BudgetPolicy
    from ..policy import load_policies

    if (cap_w is None) == (policy_file is None):
        raise ArgumentError("a governor needs --cap or --policy, and not both", fix="tessera governor serve --cap 20kW")
    if cap_w is not None:
        return BudgetPolicy(cap_w=cap_w, **more)
    assert policy_file is not None
    rack = load_policies(policy_file).rack_power_governor
    if rack is None:
        raise ArgumentError(
            f"{policy_file} has no section rack_power_governor", fix="rack_power_governor: {rack_cap_kw: 20}"
        )
    return replace(BudgetPolicy.from_rack(rack), **more)


def _first_token(folder: Path) -> Any:
    """Return the tokens of a governor; if none was ever made for an operator, make one, in a file of its own."""
    from ..fleet.governor.tokens import Role, TokenFile

    tokens = TokenFile(folder / "tokens.json")
    known, path = tokens.read(), folder / OPERATOR_FILE
    if not known or not (path.exists() or any(t.role is Role.OPERATOR for t in known)):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(tokens.create("operator", Role.OPERATOR) + "\n")
    return tokens


@command.command("join")
@power_option("--guaranteed", "What this node may always draw, also without the governor.", required=True)
@power_option("--max", "The most that this node can draw.")
@click.option("--node", help="This node's name.  [default: its host name]")
@sensor_option
@click.option("--rack-meter", is_flag=True, help="Also report the rack's PDUs, which this node reads by Redfish.")
@click.option("--control", is_flag=True, help="Hold the cap by the GPUs' power limits, too (needs permission).")
@power_option("--host-power", "With --control: what the node draws besides its GPUs.", "0W")
@click.option("--lease-file", type=FILE, help="Where schedules of this node find the lease.")
@connect_options
@json_option
def join(
    guaranteed_w: float,
    max_w: float | None,
    node: str | None,
    sensors: tuple[str, ...],
    rack_meter: bool,
    control: bool,
    host_power_w: float,
    lease_file: Path | None,
    connect: Connect,
    as_json: bool,
) -> None:
    """Speak for this node: report its power, and keep it to its lease. Runs until Ctrl-C.

    \b
    Example:
      tessera governor join --guaranteed 800W
      tessera governor join --guaranteed 800W --sensor redfish --control --host-power 400W

    Schedules with power_cap="governor", or with a `node:` cap, follow the lease. Without the governor the node falls
    back to its guaranteed share before its lease ends; one that cannot be reached is waited for. Exit code 1: the
    governor refuses this node, its token or its share.
    """
    from ..fleet.governor.daemon import CapApplier, DaemonState, DriverCap, LeaseFile, NodeDaemon, find_node_power
    from ..monitor.snapshot import PowerWatch
    from ..report.governor import describe_daemon
    from ..runtime.node_lease import lease_path
    from ..sensors.discover import discover
    from .watch import Quit

    client = connect(timeout_s=2.0)
    with Quit() as quit_, PowerWatch(discover(sensors or None, scope="machine"), 1.0) as watch:
        appliers: list[CapApplier] = [LeaseFile(lease_file or lease_path())]
        if control:
            appliers.append(DriverCap(host_power_w))

        def read_power() -> tuple[float | None, float | None]:
            node_w, rack_w = find_node_power(watch.take_snapshot())
            return node_w, rack_w if rack_meter else None

        def show(state: DaemonState) -> None:
            print_json(state) if as_json else click.echo(describe_daemon(state))
            sys.stdout.flush()

        daemon = NodeDaemon(
            governor=client,
            node=node or socket.gethostname(),
            guaranteed_w=guaranteed_w,
            max_w=max_w,
            appliers=appliers,
            read_power=read_power,
            on_change=show,
        )
        _run_daemon(daemon, quit_)


def _run_daemon(daemon: NodeDaemon, quit_: Quit) -> None:
    """Run until the user quits, or until the governor refuses this node, which raises."""
    stop = threading.Event()
    worker = threading.Thread(target=daemon.run, args=(stop,), name="tessera-node")
    worker.start()
    try:
        while worker.is_alive() and not quit_.wait(1.0):
            pass
    finally:
        stop.set()
        worker.join()
    if daemon.refusal is not None:
        raise daemon.refusal


@command.command("request")
@click.argument("job")
@click.option("--watts", multiple=True, required=True, metavar="NODE=POWER", help="Watts on a node; may be repeated.")
@click.option("--priority", type=click.IntRange(0, 9), default=5, show_default=True, help="9 is the highest.")
@click.option("--user", default="", help="Whose job it is: users share the budget fairly.")
@click.option("--min-share", callback=parse_option(parse_fraction), default="50%", show_default=True,
              help="The share of its watts that the job needs to be useful.")  # fmt: skip
@duration_option("--ttl", "How long the lease lasts without `renew`.", "60s")
@duration_option("--soft-start", "How long this job's watts rise.")
@duration_option("--wait", "Wait until the job is admitted; exit code 1 if it is not by then.")
@connect_options
@json_option
def request(
    job: str, watts: tuple[str, ...], wait_s: float | None, connect: Connect, as_json: bool, **asked: Any
) -> None:
    """Ask for watts for a job. The same request again is the same lease; a job that has ended needs a new name.

    \b
    Example:
      tessera governor request train-7 --watts node1=6kW --watts node2=6kW --ttl 2h --wait 10min

    Exit code 1: the job has ended, or was not admitted within --wait.
    """
    from ..fleet.leases import JobState, PowerRequest
    from ..report.governor import describe_job

    wanted = PowerRequest(job=job, watts=_parse_watts(watts), **asked)
    client = connect()
    status = client.request(wanted)
    end_s = time.monotonic() + (wait_s or 0.0)
    while status.state is JobState.QUEUED and time.monotonic() < end_s:
        time.sleep(min(_POLL_S, max(0.0, end_s - time.monotonic())))
        status = client.renew(job)
    print_json(status) if as_json else click.echo(describe_job(status))
    if status.state is JobState.ENDED or (wait_s is not None and status.state is not JobState.ACTIVE):
        sys.exit(1)


def _parse_watts(texts: tuple[str, ...]) -> dict[str, float]:
    watts: dict[str, float] = {}
    for text in texts:
        node, equals, power = text.rpartition("=")
        if not equals or not node:
            raise ArgumentError(f"--watts {text} is not NODE=POWER", fix="--watts node1=6kW")
        if node in watts:
            raise ArgumentError(f"--watts names node {node!r} twice", fix="give each node once")
        watts[node] = parse_power(power)
    return watts


def _job_command(name: str, text: str, *, needs_lease: bool) -> None:
    """`renew` and `release`: one job in, its status out. Where it `needs_lease`, a job that has ended is a failure."""
    text += f"\n\n\b\nExample:\n  tessera governor {name} train-7"
    text += "\n\nExit code 1: the job has ended, and needs a new name." if needs_lease else ""

    @command.command(name, help=text)
    @click.argument("job")
    @connect_options
    @json_option
    def run(job: str, connect: Connect, as_json: bool) -> None:
        from ..fleet.leases import JobState
        from ..report.governor import describe_job

        status = getattr(connect(), name)(job)
        print_json(status) if as_json else click.echo(describe_job(status))
        if needs_lease and status.state is JobState.ENDED:
            sys.exit(1)


_job_command("renew", "Let a job's lease last from now, as long as it was asked for.", needs_lease=True)
_job_command("release", "End a job: its watts are free. Once more does no harm.", needs_lease=False)


@command.command("status")
@connect_options
@json_option
def status(connect: Connect, as_json: bool) -> None:
    """Show the budget: what nodes may draw and draw, which jobs run and wait.

    \b
    Example:
      tessera governor status
    """
    found = connect().describe()
    if as_json:
        print_json(found)
        return
    from ..report.console import open_console
    from ..report.governor import print_status

    print_status(found, open_console())


@command.command("shed")
@click.option("--reason", required=True, help="Why; jobs are told.")
@power_option("--to", "Down to how much.  [default: the guaranteed shares]")
@connect_options
@json_option
def shed(reason: str, to_w: float | None, connect: Connect, as_json: bool) -> None:
    """Declare an emergency: take watts away from jobs, the lowest priority first.

    \b
    Example:
      tessera governor shed --reason "feed B lost" --to 8kW
    """
    from ..report.governor import describe_target

    emergency = connect().declare_emergency(reason, to_w)
    if as_json:
        print_json(emergency)
        return
    to = describe_target(emergency.to_w)
    click.echo(
        f"leases fall {to}: nodes are told with their next heartbeat\nnext, when it is over: tessera governor resume"
    )


@command.command("resume")
@connect_options
@json_option
def resume(connect: Connect, as_json: bool) -> None:
    """End an emergency: jobs that were shed wait for admission, and start softly.

    \b
    Example:
      tessera governor resume
    """
    answer = connect().end_emergency()
    if as_json:
        print_json(answer)
        return
    ended = answer.ended
    click.echo("there is no emergency: nothing changed" if ended is None else f"ended: {ended.reason}")


@command.command("remove")
@click.argument("node")
@connect_options
def remove(node: str, connect: Connect) -> None:
    """Take a node out for good, once its power is off: its guaranteed share is free then.

    \b
    Example:
      tessera governor remove node7
    """
    connect().remove(node)
