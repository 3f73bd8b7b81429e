"""No metric of the tables is there for show: serving, waiting, falling back, retrying and shedding move all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pd_serve.engine.fake_faults import Fault
from pd_serve.errors import Overloaded
from pd_serve.observe.counting import CountingSink
from pd_serve.observe.metrics import METRICS, REPLICA_COUNTS, REPLICA_GAUGES, PrometheusSink
from pd_serve.observe.replica_gauges import ReplicaGauges
from pd_serve.path import replica_host
from pd_serve.path.channel import connect_in_process
from pd_serve.path.frames import Ping
from tests.path import cluster as clusters
from tests.path.cluster import Cluster, request, rules, until


class Checked(CountingSink):
    """Counts in memory as tests of the path do, and into Prometheus as an ingress does; notes every gauge that rose."""

    registry: CollectorRegistry
    prometheus: PrometheusSink
    rose: set[str]

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        super().count(name, value, **labels)
        if name not in REPLICA_COUNTS:
            self.prometheus.count(name, value, **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        super().observe(name, value, **labels)
        self.prometheus.observe(name, value, **labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        super().gauge(name, value, **labels)
        self.prometheus.gauge(name, value, **labels)
        if value > 0:
            self.rose.add(name)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorRegistry]:
    """What all sinks of the clusters of one test count into."""
    registry = CollectorRegistry()
    monkeypatch.setattr(Checked, "registry", registry, raising=False)
    monkeypatch.setattr(Checked, "prometheus", PrometheusSink(registry), raising=False)
    monkeypatch.setattr(Checked, "rose", set(), raising=False)
    monkeypatch.setattr(clusters, "CountingSink", Checked)
    return registry


def moved(registry: CollectorRegistry) -> set[str]:
    """Names, as in the tables, of what has a value above zero."""
    samples = [s for family in registry.collect() for s in family.samples if s.value > 0]
    names = {s.name.removeprefix("pd_") for s in samples if not s.name.endswith("_created")}
    return {name.removesuffix("_total").removesuffix("_count") for name in names} | Checked.rose


async def test_every_metric_of_an_ingress_moves(registry: CollectorRegistry) -> None:
    cluster = await Cluster.start(
        decodes=2,
        prefill_faults=[Fault(stage="prefill_done", action="fail", times=1)],
        decode_faults=[Fault(stage="transfer_done", action="die", times=1)],
        rules=rules(max_running=4, max_queue=4),
    )
    try:
        again = request(200, seed=1)
        results = await asyncio.gather(
            *(cluster.ask(request(200, seed=seed)) for seed in range(12)), return_exceptions=True
        )
        assert sum(isinstance(result, Overloaded) for result in results) == 4
        await cluster.ask(again)  # its blocks are cached now
        cluster.tell([])
        late = asyncio.create_task(cluster.ask(request(200, seed=99)))
        await until(lambda: cluster.ingress.sink.total("waits"), "it waits for a replica")
        cluster.tell([node for node in cluster.nodes if node is not cluster.decode])
        await late
    finally:
        await cluster.close()
    assert set(METRICS) - moved(registry) == set()


async def test_every_count_of_a_replica_moves(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_host, "INGRESS_SILENCE_S", 1.0)
    cluster = await Cluster.start()
    try:
        connect_in_process("ghost", cluster.decode._on_message).send(Ping())
        await cluster.ask(request(200))
        sink = cluster.decode.sink
        await until(lambda: sink.total("ingresses_lost"), "the silent ingress is given up")
        assert {name for name in REPLICA_COUNTS if sink.total(name)} == set(REPLICA_COUNTS)
        assert sink.by_label("legs", "outcome", role="decode") == {"ok": 1}
        assert sink.by_label("legs", "outcome", role="prefill") == {}
    finally:
        await cluster.close()


async def test_every_gauge_of_a_replica_moves() -> None:
    cluster = await Cluster.start()
    registry, seen = CollectorRegistry(), set[str]()
    try:
        view = cluster.ingress.pools.view()
        busy = msgspec.structs.replace(view.decode[0].stats, **dict.fromkeys(view.decode[0].stats.__struct_fields__, 1))
        decode = msgspec.structs.replace(view.decode[0], stats=busy)
        registry.register(ReplicaGauges(lambda: msgspec.structs.replace(view, decode=(decode,))))
        seen = {s.name.removeprefix("pd_") for family in registry.collect() for s in family.samples if s.value > 0}
    finally:
        await cluster.close()
    assert seen == set(REPLICA_GAUGES)
