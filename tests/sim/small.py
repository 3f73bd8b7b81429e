"""Small clusters for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.routing import RoutingRules
from pd_serve.sim.cluster import Cluster
from pd_serve.sim.network import Link, Links
from pd_serve.sim.outcome import Served
from pd_serve.sim.profile import Profile, StepTimes
from pd_serve.sim.rules import PathRules, PoolRules
from pd_serve.sim.spec import PoolSpec, Spec
from pd_serve.sim.workloads.arrival import Arrival

STEPS = StepTimes(
    prefill_base_s=0.003,
    prefill_token_s=2e-5,
    prefill_attention_s=1e-9,
    decode_base_s=0.005,
    decode_sequence_s=5e-5,
    decode_context_s=4e-8,
)
PROFILE = Profile(
    name="test",
    hardware="none",
    model="none",
    measured={},
    steps=STEPS,
    block_size=16,
    kv_tokens=64_000,
    kv_bytes_per_token=1000,
    start_s=3.0,
    warmup_s=1.0,
)
RULES = PoolRules(max_num_seqs=64, max_num_batched_tokens=2048, enable_prefix_caching=True, gpus=1)
PATH = PathRules(
    admission=AdmissionRules(max_running=1000, max_queue=1000),
    routing=RoutingRules(min_handoff_tokens=16),
    router="least_loaded",
    first_token_timeout_s=60.0,
    total_timeout_s=120.0,
    no_replica_timeout_s=10.0,
    lease_s=30.0,
    settle_at_blocks=True,
    recompute=True,
    max_model_len=32_768,
    max_tokens=1024,
)
FAST = Links(
    node=Link(bytes_per_s=1e9, latency_s=0.0),
    rack=Link(bytes_per_s=1e8, latency_s=0.001),
    across=Link(bytes_per_s=1e7, latency_s=0.01),
    wire_s=0.0,
)


def spec(prefill: int = 1, decode: int = 1, profile: Profile = PROFILE, rules: PoolRules = RULES, **other: Any) -> Spec:
    """A cluster of equal replicas; no latencies but those in `other`. Fields of the path's rules may be given, too."""
    path = {name: other.pop(name) for name in PathRules.__struct_fields__ if name in other}
    pool = PoolSpec(replicas=prefill, profile=profile, rules=rules) if prefill else None
    return Spec(
        prefill=pool,
        decode=PoolSpec(replicas=decode, profile=profile, rules=rules),
        path=msgspec.structs.replace(PATH, **path),
        **{"ingresses": 1, "links": FAST, **other},
    )


def request(at: float = 0.0, prompt: int = 100, output: int = 10, **other: Any) -> Arrival:
    return Arrival(at=at, prompt_tokens=prompt, output_tokens=output, **other)


def simulate(cluster_spec: Spec, arrivals: Iterable[Arrival], until: float = 1000.0) -> tuple[Cluster, list[Served]]:
    """Run to the end; outcomes in the order in which they came."""
    served: list[Served] = []
    cluster = Cluster(cluster_spec, arrivals, served.append)
    cluster.run(until)
    assert cluster.over, "requests are left"
    return cluster, served
