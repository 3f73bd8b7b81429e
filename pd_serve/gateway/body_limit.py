"""Bodies that are too large are refused before they are held in memory."""

from __future__ import annotations

from pd_serve.errors import TooLarge
from pd_serve.gateway.asgi import App, Message, Receive, Scope, Send, header
from pd_serve.path import failure


class BodyLimit:
    """Answers 413 to bodies of more than `max_bytes`: at once when the client says how long it is, else while reading.

    Stands inside of `OneErrorShape`, which writes the answer.
    """

    def __init__(self, app: App, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_bytes:
            raise self._refusal()
        read = 0

        async def receive_bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, receive_bounded, send)

    def _refusal(self) -> TooLarge:
        error = TooLarge(f"the request body is larger than {self._max_bytes} bytes")
        failure.note(error)
        return error
