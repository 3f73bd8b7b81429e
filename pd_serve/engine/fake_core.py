"""The fake engine's core: the step loop that computes, samples and hands out deltas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pd_serve.engine.fake_faults import Fault, FaultScript
from pd_serve.engine.fake_model import FakeModel
from pd_serve.engine.fake_scheduler import Chunk, Scheduler, Sequence, State
from pd_serve.engine.fake_timing import Pacer, Timing
from pd_serve.errors import EngineFailed, PdServeError
from pd_serve.types import ChoiceDelta, Delta, KvReport, LogprobsAtPosition, Request

logger = logging.getLogger(__name__)


class Leg:
    """One request inside the engine.

    Args:
        sequences: one a choice; those after the first begin once the first has computed the prompt, whose blocks they
            then find in the prefix cache.
        keep_pages: keep the prompt's KV as pages when the leg is done (a prefill leg).
    """

    def __init__(self, request: Request, sequences: list[Sequence], keep_pages: bool = False) -> None:
        self.request = request
        self.sequences = sequences
        self.events: asyncio.Queue[Delta | PdServeError] = asyncio.Queue()
        self.keep_pages = keep_pages
        self.pages = bytearray()
        self.kv: KvReport | None = None
        self.prompt_logprobs: tuple[LogprobsAtPosition | None, ...] | None = None
        self.scheduled = False
        self.followers = sequences[1:]
        """Choices that have not begun."""
        self._begun = False

    @property
    def finished(self) -> bool:
        return all(sequence.answer.finish_reason for sequence in self.sequences)

    def push(self, choices: list[ChoiceDelta]) -> None:
        """Hand out what one step added."""
        edge = self.finished or not self._begun
        self.events.put_nowait(
            Delta(
                self.request.id,
                tuple(choices),
                finished=self.finished,
                cached_tokens=self.sequences[0].cached_tokens if edge else None,
                prompt_logprobs=None if self._begun else self.prompt_logprobs,
                kv=self.kv if edge else None,
            )
        )
        self._begun = True


class Core:
    """Sequences of one engine, stepped on the event loop.

    Args:
        scheduled: called once with each leg when its blocks are allocated.
    """

    def __init__(
        self,
        model: FakeModel,
        scheduler: Scheduler,
        timing: Timing,
        script: FaultScript,
        scheduled: Callable[[Leg], None],
    ) -> None:
        self.scheduler = scheduler
        self.legs: dict[str, Leg] = {}
        self.death: str = ""
        self.died = asyncio.Event()
        self._model = model
        self._timing = timing
        self._script = script
        self._scheduled = scheduled
        self._wake = asyncio.Event()
        self._pacer = Pacer()
        self._stall_s = 0.0
        self._due = float("inf")
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run())

    async def close(self) -> None:
        self.die("the engine is closed")
        if self._loop:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    # ------------------------------------------------------------------------------------ legs

    def add(self, leg: Leg) -> None:
        self.legs[leg.request.id] = leg
        first = leg.sequences[0]
        if first.answer.finish_reason:  # resumed after its last token
            leg.push([first.answer.delta()])
        else:
            self.scheduler.add(first)
            self._wake.set()

    def remove(self, leg: Leg) -> None:
        """Nobody wants it any more, or it is finished. Idempotent."""
        if self.legs.get(leg.request.id) is leg:
            del self.legs[leg.request.id]
        for sequence in leg.sequences:
            self.scheduler.remove(sequence)
        self._wake.set()

    def fail(self, leg: Leg, error: PdServeError) -> None:
        """End the leg with an error."""
        self.remove(leg)
        leg.events.put_nowait(error)

    def loaded(self, sequence: Sequence) -> None:
        if sequence.state is State.LOADING:
            self.scheduler.loaded(sequence)
            self._wake.set()

    def die(self, reason: str) -> None:
        """Every leg fails, and the engine does nothing any more."""
        if self.death:
            return
        self.death = reason
        self.died.set()
        self._wake.set()
        for leg in list(self.legs.values()):
            self.fail(leg, EngineFailed(reason))

    def overdue_s(self) -> float:
        """How much later than planned the step in progress is."""
        return max(asyncio.get_running_loop().time() - self._due, 0.0)

    # ------------------------------------------------------------------------------------ steps

    async def _run(self) -> None:
        try:
            while not self.death:
                await self._step()
        except Exception:
            logger.exception("the fake engine's step loop broke")
            self.die("the engine's step loop broke")

    async def _step(self) -> None:
        chunks = self.scheduler.schedule()
        self._note_scheduled()
        if not chunks:
            self._pacer.pause()
            self._wake.clear()
            await self._wake.wait()
            return
        prompt_tokens = sum(chunk.tokens for chunk in chunks if chunk.tokens > 1)
        decodes = sum(1 for chunk in chunks if chunk.tokens == 1)
        seconds = self._timing.step_s(prompt_tokens, decodes)
        self._due = asyncio.get_running_loop().time() + seconds
        await self._pacer.step(seconds)
        if self._stall_s:
            stall_s, self._stall_s = self._stall_s, 0.0
            await asyncio.sleep(stall_s)
        self._due = float("inf")
        self._advance(chunks)

    def _note_scheduled(self) -> None:
        for leg in self.legs.values():
            if not leg.scheduled and leg.sequences[0].blocks:
                leg.scheduled = True
                self._scheduled(leg)

    def _advance(self, chunks: list[Chunk]) -> None:
        added: dict[str, list[ChoiceDelta]] = {}
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is State.RUNNING and not self._struck_mid_prefill(chunk):
                self.scheduler.advance(chunk)
                if sequence.uncomputed == 0:
                    added.setdefault(sequence.leg_id, []).append(self._sample(sequence))
        for leg_id, choices in added.items():
            if leg := self.legs.get(leg_id):
                self._hand_out(leg, choices)

    def _sample(self, sequence: Sequence) -> ChoiceDelta:
        sequence.token_ids.append(sequence.answer.sample(sequence.cache))
        return sequence.answer.delta()

    def _hand_out(self, leg: Leg, choices: list[ChoiceDelta]) -> None:
        if leg.keep_pages:
            leg.pages = self._model.pages(leg.sequences[0].cache, leg.sequences[0].prompt_tokens)
        leg.push(choices)
        for choice in choices:
            if choice.finish_reason:
                self.scheduler.remove(leg.sequences[choice.index])
        for follower in leg.followers:
            self.scheduler.add(follower)
        leg.followers = []
        for choice in choices:
            sequence = leg.sequences[choice.index]
            if fault := self._script.strike("after_token_k", leg.request.id, len(sequence.answer.token_ids)):
                self._suffer(fault, leg, sequence)

    # ------------------------------------------------------------------------------------ faults

    def _struck_mid_prefill(self, chunk: Chunk) -> bool:
        sequence = chunk.sequence
        if sequence.past_half or len(sequence.cache) + chunk.tokens <= sequence.prompt_tokens // 2:
            return False
        sequence.past_half = True
        fault = self._script.strike("mid_prefill", sequence.leg_id)
        if fault:
            self._suffer(fault, self.legs[sequence.leg_id], sequence)
        return fault is not None

    def _suffer(self, fault: Fault, leg: Leg, sequence: Sequence) -> None:
        """Let a fault happen to a sequence in the step loop."""
        match fault.action:
            case "fail":
                self.fail(leg, EngineFailed(f"scripted fault at {fault.stage}"))
            case "die":
                self.die(f"scripted death at {fault.stage}")
            case "stall":
                self.stall(fault.seconds)
            case "hang" | "slow" if sequence.state is State.RUNNING:
                self.scheduler.hold(sequence)
                if fault.action == "slow":
                    asyncio.get_running_loop().call_later(fault.seconds, self._resume, sequence)
            case _:
                pass  # it was the last token

    def stall(self, seconds: float) -> None:
        """The next step takes so much longer."""
        self._stall_s = seconds

    def _resume(self, sequence: Sequence) -> None:
        self.scheduler.resume(sequence)
        self._wake.set()
