"""The simulator against the live request path: the same workload, the real path with fake engines on virtual time.

Everything between the client and the engine is the live code, and the fake engine has a scheduler, a cache and
hand-offs of its own; only time is virtual, so the comparison is exact and the same in every run.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from pd_serve.engine.fake import FakeSettings
from pd_serve.errors import Overloaded
from pd_serve.policy.admission import AdmissionRules
from pd_serve.sim.histogram import exact_percentile
from pd_serve.sim.network import Link, Links
from pd_serve.sim.profile import StepTimes
from pd_serve.sim.spec import Spec
from pd_serve.sim.workloads.arrival import Arrival
from pd_serve.types import Delta, Role
from tests.path.cluster import Cluster, fast, request, rules
from tests.sim.small import PATH, PROFILE, RULES, simulate, spec
from tests.sim.virtual_time import run

WARM_S = 5.0
"""Arrivals begin so long after the start, when all replicas have reported."""
NO_DISTANCE = Link(bytes_per_s=1e15, latency_s=0.0)


def workload(count: int, rate: float, seed: int, longest: int = 800) -> list[Arrival]:
    rng, now = random.Random(seed), WARM_S
    rows = []
    for _ in range(count):
        now += rng.expovariate(rate)
        rows.append(Arrival(at=now, prompt_tokens=rng.randrange(20, longest), output_tokens=rng.randrange(2, 60)))
    return rows


def settings(**other: object) -> FakeSettings:
    return fast(**{"prefill_tokens_per_s": 20_000.0, "decode_step_s": 0.01, "max_model_len": 2048, **other})


class Live:
    """What the clients of the real path saw."""

    def __init__(self) -> None:
        self.latencies: list[tuple[float, float]] = []
        """TTFT and TPOT of each request that was served."""
        self.refused = 0
        self.preemptions = 0


async def _live(prefills: int, decodes: int, fake: FakeSettings, rows: list[Arrival], limits: AdmissionRules) -> Live:
    path = rules(max_running=limits.max_running, max_queue=limits.max_queue, total_timeout_s=120.0)
    cluster = await Cluster.start(prefills, decodes, settings=fake, rules=path)
    loop = asyncio.get_running_loop()
    began = loop.time()
    live = Live()

    async def ask(number: int, row: Arrival) -> None:
        await asyncio.sleep(row.at - (loop.time() - began))
        arrived, moments = loop.time(), []

        def note(delta: Delta) -> None:
            moments.extend([loop.time()] * sum(len(choice.token_ids) for choice in delta.choices))

        asked = request(row.prompt_tokens, row.output_tokens, seed=number, sampling={"ignore_eos": True})
        try:
            async for delta in cluster.ingress.stream(asked):
                note(delta)
        except Overloaded:
            live.refused += 1
            return
        live.latencies.append((moments[0] - arrived, (moments[-1] - moments[0]) / (len(moments) - 1)))

    await asyncio.gather(*(ask(number, row) for number, row in enumerate(rows)))
    live.preemptions = sum(node.engine.preemptions for node in cluster.nodes)
    await cluster.close()
    return live


def _simulated(prefills: int, decodes: int, fake: FakeSettings, rows: list[Arrival], limits: AdmissionRules) -> Spec:
    steps = StepTimes(
        prefill_base_s=0.0,
        prefill_token_s=1.0 / fake.timing.prefill_tokens_per_s,
        prefill_attention_s=0.0,
        decode_base_s=fake.timing.decode_step_s,
        decode_sequence_s=0.0,
        decode_context_s=0.0,
    )
    return spec(
        prefill=prefills,
        decode=decodes,
        profile=msgspec.structs.replace(PROFILE, steps=steps, kv_tokens=fake.kv_tokens),
        rules=msgspec.structs.replace(
            RULES, max_num_seqs=fake.max_num_seqs, max_num_batched_tokens=fake.max_num_batched_tokens
        ),
        links=Links(node=NO_DISTANCE, rack=NO_DISTANCE, across=NO_DISTANCE, wire_s=0.0),
        admission=limits,
        max_model_len=fake.max_model_len,
        first_token_timeout_s=60.0,
        no_replica_timeout_s=5.0,
        lease_s=10.0,
        max_tokens=PATH.max_tokens,
    )


WIDE = AdmissionRules(max_running=256, max_queue=256)
CASES: dict[str, tuple[int, int, int, float, dict[str, object], AdmissionRules]] = {
    # prefill replicas, decode replicas, requests, requests a second, the engine's settings, the gate
    "one_pair_calm": (1, 1, 200, 8.0, {}, WIDE),
    "one_pair_busy": (1, 1, 400, 40.0, {}, WIDE),
    "aggregated": (0, 1, 300, 15.0, {}, WIDE),
    "four_and_two": (4, 2, 1200, 60.0, {}, WIDE),
    "chunks": (1, 1, 200, 15.0, {"max_num_batched_tokens": 128}, WIDE),
    "preemptions": (1, 1, 600, 8.5, {"kv_tokens": 2048}, WIDE),
    "few_sequences": (1, 1, 200, 12.0, {"max_num_seqs": 3}, WIDE),
    "gate": (1, 1, 300, 40.0, {}, AdmissionRules(max_running=8, max_queue=20)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_path_and_the_simulator_agree_within_five_percent(case: str, record_property):
    prefills, decodes, count, rate, other, limits = CASES[case]
    fake = settings(**other)
    # The live client asks for exactly the output that it will get; so does the simulated one.
    rows = [msgspec.structs.replace(row, max_tokens=row.output_tokens) for row in workload(count, rate, seed=3)]
    live = run(_live(prefills, decodes, fake, rows, limits))
    cluster, served = simulate(_simulated(prefills, decodes, fake, rows, limits), rows)
    ok = [one for one in served if one.outcome == "ok"]

    assert len(ok) == len(live.latencies)
    assert live.refused == count - len(ok) == cluster.collector.outcomes.get("shed", 0)
    for name, measured, simulated in (
        ("ttft", [ttft for ttft, _ in live.latencies], [one.first_token for one in ok]),
        ("tpot", [tpot for _, tpot in live.latencies], [one.tpot for one in ok]),
    ):
        for percent in (50, 90):
            figures = exact_percentile(simulated, percent), exact_percentile(measured, percent)
            record_property(f"{name}_p{percent}", figures)
            assert figures[0] == pytest.approx(figures[1], rel=0.05), f"{name} p{percent}"
    if case == "preemptions":
        assert live.preemptions > 0
        assert abs(cluster.totals(Role.DECODE).preemptions - live.preemptions) <= 1
    if case == "gate":
        assert live.refused > 50
