"""Talks to one Redfish service: HTTPS with the certificate checked, over one kept-alive connection.

A BMC is a small computer behind a slow link, and a compromised one must not harm its clients. So there are no
redirects and no proxies, only paths on the configured host are asked for, and the size and time of every answer are
bounded. The password goes into one header and nowhere else: not into errors, representations or logs.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from ..errors import ArgumentError

Json = dict[str, Any]

# The largest resources are log collections of tens of KiB a page; an answer above this is an error or an attack.
MAX_BODY_BYTES = 4 << 20
# The socket's timeout bounds one wait. A whole answer may take this many timeouts: a dripping server is cut off.
DEADLINE_TIMEOUTS = 2.0
_CHUNK_BYTES = 1 << 16


FailureKind = Literal["unreachable", "tls", "denied", "status", "malformed"]
"""No connection, no trust, wrong credentials (all three concern the whole service), or one resource that is useless."""


class RequestFailed(Exception):
    """A request failed: `reason` is a text for people, the sensor acts on `kind`."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        self.kind = kind
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True)
class RedfishConfig:
    """The address and account of a Redfish service. `ca_file` is the CA of its certificate, in PEM form."""

    url: str
    username: str
    password: str = field(repr=False)
    ca_file: str | None = None
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        parts = _split_url(self.url)
        if parts is None or parts[2] not in ("", "/", "/redfish/v1", "/redfish/v1/"):
            # The URL itself is not repeated: people put passwords into URLs.
            raise ArgumentError(
                "the Redfish URL is not of the form https://host[:port]",
                why="only HTTPS is supported, and username and password are separate arguments",
                fix='RedfishConfig(url="https://bmc.example", username=..., password=...)',
            )
        if not self.username or ":" in self.username:
            raise ArgumentError("the Redfish user name is empty or has a colon", fix="give the BMC account's name")
        if not 0 < self.timeout_s < 600:
            raise ArgumentError(f"timeout_s={self.timeout_s} is not between 0 and 600", fix="e.g. timeout_s=5.0")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> RedfishConfig | None:
        """Read TESSERA_REDFISH_URL, _USER, _PASSWORD and optionally _CA_FILE; None if no URL is set."""
        url = environ.get("TESSERA_REDFISH_URL")
        if not url:
            return None
        return cls(
            url=url,
            username=environ.get("TESSERA_REDFISH_USER", ""),
            password=environ.get("TESSERA_REDFISH_PASSWORD", ""),
            ca_file=environ.get("TESSERA_REDFISH_CA_FILE") or None,
        )

    @property
    def address(self) -> tuple[str, int]:
        parts = _split_url(self.url)
        assert parts is not None  # checked in __post_init__
        return parts[0], parts[1]


def _split_url(url: str) -> tuple[str, int, str] | None:
    """Return host, port and path of an https URL without user, query and fragment; None for any other."""
    try:
        parts = urlsplit(url)
        port = parts.port or 443
    except ValueError:
        return None
    plain = not (parts.username or parts.password or parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme != "https" or not parts.hostname or not plain:
        return None
    return parts.hostname, port, parts.path


def local_path(uri: object, address: tuple[str, int]) -> str:
    """Return the path of a link on the configured host. Raises RequestFailed for a link that leads anywhere else."""
    text = uri if isinstance(uri, str) else ""
    if text.startswith("https://"):
        parts = _split_url(text)
        text = parts[2] if parts is not None and parts[:2] == address else ""
    safe = text.isascii() and text.isprintable() and not set(text) & set(" \\@")
    inside = text.startswith("/redfish/v1") and ".." not in text.split("?")[0].split("/")
    if not (safe and inside):
        raise RequestFailed("malformed", f"a link that leaves the service is not followed: {str(uri)[:80]!r}")
    return text


def tls_context(config: RedfishConfig) -> ssl.SSLContext:
    """Return TLS settings that check certificates against the system's CAs, or against `ca_file`."""
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ArgumentError(
            f"the CA file {config.ca_file} cannot be read", why=str(error), fix="give a PEM file with the BMC's CA"
        ) from error


class RedfishClient:
    """Gets resources as JSON objects. Must not be used by several threads at once."""

    def __init__(self, config: RedfishConfig, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._monotonic_s = monotonic_s
        self._tls = tls_context(config)
        self._connection: http.client.HTTPConnection | None = None

    def get(self, uri: object) -> Json:
        """Return the resource at a link. Raises RequestFailed."""
        path = local_path(uri, self._config.address)
        status, body = self._request(path)
        _check(status, path)
        return _parse(body, path)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, path: str) -> tuple[int, bytes]:
        """Send a request, and send it again if the kept-alive connection was closed in the meantime."""
        reused = self._connection is not None
        try:
            return self._exchange(path)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            self.close()
            if not reused:
                raise RequestFailed("unreachable", f"the service hung up: {type(error).__name__}") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(error) from None
        try:
            return self._exchange(path)
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(error) from None

    def _exchange(self, path: str) -> tuple[int, bytes]:
        config = self._config
        if self._connection is None:
            host, port = config.address
            self._connection = http.client.HTTPSConnection(host, port, timeout=config.timeout_s, context=self._tls)
        credentials = base64.b64encode(f"{config.username}:{config.password}".encode()).decode()
        headers = {
            "Accept": "application/json",
            "Authorization": f"Basic {credentials}",
            "OData-Version": "4.0",
            "User-Agent": "tessera",
        }
        limit_s = DEADLINE_TIMEOUTS * config.timeout_s
        deadline_s = self._monotonic_s() + limit_s
        cut_off = threading.Timer(limit_s, _hang_up, [self._connection])
        cut_off.daemon = True
        cut_off.start()
        try:
            self._connection.request("GET", path, headers=headers)
            return self._receive(self._connection.getresponse(), path, deadline_s)
        except (OSError, http.client.HTTPException):
            if self._monotonic_s() > deadline_s:
                raise TimeoutError from None
            raise
        finally:
            cut_off.cancel()

    def _receive(self, response: http.client.HTTPResponse, path: str, deadline_s: float) -> tuple[int, bytes]:
        content = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                self.close()
                raise RequestFailed("malformed", f"{path} answers with more than {MAX_BODY_BYTES >> 20} MiB")
            if self._monotonic_s() > deadline_s:
                raise TimeoutError
        if self._monotonic_s() > deadline_s:  # cut off: the end is not the answer's own
            raise TimeoutError
        response.read()  # read1 stops at the last byte; only a read past it frees the connection
        if response.will_close:
            self.close()
        return response.status, bytes(content)

    def _failure(self, error: OSError | http.client.HTTPException) -> RequestFailed:
        """Describe a connection's failure in our own words, because exception texts may quote headers."""
        self.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            return RequestFailed("tls", f"the certificate was not accepted: {error.verify_message}")
        if isinstance(error, ssl.SSLError):
            return RequestFailed("tls", f"TLS failed: {error.reason or type(error).__name__}")
        if isinstance(error, TimeoutError):
            return RequestFailed("unreachable", f"no answer within {self._config.timeout_s:g} s")
        if isinstance(error, OSError):
            return RequestFailed("unreachable", f"cannot connect: {error.strerror or type(error).__name__}")
        return RequestFailed("malformed", f"not an HTTP answer: {type(error).__name__}")


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Shut the socket down from another thread, so that a reader waiting for bytes returns at once."""
    with contextlib.suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def _check(status: int, path: str) -> None:
    # 403 is one resource this account may not see, not a wrong password (RFC 9110, 15.5.2 and 15.5.4).
    if status == 401:
        raise RequestFailed("denied", f"{path}: the service refused the credentials (HTTP {status})")
    if not 200 <= status < 300:
        raise RequestFailed("status", f"{path}: HTTP {status}")


def _parse(body: bytes, path: str) -> Json:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestFailed("malformed", f"{path}: not JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise RequestFailed("malformed", f"{path}: a JSON {type(value).__name__}, not an object")
    return value
