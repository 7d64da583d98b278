"""The HTTP API as a table: every route with its role, its body and its answer; and the OpenAPI document made from it.

Bodies are strict: an unknown key, a wrong type or a number out of range is an error, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..leases import BudgetStatus, CapGrant, Emergency, EndedEmergency, JobStatus, NodeStatus
from .tokens import Role

NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}$(?!\n)"
"""Names of jobs, nodes, users and sessions: they stand in paths, logs and screens. Python's $ allows a line break."""
JSON, TEXT = "application/json", "text/plain; version=0.0.4; charset=utf-8"
"""What a call answers with; the text is that of Prometheus."""
MOST_W, MOST_S = 1e9, 90 * 86400.0

Name = Annotated[str, Meta(pattern=NAME)]
Watts = Annotated[float, Meta(gt=0, le=MOST_W)]
WattsOrNone = Annotated[float, Meta(ge=0, le=MOST_W)]
Seconds = Annotated[float, Meta(gt=0, le=MOST_S)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object without unknown keys."""


class JobBody(_Body, frozen=True, kw_only=True):
    """A job asks for watts, by node. The same body again is the same job."""

    job: Name
    watts: Annotated[dict[Name, Watts], Meta(min_length=1, max_length=4096)]
    priority: Annotated[int, Meta(ge=0, le=9)] = 5
    user: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:@=+-]{0,128}$(?!\n)")] = ""
    min_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    ttl_s: Seconds = 60.0
    soft_start_s: Annotated[float, Meta(ge=0, le=3600)] | None = None


class RenewBody(_Body, frozen=True, kw_only=True):
    """How long the lease lasts from now; as long as was asked at first where it is left out."""

    ttl_s: Seconds | None = None


class JoinBody(_Body, frozen=True, kw_only=True):
    """A daemon will speak for a node, under a session of its own."""

    guaranteed_w: WattsOrNone
    session: Name
    max_w: Watts | None = None


class HeartbeatBody(_Body, frozen=True, kw_only=True):
    """What a node obeys (`acked`: the highest grant in force) and draws."""

    session: Name
    acked: Annotated[int, Meta(ge=0)] = 0
    measured_w: WattsOrNone | None = None


class PowerBody(_Body, frozen=True, kw_only=True):
    """A reading of the rack's own meter."""

    measured_w: WattsOrNone


class EmergencyBody(_Body, frozen=True, kw_only=True):
    """Why, and down to how many watts; to the guaranteed shares where it is left out."""

    reason: Annotated[str, Meta(min_length=1, max_length=200)]
    to_w: WattsOrNone | None = None


class HealthAnswer(_Body, frozen=True, kw_only=True):
    """The governor answers."""

    ok: bool = True


class ErrorText(_Body, frozen=True, kw_only=True):
    """What happened, why, and what to do; `code` is for programs."""

    code: str
    what: str
    why: str
    fix: str


class ErrorAnswer(_Body, frozen=True, kw_only=True):
    """Any answer with a status of 400 or more."""

    error: ErrorText


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. `call` names the method of GovernorService; `{node}` or `{job}` in the path is its argument."""

    method: str
    path: str
    call: str
    role: Role | None
    summary: str
    body: Any = None
    answer: Any = None
    media: str = JSON


ROUTES = (
    Route("GET", "/v1/health", "", None, "Whether the governor answers. Needs no token.", answer=HealthAnswer),
    Route("GET", "/v1/openapi.json", "", None, "This document. Needs no token."),
    Route("GET", "/v1/status", "describe", Role.READ, "The whole budget: nodes, jobs, watts.", answer=BudgetStatus),
    Route("GET", "/metrics", "", Role.READ, "The budget and counts of events, for Prometheus.", media=TEXT),
    Route("POST", "/v1/jobs", "request", Role.JOB, "Ask for watts.", JobBody, JobStatus),
    Route("GET", "/v1/jobs/{job}", "show_job", Role.READ, "Where a job stands.", answer=JobStatus),
    Route("POST", "/v1/jobs/{job}/renew", "renew", Role.JOB, "Let a lease last from now.", RenewBody, JobStatus),
    Route("DELETE", "/v1/jobs/{job}", "release", Role.JOB, "End a job.", answer=JobStatus),
    Route("POST", "/v1/nodes/{node}/join", "join", Role.NODE, "Speak for a node.", JoinBody, NodeStatus),
    Route(
        "POST", "/v1/nodes/{node}/heartbeat", "heartbeat", Role.NODE, "Renew a node's lease.", HeartbeatBody, CapGrant
    ),
    Route("DELETE", "/v1/nodes/{node}", "remove", Role.OPERATOR, "Take a node out for good."),
    Route("POST", "/v1/power", "report_power", Role.NODE, "Report the rack's own meter (a PDU).", PowerBody),
    Route(
        "POST", "/v1/emergency", "declare_emergency", Role.OPERATOR, "Shed jobs, the lowest priority first.",
        EmergencyBody, Emergency,
    ),
    Route("DELETE", "/v1/emergency", "end_emergency", Role.OPERATOR, "End an emergency.", answer=EndedEmergency),
)  # fmt: skip


def describe_api() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    types = [t for r in ROUTES for t in (r.body, r.answer) if t is not None] + [ErrorAnswer]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(map(id, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        operation: dict[str, Any] = {
            "operationId": route.call or route.path.rsplit("/", 1)[1].removesuffix(".json"),
            "summary": route.summary,
            "security": [{"token": []}] if route.role else [],
            "responses": {
                "200": {"description": "done", **_describe_answer(route, by_type)},
                "default": {"description": "refused, or wrong", **_content(by_type[id(ErrorAnswer)])},
            },
        }
        names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": n, "in": "path", "required": True, "schema": {"type": "string", "pattern": NAME}}
                for n in names
            ]
        if route.body is not None:
            operation["requestBody"] = {"required": True, **_content(by_type[id(route.body)])}
        if route.role:
            operation["description"] = f"Role: {route.role}, or operator."
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tessera governor", "version": "1", "description": "The power budget of a rack or row."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_answer(route: Route, by_type: dict[int, Any]) -> dict[str, Any]:
    if route.media != JSON:
        return {"content": {route.media.partition(";")[0]: {"schema": {"type": "string"}}}}
    return _content(by_type.get(id(route.answer), {"type": "object"}))


def _content(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
