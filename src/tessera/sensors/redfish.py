"""Power of chassis, power supplies and rack PDUs, and their over-current events, from a Redfish service.

    RedfishConfig ──► RedfishClient (_redfish_http)      TLS, credentials, bounds
                          │
                      Walker (_redfish_walk)             what there is, once, at start
                          │
                      RedfishSensor (here)               reads it again and again: samples, currents, events

None of these domains counts: a chassis or a PDU contains the GPUs and CPUs that other sensors count. A request takes
10 ms to seconds, so `read` must run on a background thread. If the service is dead, that costs one timeout in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ..clock import NS_PER_S, Clock, EpochMap, now_ns
from ..errors import SensorLost, SensorPermission, SensorUnavailable
from ..schema import Capability, Domain, PowerEvent, Telemetry
from ._meters import PolledPower
from ._redfish_http import Json, RedfishClient, RedfishConfig, RequestFailed
from ._redfish_walk import RedfishPoint, RedfishReading, Survey, Walker, collection, link, mapping, text
from .base import Batch
from .ipmi import classify_event

__all__ = ["RedfishConfig", "RedfishSensor"]

# NEC (NFPA 70) 210.20(A), 215.3: a breaker is rated at 125% of its continuous load, so a lasting load above 80% of its
# rating may trip it.
NEAR_TRIP = 0.80
# Assumed: an alarm ends below this, so that a load right at the threshold is not reported again and again.
NEAR_TRIP_REARM = 0.75
# Assumed: supplies and PDUs meter within about 3%; the Redfish excerpts read here carry no accuracy.
GAIN_ERROR = 0.03
# A PDU has tens of circuits with one request each. They take turns, so that one read stays short.
CIRCUITS_PER_READ = 8
EVENTS_PERIOD_S = 10.0
# The time allowed for the first survey: a slow BMC may need some 60 requests of a second each.
START_S = 120.0
# How many failures in a row mean that the sensor is lost. One lost answer is common while a BMC is busy.
FAILURES_TO_LOSE = 3


@dataclass(slots=True, kw_only=True)
class _Watch:
    """One point that is read, and the state of its readings and alarms."""

    point: RedfishPoint
    power: PolledPower
    alarms: set[str] = field(default_factory=set)
    read_ns: int | None = None

    def take(self, batch: Batch, time_ns: int, reading: RedfishReading) -> None:
        """Turn a reading into a sample or a gap, telemetry and events."""
        if reading.power_w is not None:
            self.power.observe(batch, power_w=reading.power_w, time_ns=time_ns, stamp=reading.stamp)
        elif self.point.has_power:
            self.power.fail(batch, time_ns, reading.problem)
        values = (reading.current_a, reading.peak_current_a, reading.voltage_v, reading.power_limit_w)
        if any(value is not None for value in values):
            batch.telemetry.append(
                Telemetry(
                    time_ns=time_ns,
                    domain=self.point.domain,
                    current_a=reading.current_a,
                    peak_current_a=reading.peak_current_a,
                    voltage_v=reading.voltage_v,
                    power_limit_w=reading.power_limit_w,
                )
            )
        self._judge(batch, time_ns, reading)
        self.read_ns = time_ns

    def _judge(self, batch: Batch, time_ns: int, reading: RedfishReading) -> None:
        current_a, rating_a = reading.current_a, reading.rating_a
        if current_a is not None and rating_a is not None and rating_a > 0:
            threshold = NEAR_TRIP_REARM if "breaker_near_trip" in self.alarms else NEAR_TRIP
            near = f"{current_a:g} A is {current_a / rating_a:.0%} of the {rating_a:g} A rating"
            self._alarm(batch, time_ns, "breaker_near_trip", near if current_a > threshold * rating_a else None)
        tripped = f"breaker of {self.point.label} tripped" if reading.breaker == "Tripped" else None
        self._alarm(batch, time_ns, "breaker_tripped", tripped)
        self._alarm(batch, time_ns, "psu_fault", reading.fault)

    def _alarm(self, batch: Batch, time_ns: int, kind: str, message: str | None) -> None:
        """Report a condition when it begins, and not again while it lasts."""
        if message is None:
            self.alarms.discard(kind)
        elif kind not in self.alarms:
            self.alarms.add(kind)
            # The condition began after the previous reading; if this is the first, nobody knows when.
            batch.events.append(
                PowerEvent(time_ns=time_ns, since_ns=self.read_ns, domain=self.point.domain, kind=kind, message=message)
            )

    def describe(self) -> Domain:
        """Return the domain with what is known of its sensor by now."""
        assumed = "" if self.power.refresh_seen else "refresh period assumed, not yet seen"
        notes = ("contains what other sensors count, so not counted", self.point.note, assumed)
        return Domain(
            name=self.point.domain,
            source="redfish",
            resolution_s=self.power.resolution_s,
            gain_error=GAIN_ERROR,
            counted=False,
            label=self.point.label,
            note="; ".join(filter(None, notes)),
        )


class RedfishSensor:
    """Reads node, power-supply and rack PDU power with currents and over-current events, over HTTPS."""

    name = "redfish"
    period_s = 1.0  # BMCs have something new about once a second

    def __init__(
        self,
        config: RedfishConfig,
        *,
        clock_ns: Callable[[], int] = now_ns,
        epoch: EpochMap | None = None,
        events_period_s: float = EVENTS_PERIOD_S,
    ) -> None:
        self._config = config
        self._clock_ns = clock_ns
        self._epoch = epoch or EpochMap(Clock(monotonic_ns=clock_ns))
        self._events_period_s = events_period_s
        self._client: RedfishClient | None = None
        self._watches: list[_Watch] = []
        self._logs: dict[str, set[str]] = {}
        self._capabilities: list[Capability] = []
        self._events_at_ns = 0
        self._next_circuit = 0
        self._failures = 0

    def start(self) -> None:
        """Connect, find what there is, and note which log entries are old."""
        self.stop()
        self._client = RedfishClient(self._config)
        try:
            self._adopt(Walker(self._get_until(time.monotonic() + START_S)).walk())
        except RequestFailed as error:
            self.stop()
            raise self._refusal(error) from None

    def _get_until(self, deadline_s: float) -> Callable[[object], Json]:
        """Return the client's `get` with a deadline, because a hostile service may describe itself for ever."""
        client = self._client
        assert client is not None

        def get(uri: object) -> Json:
            if time.monotonic() > deadline_s:
                raise RequestFailed("unreachable", f"it took longer than {START_S:g} s to describe itself")
            return client.get(uri)

        return get

    def _adopt(self, survey: Survey) -> None:
        if not survey.points:
            raise RequestFailed("status", "it describes no chassis, supply or PDU with a power reading")
        now = self._clock_ns()
        self._watches = [_Watch(point=p, power=PolledPower(p.domain, started_ns=now)) for p in survey.points]
        self._failures = 0
        self._logs, problems = {}, list(survey.problems)
        for path in survey.logs:
            try:
                self._logs[path] = {_key(entry) for entry in self._entries(path)}
            except RequestFailed as error:
                problems.append(error.reason)
        self._events_at_ns = now
        self._capabilities = [
            Capability(name=f"{p.domain}.power", available=True) for p in survey.points if p.has_power
        ]
        self._capabilities += [Capability(name="redfish.resource", available=False, reason=r) for r in problems]
        no_logs = None if self._logs else "the service has no readable log of power events"
        self._capabilities.append(Capability(name="redfish.events", available=bool(self._logs), reason=no_logs))

    def _refusal(self, error: RequestFailed) -> SensorPermission | SensorUnavailable:
        where = "{}:{}".format(*self._config.address)
        if error.kind == "denied":
            return SensorPermission(
                f"the Redfish service at {where} refuses the login",
                why=error.reason,
                fix="check the user name and password, and that the account may read (ReadOnly role)",
            )
        if error.kind == "tls":
            return SensorUnavailable(
                f"the Redfish service at {where} cannot be trusted",
                why=error.reason,
                fix="give ca_file=... with the CA (or the self-signed certificate) of this BMC in PEM form",
            )
        return SensorUnavailable(
            f"the Redfish service at {where} gives no power readings",
            why=error.reason,
            fix="check the address, and that Redfish is enabled on the BMC",
        )

    def domains(self) -> Sequence[Domain]:
        """Return the domains with a power reading. Their resolution is assumed until changes were seen."""
        return [watch.describe() for watch in self._watches if watch.point.has_power]

    def capabilities(self) -> Sequence[Capability]:
        return list(self._capabilities)

    def read(self) -> Batch:
        """Return samples, currents, alarms, and the power events logged since the last read."""
        if self._client is None:
            raise SensorLost("the Redfish sensor was not started", fix="call start() first")
        batch = Batch()
        answered, failure = self._read_points(batch)
        if answered:
            self._failures = 0
            self._read_logs(batch)
            return batch
        self._failures += 1
        if failure is not None and (failure.kind == "denied" or self._failures >= FAILURES_TO_LOSE):
            # Wrong credentials are not tried again every second, because that locks accounts.
            raise SensorLost(
                "the Redfish service does not answer any more",
                why=failure.reason,
                fix="check that the BMC is reachable, and its credentials unchanged",
            )
        return batch

    def _due(self) -> list[_Watch]:
        """Return what to read now: everything but circuits, and those circuits whose turn it is."""
        circuits = [w for w in self._watches if w.point.circuit]
        if len(circuits) > CIRCUITS_PER_READ:
            first = self._next_circuit % len(circuits)
            self._next_circuit = first + CIRCUITS_PER_READ
            circuits = (circuits + circuits)[first : first + CIRCUITS_PER_READ]
        return [w for w in self._watches if not w.point.circuit] + circuits

    def _read_points(self, batch: Batch) -> tuple[bool, RequestFailed | None]:
        """Read what is due, each resource once. Return whether any answered, and the last failure."""
        assert self._client is not None
        resources: dict[str, tuple[int, Json] | RequestFailed] = {}
        dead: RequestFailed | None = None
        failure: RequestFailed | None = None
        for watch in self._due():
            path = watch.point.path
            if dead is None and path not in resources:
                resources[path] = self._fetch(path)
            answer = resources.get(path, dead)
            if isinstance(answer, RequestFailed):
                failure = answer
                # The whole service is gone: asking for the rest would cost one timeout each.
                dead = answer if answer.kind in ("unreachable", "tls", "denied") else dead
                if watch.point.has_power:
                    watch.power.fail(batch, self._clock_ns(), answer.reason)
            elif answer is not None:
                watch.take(batch, answer[0], watch.point.parse(answer[1]))
        return any(isinstance(r, tuple) for r in resources.values()), failure

    def _fetch(self, path: str) -> tuple[int, Json] | RequestFailed:
        assert self._client is not None
        before_ns = self._clock_ns()
        try:
            resource = self._client.get(path)
        except RequestFailed as error:
            return error
        return (before_ns + self._clock_ns()) // 2, resource

    def _entries(self, path: str) -> list[Json]:
        assert self._client is not None
        return collection(self._client.get, path)

    def _read_logs(self, batch: Batch) -> None:
        now = self._clock_ns()
        if now - self._events_at_ns < self._events_period_s * NS_PER_S:
            return
        self._epoch.observe()
        since_ns, self._events_at_ns = self._events_at_ns, now
        for path, seen in self._logs.items():
            try:
                entries = self._entries(path)
            except RequestFailed:
                continue  # the log is not power data: the next round sees what this one missed
            for entry in entries:
                if _key(entry) not in seen:
                    self._log_event(batch, entry, since_ns, now)
            self._logs[path] = {_key(entry) for entry in entries}

    def _log_event(self, batch: Batch, entry: Json, since_ns: int, now: int) -> None:
        message = text(entry.get("Message")) or text(entry.get("MessageId")) or ""
        words = " ".join(text(entry.get(key)) or "" for key in ("MessageId", "Message", "SensorType", "EntryCode"))
        kind = classify_event(words)
        if kind is not None:
            begun_ns, time_ns = self._logged_ns(entry, since_ns, now)
            domain = self._origin(link(mapping(entry.get("Links")), "OriginOfCondition"))
            batch.events.append(
                PowerEvent(time_ns=time_ns, since_ns=begun_ns, domain=domain, kind=kind, message=message)
            )

    def _logged_ns(self, entry: Json, since_ns: int, now: int) -> tuple[int, int]:
        """Return the earliest and the latest time when an entry was made; a BMC's clock is often wrong."""
        try:
            created = datetime.fromisoformat(str(entry.get("Created")))
        except ValueError:
            return since_ns, now
        if created.tzinfo is None:
            return since_ns, now
        time_ns = self._epoch.to_monotonic(round(created.timestamp() * NS_PER_S))
        if not since_ns <= time_ns <= now:
            return since_ns, now
        # Most logs have whole seconds: the event happened within the second after its stamp.
        return time_ns, time_ns if created.microsecond else min(time_ns + NS_PER_S, now)

    def _origin(self, uri: object) -> str:
        """Return the domain of a log entry: the one read under its origin, or the first one."""
        for watch in self._watches:
            if isinstance(uri, str) and f"{watch.point.path}/".startswith(f"{uri}/"):
                return watch.point.domain
        return self._watches[0].point.domain

    def stop(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _key(entry: Json) -> str:
    """Return a key that differs between log entries, even after the log was cleared and Ids start again."""
    return f"{entry.get('@odata.id') or entry.get('Id')} {entry.get('Created')}"
