"""KV through Ray's object store, without a central process.

A prefill worker puts the pages and owns the object, so that its death ends the object (`lost`, and decode recomputes).
It publishes the reference to a relay actor that belongs to the decode worker; the decode worker collects all new
references with one long poll and reads the pages in place. Both workers join the cluster as Ray drivers.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from pd_serve.errors import TransferFailed
from pd_serve.kv.envelope import Envelope
from pd_serve.kv.transport.base import Payload
from pd_serve.kv.transport.fetches import Fetches
from pd_serve.kv.transport.inbox import Inbox
from pd_serve.kv.transport.relay import IDLE_S, NAMESPACE, Relay, relay_name
from pd_serve.types import KvAddress

logger = logging.getLogger(__name__)

OFFER_THREADS = 4
"""Puts and publishes that run at once."""
FETCH_THREADS = 64
"""Gets that run at once. One of pages on a node that froze keeps its thread until its deadline."""
MAX_PEERS = 256
"""Relays of peers that are remembered."""
CALL_TIMEOUT_S = 10.0
"""Longest wait for a peer's relay."""
EXPIRY_S = 1.0
"""How often leases are checked."""


class _Arrival(msgspec.Struct, frozen=True):
    envelope: bytes
    ref: Any


def join(address: str) -> None:
    """Make this process a Ray driver in our namespace, unless it is part of Ray already."""
    if ray.is_initialized():
        return
    # Ray draws the ids of its subscriptions from `random`, which an engine has seeded: all engines would have the same
    # id, and each one's poll would end the others', so that every driver polls without a pause.
    state = random.getstate()
    random.seed()
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    finally:
        random.setstate(state)


class ObjectStoreEnd:
    """One rank's `Transport` end.

    Args:
        ray_address: the cluster to join.
        engine_id: made anew for each life of the engine.
        receives: whether this end takes KV (a decode engine); it then owns a relay, which dies with this process.
    """

    def __init__(self, ray_address: str, engine_id: str, rank: int = 0, ranks: int = 1, *, receives: bool) -> None:
        join(ray_address)
        self._address = KvAddress("object_store", engine_id, ranks)
        self._rank = rank
        self._inbox: Inbox[_Arrival] = Inbox()
        self._peers: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._fetches: Fetches[_Arrival] = Fetches(_fetch, FETCH_THREADS)
        self._pool = ThreadPoolExecutor(OFFER_THREADS, thread_name_prefix="pd-kv-offer")
        self._closed = threading.Event()
        self._relay: Any = None
        if receives:
            self._relay = _make_relay(engine_id, rank)
            threading.Thread(target=self._collect_all, name="pd-kv-collect", daemon=True).start()
            threading.Thread(target=self._expire_all, name="pd-kv-expire", daemon=True).start()

    def address(self) -> KvAddress:
        return self._address

    def wait_ready(self, timeout_s: float) -> None:
        if self._relay is not None:
            try:
                ray.get(self._relay.ready.remote(), timeout=timeout_s)
            except RayError as error:
                raise TransferFailed("unreachable") from error

    # ------------------------------------------------------------------------------------ sending

    def offer(self, target: KvAddress, envelope: Envelope, pages: memoryview, lease_s: float) -> Future[None]:
        try:
            return self._pool.submit(_typed, self._offer, target, envelope, pages, lease_s)
        except RuntimeError:  # closed
            refused: Future[None] = Future()
            refused.set_exception(TransferFailed("lost"))
            return refused

    def _offer(self, target: KvAddress, envelope: Envelope, pages: memoryview, lease_s: float) -> None:
        ref = ray.put(np.frombuffer(pages, dtype=np.uint8))
        peer = (target.engine_id, self._rank)
        try:
            publish = self._peer(peer).publish
            call = publish.remote(envelope.handoff_id, msgspec.msgpack.encode(envelope), [ref], lease_s)
            accepted = ray.get(call, timeout=CALL_TIMEOUT_S)
        except (RayError, ValueError) as error:  # ValueError: no actor of this name
            with self._lock:
                self._peers.pop(peer, None)
            raise TransferFailed("unreachable") from error
        if not accepted:
            raise TransferFailed("refused")

    def _peer(self, key: tuple[str, int]) -> Any:
        with self._lock:
            if key in self._peers:
                self._peers.move_to_end(key)
                return self._peers[key]
        actor = ray.get_actor(relay_name(*key), namespace=NAMESPACE)
        with self._lock:
            self._peers[key] = actor
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        return actor

    # ------------------------------------------------------------------------------------ receiving

    def take(self, handoff_id: str, lease_s: float) -> Future[Payload]:
        payload: Future[Payload] = Future()
        now = time.monotonic()
        arrival = self._inbox.take(handoff_id, now, lease_s)
        arrival.add_done_callback(lambda done: self._on_arrival(handoff_id, done, payload, now + lease_s))
        return payload

    def _on_arrival(
        self, handoff_id: str, arrival: Future[_Arrival], payload: Future[Payload], deadline: float
    ) -> None:
        if error := arrival.exception():
            payload.set_exception(error)
            return
        payload.add_done_callback(lambda done: self._on_fetched(handoff_id, done))
        self._fetches.start(handoff_id, arrival.result(), payload, deadline)
        if reason := self._inbox.refusal(handoff_id):  # closed between its arrival and the start of the fetch
            self._fetches.end(handoff_id, reason)

    def _on_fetched(self, handoff_id: str, payload: Future[Payload]) -> None:
        if error := payload.exception():  # nothing to release
            self._inbox.close_id(handoff_id, str(error))

    def withdraw(self, handoff_id: str, reason: str) -> None:
        self._inbox.close_id(handoff_id, reason)
        self._fetches.end(handoff_id, reason)

    def release(self, handoff_id: str) -> None:
        self.withdraw(handoff_id, "released")

    def held(self) -> int:
        return self._inbox.held()

    def _collect_all(self) -> None:
        while not self._closed.is_set():
            try:
                self._collect()
            except GetTimeoutError:
                continue
            except Exception as error:
                # The relay died, and Ray starts it again, or Ray itself is going down. Leases bound every wait.
                if not self._closed.is_set():
                    logger.warning("the KV relay does not answer: %s", type(error).__name__)
                self._closed.wait(EXPIRY_S)

    def _collect(self) -> None:
        """One poll, in a frame of its own: no reference stays behind in it while the next poll waits."""
        for handoff_id, envelope, refs, lease_s in ray.get(
            self._relay.collect.remote(), timeout=IDLE_S + CALL_TIMEOUT_S
        ):
            self._inbox.deliver(handoff_id, _Arrival(envelope, refs[0]), time.monotonic(), lease_s)

    def _expire_all(self) -> None:
        while not self._closed.wait(EXPIRY_S):
            now = time.monotonic()
            self._inbox.expire(now)
            self._fetches.expire(now)

    # ------------------------------------------------------------------------------------ both

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._inbox.shut()
        self._fetches.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._relay is not None and ray.is_initialized():
            ray.kill(self._relay)


def _make_relay(engine_id: str, rank: int) -> Any:
    options = {
        "name": relay_name(engine_id, rank),
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_concurrency": 1000,
        "max_restarts": 3,
    }
    return ray.remote(Relay).options(**options).remote()


def _fetch(arrival: _Arrival, deadline: float) -> Payload:
    payload: Payload = _typed(_get, arrival, deadline)
    return payload


def _get(arrival: _Arrival, deadline: float) -> Payload:
    try:
        pages = ray.get(arrival.ref, timeout=max(deadline - time.monotonic(), 0.0))
    except GetTimeoutError as error:
        raise TransferFailed("expired") from error
    return Payload(msgspec.msgpack.decode(arrival.envelope, type=Envelope), memoryview(pages))


def _typed(work: Any, *args: Any) -> Any:
    """Run `work`; whatever it raises becomes a TransferFailed."""
    try:
        return work(*args)
    except TransferFailed:
        raise
    except RayActorError as error:
        raise TransferFailed("unreachable") from error
    except RayError as error:  # OwnerDiedError, ObjectLostError, OutOfMemory, ...
        raise TransferFailed("lost") from error
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise TransferFailed("malformed") from error
