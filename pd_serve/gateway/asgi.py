"""The shapes of ASGI that the gateway's middleware is written in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(message: Message | Scope, name: bytes) -> bytes | None:
    """Value of a header (`name` in lower case) of a request scope or a response's start, or None."""
    for key, value in message.get("headers", ()):
        if key.lower() == name:
            return bytes(value)
    return None
