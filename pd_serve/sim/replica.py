"""A replica: the engine, its promises, its ledgers, and the legs that ingresses gave it.

The counterpart of `path/replica_host.py` and of the KV connector, on virtual time. `policy.room` and `kv.ledger` are
the live ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_serve.errors import Draining, InvalidRequest, Overloaded, PdServeError, TransferFailed
from pd_serve.policy.room import Load, Room
from pd_serve.sim.attempt import Attempt
from pd_serve.sim.blocks import units_of
from pd_serve.sim.clock import Clock
from pd_serve.sim.engine import Engine
from pd_serve.sim.kv_side import KvSide
from pd_serve.sim.network import Network, Place
from pd_serve.sim.profile import Profile
from pd_serve.sim.rules import PathRules
from pd_serve.sim.sequence import Sequence, Stage
from pd_serve.sim.views import Answer
from pd_serve.sim.workloads.arrival import UNIT_TOKENS
from pd_serve.types import EngineStats, ReplicaInfo, Role

if TYPE_CHECKING:
    from pd_serve.sim.ingress import Ingress


class Legs:
    """Counts of one replica's legs: `started == ok + failed + aborted + lost + running`; refused ones apart."""

    __slots__ = ("aborted", "failed", "lost", "ok", "refused", "started")

    def __init__(self) -> None:
        self.started = self.ok = self.failed = self.aborted = self.lost = self.refused = 0


class Replica:
    """One replica of one pool.

    Args:
        wire_s: seconds of a message to an ingress, or back.
    """

    def __init__(
        self,
        info: ReplicaInfo,
        place: Place,
        engine: Engine,
        profile: Profile,
        rules: PathRules,
        clock: Clock,
        network: Network,
        wire_s: float,
    ) -> None:
        self.info = info
        self.place = place
        self.engine = engine
        self._profile = profile
        self._rules = rules
        self._clock = clock
        self._network = network
        self._wire_s = wire_s
        self.room = Room(info.kv_tokens_total, info.max_num_seqs)
        self.kv = KvSide(self, profile, rules, clock, network)
        self.sequences: dict[str, Sequence] = {}
        """Legs that run here, by their ids."""
        self.legs = Legs()
        self.alive = True
        self.draining = False
        self._stalled: deque[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        """What arrived while the process stood still."""
        self._sample: Answer | None = None
        self.hit_tokens = 0
        self.prompt_tokens = 0

    # ------------------------------------------------------------------------------------ messages

    def deliver(self, handle: Callable[..., None], *args: Any) -> None:
        """A message arrived for one of this replica's methods."""
        if self._stalled is not None:
            self._stalled.append((handle, args))
        elif self.alive:
            handle(*args)

    def _tell(self, handle: Callable[..., None], *args: Any) -> None:
        self._clock.after(self._wire_s, handle, *args)

    # ------------------------------------------------------------------------------------ legs

    def decode(self, attempt: Attempt) -> None:
        """Grant room and generate, or refuse."""
        run, leg_id = attempt.run, f"{attempt.run.id}.{attempt.number}d"
        if error := self._cannot_take(leg_id, attempt):
            self.legs.refused += 1
            self._tell(run.decode_failed, attempt, error)
            return
        sequence = self._sequence(leg_id, attempt, run.output_tokens)
        self.room.start(leg_id)
        self._tell(run.granted, attempt)
        self._clock.after(self._profile.overheads.decode_leg_s, self._submit, sequence)

    def prefill(self, attempt: Attempt) -> None:
        """Compute the prompt and send its KV."""
        leg_id = f"{attempt.run.id}.{attempt.number}p"
        if self.draining:
            self.legs.refused += 1
            self._tell(attempt.run.prefill_failed, attempt, Draining("the replica is draining"))
            return
        sequence = self._sequence(leg_id, attempt, 1)
        self._clock.after(self._profile.overheads.prefill_leg_s, self._submit, sequence)

    def _submit(self, sequence: Sequence) -> None:
        """The engine has the leg, unless it was aborted on the way."""
        if not self.alive:
            return
        if self._stalled is not None:
            self._stalled.append((self._submit, (sequence,)))
        elif sequence.stage is Stage.NEW:
            self.engine.submit(sequence)

    def abort(self, leg_id: str) -> None:
        """Nobody wants this leg any more. Unknown ids are ignored."""
        sequence = self.sequences.pop(leg_id, None)
        if sequence is None:
            return
        self.legs.aborted += 1
        self._forget(sequence)
        self.engine.abort(sequence)

    def withdraw(self, handoff_id: str, reason: str) -> None:
        """No KV will come for this hand-off."""
        self.kv.withdraw(handoff_id, reason)

    def _cannot_take(self, leg_id: str, attempt: Attempt) -> PdServeError | None:
        if self.draining:
            return Draining("the replica is draining")
        tokens = attempt.run.prompt_tokens + attempt.run.max_tokens
        if attempt.run.prompt_tokens + attempt.run.output_tokens > self.info.kv_tokens_total:
            return InvalidRequest("the request is longer than the KV cache")
        load = Load(tokens=self.engine.kv_tokens_used, sequences=self.engine.scheduler.size)
        now = self._clock.now
        lacking = self.room.grant(leg_id, tokens, 1, load, now, now + self._rules.lease_s)
        return Overloaded(f"no room ({lacking})") if lacking else None

    def _sequence(self, leg_id: str, attempt: Attempt, output_tokens: int) -> Sequence:
        run, size = attempt.run, self._profile.block_size
        row = run.row
        output_units: tuple[Any, ...] = ()
        if self.info.role is Role.DECODE and row.output_units:
            first, total = row.prompt_tokens // UNIT_TOKENS, row.prompt_tokens + output_tokens
            output_units = units_of(row.output_units, first, total, UNIT_TOKENS, size)
        sequence = Sequence(
            leg_id,
            run.prompt_tokens,
            output_tokens,
            run.units(size),
            self,
            owner=attempt,
            takes_kv=attempt.handoff is not None and self.info.role is Role.DECODE,
            output_units=output_units,
        )
        self.sequences[leg_id] = sequence
        self.legs.started += 1
        return sequence

    # ------------------------------------------------------------------------------------ from the engine

    def on_blocks(self, sequence: Sequence) -> None:
        attempt: Attempt = sequence.owner
        if self._rules.settle_at_blocks:
            self.room.settle(sequence.leg_id)
        if sequence.preempted:
            return
        self.prompt_tokens += sequence.prompt_tokens
        self.hit_tokens += sequence.cached_tokens
        if self.info.role is Role.PREFILL:
            attempt.prefill_cached = sequence.cached_tokens
            return
        attempt.local_tokens = sequence.cached_tokens
        if attempt.handoff is None:
            attempt.prefill_cached = sequence.cached_tokens
        elif sequence.stage is Stage.LOADING:
            self.kv.load(attempt.handoff, sequence)
        else:  # all of it is here
            self.kv.not_needed(attempt.handoff.id)

    def on_first_token(self, sequence: Sequence) -> None:
        if self.info.role is Role.DECODE and sequence.leg_id in self.sequences:
            attempt: Attempt = sequence.owner
            self.room.settle(sequence.leg_id)
            self._tell(attempt.run.first_token, attempt)

    def on_finished(self, sequence: Sequence) -> None:
        if self.sequences.pop(sequence.leg_id, None) is None:  # aborted during its last step
            return
        self.legs.ok += 1
        attempt: Attempt = sequence.owner
        if self.info.role is Role.PREFILL:
            self.kv.give(attempt)
            self._tell(attempt.run.prefilled, attempt)
        else:
            self._tell(attempt.run.finished, attempt, sequence.preempted)

    # ------------------------------------------------------------------------------------ upkeep

    def stats(self) -> EngineStats:
        scheduler = self.engine.scheduler
        return EngineStats(
            waiting=len(scheduler.waiting) + len(scheduler.ready) + len(scheduler.loading),
            running=len(scheduler.running),
            waiting_prompt_tokens=scheduler.waiting_prompt_tokens,
            kv_tokens_total=self.info.kv_tokens_total,
            kv_tokens_used=self.engine.kv_tokens_used,
            reserved_tokens=self.room.reserved_tokens,
            handoffs_held=self.kv.gives.held() + self.kv.takes.held(),
        )

    def load_over(self, sequence: Sequence, failure: str) -> None:
        """KV was put into the sequence's blocks, or will not be: then it computes the prompt itself, or fails."""
        attempt: Attempt = sequence.owner
        attempt.fallback = attempt.fallback or failure
        if not failure or self._rules.recompute:
            self.engine.loaded(sequence, not failure)
            return
        del self.sequences[sequence.leg_id]
        self.room.settle(sequence.leg_id)
        self.legs.failed += 1
        self.engine.abort(sequence)
        self._tell(attempt.run.decode_failed, attempt, TransferFailed(f"KV did not come ({failure})"))

    def _forget(self, sequence: Sequence) -> None:
        """Let go of what an aborted leg held."""
        self.room.settle(sequence.leg_id)
        attempt: Attempt = sequence.owner
        if attempt.handoff is not None and self.info.role is Role.DECODE:
            self.kv.cancel(attempt.handoff.id)

    def answer(self) -> Answer | None:
        """To a ping: its last report. None when the process is gone or stands still."""
        return self._sample if self.alive and self._stalled is None else None

    def report(self, ingresses: list[Ingress]) -> EngineStats | None:
        """Expire what is due, and tell every ingress the counts. None when the process is gone or stands still."""
        if not self.alive or self._stalled is not None:
            return None
        self.room.expire(self._clock.now)
        self.kv.expire()
        stats = self.stats()
        self._sample = (self.info.id, stats, self.draining)
        self._tell(_heard, ingresses, self._sample)
        return stats

    # ------------------------------------------------------------------------------------ ends and faults

    def end_legs(self) -> None:
        """Time is up: what still runs ends with an error."""
        for leg_id in list(self.sequences):
            sequence = self.sequences.pop(leg_id)
            self.legs.failed += 1
            self._forget(sequence)
            self.engine.abort(sequence)
            attempt: Attempt = sequence.owner
            error: PdServeError = Draining("the replica had to leave")
            failed = attempt.run.decode_failed if self.info.role is Role.DECODE else attempt.run.prefill_failed
            self._tell(failed, attempt, error)

    def kill(self) -> None:
        """The process is gone, with everything in it."""
        self.alive = False
        self._stalled = None
        self.engine.kill()
        self.legs.lost += len(self.sequences)
        self.sequences.clear()
        self.kv.clear()

    def stall(self) -> None:
        """The process stands still."""
        if self.alive and self._stalled is None:
            self._stalled = deque()
            self.engine.freeze()

    def wake(self) -> None:
        """It goes on, and reads what arrived meanwhile."""
        if not self.alive or self._stalled is None:
            return
        stalled, self._stalled = self._stalled, None
        self.engine.thaw()
        for handle, args in stalled:
            if self.alive:
                handle(*args)


def _heard(ingresses: list[Ingress], answer: Answer) -> None:
    """A report arrives at all ingresses."""
    for ingress in ingresses:
        ingress.on_answers([answer])
