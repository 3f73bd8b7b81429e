"""One small request straight to the engine: a replica that publishes itself has answered one."""

from __future__ import annotations

import asyncio
import time

from pd_serve.engine.base import Engine
from pd_serve.errors import EngineFailed
from pd_serve.types import Request

PROBE_S = 60.0
"""The first request of an engine may compile what later ones use."""


async def probe(engine: Engine) -> None:
    """Generate at most two tokens, without a hand-off, in either role.

    Raises:
        EngineFailed: no answer came within `PROBE_S`.
        PdServeError: what the engine said instead.
    """
    request = Request(id="probe", prompt_token_ids=(1,), max_tokens=2, deadline=time.monotonic() + PROBE_S)
    await engine.grant(request)
    try:
        async with asyncio.timeout(PROBE_S):
            finished = [delta.finished async for delta in engine.decode(request)]
    except TimeoutError:
        raise EngineFailed(f"the engine did not answer its first request within {PROBE_S:.0f} s") from None
    finally:
        engine.revoke(request.id)
    if not any(finished):
        raise EngineFailed("the engine did not finish its first request")
