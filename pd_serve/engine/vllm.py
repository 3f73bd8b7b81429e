"""The engine that computes: one vLLM `AsyncLLM`, its KV connector, and what was promised on its behalf."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from pd_serve import compat
from pd_serve.config import AppConfig
from pd_serve.engine import handoff as legs
from pd_serve.engine.base import Capabilities, EngineDescription
from pd_serve.engine.vllm_calls import HeldCount, kv_stats, typed_errors
from pd_serve.engine.vllm_resume import resumable, resumed
from pd_serve.engine.vllm_start import Started, start_vllm
from pd_serve.errors import EngineFailed, InvalidRequest, Overloaded, PdServeError, TransferFailed
from pd_serve.kv.params import blocks_to_move
from pd_serve.policy.room import Load, Room
from pd_serve.types import (
    Delta,
    EngineStats,
    Handoff,
    KvOutcome,
    KvReport,
    PrefillResult,
    Request,
    Role,
    hash_tokens,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

STALL_S = 60.0
"""An engine that has work and ends no step for so long cannot make progress."""


class _Leg:
    """One request in the engine."""

    def __init__(self, request: Request) -> None:
        self.prompt_tokens = len(request.prompt_token_ids)
        self.sequences = request.n
        self.waiting = True


class VllmEngine:
    """`pd_serve.engine.base.Engine` over vLLM.

    Args:
        config: the whole configuration.
        role: which pool this engine belongs to.
        ray_address: the cluster that the engine's workers join to move KV.
    """

    def __init__(self, config: AppConfig, role: Role, ray_address: str) -> None:
        self._config = config
        self._role = role
        self._ray_address = ray_address
        self._started: Started | None = None
        self._room = Room(0, 0)
        self._legs: dict[str, _Leg] = {}
        self._held = HeldCount()
        self._background: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------ life

    async def start(self) -> EngineDescription:
        with typed_errors("the engine cannot start", its_fault=True):
            self._started = await start_vllm(self._config, self._role, self._ray_address)
        self._room = Room(self.description.kv_tokens_total, self.description.max_num_seqs)
        return self.description

    async def close(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            pids = compat.engine_pids(started.llm)
            await asyncio.to_thread(started.llm.shutdown)
            await asyncio.to_thread(compat.end_processes, pids)

    @property
    def _engine(self) -> Started:
        if self._started is None:
            raise EngineFailed("the engine is not running")
        return self._started

    @property
    def description(self) -> EngineDescription:
        """What `start` returned."""
        return self._engine.description

    # ------------------------------------------------------------------------------------ legs

    async def prefill(self, request: Request, handoff: Handoff) -> PrefillResult:
        began = time.monotonic()
        tokens: list[int] = []
        cached = 0
        async with contextlib.aclosing(self._run(request, legs.prefill_sampling(handoff))) as outputs:
            async for output in outputs:
                tokens += output.outputs[0].token_ids
                cached = output.num_cached_tokens or 0
        if not tokens:
            raise EngineFailed("the engine computed no token")
        prompt_tokens = len(request.prompt_token_ids)
        return PrefillResult(
            token_id=tokens[0],
            cached_tokens=cached,
            computed_tokens=prompt_tokens - cached,
            generated_tokens=len(tokens),
            kv_bytes=blocks_to_move(prompt_tokens, self.description.block_size) * self._engine.block_bytes,
            seconds=time.monotonic() - began,
        )

    async def decode(
        self, request: Request, handoff: Handoff | None = None, emitted: tuple[int, ...] = ()
    ) -> AsyncIterator[Delta]:
        from pd_serve.engine.vllm_outputs import delta

        monitor, first = self._engine.monitor, True
        refusal: KvReport | None = None
        told: KvReport | None = None
        self._room.start(request.id)
        try:
            params = self._decode_params(request)
            if emitted:
                request, params = resumed(request, params, emitted)
            refusal = self._refusal(request, handoff)
            wanted = handoff if refusal is None else None
            if wanted is not None:
                monitor.expect(wanted.id)
            async with contextlib.aclosing(self._run(request, legs.decode_sampling(params, wanted))) as outputs:
                async for output in outputs:
                    kv = refusal or (monitor.report(wanted.id) if wanted is not None else _NOT_PLANNED)
                    _raise_if_failed(output, kv)
                    step = delta(output, request, kv, told, first=first, block_size=self.description.block_size)
                    first, told = False, step.kv or told
                    yield step
        finally:
            self._room.settle(request.id)
            if handoff is not None:
                monitor.forget(handoff.id)
                if first or refusal is not None:  # perhaps the engine never saw it: whatever comes is not wanted
                    self._spawn(self.withdraw(handoff.id, "aborted"))

    def _decode_params(self, request: Request) -> SamplingParams:
        try:
            params = compat.decode_sampling(request.sampling)
        except Exception as error:
            if isinstance(error, msgspec.MsgspecError) or compat.is_request_error(error):
                raise InvalidRequest(f"the sampling parameters cannot be used: {error}") from error
            raise
        return compat.as_deltas(params, request.max_tokens, request.n)

    def _refusal(self, request: Request, handoff: Handoff | None) -> KvReport | None:
        """A report when KV of this hand-off must not be asked for, because it is not this prompt's."""
        if handoff is None or handoff.prompt_hash == hash_tokens(request.prompt_token_ids, request.cache_salt):
            return None
        if self._config.kv.load_failure_policy == "fail":
            raise TransferFailed("the KV that was handed over is not this prompt's")
        return KvReport(outcome=KvOutcome.RECOMPUTED, reason="other_prompt")

    async def _run(self, request: Request, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs for one leg. Leaving it early aborts the request in the engine."""
        llm = self._engine.llm
        if min(request.prompt_token_ids, default=0) < 0:  # would end the whole engine of vLLM 0.26
            raise InvalidRequest("a token id of the prompt is negative", param="prompt")
        reasoning = compat.take_reasoning(params)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        if not self._legs:
            self._engine.monitor.work_began()
        leg = self._legs[request.id] = _Leg(request)
        try:
            with typed_errors("the engine failed"):
                outputs = llm.generate(prompt, params, request.id, priority=request.priority, **reasoning)
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        if leg.waiting:
                            leg.waiting = False
                            self._room.settle(request.id)
                        yield output
        finally:
            self._legs.pop(request.id, None)

    async def withdraw(self, handoff_id: str, reason: str) -> None:
        if self.description.kv.engine_id:
            with typed_errors("the engine failed", its_fault=True):
                await self._engine.llm.collective_rpc("pd_kv_withdraw", args=(handoff_id, reason))

    def _spawn(self, call: Coroutine[None, None, None]) -> None:
        """Run `call` beside everything else; a dead engine makes no difference to it."""

        async def run() -> None:
            with contextlib.suppress(PdServeError):
                await call

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ------------------------------------------------------------------------------------ room

    async def grant(self, request: Request) -> None:
        tokens = len(request.prompt_token_ids) + request.n * request.max_tokens
        now = time.monotonic()
        lacking = self._room.grant(request.id, tokens, request.n, self._load(), now, now + self._config.kv.lease_s)
        if lacking:
            raise Overloaded(f"the decode replica has no room: {lacking}", retry_after_s=1.0)

    def revoke(self, request_id: str) -> None:
        self._room.revoke(request_id)

    def _load(self) -> Load:
        sequences = self._sequences()
        return Load(tokens=self._kv_tokens_used() if sequences else 0, sequences=sequences)

    def _sequences(self) -> int:
        return sum(leg.sequences for leg in self._legs.values())

    def _kv_tokens_used(self) -> int:
        return round(self._engine.monitor.kv_usage * self.description.kv_tokens_total)

    # ------------------------------------------------------------------------------------ what it says about itself

    async def stats(self) -> EngineStats:
        self._room.expire(time.monotonic())
        held = await self._held.ask(self._engine.llm) if self.description.kv.engine_id else 0
        sequences = self._sequences()
        running = min(self._engine.monitor.running, sequences)
        return EngineStats(
            waiting=sequences - running,
            running=running,
            waiting_prompt_tokens=sum(leg.prompt_tokens for leg in self._legs.values() if leg.waiting),
            kv_tokens_total=self.description.kv_tokens_total,
            kv_tokens_used=self._kv_tokens_used(),
            reserved_tokens=self._room.reserved_tokens,
            handoffs_held=held,
        )

    async def kv_counts(self) -> list[dict[str, Any]]:
        """Counts of the ledgers of each rank (`WorkerSide.stats`); empty without a KV connector."""
        if not self.description.kv.engine_id:
            return []
        with typed_errors("the engine failed", its_fault=True):
            return await kv_stats(self._engine.llm)

    async def health(self) -> None:
        from pd_serve.engine.vllm_monitor import broken_process

        llm = self._engine.llm
        with typed_errors("the engine failed", its_fault=True):
            await llm.check_health()
        if broken := broken_process(compat.engine_pids(llm)):
            raise EngineFailed(f"a process of the engine is {broken}")
        if self._legs and time.monotonic() - self._engine.monitor.last_step > STALL_S:
            raise EngineFailed(f"the engine has work and ended no step for {STALL_S:.0f} s")

    def capabilities(self, request: Request) -> Capabilities:
        try:
            return Capabilities(resume=resumable(self._decode_params(request)))
        except InvalidRequest:
            return Capabilities(resume=False)


_NOT_PLANNED = KvReport(outcome=KvOutcome.LOCAL, reason="not_planned")


def _raise_if_failed(output: RequestOutput, kv: KvReport) -> None:
    if any(choice.finish_reason == "error" for choice in output.outputs):
        if kv.outcome is KvOutcome.RECOMPUTED:
            raise TransferFailed(f"the KV did not come or does not match: {kv.reason}")
        raise EngineFailed("the engine ended the request with an error")
