"""Virtual time: a heap of events and seeded randomness. Nothing in `sim` reads a real clock."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

Call = Callable[..., object]


class Clock:
    """Runs callbacks in the order of their times; those of the same time in the order in which they were asked for.

    An event cannot be taken back: whoever may change its mind passes a version and looks at it when called.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.events = 0
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._asked = 0
        self._stopped = False

    def at(self, when: float, call: Call, *args: Any) -> None:
        """Call at time `when`, which is not in the past."""
        if when < self.now:
            raise ValueError(f"{when} is before now, {self.now}")
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, call, args))

    def after(self, delay_s: float, call: Call, *args: Any) -> None:
        """Call in `delay_s` seconds; with 0, after everything that was asked for this moment already."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._asked, call, args))

    def run(self, until: float = float("inf")) -> None:
        """Run until `stop` is called, nothing is left, or the next event is later than `until`."""
        heap, pop = self._heap, heapq.heappop
        self._stopped = False
        while heap and not self._stopped:
            when, _, call, args = heap[0]
            if when > until:
                self.now = until
                return
            pop(heap)
            self.now = when
            self.events += 1
            call(*args)

    def stop(self) -> None:
        """End `run` after the present event."""
        self._stopped = True

    @property
    def pending(self) -> int:
        """Events that are still to come, among them those that nobody waits for any more."""
        return len(self._heap)


class Streams:
    """One generator for each subsystem, all from one seed, so that a change in one leaves the others as they were."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def get(self, name: str) -> random.Random:
        """A new generator; the same name gives the same numbers, in every process."""
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return random.Random(int.from_bytes(digest[:8], "little"))
