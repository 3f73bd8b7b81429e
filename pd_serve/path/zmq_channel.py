"""The channel over ZMQ: a ROUTER at each replica, a DEALER at each ingress, CURVE between them.

CURVE encrypts and authenticates both ends; a client whose key is not the application's own is turned away before a
byte of its messages is read. A connection is never re-made behind our back: when it breaks, both ends hear of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from pd_serve.errors import ReplicaLost
from pd_serve.path import frames
from pd_serve.path.channel import OnMessage
from pd_serve.path.frames import ToIngress, ToReplica

logger = logging.getLogger(__name__)

SEND_QUEUE_MESSAGES = 100_000
"""Messages that wait for a peer which does not read, before it counts as gone."""
ZAP_DOMAIN = "pd_serve"
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED  # nobody listens there
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class ChannelKeys(msgspec.Struct, frozen=True):
    """CURVE keys of one application, Z85 text. Made once, handed out over Ray, never written down."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def generate(cls) -> ChannelKeys:
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def __repr__(self) -> str:
        return "ChannelKeys(...)"


class _OnlyClient:
    """ZAP credentials provider that admits one public key."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._client_public)


class ZmqHub:
    """A replica's socket for all ingresses.

    Args:
        host: address of the interface to listen on.
        keys: the application's.
        on_message: called for each message on the event loop that called `start`.
        port: 0 for a free one.
        on_gone: called with the name of an ingress that a message could not be sent to any more.
    """

    def __init__(
        self,
        host: str,
        keys: ChannelKeys,
        on_message: OnMessage,
        port: int = 0,
        on_gone: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._host = host
        self._port = port
        self._keys = keys
        self._on_message = on_message
        self._on_gone = on_gone
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> str:
        """Listen; returns the endpoint (`tcp://host:port`) that ingresses connect to."""
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, _OnlyClient(self._keys.client_public))
        socket = self._socket
        socket.curve_server = True
        socket.curve_secretkey = self._keys.server_secret
        socket.zap_domain = ZAP_DOMAIN.encode()
        socket.router_mandatory = True  # a vanished ingress is an error, not silence
        socket.sndhwm = socket.rcvhwm = SEND_QUEUE_MESSAGES
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.linger = 1_000
        socket.bind(f"tcp://{self._host}:{self._port}")
        self._reader = asyncio.create_task(self._read())
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def _read(self) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart()
            try:
                message = frames.decode_to_replica(b"".join(parts))
            except msgspec.DecodeError:
                logger.warning("dropped a message that is not ours from ingress %s", identity.hex())
                continue
            try:
                self._on_message(_ZmqReplicaWire(self, identity), message)
            except Exception:  # one bad message must not silence the replica for everyone
                logger.exception("a message from ingress %s could not be handled", identity.hex())

    def send(self, identity: bytes, message: ToIngress) -> None:
        sent = _future(self._socket.send_multipart([identity, frames.encode(message)], flags=zmq.NOBLOCK))
        sent.add_done_callback(lambda done: self._sent(identity, done))

    def _sent(self, identity: bytes, sent: asyncio.Future[object]) -> None:
        if sent.cancelled() or not isinstance(error := sent.exception(), zmq.ZMQError):
            return
        logger.debug("a message to ingress %s was not sent: %s", identity.hex(), error)
        self._on_gone(identity.hex())

    async def close(self) -> None:
        if self._reader:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        self._authenticator.stop()
        self._socket.close()
        self._context.term()


def _future(pending: object) -> asyncio.Future[Any]:
    """zmq.asyncio returns futures that its stubs call awaitables."""
    return cast("asyncio.Future[Any]", pending)


class _ZmqReplicaWire:
    def __init__(self, hub: ZmqHub, identity: bytes) -> None:
        self._hub = hub
        self._identity = identity

    @property
    def peer(self) -> str:
        return self._identity.hex()

    def send(self, message: ToIngress) -> None:
        self._hub.send(self._identity, message)


class ZmqIngressWire:
    """An ingress's connection to one replica.

    Args:
        context: shared by all connections of the process.
        address: endpoint that the replica published.
        keys: the application's.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: ChannelKeys) -> None:
        self._socket = socket = context.socket(zmq.DEALER)
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
        socket.routing_id = secrets.token_bytes(8)
        socket.sndhwm = socket.rcvhwm = SEND_QUEUE_MESSAGES
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.reconnect_ivl = -1
        socket.linger = 0
        self._monitor = socket.get_monitor_socket(_LOST)
        self._lost = False
        self._incoming: asyncio.Future[bytes] | None = None
        socket.connect(address)
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        await self._monitor.recv_multipart()
        self._end()

    def _end(self) -> None:
        self._lost = True
        if self._incoming and not self._incoming.done():
            self._incoming.cancel()

    def send(self, message: ToReplica) -> None:
        if self._lost:
            raise ReplicaLost("the connection to the replica is lost")
        sent = _future(self._socket.send(frames.encode(message), flags=zmq.NOBLOCK))
        if sent.done() and sent.exception() is not None:
            raise ReplicaLost("the replica does not read its messages")

    async def receive(self) -> ToIngress:
        if self._lost:
            raise ReplicaLost("the connection to the replica is lost")
        incoming = self._incoming = _future(self._socket.recv())
        try:
            return frames.decode_to_ingress(await incoming)
        except asyncio.CancelledError:
            if self._was_ended(asyncio.current_task()):
                raise ReplicaLost("the connection to the replica is lost") from None
            raise
        except msgspec.DecodeError as error:
            raise ReplicaLost("the replica speaks another version of the protocol") from error

    def _was_ended(self, reader: asyncio.Task[Any] | None) -> bool:
        """Whether a cancelled read means that the channel ended, not that its reader was cancelled."""
        return self._lost and not (reader and reader.cancelling())

    def close(self) -> None:
        """Idempotent."""
        self._end()
        self._watcher.cancel()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close()
