"""The Ray actor that stands in front of a decode worker, because a Ray driver cannot be called. Light on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

NAMESPACE = "pd_serve"
IDLE_S = 20.0
"""Longest time that `collect` waits for something to come."""
STALE_S = 60.0
"""After this long without `collect` the worker is taken for dead or stuck, and offers are refused."""
MAX_PENDING = 4096
"""Offers that may wait for the next `collect`."""


Offer = tuple[str, bytes, list[Any], float]


def relay_name(engine_id: str, rank: int) -> str:
    """Name of the relay of one rank of one life of an engine, in `NAMESPACE`."""
    return f"pd_kv:{engine_id}:{rank}"


class Relay:
    """Passes offers on to the worker that owns it. Holds a reference only until the worker's next `collect`.

    An offer is `(handoff_id, envelope as msgpack, [ObjectRef], lease in seconds)`: the list makes Ray pass the
    reference itself and count it.
    """

    def __init__(self) -> None:
        self._pending: dict[int, Offer] = {}
        self._numbers = itertools.count()
        self._arrived = asyncio.Event()
        self._collected_at = time.monotonic()

    async def ready(self) -> bool:
        return True

    async def publish(self, handoff_id: str, envelope: bytes, refs: list[Any], lease_s: float) -> bool:
        """Called by a prefill worker. False when the offer is not taken in."""
        if time.monotonic() - self._collected_at > STALE_S or len(self._pending) >= MAX_PENDING:
            return False
        number = next(self._numbers)
        self._pending[number] = (handoff_id, envelope, refs, lease_s)
        asyncio.get_running_loop().call_later(lease_s, self._pending.pop, number, None)
        self._arrived.set()
        return True

    async def collect(self) -> list[Offer]:
        """Called by the worker that owns this: everything that came since, at the latest after `IDLE_S`."""
        self._collected_at = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), IDLE_S)
        self._arrived.clear()
        offers = list(self._pending.values())
        self._pending.clear()
        return offers
