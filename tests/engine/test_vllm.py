"""Real vLLM, prefill and decode apart, KV through Ray's object store: equal to one engine doing both (float32)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.vllm_asks import B, fresh_prompt, ids, outcome, text

if TYPE_CHECKING:
    from tests.engine.vllm_pair import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(240)]


LENGTHS = [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 200, 700]


@pytest.fixture(scope="module")
def reference(pair: Pair) -> dict[int, tuple[list[int], Any]]:
    """For each length a prompt, and what one engine alone makes of it."""
    prompts = {n: fresh_prompt(n) for n in LENGTHS}
    requests = [pair.request(prompt, 16) for prompt in prompts.values()]
    results = pair.aggregated(*requests)
    return {n: (prompts[n], deltas) for n, deltas in zip(LENGTHS, results, strict=True)}


# --------------------------------------------------------------------------------------------- parity


@pytest.mark.case("B08")
@pytest.mark.parametrize("length", LENGTHS)
def test_one_request_alone_equals_one_engine(pair: Pair, reference: Any, length: int) -> None:
    prompt, expected = reference[length]
    pair.forget_prefixes()
    [(prefilled, deltas)] = pair.both(pair.request(prompt, 16))
    assert ids(deltas) == ids(expected)
    assert text(deltas) == text(expected)
    assert deltas[-1].finished
    assert deltas[-1].choices[0].finish_reason == "length"
    assert prefilled.generated_tokens == 1
    blocks = -(-(length - 1) // B)
    assert deltas[-1].kv.blocks == blocks
    assert deltas[-1].kv.bytes == prefilled.kv_bytes
    assert outcome(deltas) == ("moved" if blocks else "local:prefix_hit")
    assert deltas[0].cached_tokens == 0
    pair.assert_quiet()


@pytest.mark.case("B08")
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_many_at_once_equal_one_engine(pair: Pair, reference: Any, max_tokens: int) -> None:
    pair.forget_prefixes()
    lengths = [n for n in LENGTHS if n != 700]
    results = pair.both(*(pair.request(reference[n][0], max_tokens) for n in lengths))
    for length, (_, deltas) in zip(lengths, results, strict=True):
        assert ids(deltas) == ids(reference[length][1])[:max_tokens]
        assert deltas[-1].choices[0].finish_reason == "length"
    pair.assert_quiet()


def test_only_blocks_that_the_decode_engine_lacks_are_moved(pair: Pair) -> None:
    head, tail = fresh_prompt(3 * B), fresh_prompt(2 * B)
    [expected] = pair.aggregated(pair.request(head + tail))
    pair.forget_prefixes()
    [(_, deltas)] = pair.both(pair.request(head + fresh_prompt(2)))
    assert deltas[-1].kv.blocks == 4
    [(prefilled, deltas)] = pair.both(pair.request(head + tail))
    assert prefilled.cached_tokens == 3 * B
    assert deltas[-1].kv.blocks == 2
    assert deltas[0].cached_tokens == 3 * B
    assert ids(deltas) == ids(expected)
    [(_, deltas)] = pair.both(pair.request(head + tail))
    assert ids(deltas) == ids(expected)
    assert deltas[-1].kv.blocks == 1  # the last one, whose end has to be computed again
    pair.assert_quiet()


def test_children_of_one_request_hand_over_once(pair: Pair) -> None:
    prompt = fresh_prompt(3 * B + 5)
    [expected] = pair.aggregated(pair.request(prompt))
    pair.forget_prefixes()
    [(_, deltas)] = pair.both(pair.request(prompt, n=3, temperature=1.0, top_k=1))
    assert [ids(deltas, i) for i in range(3)] == [ids(expected)] * 3
    assert deltas[-1].kv.blocks == 4
    assert outcome(deltas) == "moved"
    pair.assert_quiet()


def test_a_stop_string_does_not_lose_the_report(pair: Pair) -> None:
    prompt = fresh_prompt(70)
    [expected] = pair.aggregated(pair.request(prompt, 16))
    stop = text(expected)[4:8]
    request = pair.request(prompt, 16, stop=[stop])
    [alone] = pair.aggregated(request)
    pair.forget_prefixes()
    [(_, deltas)] = pair.both(pair.request(prompt, 16, stop=[stop]))
    assert text(deltas) == text(alone)
    assert deltas[-1].choices[0].finish_reason == "stop"
    assert deltas[-1].choices[0].stop_reason == stop
    assert outcome(deltas) == "moved"
    pair.assert_quiet()


@pytest.mark.case("B47")
def test_logprobs_equal_one_engine(pair: Pair) -> None:
    prompt = fresh_prompt(2 * B)
    [expected] = pair.aggregated(pair.request(prompt, 6, logprobs=3))
    pair.forget_prefixes()
    [(_, deltas)] = pair.both(pair.request(prompt, 6, logprobs=3))
    positions = [p for d in deltas for c in d.choices for p in c.logprobs]
    wanted = [p for d in expected for c in d.choices for p in c.logprobs]
    assert len(positions) == 6
    assert [[entry.token_id for entry in p] for p in positions] == [[entry.token_id for entry in p] for p in wanted]
    for position, other in zip(positions, wanted, strict=True):
        assert [e.logprob for e in position] == pytest.approx([e.logprob for e in other], abs=1e-3)


def test_a_request_that_may_not_read_cached_kv_is_recomputed_and_counted(pair: Pair) -> None:
    [(_, deltas)] = pair.both(pair.request(fresh_prompt(70), 2, prompt_logprobs=1))
    assert outcome(deltas) == "recomputed:not_allowed"
    assert len(deltas[0].prompt_logprobs) == 70
    pair.assert_quiet()


def test_going_on_from_emitted_tokens(pair: Pair) -> None:
    import ray

    prompt = fresh_prompt(50)
    [expected] = pair.aggregated(pair.request(prompt, 16))
    for cut in (1, 7, 15):
        emitted = tuple(ids(expected)[:cut])
        rest = ray.get(pair.decode.decode.remote(pair.request(prompt, 16), None, emitted))
        assert ids(rest) == ids(expected)[cut:]
        assert text(expected).endswith(text(rest))
        assert rest[-1].choices[0].finish_reason == "length"
    refused = ray.get(pair.decode.decode.remote(pair.request(prompt, 16, presence_penalty=1.0), None, (1,)))
    assert refused.kind == "InvalidRequest"


# --------------------------------------------------------------------------------------------- the prefill clamp


@pytest.mark.case("B26")
def test_transfer_parameters_of_the_caller_do_not_survive(pair: Pair) -> None:
    import ray

    prompt = fresh_prompt(40)
    foreign = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "pd_serve": {"role": "decode", "handoff": 1}}
    request = pair.request(prompt, 4, extra_args={"kv_transfer_params": foreign})
    deltas = ray.get(pair.decode.decode.remote(request))
    assert outcome(deltas) == "local:not_planned"
    assert len(ids(deltas)) == 4
    pair.assert_quiet()


@pytest.mark.case("B01")
@pytest.mark.case("B03")
def test_prefill_samples_one_token_whatever_the_caller_asked_for(pair: Pair) -> None:
    request = pair.request(fresh_prompt(40), 30, min_tokens=25, n=2, temperature=1.0, stop=["e"], logprobs=2, seed=3)
    [(prefilled, deltas)] = pair.both(request)
    assert prefilled.generated_tokens == 1
    assert outcome(deltas) == "moved"
    assert len(ids(deltas, 1)) >= 25
    pair.assert_quiet()


# --------------------------------------------------------------------------------------------- bad requests


@pytest.mark.case("B14")
@pytest.mark.case("B37")
@pytest.mark.parametrize("prompt", [[], [-1], [10**9], [5] * 1100], ids=["empty", "negative", "unknown", "too_long"])
def test_a_bad_prompt_harms_only_itself(pair: Pair, prompt: list[int]) -> None:
    import ray

    request = pair.request(prompt, 4)
    for refused in (
        ray.get(pair.decode.decode.remote(request)),
        ray.get(pair.prefill.prefill.remote(request, pair.handoff(request))),
    ):
        assert refused.kind == "InvalidRequest"
        assert "/" not in refused.message
        assert "Traceback" not in refused.message
    [(_, deltas)] = pair.both(pair.request(fresh_prompt(40), 3))
    assert outcome(deltas) == "moved"
    pair.assert_quiet()
