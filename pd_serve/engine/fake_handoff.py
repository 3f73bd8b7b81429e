"""How KV leaves and enters the fake engine: real bytes over a real transport, with a ledger on each side."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import TypeVar

from pd_serve.engine.fake_faults import FaultScript, damage
from pd_serve.engine.fake_model import FakeModel, KvCache
from pd_serve.errors import TransferFailed
from pd_serve.kv.envelope import Envelope, Expected, checksum, mismatch
from pd_serve.kv.ledger import Ledger, Owner
from pd_serve.kv.transport.base import Payload, Transport
from pd_serve.types import Handoff, KvOutcome, KvReport, Request, hash_tokens

T = TypeVar("T")


class Outbox:
    """KV that this engine computed for others.

    Args:
        with_checksum: put a checksum into envelopes.
    """

    def __init__(self, model: FakeModel, transport: Transport, script: FaultScript, with_checksum: bool) -> None:
        self._model = model
        self._transport = transport
        self._script = script
        self._with_checksum = with_checksum
        self.ledger = Ledger()

    def open(self, handoff: Handoff) -> bool:
        """From now on this engine owns the hand-off's KV. False when the id was used before."""
        return self.ledger.open(handoff.id, time.monotonic(), handoff.lease_s)

    async def offer(self, leg_id: str, handoff: Handoff, pages: bytearray) -> None:
        """Give the pages to the target. Raises TransferFailed when it cannot be reached."""
        envelope = Envelope(
            handoff_id=handoff.id,
            source=self._transport.address().engine_id,
            fingerprint=self._model.fingerprint(),
            prompt_tokens=handoff.prompt_tokens,
            prompt_hash=handoff.prompt_hash,
            rank=0,
            layers=self._model.layers,
            blocks=self._model.blocks(handoff.prompt_tokens),
            page_bytes=self._model.page_bytes,
            checksum=checksum(memoryview(pages)) if self._with_checksum else None,
        )
        if not self.ledger.move(handoff.id, Owner.TRANSPORT, len(pages)):
            raise TransferFailed("expired")
        fault = self._script.strike("mid_transfer", leg_id, damage=True)
        for sent, data in damage(fault.action, envelope, pages) if fault else [(envelope, pages)]:
            await _result(self._transport.offer(handoff.target, sent, memoryview(data), handoff.lease_s))
        self.ledger.done(handoff.id, time.monotonic())

    def close(self, handoff_id: str, error: BaseException) -> None:
        """The leg ended with `error` before the KV was given away."""
        if isinstance(error, asyncio.CancelledError):
            self.ledger.cancel(handoff_id, time.monotonic(), "aborted")
        else:
            reason = error.message if isinstance(error, TransferFailed) else type(error).__name__
            self.ledger.fail(handoff_id, time.monotonic(), reason)


class Inbound:
    """One hand-off that a decode leg waits for.

    Args:
        request: the leg.
        ledger: of all hand-offs that this engine receives.
    """

    def __init__(
        self, request: Request, handoff: Handoff, model: FakeModel, transport: Transport, ledger: Ledger
    ) -> None:
        self.handoff = handoff
        self._request = request
        self._model = model
        self._transport = transport
        self._ledger = ledger
        self._began = self._arrived = time.monotonic()
        self._used_before = not ledger.open(handoff.id, self._began, handoff.lease_s)

    async def take(self) -> Payload:
        """The KV, checked against its envelope. Raises TransferFailed with a reason word."""
        if self._used_before:
            raise TransferFailed("taken")
        if self.handoff.prompt_hash != hash_tokens(self._request.prompt_token_ids, self._request.cache_salt):
            raise TransferFailed("other_prompt")
        self._began = time.monotonic()
        payload = await _result(self._transport.take(self.handoff.id, self.handoff.lease_s))
        self._arrived = time.monotonic()
        self._ledger.move(self.handoff.id, Owner.TRANSPORT, payload.pages.nbytes)
        expected = Expected(
            fingerprint=self._model.fingerprint(),
            rank=0,
            layers=self._model.layers,
            blocks=self._model.blocks(self.handoff.prompt_tokens),
            page_bytes=self._model.page_bytes,
        )
        if wrong := mismatch(payload.envelope, payload.pages, self.handoff, expected):
            raise TransferFailed(wrong)
        return payload

    def put(self, payload: Payload, cache: KvCache) -> KvReport:
        """Copy what the cache lacks of the prompt, its last token aside, which the engine computes itself."""
        self._ledger.move(self.handoff.id, Owner.TARGET)
        had = len(cache) // self._model.block_size
        self._model.put(cache, payload.pages, self.handoff.prompt_tokens - 1)
        self._transport.release(self.handoff.id)
        now = time.monotonic()
        self._ledger.done(self.handoff.id, now)
        return KvReport(
            outcome=KvOutcome.MOVED,
            bytes=payload.pages.nbytes,
            blocks=self._model.blocks(self.handoff.prompt_tokens) - had,
            wait_s=self._arrived - self._began,
            copy_s=now - self._arrived,
        )

    def fail(self, reason: str) -> KvReport:
        """It did not come, or may not be used; whatever still comes is refused."""
        self._transport.withdraw(self.handoff.id, reason)
        self._ledger.fail(self.handoff.id, time.monotonic(), reason)
        return KvReport(outcome=KvOutcome.RECOMPUTED, reason=reason, wait_s=time.monotonic() - self._began)

    def drop(self, reason: str) -> None:
        """Nobody wants it any more. Idempotent."""
        if self._ledger.cancel(self.handoff.id, time.monotonic(), reason):
            self._transport.withdraw(self.handoff.id, reason)


async def _result(future: Future[T]) -> T:
    """The transport's future's result. Being cancelled leaves the future to its owner, who ends it when it is
    withdrawn or its lease ends."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    future.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(done.set))
    await done.wait()
    return future.result()
