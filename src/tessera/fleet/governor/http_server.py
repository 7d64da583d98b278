"""A small, strict HTTP/1.1 server on asyncio: one JSON body in, one out. Everything that a client can hold is bounded.

Anything that is not clearly right is refused and the connection closed: a line that is too long, a repeated header, a
body without a length, chunks, another method. If there are too many connections, those that have not shown a token are
closed first, so that slow or silent strangers cannot keep nodes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

HEAD_BYTES, BODY_BYTES = 8192, 512 << 10
"""The longest head and body of a request: a job of 4,096 nodes has 200 KB."""
CONNECTIONS = 512
REQUEST_S, IDLE_S = 10.0, 120.0
"""A request must be complete within REQUEST_S of its beginning; a client with a token may be silent for IDLE_S."""

_LINE = re.compile(r"([A-Z]{3,10}) (/[!-~]{0,1023}) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([ -~\t]*?)[ \t]*")
_ONCE = frozenset({"authorization", "connection", "content-length", "content-type", "expect", "host"})


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete request. Names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool
    peer: str = ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer, in JSON unless it says otherwise. `known`: the request carried a valid token."""

    status: int
    body: bytes
    known: bool = False
    media: str = "application/json"


class BadRequest(Exception):
    """A request that is answered only with this status; the connection then ends."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status, self.what = status, what


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection; `writer` is None until TLS is established."""

    sock: socket.socket
    known: bool = False
    task: asyncio.Task[None] | None = None
    writer: asyncio.StreamWriter | None = None
    running: bool = False

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        elif not self.running:  # a task that is cancelled before it begins closes nothing
            self.sock.close()
        if self.task is not None:
            self.task.cancel()


class HttpServer:
    """Serves one listening socket until `close`."""

    def __init__(
        self,
        handle: Handler,
        listener: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
        refuse: Callable[[int, str], bytes],
    ) -> None:
        self._handle, self._listener, self._tls, self._refuse = handle, listener, tls, refuse
        self._open: dict[_Connection, None] = {}  # in the order in which they came
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop accepting, and end what is open."""
        if self._accepting is not None:
            self._accepting.cancel()
        tasks = [c.task for c in self._open if c.task is not None]
        for connection in list(self._open):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next round
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:  # too many open files, or the client is already gone
                await asyncio.sleep(0.05)
                continue
            if len(self._open) >= CONNECTIONS and not self._make_room():
                sock.close()
                continue
            connection = _Connection(sock)
            self._open[connection] = None
            connection.task = asyncio.create_task(self._run(connection))

    def _make_room(self) -> bool:
        """Close the oldest connection without a token; return False if all have one."""
        for connection in self._open:
            if not connection.known:
                del self._open[connection]
                connection.abort()
                return True
        return False

    async def _run(self, connection: _Connection) -> None:
        connection.running = True
        try:
            await self._serve(connection)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client went away, was too slow, or had to make room
        finally:
            self._open.pop(connection, None)
            if connection.writer is None:
                connection.sock.close()
            else:
                connection.writer.transport.abort()

    async def _serve(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=HEAD_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        with contextlib.suppress(OSError):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection.sock,
            ssl=self._tls,
            ssl_handshake_timeout=REQUEST_S if self._tls else None,
            ssl_shutdown_timeout=1.0 if self._tls else None,
        )
        transport.set_write_buffer_limits(high=0)  # `drain` waits until the client has taken all
        writer = connection.writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        keep_alive = True
        while keep_alive:
            async with asyncio.timeout(IDLE_S if connection.known else REQUEST_S):
                first = await reader.readexactly(1)
            try:
                async with asyncio.timeout(REQUEST_S):
                    request = await self._read(reader, writer, first)
                response, keep_alive = await self._handle(request), request.keep_alive
            except BadRequest as exc:
                response, keep_alive = HttpResponse(exc.status, self._refuse(exc.status, exc.what)), False
            connection.known = connection.known or response.known
            async with asyncio.timeout(REQUEST_S):
                writer.write(_format(response, keep_alive))
                await writer.drain()
        writer.close()
        async with asyncio.timeout(1.0):
            await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> HttpRequest:
        try:
            head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise BadRequest(431, f"the head of a request has at most {HEAD_BYTES} bytes") from None
        method, path, headers, newer = _parse_head(head)
        if "transfer-encoding" in headers:
            raise BadRequest(501, "a body needs a Content-Length; chunks are not read")
        length = headers.get("content-length", "0" if method != "POST" else "")
        if not re.fullmatch(r"[0-9]{1,9}", length):
            raise BadRequest(411 if not length else 400, "a POST needs a Content-Length")
        if int(length) > BODY_BYTES:
            raise BadRequest(413, f"a body has at most {BODY_BYTES} bytes")
        if headers.get("expect", "").lower() == "100-continue" and int(length):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(length))
        closes = headers.get("connection", "").lower() == "close"
        peer = writer.get_extra_info("peername")
        where = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        return HttpRequest(method, path, headers, body, keep_alive=newer and not closes, peer=where)


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str], bool]:
    """Return method, path, headers, and whether it is HTTP/1.1."""
    try:
        first, *lines = head[:-4].decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise BadRequest(400, "the head of a request is ASCII") from None
    line = _LINE.fullmatch(first)
    if line is None:
        raise BadRequest(400, "the first line is not one of HTTP: GET, POST or DELETE, a path, HTTP/1.1")
    if line[1] not in ("GET", "POST", "DELETE"):
        raise BadRequest(405, f"{line[1]} is not a method of this API: GET, POST and DELETE are")
    headers: dict[str, str] = {}
    for text in lines:
        header = _HEADER.fullmatch(text)
        if header is None:
            raise BadRequest(400, "a header is not NAME: VALUE")
        name = header[1].lower()
        if name in headers and name in _ONCE:
            raise BadRequest(400, f"the header {name} comes twice")
        headers[name] = header[2]
    return line[1], line[2], headers, line[3] == "1"


def _format(response: HttpResponse, keep_alive: bool) -> bytes:
    closing = "" if keep_alive else "Connection: close\r\n"
    head = (
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
        f"Content-Type: {response.media}\r\nContent-Length: {len(response.body)}\r\nCache-Control: no-store\r\n"
        f"{closing}\r\n"
    )
    return head.encode() + response.body
