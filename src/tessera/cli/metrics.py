"""`tessera metrics`: a Prometheus endpoint, joules as counters."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Any

import click

from ..errors import ArgumentError, TesseraError
from ..monitor.snapshot import PowerWatch
from ..report import prometheus as report
from ..sensors.discover import discover
from . import completion
from .plain import say
from .watch import ONCE_S, SENSOR_HELP, Quit

# "Power now" is the mean of the newest second: a scrape every 15 s would alias anything shorter.
NEWEST_S = 1.0
_ADDRESS = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>\d{1,5})")


@click.command()
@click.option(
    "--listen", default="127.0.0.1:9400", show_default=True, metavar="HOST:PORT",
    help="Address to serve on; [::1]:9400 for IPv6, port 0 for any free one.",
)  # fmt: skip
@click.option("--sensor", "sensors", multiple=True, shell_complete=completion.sensors, metavar="NAME", help=SENSOR_HELP)
@click.option("--once", is_flag=True, help="Print the metrics after a second of sampling, and exit.")
@click.option("--dashboard", is_flag=True, help="Print a Grafana dashboard for these metrics (JSON), and exit.")
def command(listen: str, sensors: tuple[str, ...], once: bool, dashboard: bool) -> None:
    """Serve Prometheus metrics at /metrics: joules as counters, power, clocks, throttling.

    \b
    Example:
      tessera metrics
      tessera metrics --dashboard > tessera.json     import it in Grafana
      tessera metrics --once | grep joules

    Only this machine can read them unless --listen names another address.
    """
    if dashboard:
        click.echo(report.dashboard(), nl=False)
        return
    report.client()  # says at once if the package is not there
    with contextlib.ExitStack() as stack:
        server = None if once else stack.enter_context(_bound(Address.parse(listen)))
        found = discover(sensors or None)
        quit_ = stack.enter_context(Quit())
        watch = stack.enter_context(PowerWatch(found, NEWEST_S))
        collector = report.SnapshotCollector(watch.take_snapshot, asked=sensors)
        if server is None:
            quit_.wait(ONCE_S)
            click.echo(report.exposition(collector), nl=False)
            return
        host, port = server.server_name, server.server_port
        with report.serving(server, collector):
            say(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/metrics (Ctrl-C stops)")
            quit_.wait()


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, as it was written and as the system understands it."""

    text: str
    family: socket.AddressFamily
    sockaddr: tuple[str, int]

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address of "HOST:PORT" or "[IPV6]:PORT"."""
        found = _ADDRESS.fullmatch(text.strip())
        if not found or int(found["port"]) > 0xFFFF:
            raise ArgumentError(
                f"--listen {text} is not an address",
                why="it has the form HOST:PORT, with a port up to 65535; IPv6 stands in brackets",
                fix="e.g. --listen 127.0.0.1:9400 or --listen '[::1]:9400'",
            )
        host, port = found["six"] or found["host"], int(found["port"])
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (socket.gaierror, UnicodeError) as exc:
            raise ArgumentError(
                f"--listen {text}: no host {host!r}",
                why=str(exc),
                fix="give an address of this machine: 127.0.0.1:9400",
            ) from exc
        family, _, _, _, sockaddr = infos[0]
        return cls(text, family, (str(sockaddr[0]), port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.sockaddr[0].partition("%")[0]).is_loopback


def _bound(address: Address) -> contextlib.AbstractContextManager[Any]:
    """A server that holds the address, closed on the way out."""
    try:
        server = report.bind(address.family, address.sockaddr)
    except OSError as exc:
        raise _refused(address, exc) from exc
    if not address.loopback:
        say(f"warning: {address.text} can be reached from other machines, without any authentication", err=True)
    return server


def _refused(address: Address, exc: OSError) -> TesseraError:
    host, port = address.text.rpartition(":")[0], address.sockaddr[1]
    fixes = {
        errno.EADDRINUSE: f"stop what listens there (ss -ltnp shows it), or take another: --listen {host}:{port + 1}",
        errno.EACCES: f"ports under 1024 are root's: --listen {host}:9400",
        errno.EADDRNOTAVAIL: "give an address of this machine (ip addr shows them), e.g. --listen 127.0.0.1:9400",
    }
    fix = fixes.get(exc.errno or 0, "try --listen 127.0.0.1:9400")
    return TesseraError(f"cannot listen on {address.text}", why=exc.strerror or str(exc), fix=fix)
