"""A client that left, in the words that the application listens for."""

from __future__ import annotations

import asyncio

from pd_serve.gateway.asgi import App, Message, Receive, Scope, Send

LEAVE_S = 5.0
"""How long a handler may take to end after its client left, before it is cancelled."""


class DisconnectOnCancel:
    """Ray Serve cancels the task of a request whose client left. vLLM's handlers run in tasks of their own and would go
    on to their last token; they stop at `http.disconnect`, so that is what the cancellation becomes.

    Has to be the outermost middleware.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def receive_or_left() -> Message:
            message = asyncio.ensure_future(receive())
            try:
                await asyncio.wait((message, left), return_when=asyncio.FIRST_COMPLETED)
                return message.result() if message.done() and not left.done() else {"type": "http.disconnect"}
            finally:
                message.cancel()

        handler = asyncio.ensure_future(self._app(scope, receive_or_left, send))
        try:
            await asyncio.shield(handler)
        except asyncio.CancelledError:
            left.set_result(None)
            try:
                await asyncio.wait((handler,), timeout=LEAVE_S)
            finally:
                handler.cancel()
            raise
