"""A picture of a run over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pd_serve.errors import ConfigError
from pd_serve.sim.report import Report

_COLORS = {"prefill": "#1f77b4", "decode": "#d95f02"}


def plot(report: Report, path: Path) -> None:
    """Write load, TTFT, queues and GPUs by window to a picture; its kind follows from the file's name.

    Raises:
        ConfigError: matplotlib is not installed, or has no such kind.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 11), layout="constrained")
    load, ttft, queues, kv, gpus = figure.subplots(5, 1, sharex=True)
    at = [window.at for window in report.windows]
    _load(load, at, report)
    _ttft(ttft, at, report)
    for pool, color in _COLORS.items():
        if pool not in report.pools:
            continue
        queues.plot(at, [w.waiting[pool] for w in report.windows], color=color, label=f"{pool}: waiting")
        queues.plot(at, [w.running[pool] for w in report.windows], color=color, ls="--", label=f"{pool}: running")
        kv.plot(at, [100 * w.kv_share[pool] for w in report.windows], color=color, label=pool)
        gpus.step(at, [w.gpus[pool] for w in report.windows], where="post", color=color, label=pool)
    queues.set_ylabel("sequences\nper replica")
    kv.set_ylabel("KV in use (%)")
    gpus.set_ylabel("GPUs")
    gpus.set_xlabel("seconds")
    for axes in (load, ttft, queues, kv, gpus):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    figure.suptitle(f"{report.arrived:,} requests, router {report.router}, seed {report.seed}")
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _load(axes: Any, at: list[float], report: Report) -> None:
    length = report.window_s
    axes.step(at, [w.arrived / length for w in report.windows], where="post", color="black", lw=2.5, label="arrived")
    axes.step(at, [w.good / length for w in report.windows], where="post", color="#2ca02c", label="within the SLO")
    axes.set_ylabel("requests\na second")


def _ttft(axes: Any, at: list[float], report: Report) -> None:
    gap = float("nan")  # no line where no request was served
    axes.plot(at, [w.ttft_p50 if w.ok else gap for w in report.windows], color="#7570b3", label="TTFT p50")
    axes.plot(at, [w.ttft_p99 if w.ok else gap for w in report.windows], color="#7570b3", ls="--", label="TTFT p99")
    axes.axhline(report.slo.ttft_s, color="grey", lw=1, label="SLO")
    axes.set_ylabel("seconds")
