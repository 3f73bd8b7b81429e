"""Public failure cases of moving KV: wrong bytes, lost bytes, aborts while it moves."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from pd_serve.engine.fake_faults import Action, Fault, Stage
from pd_serve.errors import PdServeError, TransferFailed
from pd_serve.types import KvOutcome
from tests.path.cluster import Answer, expected, fast, request, rules
from tests.path.conftest import Start

DAMAGE: dict[Action, str] = {
    "corrupt": "checksum",
    "truncate": "length",
    "drop_layer": "layout",
    "wrong_blocks": "blocks",
    "other_prompt": "other_prompt",
    "other_generation": "other_generation",
}
"""What happens to the KV, and the reason that has to be counted for it."""


@pytest.mark.parametrize("action", DAMAGE)
async def test_b16_damaged_kv_is_recomputed(start: Start, action: Action) -> None:
    """Invariant 4: KV that does not match its envelope is never decoded."""
    cluster = await start(prefill_faults=[Fault(stage="mid_transfer", action=action)])
    asked = [request(200, seed=seed) for seed in range(4)]
    answers = await asyncio.gather(*(cluster.ask(one) for one in asked))
    assert [answer.tokens() for answer in answers] == [expected(one) for one in asked]
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {DAMAGE[action]: 4}
    assert cluster.decode.engine.received.counts().failed == {DAMAGE[action]: 4}
    assert cluster.prefill.engine.script.struck == 4


@pytest.mark.parametrize("action", DAMAGE)
async def test_b16_damaged_kv_fails_the_request_by_policy(start: Start, action: Action) -> None:
    """Invariant 4, with `load_failure_policy: fail`: an error, never a wrong answer."""
    cluster = await start(
        decode_settings=fast(load_failure_policy="fail"), prefill_faults=[Fault(stage="mid_transfer", action=action)]
    )
    with pytest.raises(TransferFailed, match=DAMAGE[action]):
        await cluster.ask(request(200))
    assert cluster.ingress.sink.by_label("errors", "kind") == {"TransferFailed": 1}


async def test_b16_without_the_check_the_damage_would_show() -> None:
    """The tests above could not pass by luck: the fake engine's tokens depend on every byte of its KV."""
    from pd_serve.engine.fake_model import KvCache
    from tests.path.cluster import FAST

    model, asked = FAST.model, request(200)
    whole = KvCache(model.layers)
    model.compute(whole, asked.prompt_token_ids)
    for place in range(0, 200 * 8 * model.layers, 97):
        pages = model.pages(whole, 200)
        layer, offset = divmod(place, 200 * 8)
        pages[layer * (len(pages) // model.layers) + offset] ^= 1
        damaged = KvCache(model.layers)
        model.put(damaged, memoryview(pages), 200)
        assert model.next_token(damaged) != model.next_token(whole)


async def test_b16_kv_that_comes_twice_is_used_once(start: Start) -> None:
    cluster = await start(prefill_faults=[Fault(stage="mid_transfer", action="duplicate")])
    asked = request(200)
    assert (await cluster.ask(asked)).tokens() == expected(asked)
    assert cluster.ingress.sink.total("fallbacks") == 0
    assert cluster.decode.engine.received.counts().done == 1


async def test_b16_kv_that_never_comes_ends_with_its_lease(start: Start) -> None:
    cluster = await start(rules=rules(lease_s=0.15), prefill_faults=[Fault(stage="mid_transfer", action="drop")])
    asked = request(200)
    answer = await cluster.ask(asked)
    assert answer.tokens() == expected(asked)
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"expired": 1}
    assert answer.last.kv
    assert 0.1 < answer.last.kv.wait_s < 10.0


async def test_b16_kv_lost_between_arrival_and_use(start: Start) -> None:
    cluster = await start(decode_faults=[Fault(stage="mid_transfer", action="fail")])
    asked = request(200)
    assert (await cluster.ask(asked)).tokens() == expected(asked)
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"lost": 1}


async def test_b16_kv_that_came_but_is_never_done_ends_with_its_lease(start: Start) -> None:
    cluster = await start(rules=rules(lease_s=0.15), decode_faults=[Fault(stage="mid_transfer", action="hang")])
    asked = request(200)
    assert (await cluster.ask(asked)).tokens() == expected(asked)
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"expired": 1}


async def test_invariant_8_a_fallback_is_counted_when_the_client_leaves_after_the_first_token(start: Start) -> None:
    cluster = await start(
        prefill_faults=[Fault(stage="prefill_done", action="fail")], decode_settings=fast(decode_step_s=0.01)
    )
    asked = request(200, max_tokens=500)
    async with aclosing(cluster.ingress.stream(asked)) as deltas:
        await anext(deltas)
    record = cluster.ingress.record(asked)
    assert record.outcome == "cancelled"
    assert record.kv
    assert record.kv.outcome is KvOutcome.RECOMPUTED
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"prefill_EngineFailed": 1}
    assert cluster.ingress.sink.by_label("handoffs", "outcome") == {"recomputed": 1}


@pytest.mark.parametrize("stage", ["before_prefill", "mid_prefill", "prefill_done", "mid_transfer"])
@pytest.mark.parametrize("action", ["fail", "die"])
async def test_b15_prefill_that_ends_early_is_a_counted_fallback(start: Start, stage: Stage, action: Action) -> None:
    """Invariant 8: decode is told at once that no KV will come, and the fallback is counted with its reason."""
    cluster = await start(prefill_faults=[Fault(stage=stage, action=action)])
    asked = [request(200, seed=seed) for seed in range(8)]
    answers = await asyncio.wait_for(asyncio.gather(*(cluster.ask(one) for one in asked)), 30.0)
    assert [answer.tokens() for answer in answers] == [expected(one) for one in asked]
    reports = [answer.last.kv for answer in answers if answer.last.kv]
    assert {report.outcome for report in reports} == {KvOutcome.RECOMPUTED}
    assert {report.reason for report in reports} == {"prefill_EngineFailed"}  # told, not left to wait for its lease
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"prefill_EngineFailed": 8}


async def test_prefill_that_fails_after_its_kv_was_taken_is_no_fallback(start: Start) -> None:
    cluster = await start(
        prefill_faults=[Fault(stage="transfer_done", action="fail")],
        decode_settings=fast(decode_step_s=0.01),
    )
    asked = request(200)
    answer = await cluster.ask(asked)
    assert answer.tokens() == expected(asked)
    assert answer.last.kv
    assert answer.last.kv.outcome is KvOutcome.MOVED
    attempt = cluster.ingress.record(asked).attempts[0]
    assert (attempt.prefill_error, attempt.fallback) == ("EngineFailed", None)
    assert cluster.ingress.sink.total("fallbacks") == 0


async def test_b15_a_prefill_that_hangs_costs_decode_at_most_the_lease(start: Start) -> None:
    cluster = await start(rules=rules(lease_s=0.2), prefill_faults=[Fault(stage="mid_prefill", action="hang")])
    asked = [request(200, seed=seed) for seed in range(8)]
    answers = await asyncio.wait_for(asyncio.gather(*(cluster.ask(one) for one in asked)), 30.0)
    assert [answer.tokens() for answer in answers] == [expected(one) for one in asked]
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"expired": 8}


async def test_b15_an_abort_storm_leaves_decode_free(start: Start, full_length: bool) -> None:
    """Many requests, 90 % of them cancelled at random times; every slot is free again and the rest is right."""
    rng = random.Random(15)
    cluster = await start(
        decode_settings=fast(max_num_seqs=8, decode_step_s=0.001),
        prefill_settings=fast(prefill_tokens_per_s=100_000.0),
    )
    asked = [request(200, seed=seed) for seed in range(200 if full_length else 80)]
    tasks = [asyncio.create_task(cluster.ask(one)) for one in asked]
    leaving = [task for task in tasks if rng.random() < 0.9]
    for task in leaving:
        await asyncio.sleep(rng.random() * 0.004)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for one, task, result in zip(asked, tasks, results, strict=True):
        if isinstance(result, Answer):
            assert result.tokens() == expected(one)
        else:
            assert task in leaving
            assert isinstance(result, asyncio.CancelledError)


async def test_b12_aborts_while_kv_is_in_flight_harm_no_one_else(start: Start) -> None:
    """Invariant 2: 100 requests cancelled at random times around a slow transfer, others running beside them."""
    rng = random.Random(12)
    seconds = 0.2
    cluster = await start(
        decode_settings=fast(max_num_seqs=128, kv_tokens=60_000),
        decode_faults=[Fault(stage="mid_transfer", action="slow", seconds=seconds)],
    )
    free_before = (await cluster.decode.engine.stats()).kv_tokens_total
    doomed = [asyncio.create_task(cluster.ask(request(100, seed=seed))) for seed in range(100)]
    survivors = [request(100, seed=seed) for seed in range(100, 110)]
    answers = [asyncio.create_task(cluster.ask(one)) for one in survivors]
    at = sorted((rng.random() * seconds * 1.2, number) for number in range(100))
    began = asyncio.get_running_loop().time()
    for when, number in at:
        await asyncio.sleep(max(began + when - asyncio.get_running_loop().time(), 0))
        doomed[number].cancel()
    await asyncio.gather(*doomed, return_exceptions=True)
    for one, answer in zip(survivors, answers, strict=True):
        assert (await answer).tokens() == expected(one)
    stats = await cluster.decode.engine.stats()
    assert (stats.kv_tokens_total, stats.kv_tokens_used) == (free_before, 0)


async def test_kv_in_decodes_own_cache_is_not_waited_for(start: Start) -> None:
    cluster = await start()
    asked = [request(200, seed=1), request(200, seed=1)]
    answers = [await cluster.ask(one) for one in asked]
    assert answers[0].tokens() == answers[1].tokens() == expected(asked[0])
    assert answers[1].last.kv
    assert (answers[1].last.kv.outcome, answers[1].last.kv.reason) == (KvOutcome.LOCAL, "in_own_cache")
    assert cluster.ingress.sink.total("fallbacks") == 0


async def test_a_former_life_of_a_decode_engine_gets_no_kv(start: Start) -> None:
    """KV addressed to an engine that is gone fails the prefill leg; the request goes to the engine that is there."""
    cluster = await start(decodes=2)
    first, second = (node for node in cluster.nodes if node.role == "decode")
    first.transport.close()
    asked = [request(200, seed=seed) for seed in range(6)]
    answers = [await cluster.ingress.outcome(one) for one in asked]
    for one, answer in zip(asked, answers, strict=True):
        assert not isinstance(answer, PdServeError)
        assert answer.tokens() == expected(one)
    reasons = cluster.ingress.sink.by_label("fallbacks", "reason")
    assert set(reasons) <= {"prefill_TransferFailed", "lost"}
    assert second.engine.received.counts().done + sum(reasons.values()) == 6
