"""What goes wrong, and what becomes of the requests then."""

import msgspec
import pytest

from pd_serve.sim.audit import at_rest
from pd_serve.sim.spec import Control, Fault
from pd_serve.types import Role
from tests.sim.small import FAST, PROFILE, STEPS, request, simulate, spec


def strike(kind, role, at, **other):
    return Fault(at=at, kind=kind, role=role, pick=0, **other)


def slow_links(seconds):
    """A hand-off of 1,008 tokens takes so long."""
    return msgspec.structs.replace(FAST, node=msgspec.structs.replace(FAST.node, bytes_per_s=1.008e6 / seconds))


def test_decode_dies_before_the_first_token_and_another_takes_over():
    cluster_spec = spec(decode=2, faults=(strike("kill", Role.DECODE, 0.01), strike("kill", Role.DECODE, 0.02)))
    cluster, (served,) = simulate(msgspec.structs.replace(cluster_spec, seed=1), [request(prompt=2000)])
    assert served.outcome == "ok"
    assert 1 <= served.retries <= 2
    cluster.settle(40.0)
    assert at_rest(cluster) == []


def test_decode_dies_after_the_first_token_and_the_client_is_told():
    _, (served,) = simulate(spec(faults=(strike("kill", Role.DECODE, 0.5),)), [request(output=1000)])
    assert (served.outcome, served.error) == ("failed", "ReplicaLost")
    assert served.finished == pytest.approx(0.5)


def test_prefill_dies_and_decode_computes_the_prompt_itself():
    _, (served,) = simulate(spec(faults=(strike("kill", Role.PREFILL, 0.01),)), [request(prompt=2000)])
    assert (served.outcome, served.fallback) == ("ok", "prefill_ReplicaLost")
    assert served.moved_bytes == 0


def test_prefill_dies_while_its_kv_is_on_the_way():
    fault = strike("kill", Role.PREFILL, 0.5)
    cluster, (served,) = simulate(spec(links=slow_links(1.0), faults=(fault,)), [request(prompt=1000)])
    assert (served.outcome, served.fallback) == ("ok", "lost")
    assert served.first_token > 1.0
    decode = cluster.replicas["decode-0"].kv.takes.counts()
    assert decode.failed == {"lost": 1}


def test_decode_dies_while_kv_is_on_the_way():
    fault = strike("kill", Role.DECODE, 0.5)
    cluster, (served,) = simulate(spec(decode=2, links=slow_links(1.0), faults=(fault, fault)), [request(prompt=1000)])
    assert served.outcome == "ok"
    cluster.settle(40.0)
    assert at_rest(cluster) == []


def test_kv_that_comes_too_late_is_recomputed_or_fails_the_request():
    late = spec(links=slow_links(5.0), lease_s=1.0)
    cluster, (served,) = simulate(late, [request(prompt=1000)])
    assert (served.outcome, served.fallback) == ("ok", "expired")
    assert 1.0 < served.first_token < 2.0
    cluster.settle(10.0)
    assert at_rest(cluster) == []
    strict = spec(links=slow_links(5.0), lease_s=1.0, recompute=False)
    _, (served,) = simulate(strict, [request(prompt=1000)])
    assert (served.outcome, served.error) == ("failed", "TransferFailed")


def test_kv_that_comes_before_there_is_room_is_kept_for_it():
    rules = msgspec.structs.replace(PROFILE, kv_tokens=3200)
    rows = [request(prompt=1000, output=400, max_tokens=400), request(at=0.001, prompt=1500, max_tokens=10)]
    cluster, (first, second) = simulate(spec(profile=rules, settle_at_blocks=True, max_model_len=3000), rows)
    assert {first.outcome, second.outcome} == {"ok"}
    assert cluster.collector.fallbacks == {}


def test_a_hung_prefill_replica_is_given_up_and_its_late_kv_changes_nothing():
    fault = strike("hang", Role.PREFILL, 0.01, seconds=20.0)
    cluster, (served,) = simulate(spec(faults=(fault,)), [request(prompt=2000)])
    assert (served.outcome, served.fallback) == ("ok", "prefill_ReplicaLost")
    assert 9.0 < served.first_token < 11.0
    cluster.settle(60.0)
    assert at_rest(cluster) == []


def test_a_hung_decode_replica_that_does_not_answer_is_left_after_the_grant_timeout():
    fault = strike("hang", Role.DECODE, 0.0, seconds=30.0)
    cluster, (served,) = simulate(spec(decode=2, faults=(fault,)), [request(at=0.2, prompt=15)])
    cluster.settle(60.0)
    assert served.outcome == "ok"
    assert at_rest(cluster) == []
    if served.retries:
        assert served.first_token == pytest.approx(5.0, abs=0.1)


def test_a_short_stop_only_delays():
    fault = strike("hang", Role.DECODE, 0.1, seconds=2.0)
    _, (plain,) = simulate(spec(), [request(output=100)])
    _, (served,) = simulate(spec(faults=(fault,)), [request(output=100)])
    assert served.outcome == "ok"
    assert served.finished == pytest.approx(plain.finished + 2.0)


def test_a_straggler_slows_only_its_own_requests():
    steps = msgspec.structs.replace(STEPS, decode_context_s=0.0)
    profile = msgspec.structs.replace(PROFILE, steps=steps)
    fault = strike("slow", Role.DECODE, 0.0, seconds=100.0, factor=4.0)
    _, served = simulate(spec(decode=2, profile=profile, faults=(fault,)), [request(), request(at=0.01)])
    first, second = sorted(served, key=lambda one: one.decode)
    assert first.decode != second.decode
    assert first.tpot == pytest.approx(4 * second.tpot)


def test_draining_ends_what_outlives_its_limit():
    control = Control(drain_s=1.0)
    fault = strike("drain", Role.DECODE, 0.5)
    cluster_spec = msgspec.structs.replace(spec(decode=2, faults=(fault,)), control=control)
    cluster, served = simulate(cluster_spec, [request(output=1000), request(at=0.01, output=50)])
    by_decode = {one.decode: one for one in served}
    long = next(one for one in served if one.id == "i0-1")
    if long.decode == "decode-0":
        assert (long.outcome, long.error) == ("failed", "Draining")
        assert long.finished == pytest.approx(1.5, abs=0.11)
    assert len(by_decode) == 2
    assert "decode-0" not in cluster.replicas
