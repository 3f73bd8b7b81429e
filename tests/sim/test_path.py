"""Requests through a whole cluster: the steps of the path, against closed forms and the live constants."""

import msgspec
import pytest

from pd_serve.path import frames, gate, pools
from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.routing import ROUTERS, Plan
from pd_serve.sim.network import Link
from pd_serve.sim.profile import Overheads, attention_pairs, step_s
from pd_serve.sim.rules import LiveConstants
from tests.sim.small import FAST, PATH, PROFILE, RULES, STEPS, request, simulate, spec


def prefill_s(tokens):
    return step_s(STEPS, tokens, attention_pairs(0, tokens), 0, 0)


def decode_s(tokens, steps):
    return sum(step_s(STEPS, 0, 0.0, 1, tokens + number) for number in range(steps))


def test_constants_are_those_of_the_live_path():
    assert LiveConstants() == LiveConstants(
        stats_period_s=frames.STATS_PERIOD_S,
        grant_timeout_s=pools.GRANT_TIMEOUT_S,
        suspect_after_s=pools.SUSPECT_AFTER_S,
        lost_after_s=pools.LOST_AFTER_S,
        rate_window_s=gate.RATE_WINDOW_S,
        ping_period_s=pools.PING_S,
    )


def test_prefill_transfer_and_decode_take_what_the_profile_says():
    _, (served,) = simulate(spec(), [request(prompt=1000, output=20)])
    moved = 1008 * 1000 / FAST.node.bytes_per_s
    first = prefill_s(1000) + moved + decode_s(999, 1)
    assert served.outcome == "ok"
    assert served.first_token == pytest.approx(first, rel=1e-9)
    assert served.tpot == pytest.approx(decode_s(1000, 19) / 19, rel=1e-9)
    assert served.finished == pytest.approx(first + decode_s(1000, 19), rel=1e-9)
    assert (served.moved_bytes, served.prefill, served.decode) == (1_008_000, "prefill-0", "decode-0")


def test_prefill_on_decode_moves_nothing():
    cluster, (served,) = simulate(spec(prefill=0), [request(prompt=1000, output=20)])
    assert served.first_token == pytest.approx(prefill_s(1000), rel=1e-9)
    assert served.tpot == pytest.approx(decode_s(1000, 19) / 19, rel=1e-9)
    assert (served.moved_bytes, served.reason) == (0, "no_prefill_replica")
    assert cluster.network.transfers == 0


def test_a_short_prompt_stays_where_it_decodes():
    _, (served,) = simulate(spec(), [request(prompt=15)])
    assert (served.reason, served.prefill) == ("short_prompt", "")


def test_overheads_and_wires_come_on_top():
    overheads = Overheads(
        ingress_s=0.1, prefill_leg_s=0.02, decode_leg_s=0.003, handoff_s=0.01, handoff_byte_s=1 / 1.008e6
    )
    slow = spec(profile=msgspec.structs.replace(PROFILE, overheads=overheads))
    slow = msgspec.structs.replace(slow, links=msgspec.structs.replace(FAST, wire_s=0.001))
    _, (plain,) = simulate(spec(), [request(prompt=1000)])
    _, (served,) = simulate(slow, [request(prompt=1000)])
    # To decode, its grant back, to prefill, the first token back: four wires.
    expected = plain.first_token + 0.1 + 0.02 + (0.01 + 1.0) + 4 * 0.001
    assert served.first_token == pytest.approx(expected, rel=1e-9)
    assert served.tpot == pytest.approx(plain.tpot, rel=1e-9)


def test_what_decode_has_in_its_own_cache_is_not_waited_for():
    rows = [request(at=0.0, prompt=1024, units=(1, 2)), request(at=5.0, prompt=1024, units=(1, 2))]
    _, (cold, warm) = simulate(spec(), rows)
    assert (cold.local_tokens, cold.cached_tokens) == (0, 0)
    assert warm.local_tokens == 1008
    assert warm.first_token < prefill_s(16) + 0.006
    assert warm.moved_bytes == 0


def test_equal_prompts_share_the_prefill_replicas_cache():
    rows = [request(at=0.0, prompt=1100, units=(1, 2, 3)), request(at=5.0, prompt=1100, units=(1, 2, 4))]
    _, (_, warm) = simulate(spec(), rows)
    assert (warm.cached_tokens, warm.local_tokens) == (1024, 1024)


def test_the_gate_lets_in_queues_and_sheds():
    rules = AdmissionRules(max_running=1, max_queue=1)
    rows = [request(at=0.0), request(at=0.001), request(at=0.002)]
    cluster, served = simulate(spec(admission=rules), rows)
    by_id = {one.id: one for one in served}
    assert [by_id[f"i0-{n}"].outcome for n in (1, 2, 3)] == ["ok", "ok", "shed"]
    assert by_id["i0-2"].admitted == pytest.approx(by_id["i0-1"].finished - 0.001)
    assert cluster.collector.errors == {"Overloaded": 1}


def test_a_prompt_beyond_the_context_is_refused():
    _, (served,) = simulate(spec(max_model_len=1000), [request(prompt=1000)])
    assert (served.outcome, served.error) == ("failed", "InvalidRequest")


def test_an_answer_is_never_longer_than_what_was_asked_for():
    _, served = simulate(spec(), [request(output=500, max_tokens=7), request(at=9.0, output=5000)])
    assert [one.output_tokens for one in served] == [7, PATH.max_tokens]


def test_a_full_decode_replica_refuses_and_the_request_waits_for_room():
    rules = msgspec.structs.replace(RULES, max_num_seqs=1)
    _, (first, second) = simulate(spec(rules=rules), [request(output=50), request(at=0.01)])
    assert second.waits >= 1
    assert second.granted + 0.01 >= first.finished
    assert second.outcome == "ok"


def test_a_client_that_leaves_frees_everything():
    rows = [request(prompt=2000, output=1000, leaves_after_s=0.5), request(at=0.1, leaves_after_s=0.0)]
    cluster, served = simulate(spec(), rows)
    assert {one.outcome for one in served} == {"cancelled"}
    cluster.settle(1.0)
    for replica in cluster.replicas.values():
        assert not replica.sequences
        assert replica.engine.blocks.used == 0


def test_a_request_runs_out_of_time():
    slow = msgspec.structs.replace(PROFILE, steps=msgspec.structs.replace(STEPS, prefill_base_s=100.0))
    _, (served,) = simulate(spec(profile=slow, first_token_timeout_s=2.0), [request()])
    assert (served.outcome, served.error, served.finished) == ("failed", "DeadlineExceeded", 2.0)
    slow = msgspec.structs.replace(PROFILE, steps=msgspec.structs.replace(STEPS, decode_base_s=1.0))
    _, (served,) = simulate(spec(profile=slow, total_timeout_s=3.5, first_token_timeout_s=3.0), [request()])
    assert (served.error, served.finished) == ("DeadlineExceeded", 3.5)


def test_no_replica_is_waited_for_and_then_given_up():
    cluster_spec = spec(prefill=0, decode=0, no_replica_timeout_s=3.0)
    _, (served,) = simulate(cluster_spec, [request()])
    assert (served.outcome, served.error) == ("failed", "NoReplica")
    assert served.finished == pytest.approx(3.0, abs=0.5)


def test_policies_see_nothing_of_true_output_lengths(monkeypatch):
    """Invariant 5: two workloads that differ in nothing else look the same to the router."""

    def seen_with(outputs):
        requests = []

        def router(request, view, rules, tried, rng):
            requests.append((request, view))
            return Plan(decode=view.decode[0].info.id, prefill=view.prefill[0].info.id, reason="test")

        monkeypatch.setitem(ROUTERS, "least_loaded", router)
        rows = [
            request(at=0.001 * number, prompt=50 + number, output=output, units=(number,))
            for number, output in enumerate(outputs)
        ]
        simulate(spec(), rows)
        return requests

    short, long = seen_with([1, 2, 3, 4]), seen_with([900, 500, 30, 77])
    assert len(short) == 4
    assert short == long


def test_scores_and_reasons_reach_the_outcome():
    cluster, _ = simulate(spec(decode=2, prefill=2), [request(at=0.1 * n) for n in range(5)])
    assert cluster.collector.reasons == {"least_loaded": 5}


def test_links_follow_the_layout():
    far = msgspec.structs.replace(FAST, rack=Link(bytes_per_s=1e6, latency_s=0.0))
    cluster_spec = msgspec.structs.replace(spec(), links=far)
    apart = msgspec.structs.replace(cluster_spec.layout, gpus_per_node=1)
    _, (near,) = simulate(cluster_spec, [request(prompt=1000)])
    _, (away,) = simulate(msgspec.structs.replace(cluster_spec, layout=apart), [request(prompt=1000)])
    assert away.first_token - near.first_token == pytest.approx(1.008 - 0.001008, rel=1e-6)
