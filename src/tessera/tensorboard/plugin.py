"""`TesseraPlugin`: the routes that TensorBoard serves below /data/plugin/tessera/."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from ..errors import TesseraError
from ..report.html import policy
from .compare import compare_runs
from .runs import RunDirectory, parse_roots

MAX_COMPARED = 12
# Only TensorBoard, which has the same origin, may show the plugin in a frame.
_FRAME = "frame-ancestors 'self'"
_PLAIN = f"default-src 'none'; style-src 'unsafe-inline'; {_FRAME}"

App = Callable[..., Any]


class TesseraPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # tensorboard has no types
    """Serves the energy of recorded runs: a page for each run, and their totals side by side."""

    plugin_name = "tessera"

    def __init__(self, context: Any) -> None:
        self._runs = RunDirectory(parse_roots(context.logdir, context.flags))

    def get_plugin_apps(self) -> dict[str, App]:
        """Return every route; none takes a path."""
        return {
            "/index.js": _static("index.js", "text/javascript"),
            "/index.css": _static("index.css", "text/css"),
            "/runs": self._app(self._list),
            "/page": self._app(self._page),
            "/compare": self._app(self._compare),
        }

    def is_active(self) -> bool:
        """Return whether there is a run to show."""
        return bool(self._runs.list())

    def frontend_metadata(self) -> Any:
        """Return the module that draws into TensorBoard's frame."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Energy")

    def _app(self, answer: Callable[[Any], Any]) -> App:
        def app(request: Any) -> Any:
            if request.method not in ("GET", "HEAD"):
                return _reply("only GET is answered", "text/plain", 405)
            return answer(request)

        served: App = wrappers.Request.application(app)
        return served

    def _list(self, request: Any) -> Any:
        rows = [
            {
                "run": run.name,
                "modified": datetime.fromtimestamp(run.modified_ns * 1e-9, UTC).strftime("%Y-%m-%d %H:%M UTC"),
                "mib": round(run.size / 2**20, 1),
                "version": f"{run.modified_ns}-{run.size}",
            }
            for run in self._runs.list().values()
        ]
        return _json({"runs": rows, "looked_in": [str(root) for root in self._runs.roots.values()]})

    def _page(self, request: Any) -> Any:
        run = self._runs.list().get(request.args.get("run", ""))
        if run is None:
            return _error_page("There is no such run", "It may have been moved or deleted: reload the page.", 404)
        try:
            return _reply(self._runs.page(run), "text/html", policy=f"{policy()}; {_FRAME}")
        except TesseraError as exc:
            return _error_page(f"{run.name} cannot be shown", str(exc), 422)

    def _compare(self, request: Any) -> Any:
        answers, failed = [], []
        for name in list(dict.fromkeys(request.args.getlist("run")))[:MAX_COMPARED]:
            run = self._runs.list().get(name)
            if run is None:
                failed.append({"run": name, "error": "there is no such run"})
                continue
            try:
                answers.append((run.name, self._runs.answer(run)))
            except TesseraError as exc:
                failed.append({"run": name, "error": str(exc)})
        return _json({**compare_runs(answers), "failed": failed})


def _static(name: str, kind: str) -> App:
    def app(request: Any) -> Any:
        return _reply(resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8"), kind)

    served: App = wrappers.Request.application(app)
    return served


def _json(data: Any) -> Any:
    return _reply(json.dumps(data, allow_nan=False), "application/json")


def _error_page(what: str, why: str, code: int) -> Any:
    body = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(what)}</title><style>:root{{color-scheme:"
        "light dark}body{font:14px/1.5 system-ui,sans-serif;margin:40px}</style>"
        f"<h1 style='font-size:18px'>{escape(what)}</h1><p style='white-space:pre-wrap'>{escape(why)}</p></html>"
    )
    return _reply(body, "text/html", code)


def _reply(text: str, kind: str, code: int = 200, *, policy: str = _PLAIN) -> Any:
    """Return a response with the headers that TensorBoard requires: its exact type, a policy, no caching."""
    headers = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-cache"), ("Referrer-Policy", "same-origin")]
    if kind == "text/html":
        headers.append(("Content-Security-Policy", policy))
    return wrappers.Response(text, status=code, content_type=f"{kind}; charset=utf-8", headers=headers)
