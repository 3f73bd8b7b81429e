"""The replica's side of the channel: runs legs on the engine and sends back one frame a step to each ingress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from pd_serve.engine.base import Engine
from pd_serve.errors import DeadlineExceeded, Draining, EngineFailed, PdServeError, ReplicaLost
from pd_serve.path import frames
from pd_serve.path.channel import ReplicaWire
from pd_serve.path.frames import ToReplica
from pd_serve.types import Delta, EngineStats, NullSink, Request, Role, Sink

logger = logging.getLogger(__name__)

INGRESS_SILENCE_S = 10.0
"""An ingress that sent nothing (not even a ping) for so long is gone: its legs are aborted."""
STATS_TIMEOUT_S = 2.0
"""An engine that does not say how it is within this time is not healthy."""


class ReplicaHost:
    """Everything that a replica does for its ingresses. One event loop, no threads.

    Args:
        engine: started.
        sink: where legs and their outcomes are counted.
    """

    def __init__(self, engine: Engine, sink: Sink | None = None) -> None:
        self._engine = engine
        self._sink: Sink = sink or NullSink()
        self._legs: dict[str, asyncio.Task[None]] = {}
        self._peers: dict[str, ReplicaWire] = {}
        self._legs_of: dict[str, set[str]] = defaultdict(set)
        self._silent_rounds: dict[str, int] = {}
        """Reports since each ingress was last heard. Not seconds: after a pause of this process nobody was silent."""
        self._frames: dict[str, list[Delta]] = defaultdict(list)
        self._flush_scheduled = False
        self._draining = False
        self._background: set[asyncio.Task[None]] = set()
        self._reporter: asyncio.Task[None] | None = None
        self._sample: frames.Stats | None = None
        """The last report; None before the first."""

    def start(self) -> None:
        """Begin to report stats; call once, on the event loop."""
        self._reporter = asyncio.create_task(self._report_stats())

    # ------------------------------------------------------------------------------------ messages in

    def on_message(self, wire: ReplicaWire, message: ToReplica) -> None:
        """Handle one message of an ingress."""
        self._peers[wire.peer] = wire
        self._silent_rounds[wire.peer] = 0
        match message:
            case frames.SubmitDecode(request=request):
                self._start_leg(wire, Role.DECODE, request, self._decode(wire, message))
            case frames.SubmitPrefill(request=request):
                self._start_leg(wire, Role.PREFILL, request, self._prefill(wire, message))
            case frames.Abort(request_id=request_id):
                if leg := self._legs.get(request_id):
                    leg.cancel()
            case frames.Withdraw(handoff_id=handoff_id, reason=reason):
                self._spawn(self._engine.withdraw(handoff_id, reason))
            case frames.Ping():
                if self._sample is not None:
                    wire.send(self._sample)

    def _start_leg(self, wire: ReplicaWire, role: Role, request: Request, run: Coroutine[None, None, None]) -> None:
        if self._draining or request.id in self._legs:
            run.close()
            refusal = Draining("the replica is draining") if self._draining else EngineFailed("leg id is in use")
            self._sink.count("legs", role=role, outcome="refused")
            wire.send(frames.Refused(request.id, refusal.to_wire()))
            return
        leg = asyncio.create_task(run)
        self._legs[request.id] = leg
        self._legs_of[wire.peer].add(request.id)
        leg.add_done_callback(lambda leg: self._leg_over(wire.peer, role, request.id, leg))

    def _leg_over(self, peer: str, role: Role, request_id: str, leg: asyncio.Task[None]) -> None:
        self._legs.pop(request_id, None)
        if legs := self._legs_of.get(peer):
            legs.discard(request_id)
        if leg.cancelled():  # perhaps before it began to run
            self._sink.count("legs", role=role, outcome="cancelled")

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ------------------------------------------------------------------------------------ legs

    async def _prefill(self, wire: ReplicaWire, message: frames.SubmitPrefill) -> None:
        request = frames.rebase(message.request, message.budget_s)
        try:
            async with _within_budget(request):
                result = await self._engine.prefill(request, message.handoff)
        except Exception as error:
            self._leg_failed(wire, request, Role.PREFILL, _typed(error))
        else:
            self._sink.count("legs", role=Role.PREFILL, outcome="ok")
            wire.send(frames.Prefilled(request.id, result))

    async def _decode(self, wire: ReplicaWire, message: frames.SubmitDecode) -> None:
        request = frames.rebase(message.request, message.budget_s)
        try:
            async with _within_budget(request):
                if not await self._granted(wire, request):
                    return
                async for delta in self._engine.decode(request, message.handoff, message.emitted):
                    self._add_to_frame(wire, delta)
        except Exception as error:
            self._leg_failed(wire, request, Role.DECODE, _typed(error))
        else:
            self._sink.count("legs", role=Role.DECODE, outcome="ok")
        finally:
            self._engine.revoke(request.id)

    async def _granted(self, wire: ReplicaWire, request: Request) -> bool:
        try:
            await self._engine.grant(request)
        except Exception as error:
            self._sink.count("legs", role=Role.DECODE, outcome="refused")
            wire.send(frames.Refused(request.id, _typed(error).to_wire()))
            return False
        wire.send(frames.Granted(request.id))
        return True

    def _leg_failed(self, wire: ReplicaWire, request: Request, role: Role, error: PdServeError) -> None:
        self._sink.count("legs", role=role, outcome=type(error).__name__)
        self._flush(wire.peer)  # what was generated before the failure stays in front of it
        wire.send(frames.Failed(request.id, error.to_wire()))

    # ------------------------------------------------------------------------------------ frames out

    def _add_to_frame(self, wire: ReplicaWire, delta: Delta) -> None:
        self._frames[wire.peer].append(delta)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            # The engine hands out all outputs of a step before this callback gets its turn.
            asyncio.get_running_loop().call_soon(self._flush_all)

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for peer in list(self._frames):
            self._flush(peer)

    def _flush(self, peer: str) -> None:
        deltas, wire = self._frames.pop(peer, None), self._peers.get(peer)
        if deltas and wire:
            wire.send(frames.Frame(tuple(deltas)))

    # ------------------------------------------------------------------------------------ stats

    async def _report_stats(self) -> None:
        while True:
            await self._report()
            await asyncio.sleep(frames.STATS_PERIOD_S)
            self._drop_silent_ingresses()

    async def _report(self) -> None:
        """One sample of the engine's counts, to every ingress."""
        stats, reason = EngineStats(), ""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await self._engine.stats()
                await self._engine.health()
        except TimeoutError:
            reason = "the engine does not answer"
        except Exception as error:  # whatever it is, the reporter lives on
            reason = _typed(error).message
        self._sample = frames.Stats(stats, healthy=not reason, draining=self._draining, reason=reason)
        for wire in list(self._peers.values()):
            wire.send(self._sample)

    def _drop_silent_ingresses(self) -> None:
        for peer in self._silent_rounds:
            self._silent_rounds[peer] += 1
        patience = INGRESS_SILENCE_S / frames.STATS_PERIOD_S
        for peer in [peer for peer, rounds in self._silent_rounds.items() if rounds > patience]:
            self._end_legs(peer, ReplicaLost("the replica heard nothing from the ingress"))
            self.ingress_gone(peer)

    def ingress_gone(self, peer: str) -> None:
        """Abort the legs of an ingress that nothing can be sent to any more. Idempotent."""
        if self._peers.pop(peer, None) is None:
            return
        for request_id in self._legs_of.pop(peer, set()):
            self._legs[request_id].cancel()
        self._silent_rounds.pop(peer, None)
        self._frames.pop(peer, None)
        self._sink.count("ingresses_lost")

    def _end_legs(self, peer: str, error: PdServeError) -> None:
        """Abort an ingress's legs and tell it, should it still be there."""
        self._flush(peer)
        for request_id in list(self._legs_of[peer]):
            self._legs[request_id].cancel()
            self._peers[peer].send(frames.Failed(request_id, error.to_wire()))

    # ------------------------------------------------------------------------------------ end

    @property
    def legs(self) -> int:
        """Legs that run now."""
        return len(self._legs)

    async def drain(self, limit_s: float) -> None:
        """Take no new legs, let those that run finish for at most `limit_s`, then end them with an error."""
        self._draining = True
        await self._report()
        give_up = time.monotonic() + limit_s
        while self._legs and time.monotonic() < give_up:
            await asyncio.wait(self._legs.values(), timeout=min(1.0, max(0.0, give_up - time.monotonic())))
        for peer in list(self._legs_of):
            self._end_legs(peer, Draining("the replica had to leave"))
        await self._cancel_legs()

    async def close(self) -> None:
        """Abort every leg and stop reporting. The engine stays open: it belongs to the caller."""
        if self._reporter:
            self._reporter.cancel()
        await self._cancel_legs()
        for task in self._background:
            task.cancel()

    async def _cancel_legs(self) -> None:
        legs = list(self._legs.values())
        for leg in legs:
            leg.cancel()
        await asyncio.gather(*legs, return_exceptions=True)


@asynccontextmanager
async def _within_budget(request: Request) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the request's budget ends inside the block."""
    try:
        async with asyncio.timeout(max(request.deadline - time.monotonic(), 0.0)):
            yield
    except TimeoutError as timeout:
        raise DeadlineExceeded("the request's time budget ran out") from timeout


def _typed(error: Exception) -> PdServeError:
    """The error as a client may see it; what the engine seam should not have let through is logged and hidden."""
    if isinstance(error, PdServeError):
        return error
    logger.error("unexpected error in a leg", exc_info=error)
    return EngineFailed("the engine failed on this request")
