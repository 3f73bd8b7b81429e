"""Every number that pd_serve counts, in tables, and the sink that counts into Prometheus.

Labels are bounded: a value beyond `MAX_LABEL_VALUES` different ones of a metric is counted as `other`, so that nothing
a client sends can grow the exposition without end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

MAX_LABEL_VALUES = 64
OTHER = "other"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metric(msgspec.Struct, frozen=True):
    """One line of the table."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _SECONDS


METRICS: dict[str, Metric] = {
    "requests": Metric("counter", "Requests that ended, by outcome: ok, failed, cancelled or shed.", ("outcome",)),
    "requests_accepted": Metric("counter", "Requests not shed: equals ok + failed + cancelled + running + queued."),
    "requests_running": Metric("gauge", "Requests that run at this ingress."),
    "requests_queued": Metric("gauge", "Requests that wait at this ingress."),
    "errors": Metric("counter", "Requests that ended in an error, by its class.", ("kind",)),
    "plans": Metric("counter", "Plans made, by their reason.", ("reason",)),
    "waits": Metric("counter", "Times a request had to wait before it could be planned.", ("reason",)),
    "retries": Metric("counter", "Attempts after the first, by what ended the one before.", ("reason",)),
    "handoffs": Metric("counter", "Planned hand-offs that ended, by how decode came by the KV.", ("outcome",)),
    "fallbacks": Metric("counter", "Prompts computed on decode that were planned to be handed over.", ("reason",)),
    "kv_bytes": Metric("counter", "Bytes of KV taken by decode replicas."),
    "kv_wait_seconds": Metric("histogram", "From decode's allocation of blocks until the KV could be taken."),
    "kv_copy_seconds": Metric("histogram", "From then until its last byte was in place."),
    "ttft_seconds": Metric("histogram", "From arrival to the first token."),
    "tpot_seconds": Metric("histogram", "Mean time of an output token after the first."),
    "itl_seconds": Metric("histogram", "Between two deltas of one request."),
    "e2e_seconds": Metric("histogram", "From arrival to the last token."),
    "stage_seconds": Metric("histogram", "Time in one stage of the path.", ("stage",)),
    "prompt_tokens": Metric("counter", "Prompt tokens of finished requests."),
    "cached_tokens": Metric("counter", "Prompt tokens of finished requests that were in a prefix cache."),
    "output_tokens": Metric("counter", "Tokens sent to clients."),
}
"""Counted by an ingress. By name without the prefix `pd_`; a counter's exported name ends in `_total`."""

REPLICA_GAUGES: dict[str, Metric] = {
    "engine_waiting": Metric("gauge", "Requests that wait in an engine.", ("role", "replica")),
    "engine_running": Metric("gauge", "Requests that an engine runs.", ("role", "replica")),
    "engine_waiting_prompt_tokens": Metric("gauge", "Prompt tokens that wait in an engine.", ("role", "replica")),
    "engine_kv_tokens_used": Metric("gauge", "Tokens of KV in use by requests of an engine.", ("role", "replica")),
    "engine_kv_tokens": Metric("gauge", "Tokens of KV that an engine can hold.", ("role", "replica")),
    "engine_handoffs_held": Metric("gauge", "Hand-offs whose KV an engine holds now.", ("role", "replica")),
    "replicas": Metric("gauge", "Replicas that this ingress knows, by role and state.", ("role", "state")),
}
"""Read off the ingress's view of its replicas whenever metrics are scraped (observe/replica_gauges.py)."""

REPLICA_COUNTS: dict[str, Metric] = {
    "legs": Metric("counter", "Legs that ended on a replica, by role and outcome.", ("role", "outcome")),
    "ingresses_lost": Metric("counter", "Ingresses whose legs were aborted because they were gone."),
}
"""Counted by each replica in its own process, which has no `/metrics`: its `stats` says them (serve/replicas.py)."""


class PrometheusSink:
    """Counts into a Prometheus registry. Thread-safe, as prometheus_client is."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._seen: dict[tuple[str, str], set[str]] = defaultdict(set)
        for name, metric in METRICS.items():
            if metric.kind == "counter":
                self._counters[name] = Counter(f"pd_{name}", metric.help, metric.labels, registry=registry)
            elif metric.kind == "gauge":
                self._gauges[name] = Gauge(f"pd_{name}", metric.help, metric.labels, registry=registry)
            else:
                self._histograms[name] = Histogram(
                    f"pd_{name}", metric.help, metric.labels, buckets=metric.buckets, registry=registry
                )

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(**self._bounded(name, labels)) if labels else counter).inc(value)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(**self._bounded(name, labels)) if labels else gauge).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        histogram = self._histograms[name]
        (histogram.labels(**self._bounded(name, labels)) if labels else histogram).observe(value)

    def _bounded(self, name: str, labels: Mapping[str, str]) -> dict[str, str]:
        return {label: self._known(name, label, value) for label, value in labels.items()}

    def _known(self, name: str, label: str, value: str) -> str:
        seen = self._seen[name, label]
        if value not in seen and len(seen) >= MAX_LABEL_VALUES:
            return OTHER
        seen.add(value)
        return value
