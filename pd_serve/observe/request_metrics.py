"""What a finished record adds to the metrics."""

from __future__ import annotations

from pd_serve.path.record import Record
from pd_serve.types import Sink


def count_record(record: Record, sink: Sink) -> None:
    """Count one finished request. Called exactly once for each record, whatever its outcome."""
    sink.count("requests", outcome=record.outcome)
    if record.admitted_at is not None:
        sink.observe("stage_seconds", record.admitted_at, stage="admit")
    if record.error and record.outcome in ("failed", "shed"):
        sink.count("errors", kind=record.error)
    _count_tokens(record, sink)
    _count_times(record, sink)
    _count_kv(record, sink)


def _count_tokens(record: Record, sink: Sink) -> None:
    sink.count("output_tokens", record.output_tokens)
    if record.outcome == "ok":
        sink.count("prompt_tokens", record.prompt_tokens)
        sink.count("cached_tokens", record.cached_tokens or 0)


def _count_times(record: Record, sink: Sink) -> None:
    if record.first_token_at is None or record.finished_at is None:
        return
    sink.observe("ttft_seconds", record.first_token_at)
    if record.outcome == "ok":
        sink.observe("e2e_seconds", record.finished_at)
        per_choice = record.output_tokens / record.n
        if per_choice > 1:
            sink.observe("tpot_seconds", (record.finished_at - record.first_token_at) / (per_choice - 1))


def _count_kv(record: Record, sink: Sink) -> None:
    for attempt in record.attempts:
        if attempt.granted_at is not None:
            sink.observe("stage_seconds", attempt.granted_at - attempt.planned_at, stage="grant")
            if attempt.prefilled_at is not None:
                sink.observe("stage_seconds", attempt.prefilled_at - attempt.granted_at, stage="prefill")
        if attempt.fallback:
            sink.count("fallbacks", reason=attempt.fallback)
    if record.kv is not None and record.attempts and record.attempts[-1].prefill_replica:
        sink.count("handoffs", outcome=record.kv.outcome.value)
        sink.count("kv_bytes", record.kv.bytes)
        sink.observe("kv_wait_seconds", record.kv.wait_s)
        sink.observe("kv_copy_seconds", record.kv.copy_s)
