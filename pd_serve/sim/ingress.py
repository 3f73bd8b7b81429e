"""One ingress replica: its gate, its views, and the requests that it has in hand.

The counterpart of `path/gate.py` and `path/pools.py`, on virtual time.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_serve.errors import Overloaded, ReplicaLost
from pd_serve.policy.admission import Load, Queue, Shed, admit
from pd_serve.policy.routing import NoPlan, Router
from pd_serve.sim.attempt import Attempt
from pd_serve.sim.clock import Clock
from pd_serve.sim.line import Line
from pd_serve.sim.outcome import Served
from pd_serve.sim.request import Run
from pd_serve.sim.rules import PathRules
from pd_serve.sim.timeouts import Timeouts
from pd_serve.sim.views import Answer, Views
from pd_serve.sim.workloads.arrival import Arrival
from pd_serve.types import Plan, ReplicaInfo, Request

if TYPE_CHECKING:
    from pd_serve.sim.replica import Replica


class Ingress:
    """One ingress.

    Args:
        overhead_s: seconds from a request's admission until it is planned.
        wire_s: seconds of a message to a replica.
        find: the replica with an id, alive or not.
        finished: called with each request's outcome.
    """

    def __init__(
        self,
        name: str,
        rules: PathRules,
        router: Router,
        rng: random.Random,
        clock: Clock,
        overhead_s: float,
        wire_s: float,
        find: Callable[[str], Replica],
        finished: Callable[[Served], None],
    ) -> None:
        self.name = name
        self.rules = rules
        self.clock = clock
        self.overhead_s = overhead_s
        self.replica = find
        self.views = Views(rules.live)
        self._router = router
        self._rng = rng
        self._wire_s = wire_s
        self._finished = finished
        self._requests = 0
        self.accepted = 0
        self.running: dict[Run, None] = {}
        self.queued: OrderedDict[Run, None] = OrderedDict()
        self.waiting: dict[Run, None] = {}
        """Running ones that wait for a change."""
        self.line = Line(clock)
        self.attempts: dict[str, dict[Attempt, None]] = {}
        """Those with a leg that runs, by replica."""
        self._finished_at: deque[float] = deque(maxlen=1000)
        self._wake_planned = False
        self._first_tokens: Timeouts[Run] = Timeouts(clock, rules.first_token_timeout_s, Run.out_of_time)
        self._totals: Timeouts[Run] = Timeouts(clock, rules.total_timeout_s, Run.out_of_time)
        self._grants: Timeouts[Attempt] = Timeouts(clock, rules.live.grant_timeout_s, self._no_answer)

    # ------------------------------------------------------------------------------------ gate

    def arrive(self, row: Arrival) -> None:
        """A request came in."""
        self._requests += 1
        run = Run(f"{self.name}-{self._requests}", row, self)
        decision = admit(self.load(), self.rules.admission)
        if isinstance(decision, Shed):
            run.fail(Overloaded(f"too many requests ({decision.reason})", retry_after_s=decision.retry_after_s))
            return
        self.accepted += 1
        self._totals.start(run)
        self._first_tokens.start(run)
        if row.leaves_after_s != float("inf"):
            self.clock.after(row.leaves_after_s, run.leave)
        if isinstance(decision, Queue):
            self.queued[run] = None
            self._let_next_in()
        else:
            self._let_in(run)

    def load(self) -> Load:
        since = self.clock.now - self.rules.live.rate_window_s
        while self._finished_at and self._finished_at[0] <= since:
            self._finished_at.popleft()
        rate = len(self._finished_at) / self.rules.live.rate_window_s
        return Load(running=len(self.running), queued=len(self.queued), finished_per_s=rate)

    def _let_in(self, run: Run) -> None:
        self.running[run] = None
        run.admitted()

    def _let_next_in(self) -> None:
        while self.queued and len(self.running) < self.rules.admission.max_running:
            self._let_in(self.queued.popitem(last=False)[0])

    def over(self, run: Run, served: Served) -> None:
        """The request ended."""
        self._totals.stop(run)
        self._first_tokens.stop(run)
        self.waiting.pop(run, None)
        self.line.leave(run)
        if run in self.running:
            del self.running[run]
            self._finished_at.append(self.clock.now)
            self._let_next_in()
        else:
            self.queued.pop(run, None)
        self._finished(served)

    # ------------------------------------------------------------------------------------ plans and legs

    def route(self, request: Request, tried: frozenset[str]) -> Plan | NoPlan:
        return self._router(request, self.views.view(self.clock.now), self.rules.routing, tried, self._rng)

    def send(self, replica: Replica, handle: Callable[..., None], *args: Any) -> None:
        """A message to a replica's method."""
        self.clock.after(self._wire_s, replica.deliver, handle, *args)

    def begin(self, attempt: Attempt) -> None:
        """The decode leg is on its way."""
        decode = attempt.decode_on.info.id
        self.attempts.setdefault(decode, {})[attempt] = None
        self.views.decode_leg(decode, attempt.kv_tokens, 1)
        self._grants.start(attempt)
        if not attempt.decode_on.alive:
            self.clock.after(self._wire_s, self._lose_legs, decode, "there is no connection to the replica")

    def was_granted(self, attempt: Attempt) -> None:
        self._grants.stop(attempt)

    def begin_prefill(self, attempt: Attempt) -> None:
        if attempt.prefill_on is None:
            return
        prefill = attempt.prefill_on.info.id
        self.attempts.setdefault(prefill, {})[attempt] = None
        self.views.prefill_leg(prefill, attempt.run.prompt_tokens, 1)
        if not attempt.prefill_on.alive:
            self.clock.after(self._wire_s, self._lose_legs, prefill, "there is no connection to the replica")

    def end_prefill(self, attempt: Attempt) -> None:
        attempt.prefill_runs = False
        if attempt.prefill_on is not None:
            prefill = attempt.prefill_on.info.id
            self.views.prefill_leg(prefill, attempt.run.prompt_tokens, -1)
            self.attempts[prefill].pop(attempt, None)

    def end(self, attempt: Attempt) -> None:
        """The decode leg is over."""
        self._grants.stop(attempt)
        decode = attempt.decode_on.info.id
        self.views.decode_leg(decode, attempt.kv_tokens, -1)
        self.attempts[decode].pop(attempt, None)
        self.changed()

    def got_first_token(self, run: Run) -> None:
        self._first_tokens.stop(run)

    def _no_answer(self, attempt: Attempt) -> None:
        attempt.run.decode_failed(attempt, ReplicaLost("the decode replica did not answer"))

    # ------------------------------------------------------------------------------------ what is known

    def follow(self, info: ReplicaInfo) -> None:
        """The controller names a new replica."""
        self.views.add(info, self.clock.now)

    def unfollow(self, replica_id: str) -> None:
        """The controller does not name it any more; its legs go on."""
        self.views.remove(replica_id)
        if not self.attempts.get(replica_id):
            self.attempts.pop(replica_id, None)

    def on_answers(self, answers: list[Answer]) -> None:
        """Replicas said what they hold."""
        now = self.clock.now
        for replica_id, stats, draining in answers:
            self.views.report(replica_id, stats, draining, now)
        self.changed()

    def channel_lost(self, replica_id: str) -> None:
        """The channel to a replica broke: it is suspect, and its legs are over."""
        self.views.lose(replica_id)
        self._lose_legs(replica_id, "the channel to the replica broke")

    def look_for_silence(self) -> None:
        for replica_id in self.views.silent(self.clock.now):
            self.channel_lost(replica_id)

    def _lose_legs(self, replica_id: str, why: str) -> None:
        for attempt in list(self.attempts.get(replica_id, ())):
            if attempt.decode_on.info.id == replica_id:
                attempt.run.decode_failed(attempt, ReplicaLost(why))
            else:
                attempt.run.prefill_failed(attempt, ReplicaLost(why))

    # ------------------------------------------------------------------------------------ waiting

    def wait(self, run: Run, at_most_s: float) -> None:
        """The run goes on at the next change, or after so long."""
        self.waiting[run] = None
        run.waits_since += 1
        self.clock.after(at_most_s, self._wait_over, run, run.waits_since)

    def _wait_over(self, run: Run, wait: int) -> None:
        if run in self.waiting and run.waits_since == wait:
            del self.waiting[run]
            run.go_on()

    def changed(self) -> None:
        """There may be room: whoever waits looks again, once for all changes of this moment."""
        if self.waiting and not self._wake_planned:
            self._wake_planned = True
            self.clock.after(0.0, self._wake)

    def _wake(self) -> None:
        self._wake_planned = False
        waiting, self.waiting = self.waiting, {}
        for run in waiting:
            run.go_on()
