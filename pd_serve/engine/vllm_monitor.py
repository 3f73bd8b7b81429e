"""What the engine says about itself at every step: its KV usage, the fate of hand-offs, and that it is alive."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import psutil
from vllm.v1.metrics.loggers import StatLoggerBase

from pd_serve.kv.connector_metadata import reports_in
from pd_serve.types import KvOutcome, KvReport


class Monitor(StatLoggerBase):
    """A stat logger of vLLM's, given to the engine as a ready object: `stat_loggers=[lambda *_: monitor]`.

    Reports are kept only for hand-offs that were announced with `expect`, until `forget`.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.kv_usage = 0.0
        """Share of the engine's KV blocks that requests hold."""
        self.running = 0
        """Sequences in the engine's batch at its last step."""
        self.last_step = time.monotonic()
        self._reports: dict[str, KvReport | None] = {}

    def work_began(self) -> None:
        """An idle engine ends no steps: its time without progress counts from here."""
        self.last_step = time.monotonic()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        self.last_step = time.monotonic()
        if scheduler_stats is None:
            return
        self.kv_usage = scheduler_stats.kv_cache_usage
        self.running = scheduler_stats.num_running_reqs
        if scheduler_stats.kv_connector_stats:
            for handoff_id, report in reports_in(scheduler_stats.kv_connector_stats).items():
                if handoff_id in self._reports:
                    self._reports[handoff_id] = report

    def log_engine_initialized(self) -> None:
        pass

    def expect(self, handoff_id: str) -> None:
        """Keep the report of this hand-off when it comes."""
        self._reports[handoff_id] = None

    def report(self, handoff_id: str) -> KvReport:
        """What became of an expected hand-off, or `NOT_REPORTED`.

        It comes with the step of the request's first output at the latest, but perhaps just after that output.
        """
        return self._reports.get(handoff_id) or NOT_REPORTED

    def forget(self, handoff_id: str) -> None:
        """Idempotent."""
        self._reports.pop(handoff_id, None)


NOT_REPORTED = KvReport(outcome=KvOutcome.RECOMPUTED, reason="not_reported")


def broken_process(pids: Iterable[int]) -> str:
    """What is wrong with one of these processes (`gone`, `stopped`), or empty."""
    for pid in pids:
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return "gone"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped"
    return ""
