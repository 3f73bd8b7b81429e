"""Errors leave in one shape, streamed or not (cases B14, B20)."""

from __future__ import annotations

import json

import pytest

from pd_serve.errors import Overloaded, PdServeError, ReplicaLost, TooLarge
from pd_serve.gateway.asgi import App, Message, Receive, Scope, Send
from pd_serve.gateway.body_limit import BodyLimit
from pd_serve.gateway.error_shape import OneErrorShape
from pd_serve.path import failure

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json"), (b"x-request-id", b"abc")]


async def call(app: App, *chunks: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> list[Message]:
    """What the client is sent. The request's body comes in `chunks`."""
    left = list(chunks) or [b""]
    sent: list[Message] = []

    async def receive() -> Message:
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "http", "headers": list(headers)}, receive, send)
    return sent


def answering(
    status: int, headers: list[tuple[bytes, bytes]], *bodies: bytes, error: PdServeError | None = None
) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if error is not None:
            failure.note(error)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def whole(sent: list[Message]) -> tuple[int, dict[bytes, bytes], bytes]:
    assert [message["type"] for message in sent].count("http.response.start") == 1
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent[1:])


async def test_a_noted_error_replaces_the_applications_own_answer() -> None:
    error = Overloaded("no room", retry_after_s=1.2)
    status, headers, body = whole(await call(OneErrorShape(answering(500, JSON, b"{}", error=error))))
    assert status == 429
    assert json.loads(body) == error.to_openai()
    assert headers[b"retry-after"] == b"2"
    assert headers[b"x-request-id"] == b"abc"
    assert headers[b"content-length"] == str(len(body)).encode()


async def test_a_stream_whose_first_event_is_an_error_is_no_stream() -> None:
    event = b'data: {"error": {"message": "bad", "type": "BadRequestError", "param": "n", "code": 400}}\n\n'
    sent = await call(OneErrorShape(answering(200, STREAM, event, b"data: [DONE]\n\n")))
    status, headers, body = whole(sent)
    assert status == 400
    assert headers[b"content-type"] == b"application/json"
    assert json.loads(body)["error"]["param"] == "n"


async def test_a_stream_that_fails_before_its_first_event_has_the_status_of_the_error() -> None:
    event = b'data: {"error": {"message": "x", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
    error = ReplicaLost("gone")
    status, _, body = whole(await call(OneErrorShape(answering(200, STREAM, event, error=error))))
    assert (status, json.loads(body)) == (502, error.to_openai())


async def test_a_stream_that_breaks_later_ends_with_the_typed_error_and_one_done() -> None:
    error = ReplicaLost("gone")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": b'data: {"choices": []}\n\n', "more_body": True})
        failure.note(error)
        event = b'data: {"error": {"message": "gone", "code": 500}}\n\n'
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    status, headers, body = whole(await call(OneErrorShape(app)))
    assert (status, headers[b"content-type"]) == (200, STREAM[0][1])
    events = body.decode().split("\n\n")
    assert json.loads(events[1].removeprefix("data: ")) == error.to_openai()
    assert events[2:] == ["data: [DONE]", ""]


async def test_a_good_stream_passes_event_by_event() -> None:
    sent = await call(OneErrorShape(answering(200, STREAM, b"data: 1\n\n", b"data: 2\n\n")))
    assert [message.get("body") for message in sent] == [None, b"data: 1\n\n", b"data: 2\n\n", b""]


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        (JSON, b'{"detail":"Not Found"}', "Not Found"),
        ([(b"content-type", b"text/plain")], b"Not Found here", "Not Found here"),
        ([], b"", "Not Found"),
    ],
)
async def test_what_the_framework_says_gets_the_shape(
    headers: list[tuple[bytes, bytes]], body: bytes, message: str
) -> None:
    status, sent_headers, answer = whole(await call(OneErrorShape(answering(404, headers, body))))
    expected = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": 404}}
    assert (status, json.loads(answer)) == (404, expected)
    assert sent_headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize("body", [b'{"error": {"message": "bad"}}', b'{"ready": false, "pools": {}}'])
async def test_what_the_application_shaped_stays(body: bytes) -> None:
    assert whole(await call(OneErrorShape(answering(503, JSON, body)))) == (503, dict(JSON), body)


async def test_an_unexpected_exception_is_not_swallowed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        await call(OneErrorShape(app))


async def test_one_requests_error_is_not_anothers() -> None:
    await call(OneErrorShape(answering(500, JSON, error=ReplicaLost("gone"))))
    status, _, _ = whole(await call(OneErrorShape(answering(404, JSON, b"{}"))))
    assert status == 404


# ------------------------------------------------------------------------------------------------ body limit


async def reading(scope: Scope, receive: Receive, send: Send) -> None:
    size = 0
    while True:
        message = await receive()
        size += len(message["body"])
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": JSON})
    await send({"type": "http.response.body", "body": str(size).encode()})


async def test_a_body_up_to_the_limit_is_read() -> None:
    status, _, body = whole(await call(OneErrorShape(BodyLimit(reading, 8)), b"1234", b"5678"))
    assert (status, body) == (200, b"8")


@pytest.mark.parametrize(
    ("chunks", "headers"),
    [
        ((b"1234", b"56789"), ()),
        ((b"",), ((b"content-length", b"9"),)),
        ((b"12345678", b"9"), ((b"content-length", b"x"),)),
    ],
)
async def test_a_larger_body_is_413(chunks: tuple[bytes, ...], headers: tuple[tuple[bytes, bytes], ...]) -> None:
    status, _, body = whole(await call(OneErrorShape(BodyLimit(reading, 8)), *chunks, headers=headers))
    assert status == TooLarge.status == 413
    assert json.loads(body)["error"]["code"] == "request_too_large"
