"""Asks two OpenAI servers the same and compares what a client can see (the standard checks PAR, SSE and ERR)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

Body = dict[str, Any]
IGNORED = {"id", "created", "kv_transfer_params", "system_fingerprint", "prompt_tokens_details", "metrics"}
"""What may differ between two right answers."""


class Server:
    """One OpenAI server."""

    def __init__(self, base_url: str, model: str) -> None:
        self.base_url = base_url
        self.model = model
        self.http = httpx.Client(base_url=base_url, timeout=120.0)

    def post(self, path: str, body: Body) -> httpx.Response:
        return self.http.post(path, json={"model": self.model, **body})

    def whole(self, path: str, body: Body) -> Body:
        """A non-streamed answer; fails the test when the status is not 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        answer: Body = response.json()
        return answer

    def events(self, path: str, body: Body) -> list[Body]:
        """The events of a streamed answer, after checking their form."""
        with self.http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as response:
            raw = response.read().decode("utf-8")
            assert response.status_code == 200, raw
            assert response.headers["content-type"].startswith("text/event-stream")
        return check_sse(raw)


def check_sse(raw: str) -> list[Body]:
    """Every event one line of JSON and a blank line, one end marker, last, one finish reason a choice (check SSE)."""
    assert raw.endswith("\n\n")
    lines = raw[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), raw
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1, raw
    assert "\ufffd" not in raw
    events: list[Body] = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    finished = [c["index"] for event in events for c in event.get("choices", ()) if c.get("finish_reason")]
    assert sorted(finished) == sorted(set(finished)), "a choice finished twice"
    assert set(finished) == {c["index"] for event in events for c in event.get("choices", ())}, (
        "a choice never finished"
    )
    return events


def check_error(response: httpx.Response, status: int | tuple[int, ...]) -> Body:
    """OpenAI's error shape, right status, nothing of the inside in it (check ERR)."""
    statuses = (status,) if isinstance(status, int) else status
    assert response.status_code in statuses, f"{response.status_code}: {response.text}"
    assert response.headers["content-type"].startswith("application/json")
    error: Body = response.json()["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert {"type", "param", "code"} <= error.keys()
    assert "Traceback" not in response.text and ".py" not in response.text and "site-packages" not in response.text
    return error


def visible(answer: Any) -> Any:
    """The answer without what may differ between two right ones."""
    if isinstance(answer, dict):
        return {key: visible(value) for key, value in answer.items() if key not in IGNORED}
    return [visible(item) for item in answer] if isinstance(answer, list) else answer


def assert_same(ours: Any, theirs: Any, where: str = "answer") -> None:
    """Equal, but for logprobs, which may differ by 1e-3."""
    if isinstance(ours, float) and isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-3), where
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{number}]")
    else:
        assert ours == theirs, where


def joined(events: list[Body]) -> dict[int, Body]:
    """What a streamed answer says in all, by choice: text, token ids, finish reason; and usage under -1."""
    choices: dict[int, Body] = {}
    for event in events:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "finish_reason": None})
            whole["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            whole["token_ids"] += choice.get("token_ids") or []
            whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
        if event.get("usage") and not event["choices"]:
            choices[-1] = visible(event["usage"])
    return choices


def assert_parity(ours: Server, reference: Server, path: str, body: Body) -> tuple[Body, Body]:
    """Same answer from both, whole and streamed (check PAR). Returns our whole answer and the joined stream."""
    whole, expected = ours.whole(path, body), reference.whole(path, body)
    assert_same(visible(whole), visible(expected))
    stream = {**body, "stream_options": {"include_usage": True}}
    streamed, expected_stream = joined(ours.events(path, stream)), joined(reference.events(path, stream))
    assert streamed == expected_stream
    return whole, streamed
