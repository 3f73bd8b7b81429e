"""What has arrived at one end, and who waits for it: the bookkeeping that every transport's receiving side shares."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Generic, TypeVar

from pd_serve.errors import TransferFailed

T = TypeVar("T")

REMEMBERED_IDS = 4096
"""Closed ids that are remembered, to refuse what comes late for them."""


class Inbox(Generic[T]):
    """Pairs offers with takes by hand-off id, whichever comes first. Thread-safe; never blocks.

    An id is in one of four states: waited for, arrived, taken (until released), or closed. Closed ids are remembered,
    the oldest forgotten first, and refuse what comes late. `now` is seconds on one monotonic clock of the caller.
    """

    def __init__(self, remember: int = REMEMBERED_IDS) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Future[T], float]] = {}
        self._arrived: dict[str, tuple[T, float]] = {}
        self._taken: dict[str, T] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()
        self._remember = remember
        self._shut = False

    def deliver(self, handoff_id: str, item: T, now: float, lease_s: float) -> bool:
        """Put in what arrived. False when nobody will want it: the caller lets go of it at once."""
        with self._lock:
            if self._shut or handoff_id in self._closed or handoff_id in self._arrived or handoff_id in self._taken:
                return False
            waiter = self._waiting.pop(handoff_id, None)
            if waiter is None:
                self._arrived[handoff_id] = (item, now + lease_s)
                return True
            self._taken[handoff_id] = item
        waiter[0].set_result(item)
        return True

    def take(self, handoff_id: str, now: float, lease_s: float) -> Future[T]:
        """The item with this id, when it comes; TransferFailed when it is withdrawn, expired or was taken before."""
        future: Future[T] = Future()
        with self._lock:
            refused = self._refusal_locked(handoff_id)
            if handoff_id in self._waiting or handoff_id in self._taken:
                refused = "taken"
            if not refused and handoff_id not in self._arrived:
                self._waiting[handoff_id] = (future, now + lease_s)
                return future
            if not refused:
                item, _ = self._arrived.pop(handoff_id)
                self._taken[handoff_id] = item
        if refused:
            future.set_exception(TransferFailed(refused))
        else:
            future.set_result(item)
        return future

    def close_id(self, handoff_id: str, reason: str) -> None:
        """Forget the item; fail its take with `reason` if one waits; refuse this id from now on. Idempotent."""
        with self._lock:
            waiter = self._close_locked(handoff_id, reason)
        if waiter is not None:
            waiter.set_exception(TransferFailed(reason))

    def refusal(self, handoff_id: str) -> str:
        """Why this id is closed; empty while it is not."""
        with self._lock:
            return self._refusal_locked(handoff_id)

    def expire(self, now: float) -> list[str]:
        """Close every id whose lease has ended, but for those already taken, whose end is their taker's care."""
        with self._lock:
            due = [i for i, (_, end) in self._waiting.items() if end <= now]
            due += [i for i, (_, end) in self._arrived.items() if end <= now]
            waiters = [self._close_locked(handoff_id, "expired") for handoff_id in due]
        for waiter in waiters:
            if waiter is not None:
                waiter.set_exception(TransferFailed("expired"))
        return due

    def held(self) -> int:
        """Items that are kept alive here."""
        with self._lock:
            return len(self._arrived) + len(self._taken)

    def waiting(self) -> int:
        """Takes that wait for their item."""
        with self._lock:
            return len(self._waiting)

    def shut(self) -> None:
        """Fail every take with `lost`, forget everything, refuse everything from now on. Idempotent."""
        with self._lock:
            self._shut = True
            waiters = [future for future, _ in self._waiting.values()]
            self._waiting.clear()
            self._arrived.clear()
            self._taken.clear()
        for waiter in waiters:
            waiter.set_exception(TransferFailed("lost"))

    def _refusal_locked(self, handoff_id: str) -> str:
        return self._closed.get(handoff_id) or ("lost" if self._shut else "")

    def _close_locked(self, handoff_id: str, reason: str) -> Future[T] | None:
        waiter = self._waiting.pop(handoff_id, None)
        self._arrived.pop(handoff_id, None)
        self._taken.pop(handoff_id, None)
        if handoff_id not in self._closed:
            self._closed[handoff_id] = reason
            if len(self._closed) > self._remember:
                self._closed.popitem(last=False)
        return waiter[0] if waiter is not None else None
