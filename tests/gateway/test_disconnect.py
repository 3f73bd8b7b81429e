"""A cancelled request reaches the handler as a client that left (case B10)."""

from __future__ import annotations

import asyncio

import pytest

from pd_serve.gateway.asgi import App, Message, Receive, Scope, Send
from pd_serve.gateway.disconnect import DisconnectOnCancel

HTTP = {"type": "http", "headers": []}


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def ignore(message: Message) -> None:
    pass


async def cancelled(app: App, receive: Receive) -> asyncio.Task[None]:
    task = asyncio.ensure_future(app(HTTP, receive, ignore))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,), timeout=2)
    return task


async def test_a_handler_in_its_own_task_hears_that_the_client_left() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            heard.append((await receive())["type"])

        await asyncio.wait((asyncio.ensure_future(listen()),))  # as vLLM waits: a cancel does not reach the inner task

    task = await cancelled(DisconnectOnCancel(app), never)
    assert task.cancelled()
    assert heard == ["http.disconnect"]


async def test_a_handler_that_does_not_listen_is_cancelled_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_serve.gateway.disconnect.LEAVE_S", 0.05)
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    await cancelled(DisconnectOnCancel(app), never)
    await asyncio.sleep(0)
    assert ended == ["cancelled"]


async def test_messages_and_errors_pass_through() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"x"
        raise ValueError("from the application")

    async def receive() -> Message:
        return {"type": "http.request", "body": b"x"}

    with pytest.raises(ValueError, match="from the application"):
        await DisconnectOnCancel(app)(HTTP, receive, ignore)
