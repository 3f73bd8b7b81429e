"""The queue in front of the path: lets requests in as `policy.admission` says, in the order in which they came."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pd_serve.errors import DeadlineExceeded, Overloaded
from pd_serve.policy.admission import AdmissionRules, Load, Queue, Shed, admit
from pd_serve.types import Sink

RATE_WINDOW_S = 10.0


class Gate:
    """Bounds what one ingress runs and queues. One event loop, no threads."""

    def __init__(self, rules: AdmissionRules, sink: Sink) -> None:
        self._rules = rules
        self._sink = sink
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._finished: deque[float] = deque(maxlen=1000)

    @asynccontextmanager
    async def admitted(self, until: float) -> AsyncIterator[None]:
        """Inside the block the request counts as running.

        Args:
            until: when it must have been let in, on the monotonic clock.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: it waited until then.
        """
        decision = admit(self.load(), self._rules)
        if isinstance(decision, Shed):
            raise Overloaded(f"too many requests ({decision.reason})", retry_after_s=decision.retry_after_s)
        self._sink.count("requests_accepted")
        if isinstance(decision, Queue):
            await self._wait_for_turn(until)
        else:
            self._running += 1
        self._gauge()
        try:
            yield
        finally:
            self._running -= 1
            self._finished.append(time.monotonic())
            self._let_next_in()
            self._gauge()

    async def _wait_for_turn(self, until: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_next_in()
        self._gauge()
        try:
            async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # let in at the very moment it gave up
                self._running -= 1
                self._let_next_in()
            else:
                self._waiting.remove(turn)
            self._gauge()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the request's time budget ran out in the queue") from None
            raise

    def _let_next_in(self) -> None:
        for turn in list(self._waiting):
            if self._running >= self._rules.max_running:
                return
            if not turn.done():  # else it gave up; it waits until it runs and leaves the queue itself
                self._waiting.remove(turn)
                self._running += 1
                turn.set_result(None)

    def load(self) -> Load:
        since = time.monotonic() - RATE_WINDOW_S
        finished = sum(1 for moment in self._finished if moment > since)
        return Load(running=self._running, queued=len(self._waiting), finished_per_s=finished / RATE_WINDOW_S)

    def _gauge(self) -> None:
        self._sink.gauge("requests_running", self._running)
        self._sink.gauge("requests_queued", len(self._waiting))
