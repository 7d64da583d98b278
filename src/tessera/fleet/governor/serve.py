"""The governor's process: a socket, TLS, signals, and a tick every heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from ...errors import ArgumentError, GovernorError
from .app import GovernorApp, refuse_request
from .http_server import HttpServer
from .service import GovernorService
from .tokens import TokenFile


def make_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a server's context for TLS 1.2 or newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as exc:
        raise ArgumentError(
            f"the certificate {certificate} and the key {key} cannot be used",
            why=str(exc),
            fix="give both in PEM form; docs/howto/governor.md shows how to make them with openssl",
        ) from exc
    return context


def bind_listener(family: socket.AddressFamily, address: tuple[str, int], *, tls: bool) -> socket.socket:
    """Return a socket that listens. Without TLS, only this machine may reach it."""
    if not tls and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise ArgumentError(
            f"the governor does not listen on {address[0]} without TLS",
            why="a token that is sent in the clear can be read and used by others",
            fix="give --tls-cert and --tls-key, or listen on 127.0.0.1",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as exc:
        listener.close()
        raise GovernorError(
            f"cannot listen on {address[0]} port {address[1]}",
            why=exc.strerror or str(exc),
            fix="stop the program that uses it (ss -ltnp shows it), or give another --listen",
        ) from exc
    return listener


async def serve_governor(
    service: GovernorService,
    tokens: TokenFile,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    started: Callable[[], None] = lambda: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`. Raises GovernorError if the disk refuses: nothing is answered then."""
    app = GovernorApp(service, tokens)
    server = HttpServer(app.handle, listener, tls=tls, refuse=refuse_request)
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: then `stop` is used
            loop.add_signal_handler(signum, stop.set)
    server.start()
    started()
    ticking = asyncio.create_task(_tick(app, service.policy.heartbeat_s))
    stopping = asyncio.create_task(stop.wait())
    try:
        ends: list[asyncio.Future[object]] = [stopping, app.failed, ticking]  # type: ignore[list-item]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if app.failed.done():
            raise app.failed.result()
        if ticking.done():
            ticking.result()
    finally:
        for task in (ticking, stopping):
            task.cancel()
        await server.close()
        app.close()


async def _tick(app: GovernorApp, period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        await app.tick()
