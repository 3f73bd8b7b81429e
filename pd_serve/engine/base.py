"""The seam between pd_serve and whatever computes tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from pd_serve.types import Delta, EngineStats, Handoff, KvAddress, PrefillResult, Request


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """For one request: what this engine does exactly."""

    resume: bool
    """`decode(..., emitted)` continues as if it had generated `emitted` itself."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed for one life of an engine."""

    fingerprint: str
    kv: KvAddress
    block_size: int
    kv_tokens_total: int
    max_num_seqs: int
    max_model_len: int


class Engine(Protocol):
    """One engine, one data-parallel rank. All methods run on the event loop that called `start`.

    Errors are `pd_serve.errors`: `InvalidRequest` for a fault of the request, `Overloaded` for no room,
    `EngineFailed` for everything else. Cancelling the task that awaits `prefill` or iterates `decode` aborts the
    request in the engine and frees what it held.
    """

    async def start(self) -> EngineDescription:
        """Load the model; return when the engine can answer.

        Raises:
            EngineFailed: it cannot start; the message says why.
        """
        ...

    async def close(self) -> None:
        """End the engine and its child processes. Idempotent."""
        ...

    async def prefill(self, request: Request, handoff: Handoff) -> PrefillResult:
        """Compute the prompt and offer its KV to `handoff.target`. Samples exactly one token."""
        ...

    def decode(
        self, request: Request, handoff: Handoff | None = None, emitted: tuple[int, ...] = ()
    ) -> AsyncIterator[Delta]:
        """Generate. With `handoff`, the prompt's KV is taken from there once it is offered; a KV that does not come
        or does not match is recomputed (or fails the request) by `kv.load_failure_policy`, and `kv` of the first
        and last delta says so. Text, stop strings and logprobs are the engine's.

        Args:
            emitted: tokens that the client already has; they are not sent again.
        """
        ...

    async def grant(self, request: Request) -> None:
        """Reserve room for prompt and expected output until `decode` starts, or the request's lease ends.

        Raises:
            Overloaded: there is no room.
        """
        ...

    def revoke(self, request_id: str) -> None:
        """Give back a grant whose `decode` will not come. Idempotent."""
        ...

    async def withdraw(self, handoff_id: str, reason: str) -> None:
        """Tell a decode that waits for this hand-off that nothing will come, so that it need not wait for the lease."""
        ...

    async def stats(self) -> EngineStats: ...

    async def health(self) -> None:
        """Raises EngineFailed when the engine cannot make progress."""
        ...

    def capabilities(self, request: Request) -> Capabilities: ...
