"""From a request to an answer: route, token, body, the budget's decision, the disk, and only then the answer."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import msgspec

from ...errors import ArgumentError, GovernorError, GovernorRefusal
from ..leases import PowerRequest
from .exposition import expose
from .http_server import HttpRequest, HttpResponse
from .messages import JSON, NAME, ROUTES, TEXT, ErrorAnswer, ErrorText, HealthAnswer, JobBody, Route, describe_api
from .service import GovernorService
from .tokens import GovernorToken, Role, TokenFile

_STATUS = {"unknown_node": 404, "unknown_job": 404, "too_large": 422, "conflict": 409, "busy": 409, "full": 429}
_NAME = re.compile(NAME)


class GovernorApp:
    """Answers requests. Changes of many requests are written together while the next ones are decided."""

    def __init__(self, service: GovernorService, tokens: TokenFile) -> None:
        self.service, self.tokens = service, tokens
        self.failed: asyncio.Future[GovernorError] = asyncio.get_running_loop().create_future()
        """Set when the disk refuses: the process must end, because its memory is ahead of the disk."""
        self._document = msgspec.json.encode(describe_api())
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tessera-store")
        self._next: asyncio.Future[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._decoders = {r.body: msgspec.json.Decoder(r.body, strict=True) for r in ROUTES if r.body is not None}

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the answer to a request, once what it changed is on disk."""
        known, code, media = False, "", JSON
        try:
            route, name = _find_route(request)
            media = route.media
            token = None
            if route.role is not None:
                token = self._check_token(request, route, name)
                known = True
            status, body = 200, self._call(route, name, request, token)
        except _Refused as exc:
            status, code, body = exc.status, exc.code, _encode_error(exc.code, exc.what, exc.why, exc.fix)
        except GovernorRefusal as exc:
            status, code = _STATUS.get(exc.code, 409), exc.code
            body = _encode_error(code, exc.what, exc.why, exc.fix)
        except ArgumentError as exc:
            status, code, body = 400, "bad_request", _encode_error("bad_request", exc.what, exc.why, exc.fix)
        if code:
            media = JSON
            self.service.journal.refuse(code, request.peer, f"{request.method} {request.path[:200]}")
        if self.service.is_changed:
            await self._save()
        return HttpResponse(status, body, known, media)

    def _check_token(self, request: HttpRequest, route: Route, name: str | None) -> GovernorToken:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        token = self.tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None and secret:
            why = "it was revoked, belongs to another governor, or was cut short"
            raise _Refused(401, "unauthorized", "this token is not one of this governor", why, _NEW_TOKEN)
        if token is None:
            what = "a token is needed: Authorization: Bearer tsg_..."
            raise _Refused(401, "unauthorized", what, "none was given", _NEW_TOKEN)
        assert route.role is not None
        if not token.may(route.role, name if route.role is Role.NODE else None):
            what = f"this token ({token.role} {token.name!r}) may not do that"
            raise _Refused(403, "forbidden", what, f"it needs {_describe_role(route.role, name)}", _NEW_TOKEN)
        if route.role is Role.JOB and name is not None and token.role is not Role.OPERATOR:
            owner = self.service.budget.find_job(name).owner
            if owner not in ("", token.name):
                what = f"this token ({token.role} {token.name!r}) may not do that"
                why = f"job {name!r} was asked for by the token {owner!r}"
                raise _Refused(403, "forbidden", what, why, "use that token, or one of an operator")
        return token

    def _call(self, route: Route, name: str | None, request: HttpRequest, token: GovernorToken | None) -> bytes:
        if route.media == TEXT:
            return expose(self.service.describe(), self.service.journal.counts).encode()
        if not route.call:
            return msgspec.json.encode(HealthAnswer()) if route.answer is HealthAnswer else self._document
        keywords: dict[str, Any] = {}
        if route.body is not None:
            keywords = _as_keywords(self._decode(route, request))
            if route.body is JobBody and token is not None:
                keywords["owner"] = token.name
        elif request.body:
            raise _Refused(400, "bad_request", "this call has no body", f"{len(request.body)} bytes came with it")
        answer = getattr(self.service, route.call)(*([] if name is None else [name]), **keywords)
        return msgspec.json.encode({} if answer is None else answer)

    def _decode(self, route: Route, request: HttpRequest) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            why = f"its Content-Type is {kind!r}"
            raise _Refused(415, "bad_request", "the body is not called JSON", why, "Content-Type: application/json")
        try:
            return self._decoders[route.body].decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise _Refused(
                400, "bad_request", "the body cannot be used", str(exc) or "it is nested too deeply"
            ) from None

    # -- the disk ---------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Wait until all changes so far are on disk. Changes that come meanwhile are written together after them."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await asyncio.shield(self._next)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._next is not None:
            done, self._next = self._next, None
            rows = self.service.take_changes()
            try:
                await loop.run_in_executor(self._writer, self.service.store.write, rows)
            except GovernorError as exc:
                if not self.failed.done():
                    self.failed.set_result(exc)
                return  # no request gets an answer, because what was decided is not on disk
            if not done.done():
                done.set_result(None)

    async def tick(self) -> None:
        """Advance the clock without a request."""
        self.service.advance()
        self.service.look_for_silence()
        if self.service.is_changed:
            await self._save()

    def close(self) -> None:
        """Write what is not written yet, and close the file."""
        self._writer.shutdown(wait=True)
        if not self.failed.done():
            self.service.store.write(self.service.take_changes())
        self.service.store.close()


_READ_API = "GET /v1/openapi.json describes every call"
_NEW_TOKEN = (
    "on the governor's machine, with the --state of its `serve`: tessera governor token create NAME --role ROLE --out "
    "FILE (for a node, NAME is the node's); then give --token-file FILE"
)


class _Refused(Exception):
    """A request that does not reach the budget."""

    def __init__(self, status: int, code: str, what: str, why: str, fix: str | None = None) -> None:
        super().__init__(what)
        self.status, self.code, self.what, self.why, self.fix = status, code, what, why, fix


def _find_route(request: HttpRequest) -> tuple[Route, str | None]:
    parts = request.path.split("/")
    allowed = []
    for route in ROUTES:
        names = _match(route.path.split("/"), parts)
        if names is None:
            continue
        if route.method == request.method:
            return route, names[0] if names else None
        allowed.append(route.method)
    if allowed:
        why = f"this path takes {' or '.join(allowed)}"
        raise _Refused(405, "not_found", f"{request.method} is not a method of this path", why)
    raise _Refused(
        404, "not_found", "there is no such path", "no call of this API has it, or a name in it cannot be one"
    )


def _match(template: list[str], parts: list[str]) -> list[str] | None:
    if len(template) != len(parts):
        return None
    names = []
    for want, part in zip(template, parts, strict=True):
        if want.startswith("{"):
            name = unquote(part)
            if not _NAME.fullmatch(name):
                return None
            names.append(name)
        elif want != part:
            return None
    return names


def _as_keywords(body: Any) -> dict[str, Any]:
    """Return the fields of a body as the service's arguments; a job is a single argument."""
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    return {"request": PowerRequest(**fields)} if isinstance(body, JobBody) else fields


def _describe_role(role: Role, name: str | None) -> str:
    return f"the role {role} of the name {name!r}, or operator" if role is Role.NODE and name else f"the role {role}"


def _encode_error(code: str, what: str, why: str | None, fix: str | None) -> bytes:
    text = ErrorText(code=code, what=what, why=why or "the request asks for what cannot be", fix=fix or _READ_API)
    return msgspec.json.encode(ErrorAnswer(error=text))


def refuse_request(status: int, what: str) -> bytes:
    """Return the body of the answer to something that is not a request."""
    return _encode_error("bad_request", what, f"the request is not one of HTTP that this server reads ({status})", None)
