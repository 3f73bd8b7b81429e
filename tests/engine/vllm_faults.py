"""Faults and looks inside for tests: a worker extension that wraps the connector's transport and finds the scheduler.

Nothing of this is in the product: the test's configuration names this class instead of the product's.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec
from vllm.v1.core.sched.scheduler import Scheduler

from pd_serve.errors import TransferFailed
from pd_serve.kv.connector_extension import KvExtension, worker_side
from pd_serve.kv.envelope import Envelope, checksum
from pd_serve.kv.transport.base import Payload, Transport
from pd_serve.types import KvAddress

_schedulers: list[Any] = []


def _remember_scheduler() -> None:
    """This module is imported by the worker before the engine, in the same process, makes its scheduler."""
    original = Scheduler.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _schedulers.append(self)
        original(self, *args, **kwargs)

    Scheduler.__init__ = init


_remember_scheduler()


class FaultyTransport:
    """A transport that does one wrong thing to everything that it carries."""

    def __init__(self, inner: Transport, fault: str, value: float) -> None:
        self.inner = inner
        self._fault = fault
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def offer(self, target: KvAddress, envelope: Envelope, pages: memoryview, lease_s: float) -> Future[None]:
        outcome: Future[None] = Future()
        if self._fault == "fail_offer":
            outcome.set_exception(TransferFailed("unreachable"))
            return outcome
        if self._fault == "swallow":
            outcome.set_result(None)
            return outcome
        if self._fault == "slow":
            time.sleep(self._value)
        envelope, pages = _damaged(self._fault, envelope, pages)
        offered = self.inner.offer(target, envelope, pages, lease_s)
        if self._fault == "twice":
            self.inner.offer(target, envelope, pages, lease_s)
        return offered

    def take(self, handoff_id: str, lease_s: float) -> Future[Payload]:
        taken = self.inner.take(handoff_id, lease_s)
        if self._fault != "slow_take":
            return taken
        late: Future[Payload] = Future()
        taken.add_done_callback(lambda done: threading.Timer(self._value, _pass_on, (done, late)).start())
        return late


def _pass_on(done: Future[Payload], late: Future[Payload]) -> None:
    if error := done.exception():
        late.set_exception(error)
    else:
        late.set_result(done.result())


def _damaged(fault: str, envelope: Envelope, pages: memoryview) -> tuple[Envelope, memoryview]:
    replace = msgspec.structs.replace
    layer = envelope.blocks * envelope.page_bytes
    match fault:
        case "flip":
            flipped = bytearray(pages)
            flipped[len(flipped) // 2] ^= 0xFF
            return envelope, memoryview(flipped)
        case "truncate":
            return envelope, pages[: envelope.nbytes // 2]
        case "drop_layer":
            kept = pages[layer:]
            return replace(envelope, layers=envelope.layers - 1, checksum=checksum(kept)), kept
        case "drop_block":
            kept = pages[envelope.layers * envelope.page_bytes :]
            return replace(envelope, blocks=envelope.blocks - 1, checksum=checksum(kept)), kept
        case "fingerprint":
            return replace(envelope, fingerprint="another"), pages
        case "other_prompt":
            return replace(envelope, prompt_hash=b"another"), pages
        case "other_generation":
            return replace(envelope, source="another"), pages
        case "rank":
            return replace(envelope, rank=envelope.rank + 1), pages
    return envelope, pages


class FaultExtension(KvExtension):
    def pd_test_fault(self, fault: str, value: float = 0.0) -> None:
        """From now on everything suffers `fault`; none with an empty one."""
        side = worker_side()
        inner = side.transport.inner if isinstance(side.transport, FaultyTransport) else side.transport
        side.transport = FaultyTransport(inner, fault, value) if fault else inner

    def pd_test_scheduler(self) -> dict[str, Any]:
        """What the engine's scheduler holds."""
        scheduler = _schedulers[0]
        side = scheduler.connector.scheduler_side
        return {
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(scheduler.requests),
            "connector": len(side._takes) + len(side._take_of) + len(side._gives) + len(side._results),
        }

    def pd_test_policy(self, recompute: bool) -> None:
        """What the engine does when a load failed."""
        _schedulers[0].recompute_kv_load_failures = recompute

    def pd_test_preemptions(self) -> int:
        """Preemptions of the requests that are in the engine now."""
        return sum(request.num_preemptions for request in _schedulers[0].requests.values())

    def pd_test_cpu_seconds(self) -> float:
        return time.process_time()

    def pd_test_pid(self) -> int:
        return os.getpid()
