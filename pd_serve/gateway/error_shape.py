"""Every error leaves in OpenAI's shape, with its own status, whether it was streamed or not.

vLLM's application answers a streamed request with 200 before it knows how the request fares. Here the head of a stream
waits for the first event: when that is an error, the client gets an ordinary error answer instead of a stream. What the
web framework says itself (an unknown path, a wrong method) is put into the same shape.
"""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any

from pd_serve.errors import PdServeError
from pd_serve.gateway.asgi import App, Message, Receive, Scope, Send, header
from pd_serve.path import failure
from pd_serve.path.failure import Failure

_EVENT = b"data: "
_ERROR_EVENT = b'data: {"error":'


class OneErrorShape:
    """Writes typed errors by the table in `pd_serve.errors`; errors that the application shaped stay as they are."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with failure.watched() as failed:
            answer = _Answer(send, failed)
            try:
                await self._app(scope, receive, answer.send)
            except Exception:
                if failed.error is None:
                    raise
                await answer.fail(failed.error)


class _Answer:
    """One response on its way out."""

    def __init__(self, send: Send, failed: Failure) -> None:
        self._send = send
        self._failed = failed
        self._held: Message | None = None
        self._body = b""
        self._started = False
        self._over = False

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body" and self._held is not None:
            await self._held_body(self._held, message)
        else:
            await self._send(self._reworded(message))

    async def _start(self, message: Message) -> None:
        if self._failed.error is not None and message["status"] >= 400:
            await self.fail(self._failed.error, message)
        elif message["status"] >= 400 or _is_stream(message):
            self._held = message
        else:
            await self._release(message)

    async def _release(self, *messages: Message) -> None:
        self._held = None
        self._started = True
        for message in messages:
            await self._send(message)

    async def _held_body(self, head: Message, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body") and not (_is_stream(head) and self._body):
            return
        if not _is_stream(head):
            await self._error_answer(head, {**message, "body": self._body})
        elif error := _error_in(self._body):
            if self._failed.error is not None:
                await self.fail(self._failed.error, head)
            else:
                await self._plain(int(error.get("code") or 500), {"error": error}, None, head)
        else:
            await self._release(head, message)

    async def _error_answer(self, head: Message, message: Message) -> None:
        words = _unshaped(head, message["body"])
        if words is None:
            await self._release(head, message)
        else:
            kind = "invalid_request_error" if head["status"] < 500 else "server_error"
            error = {"message": words, "type": kind, "param": None, "code": head["status"]}
            await self._plain(head["status"], {"error": error}, None, head)

    def _reworded(self, message: Message) -> Message:
        """The error event of a stream that broke, with the typed error in it."""
        error = self._failed.error
        if error is None or not message.get("body", b"").startswith(_ERROR_EVENT):
            return message
        return {**message, "body": _EVENT + json.dumps(error.to_openai()).encode() + b"\n\n"}

    async def fail(self, error: PdServeError, head: Message | None = None) -> None:
        """Answer with `error`, unless an answer has begun. `head` is the start that it takes the place of."""
        if not self._started and not self._over:
            await self._plain(error.status, error.to_openai(), error.retry_after_s, head)

    async def _plain(self, status: int, body: Any, retry_after_s: float | None, head: Message | None) -> None:
        self._over = True
        content = json.dumps(body).encode()
        headers = [one for one in (head or {}).get("headers", ()) if not one[0].lower().startswith(b"content-")]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(retry_after_s)).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})


def _is_stream(head: Message) -> bool:
    return (header(head, b"content-type") or b"").startswith(b"text/event-stream")


def _error_in(body: bytes) -> dict[str, Any] | None:
    """The error object, when the body begins with an error event."""
    if not body.startswith(_ERROR_EVENT):
        return None
    event = json.loads(body[len(_EVENT) :].split(b"\n\n", 1)[0])
    error: dict[str, Any] = event["error"]
    return error


def _unshaped(head: Message, body: bytes) -> str | None:
    """What an error says that is in none of the application's own shapes: plain text, nothing, or a bare detail."""
    if not (header(head, b"content-type") or b"").startswith(b"application/json"):
        return body.decode("utf-8", "replace") or HTTPStatus(head["status"]).phrase
    try:
        content = json.loads(body)
    except ValueError:
        return HTTPStatus(head["status"]).phrase
    return str(content["detail"]) if isinstance(content, dict) and content.keys() == {"detail"} else None
