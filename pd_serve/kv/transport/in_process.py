"""A transport between ends of one process: for the fake engine, the simulator and tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from pd_serve.errors import TransferFailed
from pd_serve.kv.envelope import Envelope
from pd_serve.kv.transport.base import Payload
from pd_serve.kv.transport.inbox import Inbox
from pd_serve.types import KvAddress


class Registry:
    """Where the ends of one process find each other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, int], InProcessEnd] = {}

    def add(self, end: InProcessEnd) -> None:
        with self._lock:
            self._ends[(end.address().engine_id, end.rank)] = end

    def remove(self, end: InProcessEnd) -> None:
        with self._lock:
            self._ends.pop((end.address().engine_id, end.rank), None)

    def find(self, engine_id: str, rank: int) -> InProcessEnd | None:
        with self._lock:
            return self._ends.get((engine_id, rank))


class InProcessEnd:
    """A `Transport` whose peers are found in `registry`.

    Leases are checked whenever an end is used, so nothing outlives its lease by more than one call.
    """

    def __init__(
        self,
        registry: Registry,
        engine_id: str,
        rank: int = 0,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._address = KvAddress("in_process", engine_id, ranks)
        self._registry = registry
        self._clock = clock
        self._inbox: Inbox[Payload] = Inbox()
        registry.add(self)

    def address(self) -> KvAddress:
        return self._address

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def offer(self, target: KvAddress, envelope: Envelope, pages: memoryview, lease_s: float) -> Future[None]:
        future: Future[None] = Future()
        peer = self._registry.find(target.engine_id, envelope.rank)
        if peer is None:
            future.set_exception(TransferFailed("unreachable"))
        else:
            # A copy, so that the sender may reuse its pages once the future is done, as over any other transport.
            peer._deliver(Payload(envelope, memoryview(bytes(pages))), lease_s)
            future.set_result(None)
        return future

    def take(self, handoff_id: str, lease_s: float) -> Future[Payload]:
        self.expire()
        return self._inbox.take(handoff_id, self._clock(), lease_s)

    def withdraw(self, handoff_id: str, reason: str) -> None:
        self._inbox.close_id(handoff_id, reason)

    def release(self, handoff_id: str) -> None:
        self._inbox.close_id(handoff_id, "released")

    def held(self) -> int:
        self.expire()
        return self._inbox.held()

    def expire(self) -> list[str]:
        """Close what has outlived its lease; returns its ids."""
        return self._inbox.expire(self._clock())

    def close(self) -> None:
        self._registry.remove(self)
        self._inbox.shut()

    def _deliver(self, payload: Payload, lease_s: float) -> None:
        self.expire()
        self._inbox.deliver(payload.envelope.handoff_id, payload, self._clock(), lease_s)
