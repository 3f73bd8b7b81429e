"""Invariants 1 and 2, and determinism, over random small clusters with faults."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_serve.policy.admission import AdmissionRules
from pd_serve.sim.audit import at_rest, audit
from pd_serve.sim.cluster import Cluster
from pd_serve.sim.report import report
from pd_serve.sim.spec import Control, Fault
from pd_serve.sim.workloads.arrival import Arrival
from pd_serve.types import Role
from tests.sim.small import PROFILE, RULES, spec

LEASE_S = 5.0


@st.composite
def faults(draw, roles):
    return Fault(
        at=draw(st.floats(0.0, 3.0)),
        kind=draw(st.sampled_from(["kill", "hang", "slow", "drain"])),
        role=draw(st.sampled_from(roles)),
        pick=draw(st.integers(0, 5)),
        seconds=draw(st.sampled_from([0.2, 6.0, 15.0])),
        factor=5.0,
    )


@st.composite
def clusters(draw):
    prefill = draw(st.integers(0, 2))
    roles = list(Role) if prefill else [Role.DECODE]
    profile = msgspec.structs.replace(
        PROFILE, kv_tokens=draw(st.sampled_from([20_000, 3000, 800])), start_s=draw(st.sampled_from([0.5, 3.0]))
    )
    rules = msgspec.structs.replace(
        RULES,
        max_num_seqs=draw(st.sampled_from([16, 3, 1])),
        max_num_batched_tokens=draw(st.sampled_from([64, 256, 1024])),
        enable_prefix_caching=draw(st.booleans()),
    )
    links = msgspec.structs.replace(
        spec().links,
        node=msgspec.structs.replace(spec().links.node, bytes_per_s=draw(st.sampled_from([1e9, 1e7, 1e6]))),
        wire_s=draw(st.sampled_from([0.0, 0.0005])),
    )
    return spec(
        prefill=prefill,
        decode=draw(st.integers(1, 3)),
        profile=profile,
        rules=rules,
        links=links,
        ingresses=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 100)),
        control=Control(drain_s=2.0),
        faults=tuple(draw(st.lists(faults(roles), max_size=5))),
        admission=AdmissionRules(
            max_running=draw(st.sampled_from([50, 2])), max_queue=draw(st.sampled_from([100, 5, 0]))
        ),
        first_token_timeout_s=draw(st.sampled_from([20.0, 1.0])),
        total_timeout_s=25.0,
        no_replica_timeout_s=draw(st.sampled_from([1.0, 5.0])),
        lease_s=draw(st.sampled_from([LEASE_S, 0.3])),
        settle_at_blocks=draw(st.booleans()),
        recompute=draw(st.booleans()),
        max_model_len=600,
        max_tokens=draw(st.sampled_from([150, 20])),
    )


@st.composite
def workloads(draw):
    rng = random.Random(draw(st.integers(0, 10_000)))
    pace = draw(st.sampled_from([5.0, 50.0, 300.0]))
    now, rows = 0.0, []
    for number in range(draw(st.integers(10, 80))):
        now += rng.expovariate(pace)
        prompt, output = rng.choice([rng.randrange(1, 64), rng.randrange(64, 640)]), rng.randrange(1, 150)
        units = (rng.randrange(4),) if prompt >= 512 else ()
        units += (1000 + rng.randrange(30),)
        full = (prompt + output) // 512 - prompt // 512
        rows.append(
            Arrival(
                at=now,
                prompt_tokens=prompt,
                output_tokens=output,
                units=units,
                output_units=tuple(5000 + 10 * number + unit for unit in range(full)),
                leaves_after_s=rng.random() * 2 if rng.random() < 0.1 else float("inf"),
            )
        )
    return rows


def run(cluster_spec, rows, look=None):
    """Outcomes and report as bytes. `look` is called at every thirtieth of a second."""
    log = hashlib.sha256()
    cluster = Cluster(cluster_spec, rows, lambda served: log.update(msgspec.json.encode(served)))
    while not cluster.over:
        cluster.run(until=cluster.clock.now + (1 / 30 if look else 1000.0))
        if look:
            assert look(cluster) == []
        assert cluster.clock.now < 2000.0, "requests are left"
    log.update(msgspec.json.encode(report(cluster)))
    cluster.settle(9.0 + 15.0 + 2 * LEASE_S)  # the longest hang, silence, and leases
    return cluster, log.hexdigest()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cluster_spec=clusters(), rows=workloads())
def test_nothing_is_lost_and_the_same_seed_gives_the_same_bytes(cluster_spec, rows):
    cluster, digest = run(cluster_spec, rows, look=audit)
    assert sum(cluster.collector.outcomes.values()) == len(rows)
    assert at_rest(cluster) == []
    assert run(cluster_spec, rows)[1] == digest


def test_another_seed_gives_other_bytes():
    rows = [Arrival(at=0.01 * number, prompt_tokens=100, output_tokens=20) for number in range(50)]
    first, second = (run(spec(prefill=2, decode=2, ingresses=2, seed=seed), rows)[1] for seed in (1, 2))
    assert first != second


def other_process() -> str:
    """Digest of one run with faults; a test asks another process for it."""
    rows = [Arrival(at=0.01 * number, prompt_tokens=50 + number, output_tokens=30) for number in range(200)]
    broken = (
        Fault(at=0.5, kind="kill", role=Role.DECODE, pick=1),
        Fault(at=0.7, kind="kill", role=Role.PREFILL, pick=0),
    )
    return run(spec(prefill=3, decode=3, ingresses=3, faults=broken), rows)[1]


def test_another_process_gives_the_same_bytes():
    command = [sys.executable, "-c", "from tests.sim.test_conservation import other_process; print(other_process())"]
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])}
    asked = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == other_process()
