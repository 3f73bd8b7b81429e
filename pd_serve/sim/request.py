"""One request on its way: the steps of `path/request.py`, in their order, on virtual time.

Admission, routing and what happens after a failure are decided by the live policies; here is only what the live path
does between their decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from pd_serve.errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded, PdServeError
from pd_serve.policy import lifecycle
from pd_serve.policy.lifecycle import Fail, Progress
from pd_serve.policy.routing import NoPlan
from pd_serve.sim.attempt import Attempt
from pd_serve.sim.blocks import Unit, units_of
from pd_serve.sim.outcome import Served
from pd_serve.sim.rules import PathRules
from pd_serve.sim.workloads.arrival import UNIT_TOKENS, Arrival
from pd_serve.types import Handoff, Plan, Request

if TYPE_CHECKING:
    from pd_serve.sim.ingress import Ingress


def policy_request(request_id: str, row: Arrival, rules: PathRules) -> Request:
    """What policies may know of a request: nothing that follows from its true output length (invariant 5)."""
    return Request(
        id=request_id,
        # Policies read the length only; 100,000 prompts of real numbers would be gigabytes.
        prompt_token_ids=cast("tuple[int, ...]", range(row.prompt_tokens)),
        max_tokens=max(min(row.max_tokens or rules.max_tokens, rules.max_model_len - row.prompt_tokens), 1),
        tenant=row.tenant,
        block_hashes=tuple([unit.to_bytes(8, "little") for unit in row.units]),
    )


class Run:
    """One request from its arrival to its outcome."""

    __slots__ = (
        "_attempt",
        "_ingress",
        "_number",
        "_plan_asked_at",
        "_progress",
        "_units",
        "admitted_at",
        "arrived",
        "attempts",
        "first_token_at",
        "id",
        "max_tokens",
        "output_tokens",
        "over",
        "preempted",
        "prompt_tokens",
        "request",
        "row",
        "waits",
        "waits_since",
    )

    def __init__(self, request_id: str, row: Arrival, ingress: Ingress) -> None:
        self.id = request_id
        self.row = row
        self._ingress = ingress
        self.arrived = ingress.clock.now
        self.request = policy_request(request_id, row, ingress.rules)
        self.prompt_tokens = row.prompt_tokens
        self.max_tokens = self.request.max_tokens
        self.output_tokens = min(row.output_tokens, self.max_tokens)
        """Only the engine may read it."""
        self.admitted_at = -1.0
        self.first_token_at = -1.0
        self.over = False
        self.attempts = 0
        """Plans that were tried; refusals for want of room do not count."""
        self._number = 0
        self.waits = 0
        self.waits_since = 0
        """Tells a wait that was ended from the one that follows."""
        self.preempted = 0
        self._attempt: Attempt | None = None
        self._progress = Progress()
        self._plan_asked_at = -1.0
        """When it began to look for replicas; below 0 when it does not."""
        self._units: tuple[Unit, ...] | None = None

    def units(self, block_size: int) -> tuple[Unit, ...]:
        """The prompt's units."""
        if self._units is None:
            self._units = units_of(self.row.units, 0, self.prompt_tokens, UNIT_TOKENS, block_size)
        return self._units

    # ------------------------------------------------------------------------------------ admit

    def admitted(self) -> None:
        """The gate let it in."""
        self.admitted_at = self._ingress.clock.now
        if self.prompt_tokens >= self._ingress.rules.max_model_len:
            self.fail(InvalidRequest("the prompt is longer than the model's context"))
        else:
            self._ingress.clock.after(self._ingress.overhead_s, self.go_on)

    # ------------------------------------------------------------------------------------ plan

    def go_on(self) -> None:
        """Plan when it is its turn: those who wait for room ask one after the other."""
        if self.over:
            return
        if self._ingress.line.turn(self):
            self.plan()
        else:
            self.waits += 1

    def plan(self) -> None:
        """It is its turn."""
        if self.over:
            return
        if self._plan_asked_at < 0:
            self._plan_asked_at = self._ingress.clock.now
        ingress = self._ingress
        plan = ingress.route(self.request, self._progress.avoid)
        if not isinstance(plan, NoPlan):
            self._plan_asked_at = -1.0
            self._submit(plan)
            return
        waited = ingress.clock.now - self._plan_asked_at
        step = lifecycle.without_plan(plan.reason, waited, ingress.rules.no_replica_timeout_s, self._progress)
        if isinstance(step, Fail):
            self.fail(step.error)
            return
        if self._progress.refused:
            ingress.line.join(self)
            self._progress = msgspec.structs.replace(self._progress, refused=frozenset())
            self._plan_asked_at = -1.0
        else:
            ingress.line.leave(self)  # the line is for room; for a replica all wait at once
        self._wait()

    def _submit(self, plan: Plan) -> None:
        """The decode leg goes first; prefill's follows when its replica granted room."""
        ingress = self._ingress
        self._number += 1
        self.attempts += 1
        decode_on = ingress.replica(plan.decode)
        prefill_on = ingress.replica(plan.prefill) if plan.prefill is not None else None
        handoff = None
        if prefill_on is not None:
            handoff = Handoff(
                id=f"{self.id}.{self._number}",
                prompt_tokens=self.prompt_tokens,
                prompt_hash=b"",
                source=prefill_on.info.kv,
                target=decode_on.info.kv,
                lease_s=min(ingress.rules.lease_s, self._first_token_left()),
            )
        attempt = Attempt(self, self._number, plan, decode_on, prefill_on, handoff, ingress.clock.now)
        attempt.kv_tokens = self.prompt_tokens + self.max_tokens
        self._attempt = attempt
        ingress.begin(attempt)
        ingress.send(decode_on, decode_on.decode, attempt)

    def granted(self, attempt: Attempt) -> None:
        """The decode replica has room; prefill runs beside what follows."""
        if attempt.over:
            return
        attempt.granted_at = self._ingress.clock.now
        self._ingress.was_granted(attempt)
        self._ingress.line.leave(self)
        if attempt.prefill_on is not None:
            attempt.prefill_runs = True
            self._ingress.begin_prefill(attempt)
            self._ingress.send(attempt.prefill_on, attempt.prefill_on.prefill, attempt)

    # ------------------------------------------------------------------------------------ prefill

    def prefilled(self, attempt: Attempt) -> None:
        """The prompt is computed and its KV on the way."""
        if attempt.prefill_runs:
            attempt.prefilled_at = self._ingress.clock.now
            self._ingress.end_prefill(attempt)

    def prefill_failed(self, attempt: Attempt, error: PdServeError) -> None:
        """Not the request's failure: decode is told that no KV will come, and computes the prompt itself."""
        if not attempt.prefill_runs:
            return
        self._ingress.end_prefill(attempt)
        attempt.fallback = f"prefill_{type(error).__name__}"
        if attempt.handoff is not None:
            on = attempt.decode_on
            self._ingress.send(on, on.withdraw, attempt.handoff.id, attempt.fallback)

    # ------------------------------------------------------------------------------------ decode

    def first_token(self, attempt: Attempt) -> None:
        if attempt.over:
            return
        self.first_token_at = self._ingress.clock.now
        self._progress = msgspec.structs.replace(self._progress, emitted_tokens=1)
        self._ingress.got_first_token(self)
        if attempt.prefill_runs and not attempt.moved_bytes:  # decode has the prompt without it
            self._abort_prefill(attempt)

    def finished(self, attempt: Attempt, preempted: int) -> None:
        if attempt.over:
            return
        self.preempted = preempted
        self._end_attempt(attempt, abort_decode=False)
        self._close("ok", None)

    def decode_failed(self, attempt: Attempt, error: PdServeError) -> None:
        """Its replica refused or ended the decode leg, or is gone."""
        if attempt.over:
            return
        self._end_attempt(attempt, abort_decode=isinstance(error, EngineFailed))
        step = lifecycle.after_decode_failure(error, attempt.plan.decode, self._progress)
        if isinstance(step, Fail):
            self.fail(step.error)
            return
        self._progress = step.progress
        if attempt.plan.decode in self._progress.refused:  # not tried
            self.attempts -= 1
        self.go_on()

    def _end_attempt(self, attempt: Attempt, abort_decode: bool) -> None:
        """Abort what still runs of it."""
        if attempt.prefill_runs:
            self._abort_prefill(attempt)
        if abort_decode:
            self._ingress.send(attempt.decode_on, attempt.decode_on.abort, f"{self.id}.{attempt.number}d")
        attempt.over = True
        self._ingress.end(attempt)

    def _abort_prefill(self, attempt: Attempt) -> None:
        self._ingress.end_prefill(attempt)
        if attempt.prefill_on is not None:
            self._ingress.send(attempt.prefill_on, attempt.prefill_on.abort, f"{self.id}.{attempt.number}p")

    # ------------------------------------------------------------------------------------ wait, end

    def _wait(self) -> None:
        """Look again when something changed."""
        left = self._first_token_left()
        if left <= 0:
            self.fail(DeadlineExceeded("the request's time budget ran out while it waited"))
            return
        self.waits += 1
        self._ingress.wait(self, min(left, self._ingress.rules.live.wait_s))

    def _first_token_left(self) -> float:
        """Seconds until it must have its first token."""
        rules = self._ingress.rules
        return self.arrived + min(rules.first_token_timeout_s, rules.total_timeout_s) - self._ingress.clock.now

    def out_of_time(self) -> None:
        """A deadline passed."""
        if not self.over:
            self._stop(DeadlineExceeded("the request's time budget ran out"))

    def leave(self) -> None:
        """The client went away."""
        if not self.over:
            self._stop(Cancelled("the client left"))

    def _stop(self, error: PdServeError) -> None:
        if self._attempt is not None and not self._attempt.over:
            self._end_attempt(self._attempt, abort_decode=True)
        self.fail(error)

    def fail(self, error: PdServeError) -> None:
        if isinstance(error, Cancelled):
            self._close("cancelled", error)
        elif isinstance(error, Overloaded) and self.admitted_at < 0:
            self._close("shed", error)
        else:
            self._close("failed", error)

    def _close(self, outcome: str, error: PdServeError | None) -> None:
        self.over = True
        served = self._served(outcome, error)
        self._attempt = None  # it points back here; unlinked, both go with the last message
        self._ingress.over(self, served)

    def _served(self, outcome: str, error: PdServeError | None) -> Served:
        now, arrived, attempt = self._ingress.clock.now, self.arrived, self._attempt
        return Served(
            id=self.id,
            arrived=arrived,
            outcome=outcome,
            error=type(error).__name__ if error else "",
            tenant=self.row.tenant,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens if outcome == "ok" else int(self.first_token_at >= 0),
            prefill=(attempt.plan.prefill or "") if attempt else "",
            decode=attempt.plan.decode if attempt else "",
            reason=attempt.plan.reason if attempt else "",
            fallback=attempt.fallback if attempt else "",
            attempts=self.attempts,
            retries=self._progress.retries,
            waits=self.waits,
            cached_tokens=attempt.prefill_cached if attempt else 0,
            local_tokens=attempt.local_tokens if attempt else 0,
            moved_bytes=attempt.moved_bytes if attempt else 0,
            admitted=self._since(self.admitted_at),
            planned=self._since(attempt.planned_at) if attempt else 0.0,
            granted=self._since(attempt.granted_at) if attempt else 0.0,
            prefilled=self._since(attempt.prefilled_at) if attempt else 0.0,
            first_token=self._since(self.first_token_at),
            finished=now - arrived,
            preempted=self.preempted,
        )

    def _since(self, moment: float) -> float:
        return moment - self.arrived if moment > self.arrived else 0.0
