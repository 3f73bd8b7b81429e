"""The report of a simulation as text."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from pd_serve.sim.report import PoolReport, Quantiles, Report

_MOST_WINDOWS = 40


def show(report: Report, out: Console, over_time: bool) -> None:
    """Print the tables."""
    out.print(_summary(report), highlight=False)
    out.print(_latency(report))
    out.print(_pools(report))
    if over_time:
        out.print(_over_time(report))


def _summary(report: Report) -> str:
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in report.outcomes.items())
    moved = sum(report.transfer_bytes.values())
    by_distance = ", ".join(f"{_size(count)} {name}" for name, count in report.transfer_bytes.items() if count)
    slo = f"TTFT <= {report.slo.ttft_s:g} s and TPOT <= {1000 * report.slo.tpot_s:g} ms"
    lines = [
        f"{report.arrived:,} requests in {report.seconds:,.1f} s of virtual time: {outcomes}",
        f"within the SLO ({slo}): {report.slo_attainment:.2%}, {report.goodput_per_s:,.2f} a second",
        f"{report.output_tokens_per_s:,.0f} output tokens a second, {report.gpu_seconds:,.0f} GPU-seconds",
        f"prompt tokens found in a cache: {report.hit_rate:.1%}",
        f"{report.transfers:,} hand-offs moved {_size(moved)}" + (f" ({by_distance})" if by_distance else ""),
    ]
    for name, counts in (("plans", report.reasons), ("fallbacks", report.fallbacks), ("errors", report.errors)):
        if counts:
            lines.append(f"{name}: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items()))
    if report.retries or report.waits:
        lines.append(f"{report.retries:,} retries, {report.waits:,} waits for room")
    return "\n".join(lines)


def _latency(report: Report) -> Table:
    table = Table("", "count", "mean", "p50", "p90", "p99", "largest", title="milliseconds")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"TTFT": report.ttft, "TPOT": report.tpot, "end to end": report.e2e, "queue at the gate": report.queue}
    rows |= {f"ITL, {pool}": numbers.itl for pool, numbers in report.pools.items() if numbers.itl.count}
    for name, numbers in rows.items():
        table.add_row(name, *_milliseconds(numbers))
    return table


def _milliseconds(numbers: Quantiles) -> list[str]:
    values = (numbers.mean, numbers.p50, numbers.p90, numbers.p99, numbers.largest)
    return [f"{numbers.count:,}", *(f"{1000 * value:,.1f}" for value in values)]


def _pools(report: Report) -> Table:
    table = Table("pool", *report.pools)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, text in _POOL_ROWS.items():
        table.add_row(name, *(text(pool) for pool in report.pools.values()))
    return table


_POOL_ROWS: dict[str, Callable[[PoolReport], str]] = {
    "replicas at the end": lambda pool: f"{pool.replicas:,}",
    "GPU-seconds": lambda pool: f"{pool.gpu_seconds:,.0f}",
    "busy": lambda pool: f"{pool.busy_share:.1%}",
    "waiting per replica, mean": lambda pool: f"{pool.waiting_mean:,.2f}",
    "waiting per replica, p99": lambda pool: f"{pool.waiting_p99:,.1f}",
    "running per replica, mean": lambda pool: f"{pool.running_mean:,.2f}",
    "waiting prompt tokens per replica": lambda pool: f"{pool.waiting_prompt_tokens_mean:,.0f}",
    "KV in use, mean": lambda pool: f"{pool.kv_share_mean:.1%}",
    "prompt tokens computed": lambda pool: f"{pool.computed_prompt_tokens:,}",
    "prompt tokens in its own cache": lambda pool: f"{pool.prefix_hit_rate:.1%}",
    "KV blocks evicted": lambda pool: f"{pool.evicted_blocks:,}",
    "preemptions": lambda pool: f"{pool.preemptions:,}",
}


def _over_time(report: Report) -> Table:
    pools = list(report.pools)
    table = Table("second", "arrived", "in SLO", "TTFT p50", "TTFT p99", title="over time (milliseconds; per replica)")
    for pool in pools:
        table.add_column(f"{pool} waiting")
        table.add_column(f"{pool} running")
        table.add_column(f"{pool} KV")
    for column in table.columns:
        column.justify = "right"
    every = max(-(-len(report.windows) // _MOST_WINDOWS), 1)
    for window in report.windows[::every]:
        share = f"{window.good / window.arrived:.0%}" if window.arrived else "-"
        cells = [f"{window.at:,.0f}", f"{window.arrived:,}", share]
        cells += [f"{1000 * window.ttft_p50:,.0f}", f"{1000 * window.ttft_p99:,.0f}"]
        for pool in pools:
            cells += [f"{window.waiting[pool]:,.1f}", f"{window.running[pool]:,.1f}", f"{window.kv_share[pool]:.0%}"]
        table.add_row(*cells)
    return table


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} PB"
