"""The load generator against a server with known times (case B89). The bounds are wide: no test asserts speed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from pd_serve.ops.load import closed_loop, open_loop, percentile

TTFT_S, STEP_S, TOKENS = 0.2, 0.02, 10


def _event(text: str, usage: int | None = None) -> bytes:
    choices = [] if usage is not None else [{"index": 0, "text": text}]
    data = {"choices": choices, **({"usage": {"completion_tokens": usage}} if usage is not None else {})}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class KnownServer:
    """Ten tokens 20 ms apart, the first after 200 ms; two of them in one event, an empty one first."""

    def __init__(self) -> None:
        self.bytewise = False
        self.glued = False
        self.behaviour = ["ok"]
        self._count = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        behaviour = self.behaviour[self._count % len(self.behaviour)]
        self._count += 1
        if behaviour == "500":
            return web.Response(status=500)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(_event(""))
        await asyncio.sleep(TTFT_S)
        pieces = [_event("a b"), *(_event("c") for _ in range(TOKENS - 2)), _event("", TOKENS) + b"data: [DONE]\n\n"]
        if self.glued:
            pieces = [b"".join(pieces)]
        for number, piece in enumerate(pieces):
            if behaviour == "cut" and number == 4:
                break
            await self._write(response, piece)
            await asyncio.sleep(STEP_S)
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        for part in [piece[i : i + 1] for i in range(len(piece))] if self.bytewise else [piece]:
            await response.write(part)


@asynccontextmanager
async def _running(server: KnownServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("bytewise", [False, True])
async def test_b89_ttft_ignores_the_empty_event_and_tokens_come_from_usage(bytewise: bool) -> None:
    server = KnownServer()
    server.bytewise = bytewise
    async with _running(server) as base_url:
        summary = await closed_loop(base_url, [{"prompt": "x"}] * 2, concurrency=2, timeout_s=30)
    assert (summary.ok, summary.failed, summary.output_tokens) == (2, 0, 2 * TOKENS)
    assert summary.ttft.p50 >= TTFT_S
    assert summary.itl.p50 >= STEP_S * 0.5
    assert summary.tpot.p50 == pytest.approx(summary.itl.mean * 8 / 9, rel=0.01)


async def test_b89_glued_events_are_told_apart() -> None:
    server = KnownServer()
    server.glued = True
    async with _running(server) as base_url:
        summary = await closed_loop(base_url, [{"prompt": "x"}], concurrency=1, timeout_s=30)
    assert (summary.ok, summary.output_tokens) == (1, TOKENS)


async def test_b89_failed_and_cut_requests_are_counted_and_in_no_latency() -> None:
    server = KnownServer()
    server.behaviour = ["ok", "500", "ok", "cut", "ok"]
    async with _running(server) as base_url:
        summary = await closed_loop(base_url, [{"prompt": "x"}] * 10, concurrency=10, timeout_s=30)
    assert (summary.requests, summary.ok, summary.failed) == (10, 6, 4)
    assert summary.errors == {"HTTP 500": 2, "cut off": 2}
    assert summary.output_tokens == 6 * TOKENS


async def test_b89_open_loop_latency_includes_the_wait_of_a_late_client() -> None:
    server = KnownServer()
    async with _running(server) as base_url:
        asyncio.get_running_loop().call_later(0.05, lambda: _block(0.5))
        summary = await open_loop(base_url, [{"prompt": "x"}] * 4, [0.1, 0.1, 0.1, 0.1], timeout_s=30)
    assert summary.ok == 4
    assert summary.ttft.p50 >= TTFT_S + 0.4


def _block(seconds: float) -> None:
    """Stall the client itself, as a busy machine would."""
    import time

    time.sleep(seconds)


async def test_b89_nothing_but_failures_has_no_latency() -> None:
    server = KnownServer()
    server.behaviour = ["500"]
    async with _running(server) as base_url:
        summary = await closed_loop(base_url, [{"prompt": "x"}] * 3, concurrency=1, timeout_s=30)
    assert summary.ok == 0
    assert math.isnan(summary.ttft.p50)


def test_percentiles() -> None:
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([float(n) for n in range(101)], 0.99) == 99.0
    assert math.isnan(percentile([], 0.5))
