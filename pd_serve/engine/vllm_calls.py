"""Calls into a running vLLM, and what its exceptions mean."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pd_serve import compat
from pd_serve.errors import EngineFailed, InvalidRequest, PdServeError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

STATS_TIMEOUT_S = 0.1
"""Longest wait for the engine's worker when counts are asked for: it answers between steps only."""


@contextmanager
def typed_errors(what: str, *, its_fault: bool = False) -> Iterator[None]:
    """The engine's exceptions as ours: InvalidRequest for what it refuses, EngineFailed with `what` otherwise.

    Args:
        its_fault: no request is involved, so whatever is raised is the engine's fault; its operator reads the message,
            which then says why.
    """
    try:
        yield
    except PdServeError:
        raise
    except Exception as error:
        if compat.is_request_error(error) and not its_fault:
            raise InvalidRequest(str(error), param=getattr(error, "parameter", None)) from error
        why = f": {first_line(error)}" if its_fault else ""
        raise EngineFailed(f"{what}: {type(error).__name__}{why}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, at most 300 characters of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"


async def describe_kv(llm: AsyncLLM) -> tuple[str, int]:
    """(fingerprint of all ranks together, bytes of one block of all layers and ranks)."""
    ranks: list[dict[str, Any]] = await llm.collective_rpc("pd_kv_describe")
    digest = hashlib.sha256("/".join(rank["fingerprint"] for rank in ranks).encode())
    return digest.hexdigest(), sum(int(rank["block_bytes"]) for rank in ranks)


async def kv_stats(llm: AsyncLLM) -> list[dict[str, Any]]:
    """`WorkerSide.stats` of each rank."""
    ranks: list[dict[str, Any]] = await llm.collective_rpc("pd_kv_stats")
    return ranks


class HeldCount:
    """How many hand-offs an engine holds: asked of its workers, or the last answer while they are in a long step."""

    def __init__(self) -> None:
        self._last = 0
        self._call: asyncio.Task[int] | None = None

    async def ask(self, llm: AsyncLLM) -> int:
        call = self._call = self._call or asyncio.create_task(_held(llm))
        done, _ = await asyncio.wait({call}, timeout=STATS_TIMEOUT_S)
        if done:
            self._call = None
            with contextlib.suppress(PdServeError):
                self._last = call.result()
        return self._last


async def _held(llm: AsyncLLM) -> int:
    with typed_errors("the engine failed", its_fault=True):
        return max(int(stats["held"]) for stats in await kv_stats(llm))
