"""Public failure cases of too much work: bounded queues, quick refusals, room on decode, one budget of time."""

from __future__ import annotations

import asyncio
import time

import pytest

from pd_serve.engine.fake_faults import Fault
from pd_serve.errors import DeadlineExceeded, InvalidRequest, NoReplica, Overloaded
from pd_serve.types import Request, Role
from tests.path.cluster import Answer, Cluster, expected, fast, prompt, request, rules, until
from tests.path.conftest import Start


@pytest.mark.parametrize(("running", "queue"), [(2, 5), (3, 0)])
async def test_b32_the_queue_is_bounded_and_refusals_are_quick(start: Start, running: int, queue: int) -> None:
    """Invariant 7: the limit in the rules is the limit in force."""
    cluster = await start(rules=rules(max_running=running, max_queue=queue))
    took: list[float] = []

    async def one(seed: int) -> Answer | Overloaded:
        began = time.monotonic()
        try:
            return await cluster.ask(request(100, seed=seed))
        except Overloaded as error:
            took.append(time.monotonic() - began)
            return error

    results = await asyncio.gather(*(one(seed) for seed in range(50)))
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert len(refused) == 50 - running - queue
    assert max(took) < 0.1
    assert all(error.retry_after_s and error.retry_after_s >= 1 and error.status == 429 for error in refused)
    assert cluster.ingress.sink.by_label("requests", "outcome") == {"ok": running + queue, "shed": len(refused)}


async def test_b32_prefill_makes_no_kv_that_decode_has_no_room_for(start: Start) -> None:
    """Invariant 7: KV that waits for decode is bounded by what decode has granted."""
    cluster = await start(decode_settings=fast(max_num_seqs=2, decode_step_s=0.003))
    clients = [asyncio.create_task(cluster.ask(request(100, max_tokens=20, seed=seed))) for seed in range(20)]
    held: list[int] = []
    while not all(client.done() for client in clients):
        finished = sum(client.done() for client in clients)
        assert cluster.prefill.submitted[Role.PREFILL] <= finished + 4
        held.append((await cluster.decode.engine.stats()).handoffs_held)
        await asyncio.sleep(0.002)
    assert max(held) <= 2
    assert cluster.ingress.sink.total("waits", reason="decode_full") > 0
    for client in clients:
        assert len((await client).tokens()) == 20


async def test_decode_full_waits_in_order_and_then_runs(start: Start) -> None:
    """Those who wait for room get it in the order in which they came, and newcomers do not pass them."""
    cluster = await start(
        decode_settings=fast(max_num_seqs=1),
        decode_faults=[Fault(stage="after_token_k", action="hang", times=1)],
    )
    order: list[int] = []

    async def one(number: int) -> None:
        asked = request(50, max_tokens=5, seed=number)
        assert (await cluster.ask(asked)).tokens() == expected(asked)
        order.append(number)

    clients = [asyncio.create_task(one(0))]
    await until(lambda: cluster.decode.engine.script.struck, "the first runs")
    for number in range(1, 12):
        clients.append(asyncio.create_task(one(number)))
        await until(lambda number=number: len(cluster.ingress.path._line) == number, "it waits")  # type: ignore[misc]
    clients[0].cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    assert order == list(range(1, 12))
    assert [record.waits.get("in_line", 0) for record in cluster.ingress.records] == [0, 0] + [1] * 10


async def test_those_who_wait_for_room_do_not_all_ask_at_once(start: Start) -> None:
    """Refusals grow with the requests that wait, not with their square."""
    cluster = await start(decode_settings=fast(max_num_seqs=2))
    await asyncio.gather(*(cluster.ask(request(40, max_tokens=2, seed=seed)) for seed in range(60)))
    assert cluster.decode.sink.total("legs", outcome="refused") < 60 + 5 * 60
    record = cluster.ingress.records[-1]
    assert len(record.attempts) == 1  # Invariant 7: a record does not grow with the time that a request waits


async def test_a_request_that_waits_for_room_ends_with_its_budget(start: Start) -> None:
    cluster = await start(
        decode_settings=fast(max_num_seqs=1),
        decode_faults=[Fault(stage="after_token_k", action="hang", request="long")],
        rules=rules(first_token_timeout_s=0.3),
    )
    long = Request(id="long", prompt_token_ids=prompt(100), max_tokens=8)
    client = asyncio.create_task(cluster.ask(long))
    await until(lambda: cluster.decode.engine.script.struck, "the long one has its first token")
    late = [request(100, seed=seed) for seed in range(1, 5)]
    results = await asyncio.gather(*(cluster.ingress.outcome(one) for one in late))
    assert {type(result) for result in results} == {DeadlineExceeded}
    assert sum(cluster.ingress.record(one).waits.get("decode_full", 0) for one in late) > 0
    client.cancel()


async def test_a_request_that_can_never_fit_is_refused_at_once(start: Start) -> None:
    cluster = await start()
    with pytest.raises(InvalidRequest):
        await asyncio.wait_for(cluster.ask(request(2000, max_tokens=500)), 1.0)
    assert cluster.ingress.sink.total("retries") == 0


async def test_a_full_engine_takes_an_oversized_wish_when_it_is_empty(start: Start) -> None:
    """A request that asks for more KV than there is runs alone; its choices take turns, and every answer is right."""
    cluster = await start(decode_settings=fast(kv_tokens=2048, max_num_seqs=8))
    asked = [request(500, max_tokens=300, n=6, seed=seed) for seed in range(2)]
    answers = await asyncio.gather(*(cluster.ask(one) for one in asked))
    for one, answer in zip(asked, answers, strict=True):
        assert [answer.tokens(index) for index in range(6)] == [expected(one, index=index) for index in range(6)]
    assert cluster.decode.engine.preemptions > 0


# ---------------------------------------------------------------------------------------------------- time


async def test_the_budget_ends_in_the_queue(start: Start) -> None:
    """Invariant 7: every wait has a deadline from one budget."""
    cluster = await start(rules=rules(max_running=1), decode_settings=fast(decode_step_s=0.01))
    first = asyncio.create_task(cluster.ask(request(100, max_tokens=40)))
    await until(lambda: cluster.decode.host.legs, "the first runs")
    late = request(100, deadline=time.monotonic() + 0.1)
    assert isinstance(await _within(10.0, cluster, late), DeadlineExceeded)
    assert cluster.ingress.record(late).admitted_at is None
    await first
    assert cluster.decode.submitted[Role.DECODE] == 1  # the late one never reached a replica


async def test_the_queue_does_not_keep_a_request_past_its_first_token_time(start: Start) -> None:
    cluster = await start(
        rules=rules(max_running=1, first_token_timeout_s=0.15), decode_settings=fast(decode_step_s=0.01)
    )
    first = asyncio.create_task(cluster.ask(request(100, max_tokens=60)))
    await until(lambda: cluster.decode.host.legs, "the first runs")
    assert isinstance(await _within(10.0, cluster, request(100)), DeadlineExceeded)
    await first
    assert cluster.decode.submitted[Role.DECODE] == 1


async def test_the_budget_ends_in_prefill(start: Start) -> None:
    cluster = await start(prefill_faults=[Fault(stage="mid_prefill", action="hang")])
    late = request(100, deadline=time.monotonic() + 0.15)
    assert isinstance(await _within(10.0, cluster, late), DeadlineExceeded)
    assert cluster.ingress.record(late).first_token_at is None


async def test_the_first_token_has_a_time_of_its_own(start: Start) -> None:
    cluster = await start(
        rules=rules(first_token_timeout_s=0.15), prefill_faults=[Fault(stage="mid_prefill", action="hang")]
    )
    assert isinstance(await _within(10.0, cluster, request(100)), DeadlineExceeded)


async def test_the_budget_ends_in_decode(start: Start) -> None:
    cluster = await start(decode_faults=[Fault(stage="after_token_k", token=3, action="hang")])
    late = request(100, deadline=time.monotonic() + 0.2)
    assert isinstance(await _within(10.0, cluster, late), DeadlineExceeded)
    assert cluster.ingress.record(late).output_tokens == 3


async def test_the_budget_ends_while_a_replica_is_silent(start: Start) -> None:
    cluster = await start()
    cluster.decode.stop()
    late = request(100, deadline=time.monotonic() + 0.15)
    assert isinstance(await _within(10.0, cluster, late), DeadlineExceeded)
    cluster.decode.go_on()
    await cluster.until_ready()


async def test_no_replica_is_said_in_time(start: Start) -> None:
    cluster = await start(rules=rules(no_replica_timeout_s=0.2))
    cluster.tell([cluster.prefill])
    began = time.monotonic()
    results = await asyncio.gather(*(cluster.ingress.outcome(request(100, seed=seed)) for seed in range(10)))
    assert {type(result) for result in results} == {NoReplica}
    assert 0.15 < time.monotonic() - began < 1.8  # all at once, not one after the other
    cluster.tell()
    await cluster.until_ready()


async def test_those_in_line_for_room_hear_together_that_the_replica_is_gone(start: Start) -> None:
    cluster = await start(
        decode_settings=fast(max_num_seqs=1),
        decode_faults=[Fault(stage="after_token_k", action="hang", request="long")],
        rules=rules(no_replica_timeout_s=0.4),
    )
    client = asyncio.create_task(cluster.ask(Request(id="long", prompt_token_ids=prompt(100), max_tokens=8)))
    await until(lambda: cluster.decode.engine.script.struck, "the long one has its first token")
    waiting = [asyncio.create_task(cluster.ingress.outcome(request(100, seed=seed))) for seed in range(10)]
    await until(lambda: len(cluster.ingress.path._line) == 10, "all wait for room")
    began = time.monotonic()
    cluster.tell([cluster.prefill])
    assert {type(result) for result in await asyncio.gather(*waiting)} == {NoReplica}
    assert time.monotonic() - began < 2.0  # one after the other would take 4 s
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    cluster.tell()
    await cluster.until_ready()


async def _within(limit_s: float, cluster: Cluster, asked: object) -> object:
    return await asyncio.wait_for(cluster.ingress.outcome(asked), limit_s)  # type: ignore[arg-type]
