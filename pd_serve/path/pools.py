"""The ingress's side of the channels: every replica it can reach, and what it knows of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from pd_serve.errors import DeadlineExceeded, PdServeError, ReplicaLost, from_wire
from pd_serve.path import frames
from pd_serve.path.channel import IngressWire
from pd_serve.path.trust import Trust
from pd_serve.types import (
    ClusterView,
    Delta,
    EngineStats,
    Handoff,
    PrefillResult,
    ReplicaInfo,
    ReplicaState,
    ReplicaView,
    Request,
    Role,
)

logger = logging.getLogger(__name__)

GRANT_TIMEOUT_S = 5.0
"""A replica that does not even refuse within this time is treated as lost for this request."""
SUSPECT_AFTER_S = 4.0
"""Silence after which a replica gets no new work (it reports every 0.5 s)."""
LOST_AFTER_S = 9.0
"""Silence after which its legs are given up."""
RECONNECT_S = 0.5
PING_S = 1.0

Connect = Callable[[ReplicaInfo], IngressWire]


def _future() -> asyncio.Future[Any]:
    """A future whose error nobody need read: whoever waited for it may have left in the same instant."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return future


class Leg:
    """One decode leg as the ingress reads it: deltas in order, then the end or an error."""

    def __init__(self) -> None:
        self.granted: asyncio.Future[None] = _future()
        self._arrived: asyncio.Queue[Delta | PdServeError] = asyncio.Queue()
        self.ended = False

    def push(self, item: Delta | PdServeError) -> None:
        self.ended = isinstance(item, PdServeError) or item.finished
        self._arrived.put_nowait(item)
        if isinstance(item, PdServeError) and not self.granted.done():
            self.granted.set_exception(item)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            item = await self._arrived.get()
            if isinstance(item, PdServeError):
                raise item
            yield item
            if item.finished:
                return


class RemoteReplica:
    """One replica and this ingress's legs on it.

    Args:
        info: what it published.
        connect: makes a channel to it; called again after a channel was lost.
        changed: called when it may have room that it had not before.
    """

    def __init__(self, info: ReplicaInfo, connect: Connect, changed: Callable[[], None]) -> None:
        self.info = info
        self._connect = connect
        self._changed = changed
        self._wire: IngressWire | None = None
        self._decodes: dict[str, Leg] = {}
        self._prefills: dict[str, asyncio.Future[PrefillResult]] = {}
        self._own: dict[str, Request] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._stats = EngineStats()
        self._heard = time.monotonic()
        self._unanswered = 0
        """Pings since anything came. Not seconds: after a pause of this process no replica was silent."""
        self._healthy = False
        self._draining = False
        self._reason = ""
        self._trust = Trust()
        self._tasks = [asyncio.create_task(self._stay_connected()), asyncio.create_task(self._ping())]

    # ------------------------------------------------------------------------------------ legs

    @asynccontextmanager
    async def decode(
        self, request: Request, handoff: Handoff | None, emitted: tuple[int, ...] = ()
    ) -> AsyncIterator[Leg]:
        """Submit a decode leg; inside the block it is granted. Leaving the block early aborts it.

        Raises:
            Overloaded: refused for want of room.
            Draining: the replica is leaving.
            DeadlineExceeded: the request's budget ended first.
            ReplicaLost: it does not answer.
        """
        leg = self._decodes[request.id] = Leg()
        self._enter(request)
        try:
            self._send(frames.SubmitDecode(request, handoff, frames.budget(request), emitted))
            patience_s = min(GRANT_TIMEOUT_S, frames.budget(request))
            try:
                async with asyncio.timeout(patience_s):  # not wait_for, which loses a cancellation (Python 3.11)
                    await leg.granted
            except TimeoutError:
                if patience_s < GRANT_TIMEOUT_S:
                    raise DeadlineExceeded("the request's time budget ran out") from None
                raise ReplicaLost("the decode replica did not answer") from None
            yield leg
        finally:
            del self._decodes[request.id]
            self._leave(request)
            if not leg.ended:
                self._try_send(frames.Abort(request.id))
            self._changed()

    async def prefill(self, request: Request, handoff: Handoff) -> PrefillResult:
        """Run a prefill leg to its end. Cancelling aborts it.

        Raises:
            PdServeError: whatever ended it.
        """
        result: asyncio.Future[PrefillResult] = _future()
        self._prefills[request.id] = result
        self._enter(request)
        try:
            self._send(frames.SubmitPrefill(request, handoff, frames.budget(request)))
            return await result
        finally:
            del self._prefills[request.id]
            self._leave(request)
            if not result.done() or result.cancelled():
                self._try_send(frames.Abort(request.id))

    def _enter(self, request: Request) -> None:
        self._own[request.id] = request
        self._idle.clear()

    def _leave(self, request: Request) -> None:
        del self._own[request.id]
        if not self._own:
            self._idle.set()

    async def idle(self) -> None:
        """Return when this ingress has no leg there. Legs end with their budget, or when the replica is lost."""
        await self._idle.wait()

    def withdraw(self, handoff_id: str, reason: str) -> None:
        """Tell the decode replica that this KV will not come."""
        self._try_send(frames.Withdraw(handoff_id, reason))

    def _send(self, message: frames.ToReplica) -> None:
        if self._wire is None:
            raise ReplicaLost("there is no connection to the replica")
        self._wire.send(message)

    def _try_send(self, message: frames.ToReplica) -> None:
        """Send unless the channel is lost: the replica aborts the legs of a channel that broke."""
        try:
            self._send(message)
        except ReplicaLost:
            logger.debug("not sent to %s, which is gone: %s", self.info.id, type(message).__name__)

    # ------------------------------------------------------------------------------------ messages in

    async def _stay_connected(self) -> None:
        while True:
            try:
                self._wire = self._connect(self.info)
                self._unanswered = 0
                self._wire.send(frames.Ping())
                while True:
                    self._on_message(await self._wire.receive())
            except ReplicaLost as lost:
                self._lose(lost)
            except Exception:  # whatever it is, the legs must hear of it, and the replica must have its chance again
                logger.exception("the channel to %s broke", self.info.id)
                self._lose(ReplicaLost("the channel to the replica broke"))
            await asyncio.sleep(RECONNECT_S)

    def _on_message(self, message: frames.ToIngress) -> None:
        self._heard, self._unanswered = time.monotonic(), 0
        match message:
            case frames.Frame(deltas=deltas):
                for delta in deltas:
                    if leg := self._decodes.get(delta.request_id):
                        leg.push(delta)
                        self._trust.worked(delta.finished)
            case frames.Granted(request_id=request_id):
                if (leg := self._decodes.get(request_id)) and not leg.granted.done():
                    leg.granted.set_result(None)
            case frames.Prefilled(request_id=request_id, result=result):
                if (prefill := self._prefills.get(request_id)) and not prefill.done():
                    prefill.set_result(result)
                    self._trust.worked()
            case frames.Failed(request_id=request_id, error=info) | frames.Refused(request_id=request_id, error=info):
                error = from_wire(info)
                if error.blames_replica:
                    self._trust.failed(time.monotonic())
                self._fail_leg(request_id, error)
            case frames.Stats(stats=stats, healthy=healthy, draining=draining, reason=reason):
                self._stats, self._healthy, self._draining, self._reason = stats, healthy, draining, reason
                self._changed()

    def _fail_leg(self, request_id: str, error: PdServeError) -> None:
        if leg := self._decodes.get(request_id):
            leg.push(error)
        elif (prefill := self._prefills.get(request_id)) and not prefill.done():
            prefill.set_exception(error)

    def _lose(self, lost: ReplicaLost) -> None:
        wire, self._wire, self._healthy = self._wire, None, False
        for request_id in (*self._decodes, *self._prefills):
            self._fail_leg(request_id, lost)
        self._changed()
        if wire:
            wire.close()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._try_send(frames.Ping())
            self._unanswered += 1
            if self._wire and self._unanswered * PING_S > LOST_AFTER_S:
                self._wire.close()  # `_stay_connected` hears of it and tries anew

    def _silence(self) -> float:
        return time.monotonic() - self._heard

    # ------------------------------------------------------------------------------------ view

    def view(self) -> ReplicaView:
        state, reason = self._state()
        return ReplicaView(
            info=self.info,
            state=state,
            reason=reason,
            stats=self._stats,
            stats_age_s=self._silence(),
            own_requests=len(self._own),
            own_prompt_tokens=sum(len(self._own[leg].prompt_token_ids) for leg in self._prefills),
            own_kv_tokens=sum(
                len(self._own[leg].prompt_token_ids) + self._own[leg].n * self._own[leg].max_tokens
                for leg in self._decodes
            ),
        )

    def _state(self) -> tuple[ReplicaState, str]:
        """What it may be given, and why not."""
        if self._draining:
            return ReplicaState.DRAINING, "it is leaving"
        if self._wire is None:
            return ReplicaState.SUSPECT, "there is no connection to it"
        if self._unanswered * PING_S > SUSPECT_AFTER_S:
            return ReplicaState.SUSPECT, "it does not answer"
        if not self._healthy:
            return ReplicaState.SUSPECT, self._reason or "it has not reported yet"
        if self._trust.suspended(time.monotonic()):
            return ReplicaState.SUSPECT, "its last legs failed"
        return ReplicaState.READY, ""

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose(ReplicaLost("the replica left"))


class Pools:
    """All replicas that this ingress may plan with.

    Args:
        connect: makes a channel to a replica.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._replicas: dict[str, RemoteReplica] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()

    def follow(self, role: Role, infos: Iterable[ReplicaInfo]) -> None:
        """These are the replicas of one role now: connect to new ones, let go of those that are not named."""
        wanted = {info.id: info for info in infos}
        for replica_id, replica in list(self._replicas.items()):
            if replica.info.role is role and wanted.get(replica_id) != replica.info:
                self._drop(replica_id)
        for replica_id, info in wanted.items():
            if replica_id not in self._replicas:
                self._replicas[replica_id] = RemoteReplica(info, self._connect, self.notify)
        self.notify()

    def _drop(self, replica_id: str) -> None:
        """A replica that Serve no longer names still finishes this ingress's legs before the channel closes."""
        replica = self._replicas.pop(replica_id)
        task = asyncio.create_task(_close_when_idle(replica))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def get(self, replica_id: str) -> RemoteReplica:
        """Raises ReplicaLost when it is not there any more."""
        try:
            return self._replicas[replica_id]
        except KeyError:
            raise ReplicaLost("the replica left") from None

    def view(self) -> ClusterView:
        views = [replica.view() for replica in self._replicas.values()]
        return ClusterView(
            now=time.monotonic(),
            prefill=tuple(view for view in views if view.info.role is Role.PREFILL),
            decode=tuple(view for view in views if view.info.role is Role.DECODE),
        )

    def notify(self) -> None:
        """Something changed: whoever waits for room looks again."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._replicas.clear()


async def _close_when_idle(replica: RemoteReplica) -> None:
    try:
        await replica.idle()
    finally:
        await replica.close()
