"""Streamed answers: usage, limits of one token, no buffering, one end (cases B07, B09, B19, B20)."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.ask import Server, assert_parity, check_error, joined
from tests.api.deployment import Deployment

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_fresh = itertools.count(1)


def words(tokens: int = 40) -> list[int]:
    rng = random.Random(f"streaming-{next(_fresh)}")
    return [rng.randrange(1000, 40000) for _ in range(tokens)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "options",
    [None, {"include_usage": True}, {"include_usage": False}, {"include_usage": True, "continuous_usage_stats": True}],
)
def test_b07_streamed_usage(n: int, options: dict[str, bool] | None, demo: Deployment, reference: Server) -> None:
    body = {"prompt": words(), "max_tokens": 6, "seed": 7, "ignore_eos": True, "n": n}
    whole = demo.server.whole(COMPLETIONS, body)["usage"]
    stream = body | ({"stream_options": options} if options else {})
    events = demo.server.events(COMPLETIONS, stream)
    with_usage = [event for event in events if event.get("usage")]
    if not options or not options["include_usage"]:
        assert with_usage == []
        return
    assert events[-1]["choices"] == []
    totals = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][name] for name in totals] == [whole[name] for name in totals]
    assert whole["completion_tokens"] == 6 * n
    if not options.get("continuous_usage_stats"):
        assert with_usage == events[-1:]
    else:
        rising = [event["usage"]["completion_tokens"] for event in with_usage]
        assert len(with_usage) == len(events)
        assert max(rising) == rising[-1] == 6 * n


def test_b07_stream_options_without_a_stream_are_refused(demo: Deployment) -> None:
    body = {"prompt": words(), "max_tokens": 2, "stream_options": {"include_usage": True}}
    check_error(demo.server.post(COMPLETIONS, body), 400)


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2, "seed": 5, "temperature": 1.0}])
def test_b09_one_token_is_one_token(more: dict[str, Any], demo: Deployment, reference: Server) -> None:
    for _ in range(5):
        body = {"prompt": words(), "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
        whole, _ = assert_parity(demo.server, reference, COMPLETIONS, body)
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
        assert whole["usage"]["completion_tokens"] == more.get("n", 1)
    demo.assert_quiet()


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_b19_nothing_buffers_the_stream(encoding: str, demo: Deployment) -> None:
    """Events arrive one by one through every hop, on a raw socket, long before the last one."""
    body = {"model": demo.server.model, "prompt": words(), "max_tokens": 24, "stream": True, "ignore_eos": True}
    arrivals = raw_arrivals(demo.server.base_url, COMPLETIONS, body, encoding)
    assert len(arrivals) >= 20, "many tokens came in one piece"
    assert arrivals[0] - arrivals[-1] < 0
    half_time = arrivals[0] + (arrivals[-1] - arrivals[0]) / 2
    before_half = sum(1 for moment in arrivals if moment <= half_time)
    assert before_half >= len(arrivals) // 5


def raw_arrivals(base_url: str, path: str, body: dict[str, Any], encoding: str) -> list[float]:
    """When each event's first byte was read from the socket."""
    url = urlsplit(base_url)
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Accept-Encoding: {encoding}\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    arrivals: list[float] = []
    with socket.create_connection((url.hostname or "", url.port or 80), timeout=60) as connection:
        connection.sendall(head.encode() + payload)
        while data := connection.recv(65536):
            if b"data: " in data:
                arrivals.append(time.monotonic())
    return arrivals


def _tool_body() -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    return {
        "messages": [{"role": "user", "content": f"Call f for {next(_fresh)}."}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 40,
    }


def test_b20_every_stream_ends_once(demo: Deployment, reference: Server, eos_token_id: int) -> None:
    """`events` checks for one end marker, last, and one finish reason a choice."""
    prompt = words()
    first = demo.server.whole(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "temperature": 0})["choices"][0]["text"]
    for body, reason in (
        ({"max_tokens": 4, "ignore_eos": True}, "length"),
        ({"max_tokens": 4, "logit_bias": {str(eos_token_id): 100}}, "stop"),
        ({"max_tokens": 4, "stop": [first]}, "stop"),
        ({"max_tokens": 4, "n": 2, "temperature": 1.0, "ignore_eos": True}, "length"),
    ):
        events = demo.server.events(COMPLETIONS, {"prompt": prompt, "temperature": 0, **body})
        assert {choice["finish_reason"] for choice in joined(events).values()} == {reason}
    demo.server.events(CHAT, _tool_body())
    for bad in ({"n": 0}, {"temperature": -1}):
        response = demo.server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "stream": True, **bad})
        check_error(response, 400)
    demo.assert_quiet()
