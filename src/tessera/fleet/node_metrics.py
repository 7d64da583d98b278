"""One node's `tessera metrics`, asked over HTTP and summed up: watts, temperature, caps, throttling, events."""

from __future__ import annotations

import dataclasses
import http.client
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..errors import ArgumentError, needs_extra
from ..units import format_power
from .node_floor import PlacementNode

TIMEOUT_S = 3.0
# Most bytes of an answer: a node with 16 GPUs and a hundred jobs has some 300 KB.
MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """What a node's endpoint tells; None: it does not. `problem` is why there is no answer.

    `basis` is that of the watts: "modelled" if any part of them is; "file" if no endpoint was asked.
    """

    power_w: float | None = None
    basis: str = "measured"
    temperature_c: float | None = None
    cap_w: float | None = None
    crest_factor: float | None = None
    energy_j: float | None = None
    throttled: tuple[str, ...] = ()
    events: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


def ask_endpoint(url: str) -> NodeReading:
    """Ask an endpoint once. A node that does not answer is a reading with a problem, not an error."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ArgumentError(f"{url!r} is not the address of metrics", fix='such as "http://n1:9400/metrics"')
    kind = http.client.HTTPConnection if parts.scheme == "http" else http.client.HTTPSConnection
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/metrics")
        response = connection.getresponse()
        data = response.read(MOST_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        return NodeReading(problem=f"no answer: {str(error) or type(error).__name__}")
    finally:
        connection.close()
    if response.status != 200 or len(data) > MOST_BYTES:
        return NodeReading(problem=f"its answer cannot be used: status {response.status}, {len(data):,} bytes")
    return read_metrics(data.decode("utf-8", errors="replace"))


def read_metrics(text: str) -> NodeReading:
    """Return the sum of a node's metrics. Watts are those of the counted domains, or else of the whole node's meter."""
    with needs_extra("prometheus_client", "prometheus", "reading nodes' metrics"):
        from prometheus_client.parser import text_string_to_metric_families
    values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    values.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        return NodeReading(problem=f"its answer is not Prometheus text: {str(error)[:120]}")
    if not any(name.startswith("tessera_") for name in values):
        return NodeReading(problem="its answer has no metrics of Tessera")
    whole = [s for s in values.get("tessera_overlapping_power_watts", ()) if s[0].get("domain") == "node"]
    powers = whole[:1] or values.get("tessera_power_watts", [])
    bases = [labels.get("basis", "measured") for labels, _ in powers]
    events: dict[str, int] = {}
    for labels, count in values.get("tessera_power_events_total", ()):
        events[labels.get("kind", "")] = events.get(labels.get("kind", ""), 0) + round(count)
    reasons = {labels.get("reason", "") for labels, on in values.get("tessera_throttle", ()) if on}
    return NodeReading(
        power_w=sum(w for _, w in powers) if powers else None,
        basis=next((basis for basis in bases if basis != "measured"), "measured"),
        temperature_c=max((c for _, c in values.get("tessera_temperature_celsius", ())), default=None),
        cap_w=sum(w for _, w in values.get("tessera_power_limit_watts", ())) or None,
        crest_factor=max((c for _, c in values.get("tessera_crest_factor", ())), default=None),
        energy_j=sum(j for _, j in values.get("tessera_energy_joules_total", ())) or None,
        throttled=tuple(sorted(reasons)),
        events=events,
    )


def fill_nodes(nodes: Sequence[PlacementNode], endpoints: Mapping[str, str]) -> tuple[list[PlacementNode], list[str]]:
    """Return the nodes with the temperatures and watts from their endpoints now, and why some do not answer.

    A node whose watts nobody knows counts at its maximum: it may be busy, and a feed that is planned without it trips.
    One that answers draws its idle watts at least: where it says less, its sensors do not see all of it.
    """
    filled, problems = [], []
    for node in nodes:
        if node.name not in endpoints:
            filled.append(node)
            continue
        reading = ask_endpoint(endpoints[node.name])
        power_w = reading.power_w
        if power_w is None:
            power_w = node.power_w if node.max_w is None else node.max_w
            problems.append(f"{node.name}: {reading.problem or 'its answer has no watts'}; {_say_counted(node)}")
        elif power_w < node.idle_w:
            seen = f"its sensors see {format_power(power_w)} of it"
            problems.append(f"{node.name}: {seen}; it counts with its idle {format_power(node.idle_w)}")
            power_w = node.idle_w
        temperature_c = node.temperature_c if reading.temperature_c is None else reading.temperature_c
        filled.append(dataclasses.replace(node, temperature_c=temperature_c, power_w=power_w))
    return filled, problems


def _say_counted(node: PlacementNode) -> str:
    if node.max_w is not None:
        return f"it counts with its maximum of {format_power(node.max_w)}"
    known = "the power" if node.power_w is not None else "the idle watts and the jobs"
    return f"it counts with {known} of the file, for that has no maximum (max: 7.6kW)"
