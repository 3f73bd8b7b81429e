"""Deadlines that all lie equally far ahead: one event for all of them, none for those that are met."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from pd_serve.sim.clock import Clock

T = TypeVar("T", bound=Hashable)


class Timeouts(Generic[T]):
    """Calls `late` with each item that is not stopped within `after_s` of its start."""

    def __init__(self, clock: Clock, after_s: float, late: Callable[[T], None]) -> None:
        self._clock = clock
        self._after_s = after_s
        self._late = late
        self._due: OrderedDict[T, float] = OrderedDict()
        self._armed = False

    def start(self, item: T) -> None:
        """Begin to wait for the item."""
        self._due[item] = self._clock.now + self._after_s
        if not self._armed:
            self._arm()

    def stop(self, item: T) -> None:
        """It came, or nobody waits for it any more. Idempotent."""
        self._due.pop(item, None)

    def _arm(self) -> None:
        self._armed = True
        self._clock.at(max(next(iter(self._due.values())), self._clock.now), self._look)

    def _look(self) -> None:
        while self._due and next(iter(self._due.values())) <= self._clock.now:
            self._late(self._due.popitem(last=False)[0])
        self._armed = False
        if self._due:
            self._arm()
