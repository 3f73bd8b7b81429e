"""KV that does not match or does not come, and requests that leave early: never a wrong answer, nothing held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.vllm_asks import B, fresh_prompt, ids, outcome

if TYPE_CHECKING:
    from tests.engine.vllm_pair import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(240)]


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
    small, huge = pair.request(fresh_prompt(10), 20), pair.request(fresh_prompt(900), 300, n=3, temperature=1.0)
    assert grant(huge) is None  # more than there is, but nothing else is there
    assert ray.get(pair.decode.stats.remote()).reserved_tokens == total
    refused = grant(small)
    assert refused.kind == "Overloaded"
    assert refused.retry_after_s
    ray.get(pair.decode.revoke.remote(huge.id))
    assert grant(small) is None
    deltas = ray.get(pair.decode.decode.remote(small))
    assert len(ids(deltas)) == 20
    pair.assert_quiet()
