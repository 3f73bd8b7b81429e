"""Who may ask: an ASGI middleware in front of everything, closed by default."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from pd_serve.gateway.asgi import App, Receive, Scope, Send
from pd_serve.gateway.keys import KeyRing
from pd_serve.path import context

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
"""Answered to anyone: they say nothing but whether the application works."""

logger = logging.getLogger(__name__)


class Access:
    """Lets a request through when it has a key, or, without keys, when only this machine can reach the server.

    Args:
        keys: empty means that no key is configured.
        loopback_only: the HTTP server listens on a loopback address.
        metrics_open: `/metrics` needs no key (scrapers inside a trusted network).
    """

    def __init__(self, app: App, keys: KeyRing, *, loopback_only: bool, metrics_open: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._loopback_only = loopback_only
        self._open = OPEN_PATHS | ({"/metrics"} if metrics_open else frozenset())
        if not keys and loopback_only:
            logger.warning("no API keys: open to everyone on this machine (see `access` in docs/config.md)")
        if not keys and not loopback_only:
            logger.error("no API keys and reachable from other machines: every request is refused")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in self._open:
            await self._app(scope, receive, send)
        elif self._keys:
            await self._with_key(scope, receive, send)
        elif self._loopback_only:
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, receive, send, 403, "this server has no API keys and is not on a loopback address")

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._keys.find(_presented(scope.get("headers", ())))
        if key is None:
            await _refuse(scope, receive, send, 401, "a valid API key is needed: Authorization: Bearer <key>")
            return
        token = context.tenant.set(key.tenant)
        try:
            await self._app(scope, receive, send)
        finally:
            context.tenant.reset(token)


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key of the `Authorization: Bearer` or `x-api-key` header; empty when there is none, or more than one."""
    found = []
    for name, value in headers:
        if name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
        elif name.lower() == b"x-api-key":
            found.append(value.strip())
    return found[0] if len(found) == 1 else b""


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str) -> None:
    """Answer without reading the body, or close a WebSocket before it is accepted."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": message})
        return
    code = "invalid_api_key" if status == 401 else "no_api_keys"
    body = json.dumps(
        {"error": {"message": message, "type": "authentication_error", "param": None, "code": code}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
