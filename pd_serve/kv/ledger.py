"""Who holds each hand-off's KV, and how each hand-off ended: a pure state machine with numbers beside it.

A hand-off is owned by exactly one party at every moment, moves only forward (source engine, transport, target engine)
and leaves the ledger by exactly one edge: done, failed with a reason, or cancelled. Whoever closes it gets a `Closed`
once and frees what it held; every later event for that id is refused. Each side of a pair keeps its own ledger of
what it sees. There is no clock, thread or I/O in here: callers pass `now` (seconds, any monotonic clock) and lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import StrEnum

import msgspec


class Owner(StrEnum):
    """Who holds the KV now, in the order in which it may change hands."""

    SOURCE = "source"  # blocks of the prefill engine
    TRANSPORT = "transport"  # a copy outside of both engines' blocks
    TARGET = "target"  # being put into blocks of the decode engine


_ORDER = {Owner.SOURCE: 0, Owner.TRANSPORT: 1, Owner.TARGET: 2}


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # it should have moved and did not
    CANCELLED = "cancelled"  # nobody wants it any more


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """How one hand-off ended."""

    id: str
    outcome: Outcome
    reason: str
    owner: Owner
    """Who held it until now and has to let go of it."""
    nbytes: int
    seconds: float
    """Since it was opened."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one ledger: `started == done + cancelled + held + sum(failed.values())`, none negative."""

    started: int = 0
    done: int = 0
    cancelled: int = 0
    held: int = 0
    failed: dict[str, int] = {}
    bytes: int = 0
    """Of the hand-offs that are done."""
    seconds: float = 0.0
    """From open to done, summed over those."""


class _Entry(msgspec.Struct):
    opened_at: float
    expires_at: float
    owner: Owner = Owner.SOURCE
    nbytes: int = 0


class Ledger:
    """Every open hand-off of one side, and the totals of the closed ones.

    Args:
        remember: how many closed ids are remembered, to refuse events that come after the end.
    """

    def __init__(self, remember: int = 4096) -> None:
        self._open: dict[str, _Entry] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._remember = remember
        self._outcomes: Counter[Outcome] = Counter()
        self._failed: Counter[str] = Counter()
        self._started = 0
        self._bytes = 0
        self._seconds = 0.0

    def open(self, handoff_id: str, now: float, lease_s: float) -> bool:
        """Begin a hand-off, owned by its source. False, and nothing changes, when this id was used before."""
        if handoff_id in self._open or handoff_id in self._closed:
            return False
        self._open[handoff_id] = _Entry(now, now + lease_s)
        self._started += 1
        return True

    def move(self, handoff_id: str, owner: Owner, nbytes: int | None = None) -> bool:
        """Pass the KV on. False when the hand-off is over or unknown: the caller lets go of the bytes at once.

        Raises:
            ValueError: `owner` stands before the present one; a hand-off never goes back.
        """
        entry = self._open.get(handoff_id)
        if entry is None:
            return False
        if _ORDER[owner] < _ORDER[entry.owner]:
            raise ValueError(f"hand-off {handoff_id} cannot go back from {entry.owner} to {owner}")
        entry.owner = owner
        if nbytes is not None:
            entry.nbytes = nbytes
        return True

    def done(self, handoff_id: str, now: float) -> Closed | None:
        """It arrived, or was passed to the other side. None when it is already over."""
        return self._close(handoff_id, now, Outcome.DONE, "")

    def fail(self, handoff_id: str, now: float, reason: str) -> Closed | None:
        """It should have moved and did not; `reason` is one word for a metric label. None when it is already over."""
        return self._close(handoff_id, now, Outcome.FAILED, reason or "unknown")

    def cancel(self, handoff_id: str, now: float, reason: str) -> Closed | None:
        """Nobody wants it any more. None when it is already over."""
        return self._close(handoff_id, now, Outcome.CANCELLED, reason)

    def expire(self, now: float) -> list[Closed]:
        """Fail every hand-off whose lease has ended. For sides whose bytes go with the `Closed`; where threads hold
        them, the end of those closes the hand-off."""
        due = [handoff_id for handoff_id, entry in self._open.items() if entry.expires_at <= now]
        return [closed for handoff_id in due if (closed := self.fail(handoff_id, now, "expired"))]

    def owner(self, handoff_id: str) -> Owner | None:
        """Who holds it, or None when it is over or was never opened."""
        entry = self._open.get(handoff_id)
        return entry.owner if entry is not None else None

    def held(self) -> int:
        """How many hand-offs are open."""
        return len(self._open)

    def counts(self) -> Counts:
        return Counts(
            started=self._started,
            done=self._outcomes[Outcome.DONE],
            cancelled=self._outcomes[Outcome.CANCELLED],
            held=len(self._open),
            failed=dict(self._failed),
            bytes=self._bytes,
            seconds=self._seconds,
        )

    def _close(self, handoff_id: str, now: float, outcome: Outcome, reason: str) -> Closed | None:
        entry = self._open.pop(handoff_id, None)
        if entry is None:
            return None
        self._closed[handoff_id] = None
        if len(self._closed) > self._remember:
            self._closed.popitem(last=False)
        closed = Closed(
            id=handoff_id,
            outcome=outcome,
            reason=reason,
            owner=entry.owner,
            nbytes=entry.nbytes,
            seconds=max(now - entry.opened_at, 0.0),
        )
        self._outcomes[outcome] += 1
        if outcome is Outcome.FAILED:
            self._failed[reason or "unknown"] += 1
        elif outcome is Outcome.DONE:
            self._bytes += closed.nbytes
            self._seconds += closed.seconds
        return closed
