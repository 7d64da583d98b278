"""A `Snapshot` as Prometheus metrics, and the small server that answers GET /metrics with it.

Base units and names follow prometheus.io/docs/practices/naming. Unknown figures are absent, never 0. The domains
of `tessera_energy_joules_total` may be summed: those that overlap others (HBM inside a board, a whole chassis) have
metrics of their own, `tessera_overlapping_*`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from .. import __version__
from ..errors import needs_extra
from ..monitor.snapshot import DomainReading, Snapshot
from ..schema import Telemetry

METRICS: Mapping[str, tuple[str, str]] = {
    "tessera_energy_joules_total": ("counter", "Energy since the start of the domains that may be summed."),
    "tessera_energy_error_joules": ("gauge", "Half-width of the 90% interval of the energy so far."),
    "tessera_energy_cost_total": ("counter", "Price of the energy since the start, by the configured factors."),
    "tessera_emissions_grams_total": (
        "counter",
        "CO2 equivalent of the energy since the start, by the configured factors.",
    ),
    "tessera_power_watts": ("gauge", "Mean power over the newest second of data."),
    "tessera_overlapping_energy_joules_total": ("counter", "Energy of domains inside or around counted ones."),
    "tessera_overlapping_power_watts": ("gauge", "Power of domains inside or around counted ones."),
    "tessera_power_limit_watts": ("gauge", "Power limit in force."),
    "tessera_temperature_celsius": ("gauge", "Temperature of the chip (core) or its memory."),
    "tessera_clock_hertz": ("gauge", "Clock frequency."),
    "tessera_throttle": ("gauge", "1 while this reason lowers the clocks, else 0."),
    "tessera_throttled_seconds_total": ("counter", "Time throttled for this reason, since the driver was loaded."),
    "tessera_memory_used_bytes": ("gauge", "Device memory in use."),
    "tessera_memory_size_bytes": ("gauge", "Size of the device memory."),
    "tessera_utilization_ratio": ("gauge", "Share of time with work on the device."),
    "tessera_sm_activity_ratio": ("gauge", "Share of the SMs' time with a warp resident."),
    "tessera_job_energy_joules_total": ("counter", "Estimated energy by user, Slurm job and pod, by CPU or SM time."),
    "tessera_job_power_watts": ("gauge", "Estimated power by user, Slurm job and pod since the last scrape."),
    "tessera_job_cpu_seconds_total": ("counter", "CPU time by user, Slurm job and pod, since the start."),
    "tessera_job_gpu_memory_bytes": ("gauge", "Device memory in use by user, Slurm job and pod."),
    "tessera_crest_factor": ("gauge", "Peak over root mean square of the newest 15 s, at the sensor's own resolution."),
    "tessera_current_amperes": ("gauge", "Current of a feed or a supply."),
    "tessera_peak_current_amperes": ("gauge", "Highest current that a feed or a supply has reported."),
    "tessera_power_events_total": (
        "counter",
        "Over-current, near trips and faults that supplies, PDUs and BMCs report.",
    ),
    "tessera_sensor_up": ("gauge", "1 while a sensor answers, 0 if it was lost or was requested and is missing."),
    "tessera_gaps_total": ("counter", "Periods without data."),
    "tessera_sampler_cpu_seconds_total": ("counter", "CPU time of the sampling thread."),
    "tessera_sampler_memory_bytes": ("gauge", "Memory that holds the samples."),
    "tessera_build_info": ("info", "Version of tessera."),
}
"""Every metric with its type and help; a test checks that the dashboard uses these names."""

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float | None]
Application = Callable[..., Iterable[bytes]]
"""A WSGI application, which answers a request."""
_TEXT = ("Content-Type", "text/plain; charset=utf-8")
_INDEX = (
    b'<!doctype html><meta name="color-scheme" content="light dark"><title>tessera</title>'
    b'<p>tessera serves <a href="/metrics">/metrics</a></p>\n'
)


def import_client() -> Any:
    """Return the package prometheus_client, or an error that says how to install it."""
    with needs_extra("prometheus_client", "prometheus", "tessera metrics"):
        import prometheus_client
        import prometheus_client.core
    return prometheus_client


def dashboard() -> str:
    """Return the Grafana dashboard (JSON) that goes with these metrics."""
    return (resources.files(__package__) / "grafana.json").read_text(encoding="utf-8")


def make_families(metrics: Mapping[str, tuple[str, str]], samples: Iterable[Sample]) -> Iterator[Any]:
    """Yield the families of the metrics that have samples; unknown values are left out."""
    known: dict[str, list[tuple[Labels, float]]] = {}
    for name, labels, value in samples:
        if value is not None:
            known.setdefault(name, []).append((labels, value))
    core = import_client().core
    kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
    for name, (kind, text) in metrics.items():
        if kind == "info":
            yield core.InfoMetricFamily(name.removesuffix("_info"), text, value={"version": __version__})
        elif rows := known.get(name):
            family = kinds[kind](name, text, labels=list(rows[0][0]))
            for labels, value in rows:
                family.add_metric(list(labels.values()), value)
            yield family


class SnapshotCollector:
    """Takes a snapshot at each scrape and turns it into metric families."""

    def __init__(self, look: Callable[[], Snapshot], requested: Iterable[str] = ()) -> None:
        self._look = look
        self._requested = tuple(requested)
        self._lock = threading.Lock()  # two scrapes at the same time must not both move the ledger
        self._reasons: dict[str, set[str]] = {}

    def collect(self) -> Iterator[Any]:
        """Yield the families that have samples now."""
        with self._lock:
            samples = list(self._samples(self._look()))
        yield from make_families(METRICS, samples)

    def _samples(self, snapshot: Snapshot) -> Iterator[Sample]:
        for r in snapshot.readings:
            yield from _power(r)
            yield "tessera_gaps_total", {"domain": r.domain}, float(r.gaps)
            yield "tessera_crest_factor", {"domain": r.domain}, r.crest_factor
            if r.telemetry is not None and r.lost is None:
                yield from _state(r.telemetry)
                yield from self._throttle(r.telemetry)
        for domain, counts in snapshot.events.items():
            for kind, count in counts.items():
                yield "tessera_power_events_total", {"domain": domain, "kind": kind}, float(count)
        if (cost := snapshot.cost) is not None:
            yield "tessera_energy_cost_total", {"currency": cost.currency}, cost.cost
            yield "tessera_emissions_grams_total", {}, cost.gco2e
        sensors = {name: False for name in self._requested if name in snapshot.missing} | dict(snapshot.sensors)
        for name, up in sensors.items():
            yield "tessera_sensor_up", {"sensor": name}, float(up)
        for owner, total in snapshot.owners:
            labels = {"user": owner.user or "", "job": owner.job or "", "pod": owner.pod or ""}
            yield "tessera_job_energy_joules_total", {**labels, "part": "cpu"}, total.cpu_j
            yield "tessera_job_energy_joules_total", {**labels, "part": "gpu"}, total.gpu_j
            yield "tessera_job_power_watts", labels, total.power_w
            yield "tessera_job_cpu_seconds_total", labels, total.cpu_s
            yield "tessera_job_gpu_memory_bytes", labels, total.gpu_memory_bytes
        yield "tessera_sampler_cpu_seconds_total", {}, snapshot.sampler_cpu_s
        yield "tessera_sampler_memory_bytes", {}, float(snapshot.sampler_bytes)

    def _throttle(self, t: Telemetry) -> Iterator[Sample]:
        """Yield reasons: current ones are 1; earlier ones, and those with a time of their own, are 0 and not absent."""
        if t.throttle is not None:
            reasons = self._reasons.setdefault(t.domain, set())
            reasons |= {*t.throttle, *(t.throttled_s or {})}
            for reason in sorted(reasons):
                yield "tessera_throttle", {"domain": t.domain, "reason": reason}, float(reason in t.throttle)
        for reason, seconds in (t.throttled_s or {}).items():
            yield "tessera_throttled_seconds_total", {"domain": t.domain, "reason": reason}, seconds


def _power(r: DomainReading) -> Iterator[Sample]:
    # The domain's own source, not the window's, which changes ("+counter") and would begin a new time series.
    labels = {"domain": r.domain, "source": r.source, "basis": r.basis, "label": r.label}
    seen = r.coverage > 0  # 0 J before the first sample is not a measurement
    if r.counted:
        yield "tessera_energy_joules_total", labels, r.energy_j if seen else None
        yield "tessera_energy_error_joules", labels, r.error_j if seen else None
        yield "tessera_power_watts", labels, r.power_w
    else:
        yield "tessera_overlapping_energy_joules_total", labels, r.energy_j if seen else None
        yield "tessera_overlapping_power_watts", labels, r.power_w


def _state(t: Telemetry) -> Iterator[Sample]:
    domain = {"domain": t.domain}
    yield "tessera_power_limit_watts", domain, t.power_limit_w
    yield "tessera_temperature_celsius", {**domain, "part": "core"}, t.temperature_c
    yield "tessera_temperature_celsius", {**domain, "part": "memory"}, t.memory_temperature_c
    for clock, mhz in t.clocks_mhz.items():
        yield "tessera_clock_hertz", {**domain, "clock": clock}, mhz * 1e6
    yield "tessera_current_amperes", domain, t.current_a
    yield "tessera_peak_current_amperes", domain, t.peak_current_a
    yield "tessera_memory_used_bytes", domain, t.memory_used_bytes
    yield "tessera_memory_size_bytes", domain, t.memory_total_bytes
    yield "tessera_utilization_ratio", domain, _ratio(t.utilization_pct)
    yield "tessera_sm_activity_ratio", domain, _ratio(t.sm_activity_pct)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100.0


def registry(collector: Any) -> Any:
    """Return a separate registry: the process's default one would add python_gc_* and others."""
    own = import_client().CollectorRegistry(auto_describe=False)
    own.register(collector)
    return own


def format_metrics(collector: SnapshotCollector) -> str:
    """Return the text that a scrape gets."""
    text: bytes = import_client().generate_latest(registry(collector))
    return text.decode()


# -- the server --------------------------------------------------------------------------------------------------


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # a silent client must not hold a thread for ever

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because scrapes are not news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind as HTTPServer does, but without asking DNS for our own name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach it."""
        return ipaddress.ip_address(self.server_name.partition("%")[0]).is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hangs up; the WSGI handler reports everything else."""


def bind(family: socket.AddressFamily, address: tuple[str, int]) -> _Server:
    """Bind the address; OSError if that fails. Nothing is answered before `serve`."""
    return _Server(family, address)


@contextlib.contextmanager
def serve(server: _Server, collector: SnapshotCollector) -> Iterator[None]:
    """Answer /metrics in a separate thread inside the `with`."""
    with serve_app(server, _only_metrics(import_client().make_wsgi_app(registry(collector)))):
        yield


@contextlib.contextmanager
def serve_app(server: _Server, app: Application) -> Iterator[None]:
    """Answer GET requests in a separate thread inside the `with`.

    A server that only this machine can reach answers only requests that name this machine.
    """
    server.set_app(_only_get(app, local=server.is_loopback))
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="tessera-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


def _only_get(answer: Application, *, local: bool) -> Application:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [_TEXT, ("Allow", "GET")])
            return [b"only GET is answered\n"]
        if local and not _names_loopback(environ.get("HTTP_HOST", "")):
            start_response("421 Misdirected Request", [_TEXT])
            return [b"ask for http://localhost: other names are not answered here\n"]
        return answer(environ, start_response)

    return app


def _only_metrics(metrics: Application) -> Application:
    """Answer GET /metrics and a tiny index; prometheus_client's own application answers any path with the metrics."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/":
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
            return [_INDEX]
        start_response("404 Not Found", [_TEXT])
        return [b"not found: the metrics are at /metrics\n"]

    return app


def _names_loopback(host: str) -> bool:
    """Return whether a Host header is an address, localhost or this machine's name.

    A web page may let its own name resolve to this machine ("DNS rebinding"), and then read what only this machine may
    read: its requests carry the page's name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name not in ("", "localhost", socket.gethostname().lower()):
            ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
