"""Gauges of every replica, made from the view at a scrape: a replica that left leaves no series behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pd_serve.observe.metrics import REPLICA_GAUGES
from pd_serve.types import ClusterView, ReplicaView


def _values(replica: ReplicaView) -> dict[str, int]:
    stats = replica.stats
    return {
        "engine_waiting": stats.waiting,
        "engine_running": stats.running,
        "engine_waiting_prompt_tokens": stats.waiting_prompt_tokens,
        "engine_kv_tokens_used": stats.kv_tokens_used,
        "engine_kv_tokens": stats.kv_tokens_total,
        "engine_handoffs_held": stats.handoffs_held,
    }


class ReplicaGauges(Collector):
    """Register it in a registry; `view` is called at each scrape."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families().values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        view = self._view()
        families = self._families()
        replicas = (*view.prefill, *view.decode)
        for replica in replicas:
            for name, value in _values(replica).items():
                families[name].add_metric([replica.info.role.value, replica.info.id], value)
        for (role, state), number in Counter((r.info.role.value, r.state.value) for r in replicas).items():
            families["replicas"].add_metric([role, state], number)
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, GaugeMetricFamily]:
        return {
            name: GaugeMetricFamily(f"pd_{name}", metric.help, labels=metric.labels)
            for name, metric in REPLICA_GAUGES.items()
        }
