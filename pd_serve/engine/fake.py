"""An engine without a model's compute: a scheduler, a KV cache, hand-offs and answers of its own, and scripted faults.

It behaves as vLLM does towards `engine/base.py`, in milliseconds and without a GPU: prompts are computed in chunks,
decodes are batched, KV is bounded and moves as bytes, and every answer depends on all of its KV (`fake_model`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Literal

import msgspec

from pd_serve.engine.base import Capabilities, EngineDescription
from pd_serve.engine.fake_blocks import BlockPool
from pd_serve.engine.fake_core import Core, Leg
from pd_serve.engine.fake_faults import Fault, FaultScript, Stage
from pd_serve.engine.fake_handoff import Inbound, Outbox
from pd_serve.engine.fake_model import Decoder, FakeModel, words
from pd_serve.engine.fake_sampling import Answer, Sampling, prompt_logprobs, sampling_of
from pd_serve.engine.fake_scheduler import Scheduler, Sequence
from pd_serve.engine.fake_timing import Timing
from pd_serve.errors import EngineFailed, InvalidRequest, Overloaded, PdServeError, TransferFailed
from pd_serve.kv.ledger import Ledger
from pd_serve.kv.transport.base import Transport
from pd_serve.policy.room import Load, Room
from pd_serve.types import Delta, EngineStats, Handoff, KvOutcome, KvReport, PrefillResult, Request


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One fake engine. Names are vLLM's where it has one."""

    model: FakeModel = FakeModel()
    timing: Timing = Timing()
    kv_tokens: int = 65_536
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_prefix_caching: bool = True
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    checksum: bool = True
    grant_s: float = 10.0
    """After this time a grant whose `decode` did not come is given back."""
    overdue_s: float = 5.0
    """An engine whose step is so much later than planned is not healthy."""


class FakeEngine:
    """An `Engine`.

    Args:
        transport: its end, closed with the engine.
        faults: what goes wrong, for the life of the engine; more may be added to `script`.
        decoder: text of one token.
    """

    def __init__(
        self, settings: FakeSettings, transport: Transport, faults: Iterable[Fault] = (), decoder: Decoder = words
    ) -> None:
        self.script = FaultScript(faults)
        self.received = Ledger()
        self._settings = settings
        self._model = settings.model
        self._transport = transport
        self._decoder = decoder
        self._outbox = Outbox(settings.model, transport, self.script, settings.checksum)
        self._pool = BlockPool(settings.kv_tokens // settings.model.block_size, settings.enable_prefix_caching)
        self._scheduler = Scheduler(
            settings.model, self._pool, settings.max_num_seqs, settings.max_num_batched_tokens, self._begin_load
        )
        self._core = Core(settings.model, self._scheduler, settings.timing, self.script, self._leg_scheduled)
        self._room = Room(self._pool.total * settings.model.block_size, settings.max_num_seqs)
        self._inbound: dict[str, Inbound] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}

    @property
    def sent(self) -> Ledger:
        """Hand-offs that this engine gives away."""
        return self._outbox.ledger

    @property
    def preemptions(self) -> int:
        """Times that a sequence had to give up its blocks."""
        return self._scheduler.preemptions

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV was computed here, again after a preemption."""
        return self._scheduler.computed_tokens

    async def start(self) -> EngineDescription:
        settings = self._settings
        kv_tokens = self._pool.total * self._model.block_size
        if kv_tokens < settings.max_model_len:
            raise EngineFailed(f"max_model_len is {settings.max_model_len}, but there is KV for {kv_tokens} tokens")
        self._core.start()
        return EngineDescription(
            fingerprint=self._model.fingerprint(),
            kv=self._transport.address(),
            block_size=self._model.block_size,
            kv_tokens_total=kv_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
        )

    async def close(self) -> None:
        await self._core.close()
        self._transport.close()

    def die(self, reason: str = "the engine died") -> None:
        """End as a crashed process does: every leg fails, now and later, and what it held is gone."""
        self._core.die(reason)
        self._transport.close()

    def stall(self, seconds: float) -> None:
        """The next step takes so much longer."""
        self._core.stall(seconds)

    # ------------------------------------------------------------------------------------ prefill

    async def prefill(self, request: Request, handoff: Handoff) -> PrefillResult:
        began = time.monotonic()
        self._check(request, max_tokens=1)
        if not self._outbox.open(handoff):
            raise EngineFailed(f"hand-off {handoff.id} was used before")
        leg = self._leg(request, [Sampling(max_tokens=1, ignore_eos=True)], keep_pages=True)
        try:
            await self._strike("before_prefill", request.id)
            self._core.add(leg)
            delta = await _next(leg)
            await self._strike("prefill_done", request.id)
            await self._strike("mid_transfer", request.id)
            await self._outbox.offer(request.id, handoff, leg.pages)
            await self._strike("transfer_done", request.id)
        except BaseException as error:
            self._outbox.close(handoff.id, error)
            raise
        finally:
            self._core.remove(leg)
        cached = delta.cached_tokens or 0
        return PrefillResult(
            token_id=delta.choices[0].token_ids[0],
            cached_tokens=cached,
            computed_tokens=len(request.prompt_token_ids) - cached,
            generated_tokens=len(leg.sequences[0].answer.token_ids),
            kv_bytes=len(leg.pages),
            seconds=time.monotonic() - began,
        )

    # ------------------------------------------------------------------------------------ decode

    async def decode(
        self, request: Request, handoff: Handoff | None = None, emitted: tuple[int, ...] = ()
    ) -> AsyncIterator[Delta]:
        self._check(request, request.max_tokens)
        leg = self._leg(request, [sampling_of(request)] * request.n, emitted=emitted, handoff=handoff)
        self._room.start(request.id)
        if handoff:
            self._inbound[request.id] = Inbound(request, handoff, self._model, self._transport, self.received)
        else:
            leg.kv = KvReport(outcome=KvOutcome.LOCAL, reason="not_planned")
        try:
            if handoff is None:
                await self._strike("before_prefill", request.id)
            self._core.add(leg)
            while True:
                delta = await _next(leg)
                yield delta
                if delta.finished:
                    return
        finally:
            self._core.remove(leg)
            self._room.settle(request.id)
            if load := self._loads.pop(request.id, None):
                load.cancel()
            if inbound := self._inbound.pop(request.id, None):
                inbound.drop("aborted")

    def _leg_scheduled(self, leg: Leg) -> None:
        """Its blocks are allocated: the engine's own counts hold them now."""
        self._room.settle(leg.request.id)
        inbound = self._inbound.get(leg.request.id)
        if inbound and leg.request.id not in self._loads:
            inbound.drop("in_own_cache")
            leg.kv = KvReport(outcome=KvOutcome.LOCAL, reason="in_own_cache")

    def _begin_load(self, sequence: Sequence) -> None:
        self._loads[sequence.leg_id] = asyncio.create_task(self._load(sequence, self._inbound[sequence.leg_id]))

    async def _load(self, sequence: Sequence, inbound: Inbound) -> None:
        if not (leg := self._core.legs.get(sequence.leg_id)):
            return
        try:
            async with asyncio.timeout(inbound.handoff.lease_s):
                payload = await inbound.take()
                await self._strike("mid_transfer", sequence.leg_id, TransferFailed("lost"))
                leg.kv = inbound.put(payload, sequence.cache)
            await self._strike("transfer_done", sequence.leg_id)
        except (TimeoutError, TransferFailed) as error:
            reason = error.message if isinstance(error, TransferFailed) else "expired"
            leg.kv = inbound.fail(reason)
            if self._settings.load_failure_policy == "fail":
                self._core.fail(leg, TransferFailed(f"the prompt's KV cache could not be moved: {reason}"))
        except EngineFailed as error:
            self._core.fail(leg, error)
        self._core.loaded(sequence)

    async def withdraw(self, handoff_id: str, reason: str) -> None:
        self._transport.withdraw(handoff_id, reason)

    # ------------------------------------------------------------------------------------ room

    async def grant(self, request: Request) -> None:
        self._check(request, request.max_tokens)
        tokens = len(request.prompt_token_ids) + request.n * request.max_tokens
        now = time.monotonic()
        load = Load(tokens=self._pool.used * self._model.block_size, sequences=self._sequences())
        lacking = self._room.grant(request.id, tokens, request.n, load, now, now + self._settings.grant_s)
        if lacking:
            raise Overloaded(f"the decode replica has no room: {lacking}", retry_after_s=1.0)

    def revoke(self, request_id: str) -> None:
        self._room.revoke(request_id)

    def _sequences(self) -> int:
        return sum(1 for leg in self._core.legs.values() for s in leg.sequences if not s.answer.finish_reason)

    # ------------------------------------------------------------------------------------ state

    async def stats(self) -> EngineStats:
        self._room.expire(time.monotonic())
        self._outbox.ledger.expire(time.monotonic())
        running = self._scheduler.running
        sequences = self._sequences()
        waiting = (*self._scheduler.waiting, *self._scheduler.ready)
        return EngineStats(
            waiting=sequences - len(running),
            running=len(running),
            waiting_prompt_tokens=sum(max(s.prompt_tokens - len(s.cache), 0) for s in (*waiting, *running)),
            kv_tokens_total=self._pool.total * self._model.block_size,
            kv_tokens_used=self._pool.used * self._model.block_size,
            reserved_tokens=self._room.reserved_tokens,
            handoffs_held=self._outbox.ledger.held() + self._transport.held(),
        )

    async def health(self) -> None:
        if self._core.death:
            raise EngineFailed(self._core.death)
        if (overdue := self._core.overdue_s()) > self._settings.overdue_s:
            raise EngineFailed(f"the engine's step is {overdue:.0f} s late")

    def capabilities(self, request: Request) -> Capabilities:
        return Capabilities(resume=request.n == 1)

    # ------------------------------------------------------------------------------------ inside

    def _check(self, request: Request, max_tokens: int) -> None:
        if self._core.death:
            raise EngineFailed(self._core.death)
        prompt, longest = len(request.prompt_token_ids), self._settings.max_model_len
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if prompt + max_tokens > longest:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {max_tokens} output tokens are more than max_model_len ({longest})",
                param="max_tokens",
            )
        if not all(0 <= token_id < self._model.vocab_size for token_id in request.prompt_token_ids):
            raise InvalidRequest("a prompt token is outside the vocabulary", param="prompt")
        if request.id in self._core.legs:
            raise EngineFailed(f"leg {request.id} is in the engine already")

    def _leg(
        self,
        request: Request,
        samplings: list[Sampling],
        *,
        emitted: tuple[int, ...] = (),
        handoff: Handoff | None = None,
        keep_pages: bool = False,
    ) -> Leg:
        sequences = [
            Sequence(
                request.id,
                (*request.prompt_token_ids, *emitted),
                len(request.prompt_token_ids),
                self._model,
                Answer(self._model, sampling, self._decoder, index, emitted),
                request.cache_salt,
                handoff if index == 0 else None,
            )
            for index, sampling in enumerate(samplings)
        ]
        leg = Leg(request, sequences, keep_pages)
        leg.prompt_logprobs = prompt_logprobs(request, samplings[0], self._model, self._decoder)
        return leg

    async def _strike(self, stage: Stage, leg_id: str, failure: PdServeError | None = None) -> None:
        """Let a scripted fault happen to a leg outside the step loop."""
        fault = self.script.strike(stage, leg_id)
        match fault and fault.action:
            case "fail":
                raise failure or EngineFailed(f"scripted fault at {stage}")
            case "die":
                self.die(f"scripted death at {stage}")
                raise EngineFailed(self._core.death)
            case "stall":
                self.stall(fault.seconds if fault else 0.0)
            case "hang" | "slow":
                try:
                    seconds = fault.seconds if fault and fault.action == "slow" else None
                    async with asyncio.timeout(seconds):
                        await self._core.died.wait()
                    raise EngineFailed(self._core.death)
                except TimeoutError:
                    return


async def _next(leg: Leg) -> Delta:
    event = await leg.events.get()
    if isinstance(event, PdServeError):
        raise event
    return event
