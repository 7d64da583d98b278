"""`tessera metrics`: a Prometheus endpoint, joules as counters."""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import Any

import click

from ..errors import TesseraError
from ..monitor.process_table import ProcessTable
from ..monitor.snapshot import PowerWatch
from ..report import metrics as report
from ..sensors.discover import discover
from .listen_address import Address as Address
from .options import sensor_option
from .watch import Quit, wait_for_look

# "Power now" is the mean of the newest second: a scrape every 15 s would alias anything shorter.
NEWEST_S = 1.0


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:9400",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to serve on; [::1]:9400 for IPv6, port 0 for any free port.",
)
@sensor_option
@click.option("--once", is_flag=True, help="Sample for a second, print the metrics and exit.")
@click.option("--dashboard", is_flag=True, help="Print a Grafana dashboard for these metrics (JSON) and exit.")
def command(listen: str, sensors: tuple[str, ...], once: bool, dashboard: bool) -> None:
    """Serve Prometheus metrics at /metrics: joules as counters, power, clocks, throttling.

    \b
    Example:
      tessera metrics
      tessera metrics --dashboard > tessera.json     import it in Grafana
      tessera metrics --once | grep joules

    Joules by user, Slurm job and Kubernetes pod (tessera_job_*) are estimates: a CPU's by CPU time, a GPU's by SM time.
    Only this machine can read them unless --listen names another address.
    """
    if dashboard:
        click.echo(report.dashboard(), nl=False)
        return
    report.import_client()  # fails at once if the package is not installed
    with contextlib.ExitStack() as stack:
        server = None if once else stack.enter_context(bind_server(Address.parse(listen)))
        available = discover(sensors or None, scope="machine")
        quit_ = stack.enter_context(Quit())
        table = ProcessTable.of_this_machine()
        watch = stack.enter_context(PowerWatch(available, NEWEST_S, processes=table))
        collector = report.SnapshotCollector(watch.take_snapshot, requested=sensors)
        if server is None:
            wait_for_look(quit_, watch)
            click.echo(report.format_metrics(collector), nl=False)
            return
        host, port = server.server_name, server.server_port
        with report.serve(server, collector):
            print(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/metrics (Ctrl-C stops)", flush=True)
            quit_.wait()


def bind_server(address: Address) -> contextlib.AbstractContextManager[Any]:
    """Return a server on the address, closed when its context ends."""
    try:
        server = report.bind(address.family, address.sockaddr)
    except OSError as exc:
        raise _bind_error(address, exc) from exc
    if not address.loopback:
        print(f"warning: other machines can reach {address.text}, without authentication", file=sys.stderr)
    return server


def _bind_error(address: Address, exc: OSError) -> TesseraError:
    host, port = address.text.rpartition(":")[0], address.sockaddr[1]
    fixes = {
        errno.EADDRINUSE: f"stop the program that uses it (ss -ltnp shows it), or use --listen {host}:{port + 1}",
        errno.EACCES: f"ports below 1024 need root; use --listen {host}:9400",
        errno.EADDRNOTAVAIL: "give an address of this machine (ip addr shows them), e.g. --listen 127.0.0.1:9400",
    }
    fix = fixes.get(exc.errno or 0, "try --listen 127.0.0.1:9400")
    return TesseraError(f"cannot listen on {address.text}", why=exc.strerror or str(exc), fix=fix)
