"""One ingress's view of its replicas, and the edges of a leg that a whole cluster meets too rarely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pd_serve.errors import EngineFailed, ReplicaLost
from pd_serve.path import frames
from pd_serve.path.frames import ToIngress, ToReplica
from pd_serve.path.pools import Pools, RemoteReplica
from pd_serve.types import (
    ChoiceDelta,
    Delta,
    EngineStats,
    Handoff,
    KvAddress,
    PrefillResult,
    ReplicaInfo,
    ReplicaState,
    Request,
    Role,
)

ADDRESS = KvAddress("in_process", "e")
HANDOFF = Handoff(id="h", prompt_tokens=3, prompt_hash=b"", source=ADDRESS, target=ADDRESS, lease_s=1.0)
RESULT = PrefillResult(token_id=1, cached_tokens=0, computed_tokens=3, generated_tokens=1, kv_bytes=8, seconds=0.1)


def info(name: str = "d", role: Role = Role.DECODE, version: str = "v1") -> ReplicaInfo:
    return ReplicaInfo(
        id=name, role=role, version=version, address="", fingerprint="f", kv=ADDRESS, kv_tokens_total=100
    )


def request(name: str = "r", **fields: int) -> Request:
    return Request(id=name, prompt_token_ids=(1, 2, 3), max_tokens=4, **fields)


def delta(name: str = "r", *, finished: bool = False) -> Delta:
    return Delta(name, (ChoiceDelta(0, "x", (5,)),), finished=finished)


class Wire:
    """An ingress's end of a channel whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[ToReplica] = []
        self._incoming: asyncio.Queue[ToIngress | None] = asyncio.Queue()

    def send(self, message: ToReplica) -> None:
        if not isinstance(message, frames.Ping):
            self.sent.append(message)

    async def receive(self) -> ToIngress:
        message = await self._incoming.get()
        if message is None:
            raise ReplicaLost("the channel is closed")
        return message

    def close(self) -> None:
        self._incoming.put_nowait(None)

    def answer(self, message: ToIngress) -> None:
        self._incoming.put_nowait(message)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[RemoteReplica, Wire]]:
    wire = Wire()
    replica = RemoteReplica(info(), lambda _: wire, lambda: None)
    await asyncio.sleep(0)
    yield replica, wire
    await replica.close()


async def test_a_cancellation_in_the_instant_of_the_grant_is_not_lost(ends: tuple[RemoteReplica, Wire]) -> None:
    """Case B27: the grant has come, the caller has been cancelled, and neither has run since."""
    replica, wire = ends

    async def decode() -> None:
        async with replica.decode(request(), None):
            pytest.fail("the cancellation was lost")

    client = asyncio.create_task(decode())
    await asyncio.sleep(0)
    replica._on_message(frames.Granted("r"))
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    assert wire.sent[-1] == frames.Abort("r")
    assert replica.view().own_requests == 0


async def test_a_finished_leg_is_not_aborted(ends: tuple[RemoteReplica, Wire]) -> None:
    replica, wire = ends
    later = [frames.Granted("r"), frames.Frame((delta(), delta("another"), delta(finished=True)))]
    asyncio.get_running_loop().call_later(0.01, lambda: [wire.answer(message) for message in later])
    async with replica.decode(request(), None) as leg:
        assert [d.finished async for d in leg] == [False, True]
    assert [type(message) for message in wire.sent] == [frames.SubmitDecode]


async def test_deltas_in_front_of_an_error_are_read_first(ends: tuple[RemoteReplica, Wire]) -> None:
    replica, wire = ends
    later = [frames.Granted("r"), frames.Frame((delta(),)), frames.Failed("r", EngineFailed("it broke").to_wire())]
    asyncio.get_running_loop().call_later(0.01, lambda: [wire.answer(message) for message in later])
    got = []
    async with replica.decode(request(), None) as leg:
        with pytest.raises(EngineFailed, match="it broke"):
            async for one in leg:
                got.append(one)  # noqa: PERF401 (what came before the error counts)
    assert got == [delta()]


async def test_a_prefill_leg(ends: tuple[RemoteReplica, Wire]) -> None:
    replica, wire = ends
    leg = asyncio.create_task(replica.prefill(request(), HANDOFF))
    await asyncio.sleep(0)
    assert (replica.view().own_prompt_tokens, replica.view().own_kv_tokens) == (3, 0)
    wire.answer(frames.Prefilled("r", RESULT))
    assert await leg == RESULT
    assert replica.view().own_requests == 0
    leg = asyncio.create_task(replica.prefill(request("r2"), HANDOFF))
    await asyncio.sleep(0)
    wire.answer(frames.Failed("r2", EngineFailed("it broke").to_wire()))
    with pytest.raises(EngineFailed):
        await leg
    assert [type(message) for message in wire.sent] == [frames.SubmitPrefill] * 2


async def test_a_lost_channel_ends_every_leg(ends: tuple[RemoteReplica, Wire]) -> None:
    replica, wire = ends

    async def decode() -> list[Delta]:
        async with replica.decode(request(), None) as leg:
            return [one async for one in leg]

    legs = [asyncio.create_task(decode()), asyncio.create_task(replica.prefill(request("p"), HANDOFF))]
    await asyncio.sleep(0)
    wire.answer(frames.Granted("r"))
    await asyncio.sleep(0.01)
    wire.close()
    assert [type(end) for end in await asyncio.gather(*legs, return_exceptions=True)] == [ReplicaLost] * 2
    await asyncio.wait_for(replica.idle(), 1.0)
    with pytest.raises(ReplicaLost):
        async with replica.decode(request("next"), None):
            pytest.fail("there is no channel")


async def test_the_view_of_a_replica(ends: tuple[RemoteReplica, Wire]) -> None:
    """Invariant 5: what a policy sees is what the replica said last, and what this ingress has there since."""
    replica, _ = ends
    assert replica.view().state is ReplicaState.SUSPECT  # it has not said anything yet
    stats = EngineStats(running=3, kv_tokens_used=40)
    replica._on_message(frames.Stats(stats, healthy=True, draining=False))
    async with asyncio.timeout(1):
        leg = asyncio.create_task(replica.decode(request("n", n=2), None).__aenter__())
        await asyncio.sleep(0)
        view = replica.view()
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
    assert (view.state, view.stats) == (ReplicaState.READY, stats)
    assert (view.own_requests, view.own_kv_tokens) == (1, 3 + 2 * 4)
    replica._on_message(frames.Stats(stats, healthy=False, draining=False))
    assert replica.view().state is ReplicaState.SUSPECT
    replica._on_message(frames.Stats(stats, healthy=True, draining=True))
    assert replica.view().state is ReplicaState.DRAINING


async def test_following_what_serve_names() -> None:
    wires: dict[str, list[Wire]] = {}

    def connect(replica: ReplicaInfo) -> Wire:
        wires.setdefault(replica.id, []).append(Wire())
        return wires[replica.id][-1]

    pools = Pools(connect)
    pools.follow(Role.DECODE, [info("d0"), info("d1")])
    pools.follow(Role.PREFILL, [info("p0", Role.PREFILL)])
    assert [v.info.id for v in pools.view().decode] == ["d0", "d1"]
    assert [v.info.id for v in pools.view().prefill] == ["p0"]
    first = pools.get("d1")

    pools.follow(Role.DECODE, [info("d1")])
    assert pools.get("d1") is first
    with pytest.raises(ReplicaLost):
        pools.get("d0")
    assert pools.get("p0")

    pools.follow(Role.DECODE, [info("d1", version="v2")])  # the same name, another life
    assert pools.get("d1") is not first
    changed = asyncio.create_task(pools.changed(10.0))
    await asyncio.sleep(0)
    pools.notify()
    await asyncio.wait_for(changed, 1.0)
    await pools.changed(0.001)
    await pools.close()
    assert pools.view().decode == ()
