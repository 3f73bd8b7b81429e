"""Where requests wait for room on decode replicas: in the order in which they came, and only the first one asks.

Without it, every change would make every waiting request ask every replica again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pd_serve.errors import DeadlineExceeded


class Line:
    """One event loop, no threads. Bounded by what the gate lets in."""

    def __init__(self) -> None:
        self._places: deque[Place] = deque()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._places)

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A request's place, left at the latest at the end of the block."""
        place = Place(self._places)
        try:
            yield place
        finally:
            place.leave()


class Place:
    """Of one request; it is in the line only when it has to wait."""

    def __init__(self, places: deque[Place]) -> None:
        self._places = places
        self._is_first = asyncio.Event()

    async def turn(self, until: float) -> bool:
        """Return when nobody waits in front; True when it had to wait for that.

        Args:
            until: on the monotonic clock.

        Raises:
            DeadlineExceeded: it was not its turn until then.
        """
        if not self._places or self._places[0] is self:
            return False
        self.join()
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await self._is_first.wait()
        except TimeoutError:
            raise DeadlineExceeded("the request's time budget ran out while it waited (decode_full)") from None

    def join(self) -> None:
        """There was no room: wait for it, behind those who wait already. Idempotent."""
        if self not in self._places:
            self._places.append(self)
        self._places[0]._is_first.set()

    def leave(self) -> None:
        """It has what it waited for, or does not want it any more. Idempotent."""
        if self in self._places:
            self._places.remove(self)
            self._is_first.clear()
            if self._places:
                self._places[0]._is_first.set()
