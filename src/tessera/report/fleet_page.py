"""The live page of a fleet: it asks its own server for history.json once, and for fleet.json again and again."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from ..fleet.status import FleetPoller, FleetStatus
from .fleet_watch import HOT_C, json_line
from .html import THEME_BUTTON, table, template
from .metrics import Application

_NODES = (
    ("node", False), ("rack", False), ("power", True), ("cap", True), ("lease", True), ("temperature", True),
    ("crest factor", True), ("near trips", True), ("notes", False),
)  # fmt: skip
_JOBS = (("job", False), ("state", False), ("granted", True), ("asked", True), ("ends in", True), ("why", False))
_EVENTS = (("time", False), ("node", False), ("event", False), ("count", True))
HISTORY = 600
"""Number of polls whose watts by rack are kept for the plot of a page that is opened later."""
_PLAIN = ("Content-Type", "text/plain; charset=utf-8")


class StatusFeed:
    """Polls a fleet in its own thread and keeps the newest status."""

    def __init__(self, poller: FleetPoller, interval_s: float) -> None:
        self._poller, self._interval_s = poller, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-fleet", daemon=True)
        self._newest: FleetStatus | None = None
        self._history: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=HISTORY)

    def __enter__(self) -> StatusFeed:
        self._poll()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def newest(self) -> FleetStatus | None:
        return self._newest

    def history(self) -> list[tuple[float, dict[str, float | None]]]:
        """Return the watts of each rack at the last polls, the oldest first."""
        return list(self._history)

    def _poll(self) -> None:
        status = self._newest = self._poller.poll()
        self._history.append((status.epoch_s, {rack.name: rack.power_w for rack in status.racks}))

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._poll()


def fleet_page(interval_s: float, hot_c: float = HOT_C) -> str:
    """Return the page, which is the same for every state: its data come from fleet.json and history.json."""
    body = (
        f"<header><div class='top'><h1>Fleet</h1>{THEME_BUTTON}</div><p class='dim' id='when'>asking ...</p></header>"
        "<p class='warn' id='lost' role='alert' hidden></p><div id='problems' role='alert'></div>"
        "<div class='tiles' id='tiles'></div><h2>Racks</h2><div id='racks'></div>"
        "<h2>Power by rack</h2><svg id='chart' role='img' aria-label='Power by rack over time'></svg>"
        "<ul class='legend' id='legend'></ul>"
        f"<h2>Nodes</h2><div id='nodes'>{table(_NODES, '', caption='Nodes, hottest first', kind='')}</div>"
        f"<section id='leases' hidden><h2>Leases</h2><div id='jobs'>{table(_JOBS, '', caption='Jobs', kind='')}</div>"
        "</section><h2>Events</h2><p class='dim' id='noevents'>none since this page's server started</p>"
        f"<div id='events'>{table(_EVENTS, '', caption='Events, newest first', kind='')}</div>"
    )
    script = template("fleet.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'"
    policy += "; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Fleet - Tessera</title>'
        f"<style>{template('run.css')}{template('fleet.css')}</style></head>"
        f"<body data-period='{escape(f'{interval_s:g}')}' data-hot='{escape(f'{hot_c:g}')}'><main>{body}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def fleet_app(feed: StatusFeed, page: str, metrics: Application) -> Application:
    """Answers /, /fleet.json, /history.json and /metrics."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/":
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
            return [page.encode()]
        if path == "/fleet.json":
            status = feed.newest()
            if status is None:
                start_response("503 Service Unavailable", [_PLAIN])
                return [b"the nodes have not been asked yet\n"]
            start_response("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
            return [json_line(status)]
        if path == "/history.json":
            start_response("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
            return [json.dumps(feed.history()).encode()]
        if path == "/metrics":
            return metrics(environ, start_response)
        start_response("404 Not Found", [_PLAIN])
        return [b"not found: /, /fleet.json, /history.json and /metrics are served\n"]

    return app
