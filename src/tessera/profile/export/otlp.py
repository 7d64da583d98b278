"""OpenTelemetry: power, joules, temperatures and memory as `hw.*` metrics, regions as spans, over OTLP/HTTP.

Everything carries the time it was recorded at, not the time it is sent. Names, units and attributes are those of
OpenTelemetry's semantic conventions for hardware; what they have no name for is under `tessera.*`.
"""

from __future__ import annotations

import logging
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, MissingExtra, TesseraError
from ..runfile_format import version
from .otlp_points import MetricPoints, series, service_name, spans

if TYPE_CHECKING:
    from ...recording import Facts, Recording

_BATCH = 2_000  # points or spans a request: some 300 kB, below what any collector refuses


@dataclass(frozen=True, slots=True)
class Otlp:
    """`profile.otlp("http://localhost:4318")`. Keys of a collector go into `headers`, which are shown nowhere.

    Power and joules are sent every `period_s` (0: every sample). At most `max_spans` regions are sent, the longest.
    No request takes longer than `timeout_s`, retries included.
    """

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    period_s: float = 1.0
    timeout_s: float = 10.0
    max_spans: int = 10_000

    def __post_init__(self) -> None:
        if "@" in self.endpoint:  # the text is not repeated: the endpoint is named in messages and reports
            raise ArgumentError(
                "the OTLP endpoint has a user or a password in it",
                why="an endpoint is shown in what is printed",
                fix='headers={"Authorization": ...}, or OTEL_EXPORTER_OTLP_HEADERS in the environment',
            )

    def write(self, recording: Recording) -> str:
        """Send the run, and say what was sent where."""
        base = _base(self.endpoint)
        sdk = _Sdk.load()
        _reach(base, self.timeout_s)
        resource = sdk.resource(_resource(recording.facts))
        made = list(series(recording, self.period_s))
        left_out = 0
        with _capture_logs() as said:
            points = sdk.metrics(
                f"{base}/v1/metrics", self.headers, self.timeout_s, resource, made, said
            )  # fmt: skip
            chosen, left_out = spans(recording, self.max_spans)
            sent = sdk.spans(f"{base}/v1/traces", self.headers, self.timeout_s, resource, chosen, said)
        short = f"; {left_out} shorter regions were left out" if left_out else ""
        return f"{base}: {points} points of {len({s.name for s in made})} metrics, {sent} spans{short}"


def _base(endpoint: str) -> str:
    try:
        parts = urllib.parse.urlsplit(endpoint)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, a port beyond 65535
        known = False
    if not known:
        raise ArgumentError(f"{endpoint!r} is not an OTLP endpoint", fix='give a URL such as "http://localhost:4318"')
    base = endpoint.rstrip("/")
    for path in ("/v1/metrics", "/v1/traces"):
        base = base.removesuffix(path)
    return base


def _reach(base: str, timeout_s: float) -> None:
    """Say at once that nobody listens: the SDK would try for `timeout_s` and only log."""
    parts = urllib.parse.urlsplit(base)
    host = str(parts.hostname)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return  # the proxy reaches it, perhaps; we do not
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
        "service.name": service_name(facts),
        "host.name": str(facts.meta.get("host") or facts.host),
        "process.pid": facts.pid,
        "tessera.run": facts.name,
    }
    rank = facts.meta.get("rank")
    return about | ({"tessera.rank": int(rank)} if rank is not None else {})


@contextmanager
def _capture_logs() -> Iterator[list[str]]:
    """What the SDK logs meanwhile: it says why a request failed nowhere else, and must not say it on our stderr."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("opentelemetry")
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


def _send(exporter: Any, data: Any, success: Any, url: str, said: Sequence[str]) -> None:
    try:
        if exporter.export(data) is success:
            return
        why = said[-1] if said else "it gave no reason"
    except OSError as exc:  # older versions of the SDK let requests' errors through
        why = str(exc)
    raise TesseraError(
        f"{url} did not take the run",
        why=why,
        fix="look into the collector's log; its HTTP receiver takes protobuf at /v1/metrics and /v1/traces",
    )


@dataclass(frozen=True, slots=True)
class _Sdk:
    """The parts of OpenTelemetry's SDK that are used; Any, since the package is optional."""

    metric: Any
    metric_exporter: Any
    resources: Any
    scope: Any
    trace: Any
    trace_api: Any
    span_exporter: Any

    @classmethod
    def load(cls) -> _Sdk:
        try:
            from opentelemetry import trace as trace_api
            from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
            from opentelemetry.sdk import resources, trace
            from opentelemetry.sdk.metrics import export
            from opentelemetry.sdk.util import instrumentation
        except ImportError as exc:
            raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otel", "profile.otlp") from exc
        return cls(
            export, metric_exporter.OTLPMetricExporter, resources, instrumentation.InstrumentationScope, trace,
            trace_api, trace_exporter.OTLPSpanExporter,
        )  # fmt: skip

    def resource(self, attributes: Mapping[str, Any]) -> Any:
        return self.resources.Resource.create(attributes)

    def metrics(
        self, url: str, headers: Mapping[str, str], timeout_s: float, resource: Any, made: Sequence[MetricPoints],
        said: Sequence[str],
    ) -> int:  # fmt: skip
        """Send the points, and say how many there were."""
        exporter = self.metric_exporter(endpoint=url, headers=dict(headers), timeout=timeout_s)
        sent = 0
        try:
            for part in _batches(made):
                data = self._metrics_data(resource, part)
                _send(exporter, data, self.metric.MetricExportResult.SUCCESS, url, said)
                sent += sum(len(s.points) for s in part)
        finally:
            exporter.shutdown()
        return sent

    def _metrics_data(self, resource: Any, made: Sequence[MetricPoints]) -> Any:
        m = self.metric
        metrics = []
        for s in made:
            points = [
                m.NumberDataPoint(
                    attributes=dict(s.attributes), start_time_unix_nano=s.start_ns, time_unix_nano=t, value=v
                )
                for t, v in s.points
            ]
            cumulative = m.AggregationTemporality.CUMULATIVE
            data = m.Sum(points, cumulative, s.monotonic) if s.sums else m.Gauge(points)
            metrics.append(m.Metric(name=s.name, description=s.description, unit=s.unit, data=data))
        scope = self.scope("tessera", version())
        scopes = [m.ScopeMetrics(scope=scope, metrics=metrics, schema_url="")]
        return m.MetricsData([m.ResourceMetrics(resource=resource, scope_metrics=scopes, schema_url="")])

    def spans(
        self, url: str, headers: Mapping[str, str], timeout_s: float, resource: Any, chosen: Sequence[Any],
        said: Sequence[str],
    ) -> int:  # fmt: skip
        """Send the regions as spans of one trace; each inside the one it lies in."""
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON  # whatever the environment says of live traces

        provider = self.trace.TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        tracer = provider.get_tracer("tessera", version())
        made: list[Any] = []
        for span in chosen:
            context = None if span.parent is None else self.trace_api.set_span_in_context(made[span.parent])
            one = tracer.start_span(span.name, context, start_time=span.start_ns, attributes=span.attributes)
            one.end(span.end_ns)
            made.append(one)
        exporter = self.span_exporter(endpoint=url, headers=dict(headers), timeout=timeout_s)
        source = iter(made)
        try:
            while part := list(islice(source, _BATCH)):
                _send(exporter, part, SpanExportResult.SUCCESS, url, said)
        finally:
            exporter.shutdown()
        return len(made)


def _batches(made: Sequence[MetricPoints]) -> Iterator[list[MetricPoints]]:
    """MetricPoints cut so that no request has more than a batch of points."""
    part: list[MetricPoints] = []
    room = _BATCH
    for whole in made:
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
