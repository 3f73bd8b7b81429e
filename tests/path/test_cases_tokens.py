"""Public failure cases of the seam between prefill and decode: parameters that leak, tokens lost or doubled."""

from __future__ import annotations

import asyncio

import pytest

from pd_serve.engine.fake_faults import Fault
from pd_serve.engine.fake_model import FakeModel
from pd_serve.types import KvOutcome
from tests.path.cluster import BLOCK, FAST, Cluster, expected, fast, prompt, request
from tests.path.conftest import Start

EOS = FAST.model.eos_token_id
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 200, 700)


def prefill_results(cluster: Cluster) -> list[int]:
    """Tokens that each prefill leg generated."""
    attempts = [attempt for record in cluster.ingress.records for attempt in record.attempts]
    return [attempt.prefill.generated_tokens for attempt in attempts if attempt.prefill]


async def test_b01_min_tokens_does_not_reach_the_prefill_leg(start: Start) -> None:
    cluster = await start()
    asked = request(100, max_tokens=20, sampling={"max_tokens": 20, "min_tokens": 10})
    answer = await cluster.ask(asked)
    assert answer.tokens() == expected(asked)
    assert len(answer.tokens()) == 20
    assert prefill_results(cluster) == [1]


async def test_b02_a_stream_moves_kv_and_falls_back_never(start: Start) -> None:
    cluster = await start()
    await cluster.ask(request(100))
    sink = cluster.ingress.sink
    assert sink.total("handoffs", outcome="moved") == 1
    assert sink.total("fallbacks") == 0


@pytest.mark.parametrize(("max_tokens", "in_sampling"), [(64, 64), (32, 64), (64, 32)])
async def test_b03_prefill_generates_one_token_whatever_the_limit(
    start: Start, max_tokens: int, in_sampling: int
) -> None:
    cluster = await start()
    answer = await cluster.ask(request(100, max_tokens=max_tokens, sampling={"max_tokens": in_sampling}))
    assert len(answer.tokens()) == min(max_tokens, in_sampling)
    assert answer.finish_reason() == "length"
    assert prefill_results(cluster) == [1]


async def test_b04_the_token_sampled_on_prefill_never_ends_the_request(start: Start) -> None:
    """Invariant 3: prefill's own token, stop or error never ends a request that decode would have continued."""
    cluster = await start()
    force_eos = {EOS: 100.0}
    first = {seed: expected(request(100, seed=seed))[0] for seed in range(5)}
    cases: list[tuple[dict[str, object], int, tuple[int, ...] | None, str]] = [
        ({"logit_bias": force_eos, "ignore_eos": True}, 5, (EOS,) * 5, "length"),
        ({"logit_bias": force_eos, "min_tokens": 5}, 8, None, "stop"),
        ({"stop": [f"<{first[2]}> "]}, 8, (first[2],), "stop"),
        ({"stop_token_ids": [first[3]]}, 8, (first[3],), "stop"),
        ({"logit_bias": force_eos}, 8, (EOS,), "stop"),
    ]
    for seed, (sampling, max_tokens, tokens, finish_reason) in enumerate(cases):
        answer = await cluster.ask(request(100, seed=seed, max_tokens=max_tokens, sampling=sampling))
        assert answer.finish_reason() == finish_reason, sampling
        if tokens is None:
            assert (len(answer.tokens()), answer.tokens().index(EOS)) == (6, 5)
        else:
            assert answer.tokens() == tokens, sampling
        assert (answer.text() == "") == (len(answer.tokens()) == 1), sampling
    assert prefill_results(cluster) == [1] * 5
    assert cluster.ingress.sink.total("handoffs", outcome="moved") == 5


async def test_b05_kv_moves_and_decode_computes_no_prompt(start: Start) -> None:
    cluster = await start()
    asked = [request(200, seed=seed) for seed in range(20)]
    answers = await asyncio.gather(*(cluster.ask(one) for one in asked))
    assert [answer.tokens() for answer in answers] == [expected(one) for one in asked]
    sink, model = cluster.ingress.sink, FAST.model
    blocks = model.blocks(200)
    assert sink.total("kv_bytes") == 20 * blocks * model.layers * model.page_bytes
    assert sink.total("handoffs", outcome="moved") == 20
    assert sink.total("fallbacks") == 0
    assert {answer.last.kv.blocks for answer in answers if answer.last.kv} == {blocks}
    assert sum(record.attempts[0].prefill.computed_tokens for record in cluster.ingress.records) == 20 * 200  # type: ignore[union-attr]


async def test_b05_a_forced_fallback_is_counted_with_its_reason(start: Start) -> None:
    """Invariant 8: any departure from the plan is counted with its reason and visible."""
    cluster = await start(prefill_faults=[Fault(stage="prefill_done", action="fail")])
    asked = request(200)
    answer = await cluster.ask(asked)
    assert answer.tokens() == expected(asked)
    assert answer.last.kv
    assert answer.last.kv.outcome is KvOutcome.RECOMPUTED
    assert cluster.ingress.sink.by_label("fallbacks", "reason") == {"prefill_EngineFailed": 1}
    attempt = cluster.ingress.record(asked).attempts[0]
    assert (attempt.fallback, attempt.prefill_error) == ("prefill_EngineFailed", "EngineFailed")


async def test_b08_no_token_is_lost_or_doubled_at_the_seam(start: Start) -> None:
    """Invariant 3: the client gets each generated token once, in order."""
    cluster = await start()
    asked = [
        request(prompt(length, seed), max_tokens=max_tokens)
        for seed, length in enumerate(LENGTHS)
        for max_tokens in (1, 2, 3, 16)
    ]
    alone = [await cluster.ask(one) for one in asked[::4]]
    together = await asyncio.gather(*(cluster.ask(one) for one in asked[1::4] + asked[2::4] + asked[3::4]))
    for one, answer in zip(asked[::4] + asked[1::4] + asked[2::4] + asked[3::4], [*alone, *together], strict=True):
        assert answer.tokens() == expected(one)
        assert answer.finish_reason() == "length"
        assert answer.text() == "".join(f"<{token}> " for token in expected(one))
        assert cluster.ingress.record(one).output_tokens == one.max_tokens
        outcome = answer.last.kv.outcome if answer.last.kv else None
        assert outcome in (KvOutcome.MOVED, KvOutcome.LOCAL)
        if len(one.prompt_token_ids) < BLOCK:
            assert outcome is KvOutcome.LOCAL


async def test_b08_sampling_with_a_seed_is_the_same_on_both_paths(start: Start) -> None:
    cluster = await start()
    sampling = {"temperature": 1.0, "seed": 7}
    moved = await cluster.ask(request(100, sampling=sampling))
    local = await cluster.ask(request(100, sampling=sampling, decode_only="prompt_logprobs"))
    assert moved.tokens() == local.tokens() != expected(request(100))


async def test_b09_one_token_is_one_token_even_with_decode_at_full_load(start: Start, full_length: bool) -> None:
    cluster = await start(decode_settings=fast(max_num_seqs=2))
    asked = [request(100, max_tokens=1, seed=seed) for seed in range(200 if full_length else 60)]
    answers = await asyncio.gather(*(cluster.ask(one) for one in asked))
    assert [answer.tokens() for answer in answers] == [expected(one) for one in asked]
    assert {answer.finish_reason() for answer in answers} == {"length"}


async def test_b09_one_token_of_each_of_two_choices_with_logprobs(start: Start) -> None:
    cluster = await start()
    asked = request(100, max_tokens=1, n=2, sampling={"n": 2, "logprobs": 3})
    answer = await cluster.ask(asked)
    assert [answer.tokens(index) for index in (0, 1)] == [expected(asked, index=index) for index in (0, 1)]
    logprobs = [c.logprobs for d in answer.deltas for c in d.choices]
    assert all(positions and len(positions) == 1 and len(positions[0]) == 3 for positions in logprobs)


async def test_siblings_share_one_hand_off(start: Start) -> None:
    cluster = await start()
    asked = request(100, n=4)
    answer = await cluster.ask(asked)
    assert [answer.tokens(index) for index in range(4)] == [expected(asked, index=index) for index in range(4)]
    assert len({answer.tokens(index) for index in range(4)}) == 4
    assert cluster.decode.engine.received.counts().done == 1
    assert cluster.ingress.record(asked).output_tokens == 4 * asked.max_tokens


async def test_an_answer_that_ends_by_itself(start: Start) -> None:
    model = FakeModel(block_size=BLOCK, eos_period=4)
    cluster = await start(settings=fast(model=model))
    cluster.can_serve = False  # the plain request's answer would end early, too
    answers = [await cluster.ask(request(100, max_tokens=60, seed=seed)) for seed in range(10)]
    for answer in answers:
        assert (EOS in answer.tokens()) == (answer.finish_reason() == "stop")
        assert EOS not in answer.tokens()[:-1]
    assert {answer.finish_reason() for answer in answers} >= {"stop"}
