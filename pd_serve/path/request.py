"""THE path: what happens to a request between the client's `generate` and the answer.

The steps of docs/architecture.md, in order: admit, plan, prefill, hand-off, decode, answer. Ingress and client (steps
1 and 2) are in front of it. "Prefill on decode" is a plan without a prefill replica, not a second mode.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec

from pd_serve.errors import DeadlineExceeded, PdServeError
from pd_serve.path.gate import Gate
from pd_serve.path.line import Line, Place
from pd_serve.path.pools import Pools, RemoteReplica
from pd_serve.path.record import Attempt, Record, Recorder
from pd_serve.policy import lifecycle
from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.lifecycle import Fail, Progress
from pd_serve.policy.routing import NoPlan, Router, RoutingRules
from pd_serve.types import Delta, Handoff, KvOutcome, Plan, Request, Sink, hash_tokens


class PathRules(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that the path reads."""

    admission: AdmissionRules
    routing: RoutingRules
    first_token_timeout_s: float
    total_timeout_s: float
    no_replica_timeout_s: float
    lease_s: float


class RequestPath:
    """One ingress's way to its replicas. One event loop, no threads; all state of a request is in its own call."""

    def __init__(
        self, pools: Pools, router: Router, rules: PathRules, recorder: Recorder, sink: Sink, rng: random.Random
    ) -> None:
        self._pools = pools
        self._router = router
        self._rules = rules
        self._recorder = recorder
        self._sink = sink
        self._rng = rng
        self._gate = Gate(rules.admission, sink)
        self._line = Line()

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """Deltas of all choices until the last one, whose `finished` is set; each token once, in order.

        Raises:
            PdServeError: whatever ended the request; after the first delta, too.
        """
        record = Record.open(request)
        request = msgspec.structs.replace(
            request, deadline=min(request.deadline, time.monotonic() + self._rules.total_timeout_s)
        )
        async with self._recorder.recording(record), self._gate.admitted(self._first_token_by(request, record)):
            record.admitted_at = record.now()
            with self._line.place() as place:
                async with aclosing(self._attempts(request, place, record)) as deltas:
                    async for delta in deltas:
                        if (gap := record.add(delta)) is not None:
                            self._sink.observe("itl_seconds", gap)
                        yield delta

    async def _attempts(self, request: Request, place: Place, record: Record) -> AsyncGenerator[Delta]:
        progress = Progress()
        for number in itertools.count(1):
            plan, progress = await self._plan(request, progress, place, record)
            attempt = record.attempt(plan)
            try:
                async with aclosing(self._run(request, plan, number, place, record, attempt)) as deltas:
                    async for delta in deltas:
                        emitted = sum(len(choice.token_ids) for choice in delta.choices)
                        progress = msgspec.structs.replace(progress, emitted_tokens=progress.emitted_tokens + emitted)
                        yield delta
                return
            except PdServeError as error:
                attempt.error = type(error).__name__
                step = lifecycle.after_decode_failure(error, plan.decode, progress)
            if isinstance(step, Fail):
                raise step.error
            progress = step.progress
            if plan.decode in progress.refused:
                record.attempts.pop()  # it was refused, not tried
            else:
                self._sink.count("retries", reason=step.reason)

    async def _plan(self, request: Request, progress: Progress, place: Place, record: Record) -> tuple[Plan, Progress]:
        asked = time.monotonic()
        while True:
            if await place.turn(self._first_token_by(request, record)):
                self._waited("in_line", record)
            plan = self._router(request, self._pools.view(), self._rules.routing, progress.avoid, self._rng)
            if not isinstance(plan, NoPlan):
                self._sink.count("plans", reason=plan.reason)
                return plan, progress
            waited, patience = time.monotonic() - asked, self._rules.no_replica_timeout_s
            step = lifecycle.without_plan(plan.reason, waited, patience, progress)
            if isinstance(step, Fail):
                raise step.error
            if progress.refused:
                place.join()
                progress, asked = msgspec.structs.replace(progress, refused=frozenset()), time.monotonic()
            else:
                place.leave()  # the line is for room; for a replica all wait at once
            await self._wait(step.reason, request, record)

    async def _run(
        self, request: Request, plan: Plan, number: int, place: Place, record: Record, attempt: Attempt
    ) -> AsyncGenerator[Delta]:
        """One attempt: the decode leg is granted first, then prefill runs beside it."""
        decode_on = self._pools.get(plan.decode)
        handoff = self._open_handoff(request, plan, number, record)
        async with (
            decode_on.decode(request.leg(f"{number}d"), handoff) as leg,
            self._prefill(request.leg(f"{number}p"), plan, decode_on, handoff, record, attempt) as prefill,
        ):
            attempt.granted_at = record.now()
            place.leave()
            deltas = aiter(leg)
            while True:
                until = self._first_token_by(request, record) if record.first_token_at is None else request.deadline
                try:
                    async with asyncio.timeout(until - time.monotonic()):
                        delta = await anext(deltas)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise DeadlineExceeded("the request's time budget ran out") from None
                if prefill and delta.kv and delta.kv.outcome is not KvOutcome.MOVED:
                    prefill.cancel()  # decode has the prompt without it
                yield delta

    def _open_handoff(self, request: Request, plan: Plan, number: int, record: Record) -> Handoff | None:
        if plan.prefill is None:
            return None
        return Handoff(
            id=f"{request.id}.{number}",
            prompt_tokens=len(request.prompt_token_ids),
            prompt_hash=hash_tokens(request.prompt_token_ids, request.cache_salt),
            source=self._pools.get(plan.prefill).info.kv,
            target=self._pools.get(plan.decode).info.kv,
            lease_s=min(self._rules.lease_s, max(self._first_token_by(request, record) - time.monotonic(), 0.0)),
        )

    @asynccontextmanager
    async def _prefill(
        self,
        request: Request,
        plan: Plan,
        decode_on: RemoteReplica,
        handoff: Handoff | None,
        record: Record,
        attempt: Attempt,
    ) -> AsyncIterator[asyncio.Task[None] | None]:
        """Inside the block the prefill leg runs. Its failure is not the request's: the decode replica is told that no
        KV will come, and computes the prompt itself."""
        if handoff is None or plan.prefill is None:
            yield None
            return
        prefill_replica = plan.prefill

        async def run() -> None:
            try:
                attempt.prefill = await self._pools.get(prefill_replica).prefill(request, handoff)
                attempt.prefilled_at = record.now()
            except PdServeError as error:
                attempt.prefill_error = type(error).__name__
                attempt.fallback = f"prefill_{attempt.prefill_error}"
                decode_on.withdraw(handoff.id, attempt.fallback)

        leg = asyncio.create_task(run())
        try:
            yield leg
        finally:
            leg.cancel()
            await asyncio.wait([leg])

    # ---------------------------------------------------------------------------- waiting

    async def _wait(self, reason: str, request: Request, record: Record) -> None:
        self._waited(reason, record)
        left = self._first_token_by(request, record) - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the request's time budget ran out while it waited ({reason})")
        await self._pools.changed(min(left, 0.5))

    def _waited(self, reason: str, record: Record) -> None:
        record.waited(reason)
        self._sink.count("waits", reason=reason)

    def _first_token_by(self, request: Request, record: Record) -> float:
        """Deadline of the first token, on the monotonic clock."""
        return min(record.started + self._rules.first_token_timeout_s, request.deadline)
