"""The seam between ingress and replica: a pair of ends that carry messages, in order, until one closes.

`path/zmq_channel.py` joins processes; `connect_in_process` joins two ends of one event loop and passes every message
through the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pd_serve.errors import ReplicaLost
from pd_serve.path import frames
from pd_serve.path.frames import ToIngress, ToReplica


class IngressWire(Protocol):
    """An ingress's end of the channel to one replica."""

    def send(self, message: ToReplica) -> None:
        """Queue a message. Never blocks.

        Raises:
            ReplicaLost: the channel is closed, or the replica is so far behind that its queue is full.
        """
        ...

    async def receive(self) -> ToIngress:
        """The next message. Raises ReplicaLost when the channel is closed."""
        ...

    def close(self) -> None: ...


class ReplicaWire(Protocol):
    """A replica's end of the channel to one ingress."""

    @property
    def peer(self) -> str:
        """Names the ingress, unique among the live ones."""
        ...

    def send(self, message: ToIngress) -> None:
        """Queue a message. Never blocks; what cannot be queued because the peer is gone is dropped."""
        ...


OnMessage = Callable[[ReplicaWire, ToReplica], None]
"""What a replica does with a message that came over a wire. Must not block."""


class _InProcessPair:
    """Both ends of a channel within one event loop."""

    def __init__(self, peer: str, on_message: OnMessage) -> None:
        self._peer = peer
        self._on_message = on_message
        self._to_ingress: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._open = True

    @property
    def peer(self) -> str:
        return self._peer

    def to_replica(self, message: ToReplica) -> None:
        if not self._open:
            raise ReplicaLost("the channel to the replica is closed")
        data = frames.encode(message)
        wire = InProcessReplicaWire(self)
        asyncio.get_running_loop().call_soon(lambda: self._on_message(wire, frames.decode_to_replica(data)))

    def to_ingress(self, message: ToIngress) -> None:
        if self._open:
            self._to_ingress.put_nowait(frames.encode(message))

    async def next(self) -> ToIngress:
        data = await self._to_ingress.get() if self._open else None
        if data is None:
            raise ReplicaLost("the channel to the replica is closed")
        return frames.decode_to_ingress(data)

    def close(self) -> None:
        self._open = False
        self._to_ingress.put_nowait(None)


class InProcessReplicaWire:
    """Replica's end of an in-process channel."""

    def __init__(self, pair: _InProcessPair) -> None:
        self._pair = pair

    @property
    def peer(self) -> str:
        return self._pair.peer

    def send(self, message: ToIngress) -> None:
        self._pair.to_ingress(message)


class InProcessIngressWire:
    """Ingress's end of an in-process channel."""

    def __init__(self, pair: _InProcessPair) -> None:
        self._pair = pair

    def send(self, message: ToReplica) -> None:
        self._pair.to_replica(message)

    async def receive(self) -> ToIngress:
        return await self._pair.next()

    def close(self) -> None:
        self._pair.close()


def connect_in_process(peer: str, on_message: OnMessage) -> InProcessIngressWire:
    """A channel from ingress `peer` to a replica of the same event loop that handles messages with `on_message`."""
    return InProcessIngressWire(_InProcessPair(peer, on_message))
