"""Real vLLM, prefill and decode apart, KV through Ray's object store: equal to one engine doing both (float32)."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(240)]

if TYPE_CHECKING:
    from tests.engine.vllm_pair import Pair

B = 32  # the smallest block of vLLM's CPU attention
LENGTHS = [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 200, 700]
_random = random.Random(7)


def fresh_prompt(tokens: int) -> list[int]:
    """No test ever meets another test's prefix."""
    return [_random.randrange(1000, 40000) for _ in range(tokens)]


def ids(deltas: Any, index: int = 0) -> list[int]:
    assert isinstance(deltas, list), deltas
    return [t for d in deltas for choice in d.choices if choice.index == index for t in choice.token_ids]


def text(deltas: Any, index: int = 0) -> str:
    return "".join(choice.text for d in deltas for choice in d.choices if choice.index == index)


def outcome(deltas: Any) -> str:
    assert isinstance(deltas, list), deltas
    kv = deltas[-1].kv
    return f"{kv.outcome}:{kv.reason}" if kv.reason else str(kv.outcome)


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


# --------------------------------------------------------------------------------------------- KV that does not match


@pytest.mark.case("B16")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("flip", "checksum"),
        ("truncate", "length"),
        ("drop_layer", "layout"),
        ("drop_block", "blocks"),
        ("fingerprint", "fingerprint"),
        ("other_prompt", "other_prompt"),
        ("other_generation", "other_generation"),
        ("rank", "rank"),
    ],
)
def test_kv_that_does_not_match_its_envelope_is_recomputed(pair: Pair, fault: str, reason: str) -> None:
    prompt = fresh_prompt(70)
    [expected] = pair.aggregated(pair.request(prompt, 6))
    pair.forget_prefixes()
    pair.fault(pair.prefill, fault)
    try:
        [(_, deltas)] = pair.both(pair.request(prompt, 6))
    finally:
        pair.fault(pair.prefill)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == f"recomputed:{reason}"
    assert deltas[-1].kv.bytes == 0
    pair.assert_quiet()


def test_a_failed_load_keeps_the_local_prefix(pair: Pair) -> None:
    head, tail = fresh_prompt(2 * B), fresh_prompt(40)
    [expected] = pair.aggregated(pair.request(head + tail, 6))
    pair.forget_prefixes()
    pair.both(pair.request(head + fresh_prompt(2), 1))
    pair.fault(pair.prefill, "flip")
    try:
        [(_, deltas)] = pair.both(pair.request(head + tail, 6))
    finally:
        pair.fault(pair.prefill)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == "recomputed:checksum"
    pair.assert_quiet()


@pytest.mark.case("B16")
def test_delivered_twice_is_used_once(pair: Pair) -> None:
    prompt = fresh_prompt(70)
    [expected] = pair.aggregated(pair.request(prompt, 6))
    pair.forget_prefixes()
    pair.fault(pair.prefill, "twice")
    try:
        [(_, deltas)] = pair.both(pair.request(prompt, 6))
    finally:
        pair.fault(pair.prefill)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == "moved"
    pair.assert_quiet()


@pytest.mark.case("B16")
def test_policy_fail_ends_the_request_with_a_typed_error(pair: Pair) -> None:
    import ray

    ray.get(pair.decode.rpc.remote("pd_test_policy", False))
    pair.fault(pair.prefill, "flip")
    try:
        [(_, failed)] = pair.both(pair.request(fresh_prompt(70), 6))
    finally:
        pair.fault(pair.prefill)
        ray.get(pair.decode.rpc.remote("pd_test_policy", True))
    assert failed.kind == "TransferFailed"
    assert "checksum" in failed.message
    pair.assert_quiet()
    [(_, deltas)] = pair.both(pair.request(fresh_prompt(70), 6))
    assert outcome(deltas) == "moved"


@pytest.mark.case("B50")
def test_a_handoff_of_another_prompt_is_refused_by_the_decode_engine(pair: Pair) -> None:
    import ray

    prompt, other = pair.request(fresh_prompt(70), 4), pair.request(fresh_prompt(70), 4)
    handoff = pair.handoff(other)
    deltas = ray.get(pair.decode.decode.remote(prompt.leg("d"), handoff))
    assert outcome(deltas) == "recomputed:other_prompt"
    ray.get(pair.prefill.prefill.remote(other.leg("p"), handoff))
    pair.assert_quiet()


# --------------------------------------------------------------------------------------------- KV that does not come


@pytest.mark.case("B15")
def test_the_lease_ends_a_wait_for_nothing(pair: Pair) -> None:
    prompt = fresh_prompt(70)
    [expected] = pair.aggregated(pair.request(prompt, 6))
    pair.forget_prefixes()
    pair.fault(pair.prefill, "swallow")
    began = time.monotonic()
    try:
        [(_, deltas)] = pair.both(pair.request(prompt, 6), lease_s=1.0)
    finally:
        pair.fault(pair.prefill)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == "recomputed:expired"
    assert time.monotonic() - began < 10
    pair.assert_quiet()


@pytest.mark.case("B15")
def test_a_withdrawn_handoff_ends_the_wait_at_once(pair: Pair) -> None:
    import ray

    request = pair.request(fresh_prompt(70), 4)
    handoff = pair.handoff(request)
    before = ray.get(pair.decode.rpc.remote("pd_test_cpu_seconds"))
    decoded = pair.decode.decode.remote(request.leg("d"), handoff)
    ready, _ = ray.wait([decoded], timeout=1.5)
    assert not ready
    used = ray.get(pair.decode.rpc.remote("pd_test_cpu_seconds")) - before
    assert used < 1.2, "waiting for KV must not keep a core busy"
    stats = ray.get(pair.decode.stats.remote())
    assert stats.waiting == 1
    assert stats.waiting_prompt_tokens == 70
    ray.get(pair.decode.withdraw.remote(handoff.id, "prefill_failed"))
    assert outcome(ray.get(decoded, timeout=10)) == "recomputed:prefill_failed"
    # What comes late for it is refused, and the prefill engine is rid of it as well.
    ray.get(pair.prefill.prefill.remote(request.leg("p"), handoff))
    pair.assert_quiet()


def test_withdrawn_before_it_is_asked_for(pair: Pair) -> None:
    import ray

    request = pair.request(fresh_prompt(70), 4)
    handoff = pair.handoff(request)
    ray.get(pair.decode.withdraw.remote(handoff.id, "prefill_failed"))
    deltas = ray.get(pair.decode.decode.remote(request.leg("d"), handoff), timeout=20)
    assert outcome(deltas) == "recomputed:prefill_failed"
    pair.assert_quiet()


def test_an_offer_that_nobody_takes_expires(pair: Pair) -> None:
    import ray

    request = pair.request(fresh_prompt(70), 4)
    handoff = pair.handoff(request, lease_s=4.0)
    ray.get(pair.prefill.prefill.remote(request.leg("p"), handoff))
    until = time.monotonic() + 4
    while ray.get(pair.decode.stats.remote()).handoffs_held == 0:
        assert time.monotonic() < until
    pair.assert_quiet(within_s=15)


# --------------------------------------------------------------------------------------------- aborts


@pytest.mark.case("B12")
@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.5])
def test_abort_before_during_and_after_the_load(pair: Pair, after_s: float) -> None:
    import ray

    survivor = fresh_prompt(90)
    [expected] = pair.aggregated(pair.request(survivor, 12))
    pair.forget_prefixes()
    request = pair.request(fresh_prompt(70), 60)
    handoff = pair.handoff(request)
    pair.fault(pair.decode, "slow_take", 1.0)
    try:
        decoded = pair.decode.decode.remote(request.leg("d"), handoff)
        ray.get(pair.prefill.prefill.remote(request.leg("p"), handoff))
        time.sleep(after_s)
        assert ray.get(pair.decode.cancel.remote(request.leg("d").id))
        assert ray.get(decoded).kind == "Cancelled"
        [(_, deltas)] = pair.both(pair.request(survivor, 12))
    finally:
        pair.fault(pair.decode)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == "moved"
    pair.assert_quiet()


@pytest.mark.case("B10")
def test_an_aborted_prefill_leaves_nothing(pair: Pair) -> None:
    import ray

    whole, request = pair.request(fresh_prompt(900)), pair.request(fresh_prompt(900))
    began = time.monotonic()
    ray.get(pair.prefill.prefill.remote(whole.leg("p"), pair.handoff(whole)))
    whole_s = time.monotonic() - began
    ray.get(pair.decode.withdraw.remote(pair.handoff(whole).id, "cancelled"))

    computed = pair.prefill.prefill.remote(request.leg("p"), pair.handoff(request))
    while ray.get(pair.prefill.stats.remote()).running == 0:  # seen when the first of four steps is done
        time.sleep(0.01)
    assert ray.get(pair.prefill.cancel.remote(request.leg("p").id))
    assert ray.get(computed).kind == "Cancelled"
    began = time.monotonic()
    short = pair.request([5])
    ray.get(pair.prefill.prefill.remote(short.leg("p"), pair.handoff(short)))
    assert time.monotonic() - began < 0.75 * whole_s, "the abandoned prompt was computed to its end"
    pair.assert_quiet()


# --------------------------------------------------------------------------------------------- pressure


@pytest.mark.case("B80")
def test_preempted_requests_recompute_and_stay_right(pair: Pair) -> None:
    import ray

    # Both fit the decode engine's 42 blocks until one grows into its 22nd.
    prompts = [fresh_prompt(21 * B - 22) for _ in range(2)]
    expected = [pair.aggregated(pair.request(prompt, 40))[0] for prompt in prompts]
    pair.forget_prefixes()
    requests = [pair.request(prompt, 40) for prompt in prompts]
    handoffs = [pair.handoff(r) for r in requests]
    decoded = [pair.decode.decode.remote(r.leg("d"), h) for r, h in zip(requests, handoffs, strict=True)]
    ray.get([pair.prefill.prefill.remote(r.leg("p"), h) for r, h in zip(requests, handoffs, strict=True)])
    preemptions = 0
    while len(ray.wait(decoded, num_returns=2, timeout=0.1)[0]) < 2:
        preemptions = max(preemptions, ray.get(pair.decode.rpc.remote("pd_test_preemptions")))
    assert preemptions > 0, "the cache was not small enough for what this test is about"
    for deltas, wanted in zip(ray.get(decoded), expected, strict=True):
        assert ids(deltas) == ids(wanted)
        assert outcome(deltas) == "moved"
    pair.assert_quiet()


def test_room_is_granted_until_it_is_full(pair: Pair) -> None:
    import ray

    def grant(request: Any) -> Any:
        return ray.get(pair.decode.grant.remote(request))

    total = pair.target.kv_tokens_total
    small, huge = pair.request(fresh_prompt(10), 100), pair.request(fresh_prompt(900), 300, n=3, temperature=1.0)
    assert grant(huge) is None  # more than there is, but nothing else is there
    assert ray.get(pair.decode.stats.remote()).reserved_tokens == total
    refused = grant(small)
    assert refused.kind == "Overloaded"
    assert refused.retry_after_s
    ray.get(pair.decode.revoke.remote(huge.id))
    assert grant(small) is None
    deltas = ray.get(pair.decode.decode.remote(small))
    assert len(ids(deltas)) == 100
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


# --------------------------------------------------------------------------------------------- deaths, so at the end


@pytest.mark.case("B15")
@pytest.mark.case("B35")
def test_a_prefill_engine_that_dies_after_its_offer(pair: Pair) -> None:
    import ray

    prompt = fresh_prompt(70)
    [expected] = pair.aggregated(pair.request(prompt, 6))
    pair.forget_prefixes()
    request = pair.request(prompt, 6)
    handoff = pair.handoff(request)
    ray.get(pair.prefill.prefill.remote(request.leg("p"), handoff))
    assert ray.get(pair.prefill.health.remote()) is None
    time.sleep(0.5)
    [child] = ray.get(pair.prefill.child_pids.remote())
    os.kill(child, signal.SIGKILL)
    time.sleep(1.5)
    deltas = ray.get(pair.decode.decode.remote(request.leg("d"), handoff), timeout=30)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == "recomputed:lost"
    health = ray.get(pair.prefill.health.remote())
    assert health.kind == "EngineFailed"
    failed = ray.get(pair.prefill.prefill.remote(pair.request(prompt).leg("p"), pair.handoff(request)))
    assert failed.kind == "EngineFailed"


@pytest.mark.case("B35")
def test_a_stopped_engine_is_not_healthy(pair: Pair) -> None:
    import ray

    [child] = ray.get(pair.decode.child_pids.remote())
    assert ray.get(pair.decode.health.remote()) is None
    os.kill(child, signal.SIGSTOP)
    try:
        assert ray.get(pair.decode.health.remote()).kind == "EngineFailed"
    finally:
        os.kill(child, signal.SIGCONT)
    assert ray.get(pair.decode.health.remote()) is None


def test_no_engine_process_outlives_its_replica(pair: Pair) -> None:
    import psutil
    import ray

    [child] = ray.get(pair.decode.child_pids.remote())
    os.kill(ray.get(pair.decode.pid.remote()), signal.SIGKILL)
    gone, alive = psutil.wait_procs([psutil.Process(child)], timeout=5)
    assert gone
    assert not alive
