"""Asks an OpenAI completions server and keeps what a comparison needs, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec


class Answer(msgspec.Struct, kw_only=True):
    """One completion as the client saw it."""

    id: str = ""
    status: int = 200
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    problems: list[str] = []
    """What is wrong with the form of the answer itself."""

    def essence(self) -> dict[str, object]:
        """What must be equal on two servers: all but the id (cached tokens are never in it)."""
        fields = msgspec.structs.asdict(self)
        del fields["id"]
        return fields


async def complete(client: httpx.AsyncClient, base_url: str, body: Mapping[str, Any]) -> Answer:
    """POST to /v1/completions and read the whole answer. Raises httpx.HTTPError when there is none."""
    url = f"{base_url}/v1/completions"
    if not body.get("stream"):
        response = await client.post(url, json=body)
        return _whole(response)
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return _whole(response)
        answer = Answer(token_ids=[], problems=[])
        events = [line async for line in response.aiter_lines() if line]
    _read_events(events, answer)
    return answer


def _whole(response: httpx.Response) -> Answer:
    if response.status_code != 200:
        return Answer(status=response.status_code, problems=[response.text[:300]])
    data = response.json()
    answer = Answer(id=data["id"], token_ids=[], problems=[])
    _add_choices(data, answer)
    _add_usage(data, answer)
    return answer


def _read_events(lines: list[str], answer: Answer) -> None:
    done = 0
    for line in lines:
        if not line.startswith("data: "):
            answer.problems.append(f"not an event: {line[:80]}")
        elif line == "data: [DONE]":
            done += 1
        else:
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.problems.append(str(event["error"]))
                continue
            answer.id = event["id"]
            _add_choices(event, answer)
            _add_usage(event, answer)
    if done != 1 or lines[-1] != "data: [DONE]":
        answer.problems.append(f"{done} end markers")


def _add_choices(data: Mapping[str, Any], answer: Answer) -> None:
    for choice in data["choices"]:
        answer.text += choice["text"]
        answer.token_ids += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            if answer.finish_reason:
                answer.problems.append("two finish reasons")
            answer.finish_reason = choice["finish_reason"]


def _add_usage(data: Mapping[str, Any], answer: Answer) -> None:
    if usage := data.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
