"""What a record says of a request's KV, whichever way it ends."""

from __future__ import annotations

from pd_serve.path.record import Record
from pd_serve.types import ChoiceDelta, Delta, KvOutcome, KvReport, Plan
from tests.path.cluster import request

PLAN = Plan(decode="d", prefill="p", reason="least_loaded")
MOVED = KvReport(outcome=KvOutcome.MOVED, bytes=8)


def delta(kv: KvReport | None = None) -> Delta:
    return Delta("r", (ChoiceDelta(0, "a", (1,)),), kv=kv)


def test_a_prefill_leg_that_fails_once_decode_has_the_kv_is_no_fallback_of_a_client_that_left() -> None:
    record = Record.open(request(4))
    attempt = record.attempt(PLAN)
    record.add(delta(MOVED))
    attempt.prefill_error = "EngineFailed"
    attempt.fallback = "prefill_EngineFailed"
    record.close("cancelled")
    assert (record.kv, attempt.fallback, attempt.prefill_error) == (MOVED, None, "EngineFailed")


def test_a_report_is_of_the_last_attempt() -> None:
    record = Record.open(request(4))
    first = record.attempt(PLAN)
    record.add(delta(KvReport(outcome=KvOutcome.RECOMPUTED, reason="expired")))
    second = record.attempt(PLAN)
    assert record.kv is None
    second.fallback = "prefill_EngineFailed"
    record.close("failed", "EngineFailed")
    assert (first.fallback, second.fallback) == ("expired", "prefill_EngineFailed")
