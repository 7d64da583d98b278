"""Sends a run to OpenTelemetry over OTLP/HTTP: power, joules, temperatures and memory as metrics, regions as spans.

Everything carries the time at which it was recorded. Names, units and attributes are those of OpenTelemetry's semantic
conventions for hardware (`hw.*`); what has no name there is under `tessera.*`.
"""

from __future__ import annotations

import logging
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, TesseraError, needs_extra
from ..runfile_format import version
from .otlp_points import MetricPoints, Span, series, spans

if TYPE_CHECKING:
    from ...recording import Facts, Recording

_BATCH = 2_000  # points or spans in a request: some 300 kB, which every collector accepts


@dataclass(frozen=True, slots=True)
class Otlp:
    """`profile.otlp("http://localhost:4318")`. Keys for a collector belong into `headers`, which are never shown.

    Power and joules are sent every `period_s` (0: every sample). If there are more than `max_spans` regions, the
    longest are sent. No request takes longer than `timeout_s`, retries included.
    """

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    period_s: float = 1.0
    timeout_s: float = 10.0
    max_spans: int = 10_000

    def __post_init__(self) -> None:
        if "@" in self.endpoint:  # do not repeat its text here: messages and reports show the endpoint
            raise ArgumentError(
                "the OTLP endpoint has a user or a password in it",
                why="an endpoint is shown in what is printed",
                fix='headers={"Authorization": ...}, or OTEL_EXPORTER_OTLP_HEADERS in the environment',
            )

    def check(self) -> None:
        """Raise an error if the endpoint is not a valid URL; a session asks before its work begins."""
        _base(self.endpoint)

    def write(self, recording: Recording) -> str:
        """Send the run; return a line that says what was sent where."""
        base = _base(self.endpoint)
        with needs_extra("opentelemetry-exporter-otlp-proto-http", "otel", "profile.otlp"):
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        _reach(base, self.timeout_s)
        resource = Resource.create(_resource(recording.facts))
        metrics = list(series(recording, self.period_s))
        chosen, left_out = spans(recording, self.max_spans)
        made_spans = _make_spans(resource, chosen)
        with _capture_logs() as logs:
            parts = (_metrics_data(resource, part) for part in _batches(metrics))
            self._send(OTLPMetricExporter, f"{base}/v1/metrics", parts, logs)
            batches = (made_spans[i : i + _BATCH] for i in range(0, len(made_spans), _BATCH))
            self._send(OTLPSpanExporter, f"{base}/v1/traces", batches, logs)
        points = sum(len(s.points) for s in metrics)
        short = f"; {left_out} shorter regions were left out" if left_out else ""
        names = len({s.name for s in metrics})
        return f"{base}: {points} points of {names} metrics, {len(made_spans)} spans{short}"

    def _send(self, exporter_class: Any, url: str, parts: Iterable[Any], logs: Sequence[str]) -> None:
        exporter = exporter_class(endpoint=url, headers=dict(self.headers), timeout=self.timeout_s)
        try:
            for part in parts:
                try:
                    if exporter.export(part).name == "SUCCESS":
                        continue
                    why = logs[-1] if logs else "it gave no reason"
                except OSError as exc:  # older versions of the SDK let requests' errors through
                    why = str(exc)
                raise TesseraError(
                    f"{url} did not take the run",
                    why=why,
                    fix="look into the collector's log; its HTTP receiver takes protobuf at /v1/metrics and /v1/traces",
                )
        finally:
            exporter.shutdown()


def _base(endpoint: str) -> str:
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, a port beyond 65535
        is_valid = False
    if not is_valid:
        raise ArgumentError(f"{endpoint!r} is not an OTLP endpoint", fix='give a URL such as "http://localhost:4318"')
    base = endpoint.rstrip("/")
    for path in ("/v1/metrics", "/v1/traces"):
        base = base.removesuffix(path)
    return base


def _reach(base: str, timeout_s: float) -> None:
    """Raise an error at once if nobody listens: the SDK would try for `timeout_s` and only log."""
    parts = urllib.parse.urlsplit(base)
    host = str(parts.hostname)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return  # only the proxy can tell whether it reaches the server
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as exc:
        raise TesseraError(
            f"no server answers at {base}", why=str(exc),
            fix="start a collector there (4318 is its usual HTTP port), or give another endpoint",
        ) from exc  # fmt: skip


def _resource(facts: Facts) -> dict[str, Any]:
    about = {
        "service.name": facts.title,
        "host.name": str(facts.meta.get("host") or facts.host),
        "process.pid": facts.pid,
        "tessera.run": facts.name,
    }
    rank = facts.meta.get("rank")
    return about | ({"tessera.rank": int(rank)} if rank is not None else {})


@contextmanager
def _capture_logs() -> Iterator[list[str]]:
    """Collect what the SDK logs: only there it says why a request failed, and it must not write to our stderr."""
    logs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("opentelemetry")
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logs
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


def _metrics_data(resource: Any, metrics: Sequence[MetricPoints]) -> Any:
    """Convert points to the SDK's own data."""
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    sdk_metrics = []
    for m in metrics:
        attributes = dict(m.attributes)
        points = [
            sdk.NumberDataPoint(attributes=attributes, start_time_unix_nano=m.start_ns, time_unix_nano=t, value=v)
            for t, v in m.points
        ]
        cumulative = sdk.AggregationTemporality.CUMULATIVE
        data = sdk.Sum(points, cumulative, m.monotonic) if m.sums else sdk.Gauge(points)
        sdk_metrics.append(sdk.Metric(name=m.name, description=m.description, unit=m.unit, data=data))
    scopes = [sdk.ScopeMetrics(scope=InstrumentationScope("tessera", version()), metrics=sdk_metrics, schema_url="")]
    return sdk.MetricsData([sdk.ResourceMetrics(resource=resource, scope_metrics=scopes, schema_url="")])


def _make_spans(resource: Any, chosen: Sequence[Span]) -> list[Any]:
    """Make the regions spans of one trace, each a child of the region around it."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON  # ignore what the environment says about live traces
    from opentelemetry.trace import set_span_in_context

    tracer = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False).get_tracer(
        "tessera", version()
    )
    sdk_spans: list[Any] = []
    for span in chosen:
        context = None if span.parent is None else set_span_in_context(sdk_spans[span.parent])
        one = tracer.start_span(span.name, context, start_time=span.start_ns, attributes=span.attributes)
        one.end(span.end_ns)
        sdk_spans.append(one)
    return sdk_spans


def _batches(metrics: Sequence[MetricPoints]) -> Iterator[list[MetricPoints]]:
    """Split metrics so that no request has more than `_BATCH` points."""
    part: list[MetricPoints] = []
    room = _BATCH
    for whole in metrics:
        rest = whole
        while rest.points:
            head, rest = rest.split_points(room)
            part.append(head)
            room -= len(head.points)
            if room == 0:
                yield part
                part, room = [], _BATCH
    if part:
        yield part
