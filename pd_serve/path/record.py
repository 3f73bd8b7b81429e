"""The record of one request: what was decided, why, and where the time went."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from pd_serve.errors import Cancelled, Overloaded
from pd_serve.types import Delta, KvOutcome, KvReport, Plan, PrefillResult, Request

Outcome = Literal["running", "ok", "failed", "cancelled", "shed"]


class Attempt(msgspec.Struct, kw_only=True):
    """One plan and what came of it. Times are seconds since the request's arrival."""

    decode_replica: str
    prefill_replica: str | None
    reason: str
    scores: dict[str, float]
    planned_at: float
    granted_at: float | None = None
    prefill: PrefillResult | None = None
    prefilled_at: float | None = None
    fallback: str | None = None
    """Why the decode replica had to compute a prompt that was planned to be handed over."""
    prefill_error: str | None = None
    """What ended the prefill leg; no fallback when its KV had been handed over by then, or was not needed."""
    error: str | None = None

    def settle(self, kv: KvReport) -> None:
        """The decode replica has said how it came by the prompt's KV."""
        if kv.outcome is not KvOutcome.RECOMPUTED:
            self.fallback = None
        elif self.fallback is None:
            self.fallback = kv.reason


class Record(msgspec.Struct, kw_only=True):
    """Everything about one request but its content. Times are seconds since its arrival, unless they say otherwise."""

    id: str
    arrived: float
    """Seconds since the epoch."""
    tenant: str
    prompt_tokens: int
    max_tokens: int
    n: int
    outcome: Outcome = "running"
    error: str | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    complete: bool = False
    """The client has the last delta."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    kv: KvReport | None = None
    """The latest word of the last attempt's decode replica."""
    waits: dict[str, int] = {}
    """Times that it had to wait before it could be planned, by reason."""
    attempts: list[Attempt] = []
    started: float = 0.0
    """Arrival on the monotonic clock."""

    @classmethod
    def open(cls, request: Request) -> Record:
        return cls(
            id=request.id,
            arrived=time.time(),
            tenant=request.tenant,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            n=request.n,
            waits={},
            attempts=[],
            started=time.monotonic(),
        )

    def now(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self.started

    def attempt(self, plan: Plan) -> Attempt:
        """Begin an attempt by this plan."""
        attempt = Attempt(
            decode_replica=plan.decode,
            prefill_replica=plan.prefill,
            reason=plan.reason,
            scores=plan.scores,
            planned_at=self.now(),
        )
        self.attempts.append(attempt)
        self.kv = None
        return attempt

    def waited(self, reason: str) -> None:
        self.waits[reason] = self.waits.get(reason, 0) + 1

    def add(self, delta: Delta) -> float | None:
        """Count what a delta brought. Returns the seconds since tokens came before, when it brought more of them."""
        gap = None
        if any(choice.token_ids for choice in delta.choices):
            now = self.now()
            if self.first_token_at is None or self.last_token_at is None:
                self.first_token_at = now
            else:
                gap = now - self.last_token_at
            self.last_token_at = now
        self.complete = delta.finished
        self.output_tokens += sum(len(choice.token_ids) for choice in delta.choices)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.kv is not None:
            self.kv = delta.kv
            if self.attempts:
                self.attempts[-1].settle(delta.kv)
        return gap

    def close(self, outcome: Outcome, error: str | None = None) -> None:
        if self.kv is not None and self.attempts:  # a prefill leg may have failed since decode said that it has the KV
            self.attempts[-1].settle(self.kv)
        self.outcome, self.error, self.finished_at = outcome, error, self.now()


class Recorder:
    """Keeps the last records in memory and passes each finished one on.

    Args:
        keep: how many are kept for `recent`.
        write: called with each finished record; must not block.
    """

    def __init__(self, keep: int = 1000, write: Callable[[Record], None] | None = None) -> None:
        self._recent: deque[Record] = deque(maxlen=keep)
        self._write = write

    @asynccontextmanager
    async def recording(self, record: Record) -> AsyncIterator[None]:
        """Invariant 1: whatever happens inside, the request ends in exactly one outcome, and is kept."""
        try:
            yield
        except Overloaded as error:
            record.close("shed" if record.admitted_at is None else "failed", type(error).__name__)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if record.complete:  # it left with the last delta in hand
                record.close("ok")
            else:
                record.close("cancelled", Cancelled.__name__)
            raise
        except BaseException as error:
            record.close("failed", type(error).__name__)
            raise
        else:
            record.close("ok")
        finally:
            self.finished(record)

    def finished(self, record: Record) -> None:
        self._recent.append(record)
        if self._write:
            self._write(record)

    def recent(self, limit: int, tenant: str | None = None) -> list[Record]:
        """The last `limit` finished records, newest first; with `tenant`, only that tenant's."""
        found = (record for record in reversed(self._recent) if tenant is None or record.tenant == tenant)
        return list(itertools.islice(found, limit))

    def find(self, request_id: str) -> Iterator[Record]:
        """Finished records whose id is, or begins with, this."""
        return (record for record in self._recent if record.id.startswith(request_id))
