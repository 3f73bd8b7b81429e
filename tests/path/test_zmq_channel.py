"""The ZMQ channel over real sockets: order, keys, garbage, and a peer that dies."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from pd_serve.errors import ReplicaLost
from pd_serve.path import frames
from pd_serve.path import pools as pools_module
from pd_serve.path.channel import OnMessage, ReplicaWire
from pd_serve.path.pools import Pools
from pd_serve.path.zmq_channel import ChannelKeys, ZmqHub, ZmqIngressWire
from pd_serve.types import ChoiceDelta, Delta, EngineStats, KvAddress, ReplicaInfo, ReplicaState, Request, Role

KEYS = ChannelKeys.generate()


def answer(wire: ReplicaWire, message: frames.ToReplica) -> None:
    """Pings are answered by stats, aborts by as many frames as the id says."""
    match message:
        case frames.Ping():
            wire.send(frames.Stats(EngineStats(running=1), healthy=True, draining=False))
        case frames.Abort(request_id=count):
            for number in range(int(count)):
                delta = Delta("r", (ChoiceDelta(0, "text", (number,)),))
                wire.send(frames.Frame((delta,)))


@asynccontextmanager
async def hub(on_message: OnMessage = answer, keys: ChannelKeys = KEYS) -> AsyncIterator[str]:
    """Address of a listening replica."""
    listening = ZmqHub("127.0.0.1", keys, on_message)
    try:
        yield listening.start()
    finally:
        await listening.close()


@asynccontextmanager
async def ingress(address: str, keys: ChannelKeys = KEYS) -> AsyncIterator[ZmqIngressWire]:
    context = zmq.asyncio.Context()
    wire = ZmqIngressWire(context, address, keys)
    try:
        yield wire
    finally:
        wire.close()
        context.destroy(linger=0)


async def test_a_message_goes_there_and_back() -> None:
    async with hub() as address, ingress(address) as wire:
        wire.send(frames.Ping())
        answered = await asyncio.wait_for(wire.receive(), 5)
    assert answered == frames.Stats(EngineStats(running=1), healthy=True, draining=False)


async def test_fifty_thousand_frames_arrive_once_and_in_order() -> None:
    count = 50_000
    async with hub() as address, ingress(address) as wire:
        wire.send(frames.Abort(str(count)))
        numbers = []
        for _ in range(count):
            frame = await asyncio.wait_for(wire.receive(), 10)
            assert isinstance(frame, frames.Frame)
            numbers.append(frame.deltas[0].choices[0].token_ids[0])
    assert numbers == list(range(count))


async def test_two_ingresses_do_not_hear_each_other() -> None:
    async with hub() as address, ingress(address) as one, ingress(address) as other:
        one.send(frames.Abort("3"))
        other.send(frames.Ping())
        assert isinstance(await asyncio.wait_for(other.receive(), 5), frames.Stats)
        assert [type(await asyncio.wait_for(one.receive(), 5)) for _ in range(3)] == [frames.Frame] * 3
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other.receive(), 0.1)


def _other_client() -> ChannelKeys:
    stranger = ChannelKeys.generate()
    return ChannelKeys(KEYS.server_public, KEYS.server_secret, stranger.client_public, stranger.client_secret)


@pytest.mark.parametrize("keys", [_other_client(), ChannelKeys.generate()], ids=["other client", "other application"])
async def test_a_stranger_is_turned_away_before_its_message_is_read(keys: ChannelKeys) -> None:
    heard: list[frames.ToReplica] = []
    async with hub(lambda _, message: heard.append(message)) as address, ingress(address, keys) as wire:
        wire.send(frames.Ping())
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(wire.receive(), 5)
    assert heard == []


async def test_a_client_without_any_key_is_not_heard() -> None:
    heard: list[frames.ToReplica] = []
    async with hub(lambda _, message: heard.append(message)) as address:
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(address)
        await plain.send(frames.encode(frames.Ping()))
        await asyncio.sleep(0.3)
        context.destroy(linger=0)
    assert heard == []


def _raw(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """A socket that has the keys but does not speak the protocol."""
    raw = context.socket(zmq.DEALER)
    raw.curve_serverkey = KEYS.server_public
    raw.curve_publickey, raw.curve_secretkey = KEYS.client_public, KEYS.client_secret
    raw.connect(address)
    return raw


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1"],
        [secrets.token_bytes(200)],
        [msgspec.msgpack.encode(["decode", 1])],
        [b"a", b"b"],
        [b"", b"", b""],
    ],
)
async def test_garbage_is_dropped_and_the_next_message_is_answered(parts: list[bytes]) -> None:
    async with hub() as address, ingress(address) as wire:
        context = zmq.asyncio.Context()
        await _raw(context, address).send_multipart(parts)
        await asyncio.sleep(0.1)
        wire.send(frames.Ping())
        assert isinstance(await asyncio.wait_for(wire.receive(), 5), frames.Stats)
        context.destroy(linger=0)


async def test_a_handler_that_raises_does_not_end_the_channel() -> None:
    def fails_once(wire: ReplicaWire, message: frames.ToReplica) -> None:
        if isinstance(message, frames.Abort):
            raise RuntimeError("bug")
        answer(wire, message)

    async with hub(fails_once) as address, ingress(address) as wire:
        wire.send(frames.Abort("1"))
        wire.send(frames.Ping())
        assert isinstance(await asyncio.wait_for(wire.receive(), 5), frames.Stats)


async def test_keys_are_not_shown() -> None:
    assert KEYS.server_secret.decode() not in f"{KEYS} {KEYS!r} {[KEYS]}"


# ---------------------------------------------------------------------------------------- a replica that dies

REPLICA = """
import asyncio, sys, msgspec
from pd_serve.path import frames
from pd_serve.path import pools as pools_module
from pd_serve.path.zmq_channel import ChannelKeys, ZmqHub
from pd_serve.types import EngineStats

async def main():
    keys = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=ChannelKeys)
    def on_message(wire, message):
        wire.send(frames.Stats(EngineStats(), healthy=True, draining=False))
    print(ZmqHub("127.0.0.1", keys, on_message).start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def replica_process() -> AsyncIterator[tuple[int, str]]:
    """(process id, address) of a replica in a process of its own."""
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", REPLICA, cwd=root, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin and process.stdout
    process.stdin.write(msgspec.msgpack.encode(KEYS).hex().encode() + b"\n")
    try:
        yield process.pid, (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_replica_is_noticed_at_once() -> None:
    async with replica_process() as (pid, address), ingress(address) as wire:
        wire.send(frames.Ping())
        await asyncio.wait_for(wire.receive(), 5)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(wire.receive(), 5)
        assert time.monotonic() - killed < 1.0
        with pytest.raises(ReplicaLost):
            wire.send(frames.Ping())


async def test_an_address_where_nobody_listens_is_lost_not_silent() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    async with ingress(address) as wire:
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(wire.receive(), 5)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come true in time")


async def test_a_pool_reconnects_to_a_replica_that_comes_back() -> None:
    context = zmq.asyncio.Context()
    pools = Pools(lambda info: ZmqIngressWire(context, info.address, KEYS))

    def state() -> ReplicaState:
        return pools.view().decode[0].state

    first = ZmqHub("127.0.0.1", KEYS, answer)
    address = first.start()
    kv = KvAddress("none", "engine")
    info = ReplicaInfo(id="d", role=Role.DECODE, version="v1", address=address, fingerprint="f", kv=kv)
    pools.follow(Role.DECODE, [info])
    await until(lambda: state() is ReplicaState.READY)
    await first.close()
    await until(lambda: state() is ReplicaState.SUSPECT)
    again = ZmqHub("127.0.0.1", KEYS, answer, port=int(address.rsplit(":", 1)[1]))
    assert again.start() == address
    await until(lambda: state() is ReplicaState.READY)
    await pools.close()
    await again.close()
    context.destroy(linger=0)


async def test_a_replica_that_falls_silent_is_given_up_and_returns_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case B22 over real sockets: libzmq still answers heartbeats while the replica's own loop says nothing."""
    for name, value in (("PING_S", 0.05), ("SUSPECT_AFTER_S", 0.2), ("LOST_AFTER_S", 0.5), ("RECONNECT_S", 0.05)):
        monkeypatch.setattr(pools_module, name, value)
    silent = False

    def now_and_then(wire: ReplicaWire, message: frames.ToReplica) -> None:
        if isinstance(message, frames.SubmitDecode):
            wire.send(frames.Granted(message.request.id))
        elif not silent:
            answer(wire, message)

    context = zmq.asyncio.Context()
    async with hub(now_and_then) as address:
        pools = Pools(lambda info: ZmqIngressWire(context, info.address, KEYS))
        kv = KvAddress("none", "engine")
        info = ReplicaInfo(id="d", role=Role.DECODE, version="v1", address=address, fingerprint="f", kv=kv)
        pools.follow(Role.DECODE, [info])
        await until(lambda: pools.view().decode[0].state is ReplicaState.READY)
        async with pools.get("d").decode(Request(id="r", prompt_token_ids=(1,), max_tokens=1), None) as leg:
            silent = True
            with pytest.raises(ReplicaLost):
                await asyncio.wait_for(anext(aiter(leg)), 5)
        assert pools.view().decode[0].state is ReplicaState.SUSPECT
        silent = False
        await until(lambda: pools.view().decode[0].state is ReplicaState.READY)
        await pools.close()
    context.destroy(linger=0)


async def test_an_ingress_that_vanished_is_noticed_by_the_next_message_to_it() -> None:
    gone: list[str] = []
    wires: list[ReplicaWire] = []
    replica = ZmqHub("127.0.0.1", KEYS, lambda wire, message: wires.append(wire), on_gone=gone.append)
    address = replica.start()
    async with ingress(address) as wire:
        wire.send(frames.Ping())
        await until(lambda: bool(wires))
    for _ in range(50):
        wires[0].send(frames.Granted("r"))
        await asyncio.sleep(0.02)
    assert set(gone) == {wires[0].peer}
    await replica.close()
