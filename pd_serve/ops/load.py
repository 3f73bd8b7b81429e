"""Load on an OpenAI server, measured honestly: every request counts, waits included, tokens as the server bills them.

Definitions: TTFT from the moment a request was due to be sent (open loop: also when the client was late) until the
first event with text; ITL between two such events; TPOT = (last - first) / (tokens - 1). Failed requests are counted
and are in no latency figure.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec


class Sent(msgspec.Struct, kw_only=True):
    """One request as the client saw it. Times are seconds on the client's monotonic clock."""

    due: float
    events: list[float] = []
    """Arrival of each event that carried text."""
    ended: float = 0.0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.events[0] - self.due

    @property
    def tpot(self) -> float:
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds at percentiles; `nan` when there is nothing to measure."""

    p50: float
    p90: float
    p99: float
    mean: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found. `requests == ok + failed`."""

    requests: int
    ok: int
    failed: int
    errors: dict[str, int]
    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    ttft: Figures
    tpot: Figures
    itl: Figures


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks; `nan` for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def figures(values: Sequence[float]) -> Figures:
    mean = sum(values) / len(values) if values else float("nan")
    return Figures(p50=percentile(values, 0.5), p90=percentile(values, 0.9), p99=percentile(values, 0.99), mean=mean)


def summarize(sent: Sequence[Sent], seconds: float) -> Summary:
    """Figures of one run that took `seconds` from the first request to the last answer."""
    ok = [request for request in sent if not request.error]
    errors: dict[str, int] = {}
    for request in sent:
        if request.error:
            errors[request.error] = errors.get(request.error, 0) + 1
    gaps = [later - earlier for r in ok for earlier, later in zip(r.events, r.events[1:], strict=False)]
    tokens = sum(request.output_tokens for request in ok)
    return Summary(
        requests=len(sent),
        ok=len(ok),
        failed=len(sent) - len(ok),
        errors=errors,
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds if seconds > 0 else float("nan"),
        ttft=figures([request.ttft for request in ok]),
        tpot=figures([request.tpot for request in ok if request.output_tokens > 1]),
        itl=figures(gaps),
    )


async def closed_loop(base_url: str, bodies: Sequence[dict[str, Any]], concurrency: int, timeout_s: float) -> Summary:
    """Send the completions `bodies` with `concurrency` in flight at any time."""
    waiting = iter(bodies)
    sent: list[Sent] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for body in waiting:
            request = Sent(due=time.monotonic(), events=[])
            sent.append(request)
            await _send(session, base_url, body, request)

    started = time.monotonic()
    async with _session(timeout_s) as session:
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
    return summarize(sent, time.monotonic() - started)


async def open_loop(base_url: str, bodies: Sequence[dict[str, Any]], at: Sequence[float], timeout_s: float) -> Summary:
    """Send body i at second `at[i]`, whatever became of those before; a late client counts as the server's wait."""
    started = time.monotonic()
    sent = [Sent(due=started + moment, events=[]) for moment in at]

    async def client(session: aiohttp.ClientSession, body: dict[str, Any], request: Sent) -> None:
        await asyncio.sleep(max(0.0, request.due - time.monotonic()))
        await _send(session, base_url, body, request)

    async with _session(timeout_s) as session:
        await asyncio.gather(*(client(session, body, request) for body, request in zip(bodies, sent, strict=True)))
    return summarize(sent, time.monotonic() - started)


def _session(timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=timeout_s), read_bufsize=1 << 20
    )


async def _send(session: aiohttp.ClientSession, base_url: str, body: dict[str, Any], request: Sent) -> None:
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{base_url}/v1/completions", json=payload) as response:
            if response.status != 200:
                request.error = f"HTTP {response.status}"
                return
            done = False
            async for data in _events(response):
                if data == b"[DONE]":
                    done = True
                    break
                _read(data, request)
        if not done and not request.error:
            request.error = "cut off"
        elif not request.events and not request.error:
            request.error = "no tokens"
    except (TimeoutError, aiohttp.ClientError) as error:
        request.error = type(error).__name__
    finally:
        request.ended = time.monotonic()


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Server-sent events, however they were cut into or glued together in reads."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].rstrip()


def _read(data: bytes, request: Sent) -> None:
    event = json.loads(data)
    if "error" in event:
        request.error = str(event["error"].get("code") or event["error"].get("type"))
        return
    if any(choice["text"] for choice in event["choices"]):
        request.events.append(time.monotonic())
    if event.get("usage"):
        request.output_tokens = event["usage"]["completion_tokens"]
