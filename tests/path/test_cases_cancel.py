"""Public failure cases of clients that leave: at every stage both engines let go, and no count drifts."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing

import pytest

from pd_serve.engine.fake_faults import Fault, Stage
from pd_serve.errors import DeadlineExceeded, EngineFailed, Overloaded, PdServeError
from pd_serve.types import Role
from tests.path.cluster import Cluster, expected, fast, request, rules, until
from tests.path.conftest import Start


async def _busy(cluster: Cluster, name: str) -> None:
    """Wait until a leg runs on that node."""
    await until(lambda: cluster.node(name).host.legs, f"a leg runs on {name}")


async def test_b10_abandoned_prompts_do_not_block_the_next_one(start: Start) -> None:
    """Ten long prompts whose clients left in the middle: prefill stops computing them within one step."""
    cluster = await start(
        prefill_settings=fast(prefill_tokens_per_s=20_000.0, max_num_batched_tokens=512),
        decode_settings=fast(max_num_seqs=16),
    )
    engine = cluster.prefill.engine
    abandoned = [asyncio.create_task(cluster.ask(request(1900, seed=seed))) for seed in range(10)]
    await until(lambda: cluster.prefill.host.legs == 10, "all ten are there")
    await until(lambda: engine.computed_tokens, "the first step is done")
    for task in abandoned:
        task.cancel()
    computed = engine.computed_tokens
    asked = request(20)
    assert (await cluster.ask(asked)).tokens() == expected(asked)
    assert engine.computed_tokens <= computed + 512 + 20  # what was left of the ten prompts were 18,000 more
    await asyncio.gather(*abandoned, return_exceptions=True)
    assert cluster.prefill.sink.total("legs", outcome="cancelled") == 10
    assert cluster.decode.sink.total("legs", outcome="cancelled") == 10


STAGES: list[tuple[Role, Stage]] = [
    (Role.PREFILL, "before_prefill"),
    (Role.PREFILL, "mid_prefill"),
    (Role.PREFILL, "prefill_done"),
    (Role.PREFILL, "mid_transfer"),
    (Role.PREFILL, "transfer_done"),
    (Role.DECODE, "mid_transfer"),
    (Role.DECODE, "transfer_done"),
    (Role.DECODE, "after_token_k"),
]


@pytest.mark.parametrize(("role", "stage"), STAGES)
@pytest.mark.parametrize("closed", [False, True], ids=["cancelled", "closed"])
async def test_leaving_at_any_stage_reaches_both_engines(start: Start, role: Role, stage: Stage, closed: bool) -> None:
    """Invariant 2: whoever holds the KV when the client leaves lets go of it (check Q finds what is left)."""
    hang = [Fault(stage=stage, action="hang", token=3)]
    cluster = await start(
        prefill_faults=hang if role is Role.PREFILL else [], decode_faults=hang if role is Role.DECODE else []
    )
    node = cluster.prefill if role is Role.PREFILL else cluster.decode
    asked = request(200, max_tokens=500 if stage == "transfer_done" and role is Role.PREFILL else 8)
    stream = cluster.ingress.stream(asked)
    got: list[int] = []

    async def read() -> None:
        async for delta in stream:
            got.extend(token for choice in delta.choices for token in choice.token_ids)

    client = asyncio.create_task(read())
    await until(lambda: node.engine.script.struck, f"{role} is at {stage}")
    await asyncio.sleep(0.01)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    if closed:
        await stream.aclose()
    record = cluster.ingress.record(asked)
    assert (record.outcome, record.error) == ("cancelled", "Cancelled")
    assert tuple(got) == expected(asked)[: len(got)]
    await until(lambda: not node.host.legs, "the leg is over")
    assert node.sink.total("legs", outcome="cancelled") == 1


async def test_leaving_while_waiting_for_a_grant(start: Start) -> None:
    cluster = await start()
    cluster.decode.stop()
    client = asyncio.create_task(cluster.ask(request(200)))
    await asyncio.sleep(0.05)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    cluster.decode.go_on()
    await cluster.until_ready()
    await until(lambda: cluster.decode.aborts, "the abort follows its submission")


async def test_leaving_while_waiting_for_a_replica(start: Start) -> None:
    cluster = await start()
    cluster.tell([])
    client = asyncio.create_task(cluster.ask(request(200)))
    await asyncio.sleep(0.05)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    assert cluster.ingress.records[-1].outcome == "cancelled"
    cluster.tell()
    await cluster.until_ready()


async def test_leaving_with_the_last_delta_in_hand_is_a_success(start: Start) -> None:
    cluster = await start()
    asked = request(100)
    async with aclosing(cluster.ingress.stream(asked)) as deltas:
        async for delta in deltas:
            if delta.finished:
                break
    assert cluster.ingress.record(asked).outcome == "ok"


@pytest.mark.parametrize("max_running", [1, 4])
async def test_b27_cancellations_in_the_race_of_dispatch_are_not_lost(
    start: Start, max_running: int, full_length: bool
) -> None:
    """Invariant 1: many requests closed after 0 to 20 ms, queued or running or just between."""
    rng = random.Random(27)
    cluster = await start(
        rules=rules(max_running=max_running, max_queue=500),
        decode_settings=fast(max_num_seqs=max_running),
    )

    async def leave_soon(seed: int) -> None:
        client = asyncio.create_task(cluster.ask(request(40, seed=seed)))
        await asyncio.sleep(rng.random() * 0.02)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)

    for batch in range(10 if full_length else 2):
        await asyncio.gather(*(leave_soon(100 * batch + number) for number in range(100)))
    good = [request(40, seed=seed) for seed in range(1000, 1010)]
    answers = await asyncio.wait_for(asyncio.gather(*(cluster.ask(one) for one in good)), 30.0)
    assert [answer.tokens() for answer in answers] == [expected(one) for one in good]


async def test_b27_a_request_that_gives_up_in_the_instant_it_is_let_in(start: Start) -> None:
    """Two leave the queue in the same turn of the event loop: the one that runs, and the one that would be next."""
    cluster = await start(rules=rules(max_running=1, max_queue=10), decode_settings=fast(decode_step_s=0.005))
    for _ in range(8):
        clients = [asyncio.create_task(cluster.ask(request(40))) for _ in range(3)]
        await asyncio.sleep(0.015)
        clients[1].cancel()
        clients[0].cancel()
        await asyncio.gather(*clients[:2], return_exceptions=True)
        assert len((await clients[2]).tokens()) == 8


async def test_b28_gauges_come_down_after_every_kind_of_ending(start: Start) -> None:
    """Invariant 1: started = ok + failed + cancelled + shed, exactly, and running = queued = 0."""
    cluster = await start(
        rules=rules(max_running=4, max_queue=50),
        decode_settings=fast(max_num_seqs=4, decode_step_s=0.002),
        decode_faults=[Fault(stage="after_token_k", token=3, action="fail", request="bad")],
    )
    sink = cluster.ingress.sink

    # The decode pool is full, 50 wait, one is one too many, and all of them leave.
    clients = [asyncio.create_task(cluster.ask(request(100, max_tokens=900, seed=seed))) for seed in range(54)]
    await until(lambda: sink.last("requests_running") == 4 and sink.last("requests_queued") == 50, "all are in")
    assert isinstance(await cluster.ingress.outcome(request(100)), Overloaded)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    assert (sink.last("requests_running"), sink.last("requests_queued")) == (0, 0)

    # Others end by error, by time, and well.
    bad = _named("bad", request(100))
    late = request(100, max_tokens=900, deadline=time.monotonic() + 0.1)
    good = request(100)
    results = await asyncio.gather(*(cluster.ingress.outcome(one) for one in (bad, late, good)))
    assert [type(result) for result in results[:2]] == [EngineFailed, DeadlineExceeded]
    assert not isinstance(results[2], PdServeError)
    assert sink.by_label("requests", "outcome") == {"cancelled": 54, "shed": 1, "failed": 2, "ok": 1}


async def test_b28_gauges_come_down_when_a_replica_dies(start: Start) -> None:
    cluster = await start(decodes=2, decode_faults=[Fault(stage="after_token_k", token=5, action="stall", seconds=30)])
    clients = [asyncio.create_task(cluster.ingress.outcome(request(100, seed=seed))) for seed in range(20)]
    await until(lambda: cluster.decode.engine.script.struck, "some have tokens")
    cluster.decode.kill()
    results = await asyncio.gather(*clients)
    assert any(isinstance(result, EngineFailed) for result in results)
    assert any(not isinstance(result, PdServeError) for result in results)
    assert cluster.ingress.sink.last("requests_running") == 0


def _named(name: str, asked: object) -> object:
    import msgspec

    return msgspec.structs.replace(asked, id=name)  # type: ignore[type-var]
