"""A replica as one ingress meets it: what it answers to each message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pd_serve.engine.fake_faults import Fault
from pd_serve.kv.transport.in_process import Registry
from pd_serve.path import frames, replica_host
from pd_serve.path.channel import InProcessIngressWire, connect_in_process
from pd_serve.path.frames import ToIngress
from pd_serve.types import EngineStats, Handoff, KvAddress, Request, Role, hash_tokens
from tests.path.cluster import FAST, Node, expected, request


class Peer:
    """An ingress of which only the wire exists."""

    def __init__(self, node: Node, name: str = "peer") -> None:
        self.wire: InProcessIngressWire = connect_in_process(name, node._on_message)

    async def next(self, *kinds: type[ToIngress]) -> ToIngress:
        """The next message that is no report, or of these kinds."""
        while True:
            message = await asyncio.wait_for(self.wire.receive(), 10.0)
            if isinstance(
                message, kinds or frames.Granted | frames.Refused | frames.Prefilled | frames.Failed | frames.Frame
            ):
                return message

    def decode(self, asked: Request, handoff: Handoff | None = None, budget_s: float = 60.0) -> None:
        self.wire.send(frames.SubmitDecode(asked, handoff, budget_s))


@pytest.fixture
async def node(fast_clocks: None) -> AsyncIterator[Node]:
    node = Node(Role.DECODE, "d", FAST, Registry(), ())
    await node.start()
    yield node
    await node.close()
    stats = await node.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens_used, stats.reserved_tokens) == (0, 0, 0, 0)
    assert node.host.legs == 0


def handoff_to(node: Node, asked: Request) -> Handoff:
    return Handoff(
        id=f"{asked.id}.h",
        prompt_tokens=len(asked.prompt_token_ids),
        prompt_hash=hash_tokens(asked.prompt_token_ids),
        source=KvAddress("in_process", "p"),
        target=node.info.kv,
        lease_s=10.0,
    )


async def test_a_decode_leg_is_granted_then_framed(node: Node) -> None:
    peer, asked = Peer(node), request(50)
    peer.decode(asked)
    assert await peer.next() == frames.Granted(asked.id)
    got: list[int] = []
    while True:
        frame = await peer.next()
        assert isinstance(frame, frames.Frame)
        got += [token for delta in frame.deltas for choice in delta.choices for token in choice.token_ids]
        if frame.deltas[-1].finished:
            break
    assert tuple(got) == expected(asked)
    assert node.sink.by_label("legs", "outcome") == {"ok": 1}


async def test_one_step_of_many_requests_is_one_frame(node: Node) -> None:
    peer = Peer(node)
    asked = [request(20, max_tokens=4, seed=seed) for seed in range(16)]
    for one in asked:
        peer.decode(one)
    finished, deltas, sent = 0, 0, 0
    while finished < 16:
        message = await peer.next()
        if isinstance(message, frames.Frame):
            sent += 1
            deltas += len(message.deltas)
            finished += sum(delta.finished for delta in message.deltas)
    assert deltas == 16 * 4
    assert sent <= 8


async def test_what_was_generated_before_a_failure_stays_in_front_of_it(node: Node) -> None:
    """Invariant 3."""
    node.engine.script.add(Fault(stage="after_token_k", token=3, action="fail"))
    peer, asked = Peer(node), request(50)
    peer.decode(asked)
    messages = [await peer.next()]
    while not isinstance(messages[-1], frames.Failed):
        messages.append(await peer.next())
    got = [
        token
        for message in messages
        if isinstance(message, frames.Frame)
        for delta in message.deltas
        for choice in delta.choices
        for token in choice.token_ids
    ]
    assert tuple(got) == expected(asked)[:3]
    assert messages[-1].error.kind == "EngineFailed"
    assert node.sink.by_label("legs", "outcome") == {"EngineFailed": 1}


@pytest.mark.parametrize("stage", ["before_prefill", "mid_prefill", "after_token_k"])
async def test_the_replica_keeps_the_budget_itself(node: Node, stage: str) -> None:
    """Invariant 7: also when the ingress that set it does not end the leg."""
    node.engine.script.add(Fault(stage=stage, action="hang"))  # type: ignore[arg-type]
    peer = Peer(node)
    peer.decode(request(50), budget_s=0.05)
    failed = await peer.next(frames.Failed)
    assert isinstance(failed, frames.Failed)
    assert failed.error.kind == "DeadlineExceeded"


async def test_a_budget_that_is_over_when_it_comes(node: Node) -> None:
    peer = Peer(node)
    peer.decode(request(50), budget_s=-1.0)
    failed = await peer.next(frames.Failed)
    assert isinstance(failed, frames.Failed)
    assert failed.error.kind == "DeadlineExceeded"


async def test_a_prefill_leg_keeps_its_budget_too(node: Node) -> None:
    node.engine.script.add(Fault(stage="mid_prefill", action="hang"))
    peer, asked = Peer(node), request(50)
    peer.wire.send(frames.SubmitPrefill(asked, handoff_to(node, asked), 0.05))
    failed = await peer.next(frames.Failed)
    assert isinstance(failed, frames.Failed)
    assert failed.error.kind == "DeadlineExceeded"
    assert node.engine.sent.held() == 0


async def test_no_room_is_a_refusal(node: Node) -> None:
    peer = Peer(node)
    peer.decode(request(50, max_tokens=500, n=63))
    await peer.next(frames.Granted)
    peer.decode(request(50, n=2))
    refused = await peer.next(frames.Refused)
    assert isinstance(refused, frames.Refused)
    assert refused.error.kind == "Overloaded"
    assert node.sink.total("legs", outcome="refused") == 1


async def test_a_draining_replica_refuses_and_says_so(node: Node) -> None:
    peer = Peer(node)
    peer.wire.send(frames.Ping())
    stats = await peer.next(frames.Stats)
    assert isinstance(stats, frames.Stats)
    assert (stats.healthy, stats.draining) == (True, False)
    await node.host.drain(0.1)
    peer.decode(request(50))
    asked = request(50)
    peer.wire.send(frames.SubmitPrefill(asked, handoff_to(node, asked), 60.0))
    for _ in range(2):
        refused = await peer.next(frames.Refused)
        assert isinstance(refused, frames.Refused)
        assert refused.error.kind == "Draining"
    while not stats.draining:
        stats = await peer.next(frames.Stats)
        assert isinstance(stats, frames.Stats)


async def test_a_leg_id_is_used_by_one_leg_at_a_time(node: Node) -> None:
    """Invariant 10: a second leg of the same name does not touch the first."""
    first, second, asked = Peer(node, "a"), Peer(node, "b"), request(50)
    first.decode(asked)
    second.decode(asked)
    refused = await second.next()
    assert isinstance(refused, frames.Refused)
    while not (isinstance(message := await first.next(), frames.Frame) and message.deltas[-1].finished):
        pass


async def test_unknown_ids_are_ignored(node: Node) -> None:
    peer, asked = Peer(node), request(50)
    peer.wire.send(frames.Abort("nobody"))
    peer.wire.send(frames.Withdraw("nothing", "no reason"))
    peer.decode(asked)
    assert await peer.next() == frames.Granted(asked.id)


async def test_an_abort_before_the_leg_has_begun(node: Node) -> None:
    peer, asked = Peer(node), request(50)
    peer.decode(asked)
    peer.wire.send(frames.Abort(asked.id))
    again = request(50)
    peer.decode(again)
    while (await peer.next()) != frames.Granted(again.id):
        pass
    assert node.sink.total("legs", outcome="cancelled") == 1


async def test_an_engine_that_does_not_say_how_it_is_is_not_healthy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reporter outlives an engine that hangs, and one that raises what it should not."""
    monkeypatch.setattr(replica_host, "STATS_TIMEOUT_S", 0.02)
    peer = Peer(node)

    async def hangs() -> EngineStats:
        await asyncio.sleep(60)
        raise AssertionError

    async def raises() -> EngineStats:
        raise ValueError("not ours")

    for broken in (hangs, raises):
        with monkeypatch.context() as patch:
            patch.setattr(node.engine, "stats", broken)
            peer.wire.send(frames.Ping())
            stats = await peer.next(frames.Stats)
            while stats.healthy:  # type: ignore[union-attr]
                stats = await peer.next(frames.Stats)
            assert "not ours" not in stats.reason  # type: ignore[union-attr]
    stats = await peer.next(frames.Stats)
    while not stats.healthy:  # type: ignore[union-attr]
        stats = await peer.next(frames.Stats)
