"""A replica whose legs fail in a row gets a pause, then one probe at a time."""

from __future__ import annotations

from pd_serve.path.trust import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Trust


def failing(times: int, now: float = 0.0) -> Trust:
    trust = Trust()
    for _ in range(times):
        trust.failed(now)
    return trust


def test_single_failures_cost_no_trust() -> None:
    assert not failing(FAILURES - 1).suspended(0.0)


def test_failures_in_a_row_pause_it_and_every_failed_probe_doubles_the_pause() -> None:
    assert failing(FAILURES).suspended(FIRST_PAUSE_S * 0.99)
    assert not failing(FAILURES).suspended(FIRST_PAUSE_S)
    assert failing(FAILURES + 1).suspended(FIRST_PAUSE_S * 1.99)
    assert not failing(FAILURES + 100).suspended(LONGEST_PAUSE_S)


def test_one_success_ends_the_matter() -> None:
    trust = failing(FAILURES)
    trust.worked(finished=False)
    assert trust.suspended(0.0)
    trust.worked()
    assert not trust.suspended(0.0)
    trust.failed(0.0)
    assert not trust.suspended(0.0)
