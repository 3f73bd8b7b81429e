"""A few requests that tell whether a deployment does what users need, and why not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

TIMEOUT_S = 300.0
RESERVE_TOKENS = 64
"""Room that the longest prompt leaves for the template's own tokens and the answer."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,  # hold the arguments to the schema
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Check(msgspec.Struct, frozen=True):
    """One thing that was tried. `detail` says what was seen, or what is wrong."""

    name: str
    ok: bool
    detail: str
    seconds: float


class _Wrong(Exception):
    """The server answered, but not as it should."""


def smoke(base_url: str, api_key: str | None = None) -> list[Check]:
    """Run every check against an OpenAI server; a check that fails does not stop the others."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base_url, headers=headers, timeout=TIMEOUT_S) as client:
        first = _run("model", lambda: _model(client)[0])
        if not first.ok:
            return [first]
        model, longest = _model(client)
        checks: dict[str, Callable[[], str]] = {
            "short answer": lambda: _short(client, model),
            "longest context": lambda: _longest(client, model, longest),
            "streamed": lambda: _streamed(client, model),
            "multi-turn": lambda: _multi_turn(client, model),
            "tool call": lambda: _tool_call(client, model),
        }
        return [first, *(_run(name, check) for name, check in checks.items())]


def _run(name: str, check: Callable[[], str]) -> Check:
    started = time.monotonic()
    try:
        ok, detail = True, check()
    except (_Wrong, httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        ok, detail = False, f"{type(error).__name__.lstrip('_')}: {error}"
    return Check(name, ok, detail, time.monotonic() - started)


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    if response.status_code != 200:
        raise _Wrong(f"HTTP {response.status_code}: {response.text[:200]}")
    data: dict[str, Any] = response.json()
    return data


def _model(client: httpx.Client) -> tuple[str, int]:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise _Wrong(f"HTTP {response.status_code}: {response.text[:200]}")
    models = response.json()["data"]
    return models[0]["id"], int(models[0].get("max_model_len") or 2048)


def _chat(client: httpx.Client, model: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0, **more}
    return _post(client, "/v1/chat/completions", body)


def _short(client: httpx.Client, model: str) -> str:
    data = _chat(client, model, [{"role": "user", "content": "The capital of France is"}])
    text = data["choices"][0]["message"]["content"]
    if not text or not text.strip():
        raise _Wrong("an empty answer")
    return repr(text)


def _longest(client: httpx.Client, model: str, longest: int) -> str:
    prompt = [1000 + number % 9000 for number in range(longest - RESERVE_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": RESERVE_TOKENS, "temperature": 0, "ignore_eos": True}
    usage = _post(client, "/v1/completions", body)["usage"]
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(prompt), RESERVE_TOKENS):
        raise _Wrong(f"usage {usage}, expected {len(prompt)} + {RESERVE_TOKENS} tokens")
    return f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens"


def _streamed(client: httpx.Client, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
    }
    text, arrivals = "", []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise _Wrong(f"HTTP {response.status_code}: {response.read()[:200]!r}")
        lines = []
        for line in response.iter_lines():
            if line:
                lines.append(line)
                arrivals.append(time.monotonic())
    if lines[-1] != "data: [DONE]":
        raise _Wrong("the stream has no end marker")
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            text += choice["delta"].get("content") or ""
    whole = _chat(client, model, body["messages"])["choices"][0]["message"]["content"]  # type: ignore[arg-type]
    if text != whole:
        raise _Wrong(f"streamed {text!r}, whole {whole!r}")
    return f"{len(lines)} events over {arrivals[-1] - arrivals[0]:.2f} s"


def _multi_turn(client: httpx.Client, model: str) -> str:
    messages = [{"role": "user", "content": "My name is Ada. Say hello."}]
    first = _chat(client, model, messages)
    messages += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "What is my name?"},
    ]
    second = _chat(client, model, messages)
    if second["usage"]["prompt_tokens"] <= first["usage"]["prompt_tokens"]:
        raise _Wrong("the second turn's prompt is not longer than the first's")
    return repr(second["choices"][0]["message"]["content"])


def _tool_call(client: httpx.Client, model: str) -> str:
    data = _chat(
        client,
        model,
        [{"role": "user", "content": "What is the weather in Prague?"}],
        max_tokens=128,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    call = data["choices"][0]["message"]["tool_calls"][0]["function"]
    if call["name"] != "get_weather":
        raise _Wrong(f"it calls {call['name']!r}")
    arguments = json.loads(call["arguments"])
    if not isinstance(arguments.get("city"), str):
        raise _Wrong(f"arguments {arguments!r}")
    return f"get_weather({call['arguments']})"
