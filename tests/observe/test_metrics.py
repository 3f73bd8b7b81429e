"""Metrics: the table, bounded labels, what a record adds."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pd_serve.observe.metrics import MAX_LABEL_VALUES, METRICS, REPLICA_GAUGES, PrometheusSink
from pd_serve.observe.replica_gauges import ReplicaGauges
from pd_serve.observe.request_metrics import count_record
from pd_serve.path.record import Record
from pd_serve.types import (
    ChoiceDelta,
    ClusterView,
    Delta,
    EngineStats,
    KvAddress,
    KvOutcome,
    KvReport,
    Plan,
    ReplicaInfo,
    ReplicaView,
    Request,
    Role,
)


def _record() -> Record:
    return Record.open(Request(id="r", prompt_token_ids=tuple(range(20)), max_tokens=4))


def test_every_metric_of_the_table_is_exported() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry)
    registry.register(ReplicaGauges(lambda: ClusterView(now=0.0)))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    names = {family.name for family in families if not family.name.endswith("_created")}
    assert names == {f"pd_{name}" for name in (*METRICS, *REPLICA_GAUGES)}


def test_b76_labels_are_bounded_whatever_the_values() -> None:
    """Invariant 7: five thousand label values make MAX_LABEL_VALUES series and one `other`."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    for number in range(5000):
        sink.count("retries", reason=f'odd "reason"\n{number}')
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [s for family in families for s in family.samples if s.name == "pd_retries_total"]
    assert len(samples) == MAX_LABEL_VALUES + 1
    assert sum(sample.value for sample in samples) == 5000


def test_a_finished_record_counts_its_tokens_times_and_kv() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    record = _record()
    record.admitted_at = 0.0
    attempt = record.attempt(Plan(decode="d", prefill="p", reason="least_loaded"))
    attempt.granted_at = attempt.planned_at
    record.add(Delta("r", (ChoiceDelta(0, "a", (1,)),)))
    report = KvReport(outcome=KvOutcome.MOVED, bytes=640, blocks=2)
    record.add(Delta("r", (ChoiceDelta(0, "b", (2, 3), "length"),), finished=True, cached_tokens=16, kv=report))
    record.close("ok")
    count_record(record, sink)
    value = registry.get_sample_value
    assert value("pd_requests_total", {"outcome": "ok"}) == 1
    assert value("pd_output_tokens_total") == 3
    assert value("pd_cached_tokens_total") == 16
    assert value("pd_kv_bytes_total") == 640
    assert value("pd_handoffs_total", {"outcome": "moved"}) == 1
    assert value("pd_tpot_seconds_count") == 1


def test_b05_a_recomputed_hand_off_is_a_counted_fallback() -> None:
    """Invariant 8."""
    registry = CollectorRegistry()
    record = _record()
    record.attempt(Plan(decode="d", prefill="p", reason="least_loaded"))
    report = KvReport(outcome=KvOutcome.RECOMPUTED, reason="checksum")
    record.add(Delta("r", (ChoiceDelta(0, "a", (1,), "length"),), finished=True, kv=report))
    record.close("ok")
    count_record(record, PrometheusSink(registry))
    assert registry.get_sample_value("pd_fallbacks_total", {"reason": "checksum"}) == 1
    assert registry.get_sample_value("pd_handoffs_total", {"outcome": "recomputed"}) == 1


def test_replica_gauges_follow_the_view_and_leave_with_the_replica() -> None:
    info = ReplicaInfo(
        id="d1", role=Role.DECODE, version="v1", address="", fingerprint="f", kv=KvAddress("in_process", "e")
    )
    replicas = [ReplicaView(info=info, stats=EngineStats(running=3))]
    registry = CollectorRegistry()
    registry.register(ReplicaGauges(lambda: ClusterView(now=0.0, decode=tuple(replicas))))
    labels = {"role": "decode", "replica": "d1"}
    assert registry.get_sample_value("pd_engine_running", labels) == 3
    replicas.clear()
    assert registry.get_sample_value("pd_engine_running", labels) is None
