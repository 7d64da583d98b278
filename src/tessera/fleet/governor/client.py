"""Calls a governor over HTTP: what jobs, the command line and node daemons use."""

from __future__ import annotations

import http.client
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from ...errors import ArgumentError, GovernorError, GovernorRefusal
from ..leases import BudgetStatus, CapGrant, Emergency, EndedEmergency, JobStatus, NodeStatus, PowerRequest
from .http_server import BODY_BYTES
from .messages import ErrorAnswer
from .tokens import read_secret

URL_VARIABLE, TOKEN_VARIABLE = "TESSERA_GOVERNOR_URL", "TESSERA_GOVERNOR_TOKEN"
FILE_VARIABLE, CA_VARIABLE = "TESSERA_GOVERNOR_TOKEN_FILE", "TESSERA_GOVERNOR_CA"
DEFAULT_URL = "http://127.0.0.1:9410"
_ANSWER_BYTES = 64 << 20
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorAddress:
    """Where a governor is, its token (never shown), and the certificate that it must prove to have."""

    url: str
    token: str = ""
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ArgumentError(f"{self.url!r} is not a governor's address", fix=f"such as {DEFAULT_URL}")
        if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise ArgumentError(
                f"{self.url} would send the token in the clear",
                why="plain http is for this machine only",
                fix=f"https://{parts.netloc}, with --ca and the governor's certificate",
            )

    def __repr__(self) -> str:
        return f"GovernorAddress({self.url!r})"

    @classmethod
    def find(
        cls, url: str | None = None, token_file: Path | None = None, ca_file: Path | None = None
    ) -> GovernorAddress:
        """Make an address from arguments, or else from TESSERA_GOVERNOR_URL, _TOKEN_FILE (or _TOKEN) and _CA."""
        path = token_file or (Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None)
        ca = ca_file or (Path(os.environ[CA_VARIABLE]) if os.environ.get(CA_VARIABLE) else None)
        token = read_secret(path) if path is not None else os.environ.get(TOKEN_VARIABLE, "")
        return cls(url=url or os.environ.get(URL_VARIABLE) or DEFAULT_URL, token=token, ca_file=ca)


class GovernorClient:
    """One connection to a governor, opened again when it was lost. Not for several threads at once.

    A call that got no answer may be repeated: every call does the same twice as once. `GovernorRefusal` means that the
    governor refused, `GovernorError` that it could not be reached.
    """

    def __init__(self, address: GovernorAddress, *, timeout_s: float = 10.0) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def request(self, request: PowerRequest) -> JobStatus:
        """Ask for watts."""
        return self._call("POST", "/v1/jobs", JobStatus, msgspec.to_builtins(request))

    def show_job(self, job: str) -> JobStatus:
        """Return the state of a job."""
        return self._call("GET", f"/v1/jobs/{quote(job, safe='')}", JobStatus)

    def renew(self, job: str, ttl_s: float | None = None) -> JobStatus:
        """Let a job's lease last from now."""
        return self._call("POST", f"/v1/jobs/{quote(job, safe='')}/renew", JobStatus, {"ttl_s": ttl_s})

    def release(self, job: str) -> JobStatus:
        """End a job."""
        return self._call("DELETE", f"/v1/jobs/{quote(job, safe='')}", JobStatus)

    def join(self, node: str, guaranteed_w: float, *, session: str, max_w: float | None = None) -> NodeStatus:
        """Register as the daemon of a node."""
        body = {"guaranteed_w": guaranteed_w, "session": session, "max_w": max_w}
        return self._call("POST", f"/v1/nodes/{quote(node, safe='')}/join", NodeStatus, body)

    def heartbeat(self, node: str, *, session: str, acked: int, measured_w: float | None) -> CapGrant:
        """Renew a node's lease."""
        body = {"session": session, "acked": acked, "measured_w": measured_w}
        return self._call("POST", f"/v1/nodes/{quote(node, safe='')}/heartbeat", CapGrant, body)

    def remove(self, node: str) -> None:
        """Remove a node for good."""
        self._call("DELETE", f"/v1/nodes/{quote(node, safe='')}", dict)

    def report_power(self, measured_w: float) -> None:
        """Report the rack's own meter."""
        self._call("POST", "/v1/power", dict, {"measured_w": measured_w})

    def declare_emergency(self, reason: str, to_w: float | None = None) -> Emergency:
        """Declare an emergency, which sheds jobs down to `to_w`."""
        return self._call("POST", "/v1/emergency", Emergency, {"reason": reason, "to_w": to_w})

    def end_emergency(self) -> EndedEmergency:
        """Let shed jobs come back."""
        return self._call("DELETE", "/v1/emergency", EndedEmergency)

    def describe(self) -> BudgetStatus:
        """Return the whole budget."""
        return self._call("GET", "/v1/status", BudgetStatus)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, method: str, path: str, kind: type[_T], body: Any = None) -> _T:
        fresh = self._connection is None
        try:
            status, data = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as exc:
            self.close()
            if fresh or isinstance(exc, TimeoutError):
                raise self._unreachable(exc) from exc
            try:  # a connection that was kept open may have been closed meanwhile
                status, data = self._exchange(method, path, body)
            except (OSError, http.client.HTTPException) as again:
                self.close()
                raise self._unreachable(again) from again
        try:
            if status != 200:
                error = msgspec.json.decode(data, type=ErrorAnswer).error
                raise GovernorRefusal(error.code, error.what, why=error.why, fix=error.fix)
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as exc:
            raise self._unreachable(exc) from exc

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._connect()
        data = None if body is None else msgspec.json.encode(body)
        if data is not None and len(data) > BODY_BYTES:
            raise ArgumentError("the request is too large for a governor", fix="use fewer nodes")
        headers = {"Authorization": f"Bearer {self.address.token}"} if self.address.token else {}
        if data is not None:
            headers["Content-Type"] = "application/json"
        self._connection.request(method, path, data, headers)
        response = self._connection.getresponse()
        answer = response.read(_ANSWER_BYTES)
        if response.will_close:
            self.close()
        return response.status, answer

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.address.url)
        assert parts.hostname is not None
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=self._timeout_s)
        try:
            tls = ssl.create_default_context(cafile=self.address.ca_file)
        except (OSError, ssl.SSLError) as exc:
            raise ArgumentError(
                f"the certificate {self.address.ca_file} cannot be used", why=str(exc), fix="give a file in PEM form"
            ) from exc
        return http.client.HTTPSConnection(parts.hostname, parts.port or 443, timeout=self._timeout_s, context=tls)

    def _unreachable(self, exc: Exception) -> GovernorError:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return GovernorError(
                f"the governor at {self.address.url} cannot be trusted",
                why=exc.verify_message,
                fix="give --ca with the certificate it was started with",
            )
        return GovernorError(
            f"the governor at {self.address.url} cannot be asked",
            why=str(exc) or type(exc).__name__,
            fix="check the address, and that `tessera governor serve` runs there",
        )
