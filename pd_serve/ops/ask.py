"""Asking a running application: is it ready, one streamed question, and where the time of a request went."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from pd_serve.ops.failures import OperationFailed

_POLL_S = 0.2


def wait_ready(url: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until `/readyz` says yes.

    Args:
        check: called now and then; what it raises ends the wait.

    Raises:
        OperationFailed: it did not within `timeout_s`; the message has the reasons it gave.
    """
    import httpx

    deadline = time.monotonic() + timeout_s
    while True:
        check()
        try:
            answer = httpx.get(f"{url}/readyz", timeout=5.0)
            if answer.status_code == 200:
                return
            reason = f"HTTP {answer.status_code}: {answer.text[:200]}"
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise OperationFailed(f"{url} is not ready after {timeout_s:.0f} s: {reason}")
        time.sleep(_POLL_S)


def headers(key: str) -> dict[str, str]:
    """What a request carries to be let in; nothing without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def stream_chat(url: str, model: str, question: str, max_tokens: int, timeout_s: float, key: str = "") -> Iterator[str]:
    """The pieces of the answer to one question, as they come.

    Raises:
        OperationFailed: the answer is an error, breaks off, or is empty.
    """
    import httpx

    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    got = done = False
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=timeout_s, headers=headers(key)
        ) as answer:
            if answer.status_code != 200:
                raise OperationFailed(f"the question failed: HTTP {answer.status_code}: {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                done = done or line == "data: [DONE]"
                piece = _piece(line)
                got = got or bool(piece)
                if piece:
                    yield piece
    except httpx.HTTPError as error:
        raise OperationFailed(f"the question failed: {error or type(error).__name__}") from error
    if not got or not done:
        raise OperationFailed("the question failed: the answer was empty" if done else "the answer broke off")


def _piece(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise OperationFailed(f"the question failed: {event['error'].get('message', event['error'])}")
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def last_record(url: str, key: str = "") -> dict[str, Any]:
    """The record of the last request, or an empty one when the application keeps none."""
    import httpx

    try:
        answer = httpx.get(f"{url}/pd/records", params={"limit": 1}, timeout=5.0, headers=headers(key))
        records = answer.json() if answer.status_code == 200 else []
    except (httpx.HTTPError, ValueError):
        return {}
    return records[0] if isinstance(records, list) and records and isinstance(records[0], dict) else {}


def where_time_went(record: dict[str, Any]) -> list[str]:
    """A line for each step of the request that the record tells about."""
    lines = []
    if record.get("prefill_replica"):
        lines.append(f"prefill  {_ms(record.get('prefill_s'))} on {record['prefill_replica']}")
    elif record.get("decode_replica"):
        lines.append("prefill  on the decode replica")
    if record.get("kv_bytes"):
        lines.append(f"KV       {record['kv_bytes'] / 1e6:.2f} MB in {_ms(record.get('kv_s'))}")
    elif record.get("kv_outcome"):
        lines.append(f"KV       {record['kv_outcome']}, nothing moved")
    if record.get("decode_replica"):
        lines.append(f"decode   {_rate(record)} on {record['decode_replica']}")
    if record.get("ttft_s") is not None:
        lines.append(f"first token after {_ms(record['ttft_s'])} at the ingress")
    return lines


def _ms(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _rate(record: dict[str, Any]) -> str:
    tokens, seconds = record.get("output_tokens") or 0, record.get("decode_s") or 0.0
    # The first token comes with the first step; the others share the time after it.
    return f"{(tokens - 1) / seconds:.1f} tokens/s ({tokens} tokens)" if tokens > 1 and seconds else f"{tokens} tokens"
