"""A replica's hand-offs: the counterpart of the KV connector and its transport, on virtual time, with the live ledger.

Prefill copies a finished prompt's KV out of its blocks and sends it; decode has blocks allocated before the KV is
there, and takes it when both are. What nobody asks for, or comes late, ends with its lease.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pd_serve.kv.ledger import Ledger, Owner
from pd_serve.sim.attempt import Attempt
from pd_serve.sim.clock import Clock
from pd_serve.sim.network import Network
from pd_serve.sim.profile import Profile
from pd_serve.sim.rules import PathRules
from pd_serve.sim.sequence import Sequence
from pd_serve.types import Handoff

if TYPE_CHECKING:
    from pd_serve.sim.replica import Replica


class KvSide:
    """Hand-offs of one replica, in both directions."""

    def __init__(self, replica: Replica, profile: Profile, rules: PathRules, clock: Clock, network: Network) -> None:
        self._replica = replica
        self._profile = profile
        self._rules = rules
        self._clock = clock
        self._network = network
        self.gives = Ledger(rules.live.remember)
        self.takes = Ledger(rules.live.remember)
        self.loads: dict[str, Sequence] = {}
        """Sequences that wait for KV, by hand-off."""
        self.sending = 0
        """Transfers under way from here."""
        self.inbox: dict[str, tuple[float, int]] = {}
        """KV that came before it was asked for: when its lease ends, and its bytes."""
        self._over: OrderedDict[str, str] = OrderedDict()
        """Hand-offs that are over, or were withdrawn, and why."""
        self.taken_bytes = 0

    # ------------------------------------------------------------------------------------ prefill

    def give(self, attempt: Attempt) -> None:
        """Copy the prompt's KV out of the blocks and send it."""
        handoff = attempt.handoff
        now, size = self._clock.now, self._profile.block_size
        if handoff is None or not self.gives.open(handoff.id, now, handoff.lease_s):
            return
        nbytes = -(-handoff.prompt_tokens // size) * size * self._profile.kv_bytes_per_token
        self.gives.move(handoff.id, Owner.TRANSPORT, nbytes)
        overheads = self._profile.overheads
        arrives = self._network.move(self._replica.place, attempt.decode_on.place, nbytes)
        arrives += overheads.handoff_s + nbytes * overheads.handoff_byte_s
        self._clock.at(arrives, self._sent, handoff, attempt.decode_on, nbytes)

    def _sent(self, handoff: Handoff, target: Replica, nbytes: int) -> None:
        if not self._replica.alive:
            target.deliver(target.kv.lost, handoff.id)
        elif not target.alive:
            self.gives.fail(handoff.id, self._clock.now, "unreachable")
        else:
            target.deliver(target.kv.arrives, handoff, nbytes, self._replica)

    # ------------------------------------------------------------------------------------ decode

    def load(self, handoff: Handoff, sequence: Sequence) -> None:
        """The sequence has blocks and waits for this hand-off's KV."""
        self.takes.open(handoff.id, self._clock.now, handoff.lease_s)
        self.loads[handoff.id] = sequence
        if handoff.id in self._over:
            self._clock.after(0.0, self._fail, handoff.id, self._over[handoff.id])
        elif handoff.id in self.inbox:
            self._clock.after(0.0, self._done, handoff.id, self.inbox.pop(handoff.id)[1])

    def not_needed(self, handoff_id: str) -> None:
        """The prefix cache has all of it."""
        self.takes.open(handoff_id, self._clock.now, 0.0)
        self.takes.cancel(handoff_id, self._clock.now, "prefix_hit")
        self._close(handoff_id, "prefix_hit")

    def arrives(self, handoff: Handoff, nbytes: int, source: Replica) -> None:
        """All of a hand-off's KV is here."""
        if source.alive:
            source.kv.gives.done(handoff.id, self._clock.now)
        if handoff.id in self.loads:
            self._done(handoff.id, nbytes)
        elif handoff.id not in self._over:
            self.inbox[handoff.id] = (self._clock.now + handoff.lease_s, nbytes)

    def lost(self, handoff_id: str) -> None:
        """The source died while it sent."""
        self.withdraw(handoff_id, "lost")

    def withdraw(self, handoff_id: str, reason: str) -> None:
        """No KV will come."""
        if handoff_id in self.loads:
            self._fail(handoff_id, reason)
        elif handoff_id not in self._over and handoff_id not in self.inbox:
            self._close(handoff_id, reason)

    def cancel(self, handoff_id: str) -> None:
        """The request that wanted it is gone."""
        if self.loads.pop(handoff_id, None):
            self.takes.cancel(handoff_id, self._clock.now, "cancelled")
        self._close(handoff_id, "cancelled")

    def _done(self, handoff_id: str, nbytes: int) -> None:
        sequence = self.loads.pop(handoff_id, None)
        if sequence is None:
            return
        self.takes.move(handoff_id, Owner.TARGET, nbytes)
        self.takes.done(handoff_id, self._clock.now)
        self._close(handoff_id, "used")
        self.taken_bytes += nbytes
        sequence.owner.moved_bytes = nbytes
        self._replica.load_over(sequence, "")

    def _fail(self, handoff_id: str, reason: str) -> None:
        if sequence := self.loads.pop(handoff_id, None):
            self.takes.fail(handoff_id, self._clock.now, reason)
            self._close(handoff_id, reason)
            self._replica.load_over(sequence, reason)

    def _close(self, handoff_id: str, reason: str) -> None:
        self.inbox.pop(handoff_id, None)
        self._over[handoff_id] = reason
        if len(self._over) > self._rules.live.remember:
            self._over.popitem(last=False)

    # ------------------------------------------------------------------------------------ upkeep

    def expire(self) -> None:
        """End what outlived its lease."""
        now = self._clock.now
        self.gives.expire(now)
        for closed in self.takes.expire(now):
            sequence = self.loads.pop(closed.id)
            self._close(closed.id, closed.reason)
            self._replica.load_over(sequence, closed.reason)
        for handoff_id in [handoff_id for handoff_id, (ends, _) in self.inbox.items() if ends <= now]:
            self._close(handoff_id, "expired")

    def clear(self) -> None:
        """The process is gone."""
        self.loads.clear()
        self.inbox.clear()
