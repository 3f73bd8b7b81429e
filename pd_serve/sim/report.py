"""What a run came to, as data; `ops/sim.py` shows it."""

from __future__ import annotations

import msgspec

from pd_serve.sim.cluster import Cluster
from pd_serve.sim.collect import PoolWindow, Slo, Window
from pd_serve.sim.histogram import Histogram
from pd_serve.types import Role

PERCENTS = (50.0, 90.0, 99.0)


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, or whatever was counted."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pool over the whole run. Means are over its replicas' reports, every half second each."""

    replicas: int
    """At the end."""
    gpu_seconds: float
    busy_share: float
    """Of the time that its replicas were there."""
    waiting_mean: float
    """Sequences that wait at one replica."""
    waiting_p99: float
    running_mean: float
    waiting_prompt_tokens_mean: float
    kv_share_mean: float
    computed_prompt_tokens: int
    prefix_hit_rate: float
    """Of the prompt tokens that came to it, those in its own cache."""
    evicted_blocks: int
    preemptions: int
    itl: Quantiles


class WindowReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of time; requests by arrival."""

    at: float
    arrived: int
    ok: int
    good: int
    ttft_p50: float
    ttft_p99: float
    waiting: dict[str, float]
    """Sequences that wait at one replica, by pool."""
    running: dict[str, float]
    kv_share: dict[str, float]
    gpus: dict[str, float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are seconds."""

    seed: int
    router: str
    seconds: float
    """Until the last request ended."""
    arrived: int
    outcomes: dict[str, int]
    errors: dict[str, int]
    reasons: dict[str, int]
    fallbacks: dict[str, int]
    retries: int
    waits: int
    slo: Slo
    slo_attainment: float
    """Good ones of all but those whose client left."""
    goodput_per_s: float
    output_tokens_per_s: float
    ttft: Quantiles
    tpot: Quantiles
    e2e: Quantiles
    queue: Quantiles
    hit_rate: float
    """Of the prompt tokens of served requests, those that some replica on their way had cached."""
    gpu_seconds: float
    transfers: int
    transfer_bytes: dict[str, int]
    """By distance."""
    pools: dict[str, PoolReport]
    windows: list[WindowReport]
    window_s: float


def report(cluster: Cluster) -> Report:
    """Everything about a run that is over."""
    numbers, spec = cluster.collector, cluster.spec
    seconds = max(numbers.last, 1e-9)
    served = sum(numbers.outcomes.values()) - numbers.outcomes.get("cancelled", 0)
    pools = {role.value: _pool(cluster, role, seconds) for role in Role if spec.pool(role)}
    return Report(
        seed=spec.seed,
        router=spec.path.router,
        seconds=seconds,
        arrived=cluster.arrived,
        outcomes=dict(sorted(numbers.outcomes.items())),
        errors=dict(sorted(numbers.errors.items())),
        reasons=dict(sorted(numbers.reasons.items())),
        fallbacks=dict(sorted(numbers.fallbacks.items())),
        retries=numbers.retries,
        waits=numbers.waits,
        slo=numbers.slo,
        slo_attainment=numbers.good / served if served else 0.0,
        goodput_per_s=numbers.good / seconds,
        output_tokens_per_s=numbers.output_tokens / seconds,
        ttft=quantiles(numbers.ttft),
        tpot=quantiles(numbers.tpot),
        e2e=quantiles(numbers.e2e),
        queue=quantiles(numbers.queue),
        hit_rate=numbers.cached_tokens / numbers.prompt_tokens if numbers.prompt_tokens else 0.0,
        gpu_seconds=sum(pool.gpu_seconds for pool in pools.values()),
        transfers=cluster.network.transfers,
        transfer_bytes=dict(cluster.network.bytes),
        pools=pools,
        windows=[_window(cluster, number) for number in sorted(numbers.windows)],
        window_s=numbers.window_s,
    )


def quantiles(histogram: Histogram) -> Quantiles:
    return Quantiles(
        count=histogram.count,
        mean=histogram.mean,
        largest=histogram.largest,
        **histogram.percentiles(PERCENTS),
    )


def _pool(cluster: Cluster, role: Role, seconds: float) -> PoolReport:
    totals, numbers = cluster.totals(role), cluster.collector
    sums = numbers.pools[role]
    present = cluster.present_s(role, seconds)
    return PoolReport(
        replicas=sum(replica.info.role is role for replica in cluster.replicas.values()),
        gpu_seconds=cluster.gpu_seconds(role, 0.0, seconds),
        busy_share=totals.busy_s / present if present else 0.0,
        waiting_mean=_mean(sums.waiting, sums),
        waiting_p99=numbers.waiting[role].percentile(99.0),
        running_mean=_mean(sums.running, sums),
        waiting_prompt_tokens_mean=_mean(sums.waiting_tokens, sums),
        kv_share_mean=_mean(sums.kv_share, sums),
        computed_prompt_tokens=totals.computed_tokens,
        prefix_hit_rate=totals.hit_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
        evicted_blocks=totals.evicted,
        preemptions=totals.preemptions,
        itl=quantiles(numbers.gaps[role]),
    )


def _window(cluster: Cluster, number: int) -> WindowReport:
    numbers = cluster.collector
    window: Window = numbers.windows[number]
    begins, length = number * numbers.window_s, numbers.window_s
    roles = [role for role in Role if cluster.spec.pool(role)]
    return WindowReport(
        at=begins,
        arrived=window.arrived,
        ok=window.ok,
        good=window.good,
        ttft_p50=window.ttft.percentile(50.0),
        ttft_p99=window.ttft.percentile(99.0),
        waiting={role.value: _mean(window.pools[role].waiting, window.pools[role]) for role in roles},
        running={role.value: _mean(window.pools[role].running, window.pools[role]) for role in roles},
        kv_share={role.value: _mean(window.pools[role].kv_share, window.pools[role]) for role in roles},
        gpus={role.value: cluster.gpu_seconds(role, begins, begins + length) / length for role in roles},
    )


def _mean(total: float, window: PoolWindow) -> float:
    return total / window.reports if window.reports else 0.0
