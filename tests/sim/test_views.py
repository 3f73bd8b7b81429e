"""Views are as stale as in real life."""

from itertools import pairwise

import msgspec
import pytest

from pd_serve.policy.routing import ROUTERS, least_loaded
from pd_serve.sim.cluster import Cluster
from pd_serve.sim.spec import Fault
from pd_serve.types import ReplicaState, Role
from tests.sim.small import FAST, PROFILE, RULES, request, spec


@pytest.fixture
def seen(monkeypatch):
    """(time, view) of every decision."""
    views = []

    def router(request, view, rules, tried, rng):
        views.append(view)
        return least_loaded(request, view, rules, tried, rng)

    monkeypatch.setitem(ROUTERS, "least_loaded", router)
    return views


def run(cluster_spec, rows, until=1000.0):
    cluster = Cluster(cluster_spec, rows)
    cluster.run(until)
    return cluster


def test_own_legs_are_known_at_once_and_others_by_report_only(seen):
    rows = [request(at=0.6 + 0.0001 * number, prompt=1000, output=900) for number in range(200)]
    large = msgspec.structs.replace(PROFILE, kv_tokens=1_000_000)
    run(spec(ingresses=2, profile=large, rules=msgspec.structs.replace(RULES, max_num_seqs=500)), rows, until=0.62)
    own = [view.decode[0].own_requests for view in seen]
    assert max(own) > 80
    assert max(own) < 120  # about half of them came to each ingress
    assert {view.decode[0].stats.waiting + view.decode[0].stats.running for view in seen} == {0}
    assert all(view.decode[0].own_kv_tokens == view.decode[0].own_requests * 2024 for view in seen)


def test_reports_come_twice_a_second_after_a_wire(seen):
    wire = msgspec.structs.replace(FAST, wire_s=0.01)
    rows = [request(at=1.0 + 0.02 * number, output=500) for number in range(200)]
    run(spec(links=wire), rows)
    ages = [view.decode[0].stats_age_s for view in seen]
    assert 0.45 < max(ages) <= 0.5
    assert min(ages) < 0.05
    running = [view.decode[0].stats.running for view in seen]
    steps = sum(a != b for a, b in pairwise(running))
    assert 5 < steps <= 15  # three reports and answers a second, though the truth changed 400 times


def test_a_hung_replica_is_suspect_after_four_seconds_and_its_legs_are_lost_after_nine(seen):
    fault = Fault(at=1.0, kind="hang", role=Role.DECODE, pick=0, seconds=100.0)
    rows = [request(at=0.9, output=10_000, max_tokens=10_000)] + [request(at=2.0 + n) for n in range(12)]
    cluster = run(spec(decode=2, faults=(fault,)), rows, until=60.0)
    states = {}
    for view in seen:
        ready = [one.state for one in view.decode if one.info.id == "decode-0"]
        states.setdefault(ready[0] if ready else None, []).append(view.now)
    assert min(states[ReplicaState.SUSPECT]) > 4.5
    assert max(states[ReplicaState.READY]) < 5.6
    assert cluster.collector.outcomes["ok"] >= 11


def test_a_dead_replica_is_known_at_once_a_new_one_when_it_is_warm(seen):
    fault = Fault(at=1.0, kind="kill", role=Role.DECODE, pick=0)
    rows = [request(at=0.2 * number) for number in range(60)]
    cluster = run(spec(decode=2, faults=(fault,)), rows)
    ready = {view.now: [one.info.id for one in view.decode if one.state is ReplicaState.READY] for view in seen}
    assert all("decode-0" not in ids for now, ids in ready.items() if now > 1.01)
    # Known to be dead after 1 s, started in 3 s, warm after 1 s more, named 0.1 s later.
    first = min(now for now, ids in ready.items() if "decode-2" in ids)
    assert 6.1 <= first < 6.4
    assert cluster.collector.outcomes == {"ok": 60}
    assert cluster.gpu_seconds(Role.DECODE, 0.0, 12.0) == pytest.approx(1.0 + 12.0 + 10.0)


def test_a_draining_replica_gets_nothing_new(seen):
    fault = Fault(at=1.0, kind="drain", role=Role.DECODE, pick=0)
    rows = [request(at=0.1 * number, output=300) for number in range(40)]
    cluster = run(spec(decode=2, faults=(fault,)), rows)
    assert cluster.collector.outcomes == {"ok": 40}
    assert set(cluster.replicas) == {"decode-1", "prefill-0"}
    assert all(
        one.state is not ReplicaState.READY for view in seen if view.now > 1.0 for one in view.decode
        if one.info.id == "decode-0"
    )  # fmt: skip
