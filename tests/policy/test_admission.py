"""Who is let in, who waits, who is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pd_serve.policy.admission import AdmissionRules, Admit, Load, Queue, Shed, admit, retry_after

rules = st.builds(AdmissionRules, max_running=st.integers(1, 50), max_queue=st.integers(0, 50))
loads = st.builds(
    Load, running=st.integers(0, 60), queued=st.integers(0, 60), finished_per_s=st.floats(0, 1e6, allow_nan=False)
)


def _load(running: int, queued: int, finished_per_s: float = 0.0) -> Load:
    return Load(running=running, queued=queued, finished_per_s=finished_per_s)


def test_the_three_answers() -> None:
    limits = AdmissionRules(max_running=2, max_queue=5)
    assert admit(_load(1, 0), limits) == Admit()
    assert admit(_load(2, 0), limits) == Queue()
    assert admit(_load(2, 4), limits) == Queue()
    assert admit(_load(2, 5), limits) == Shed("queue_full", 1.0)


def test_nobody_passes_those_who_wait() -> None:
    assert admit(_load(1, 1), AdmissionRules(max_running=2, max_queue=5)) == Queue()


def test_without_a_queue_a_full_ingress_refuses() -> None:
    assert isinstance(admit(_load(2, 0), AdmissionRules(max_running=2, max_queue=0)), Shed)


@given(loads, rules)
def test_what_runs_and_what_waits_is_bounded(load: Load, limits: AdmissionRules) -> None:
    """Invariant 7: a decision never takes either count beyond its limit."""
    decision = admit(load, limits)
    if isinstance(decision, Admit):
        assert load.running + 1 <= limits.max_running
        assert load.queued == 0
    elif isinstance(decision, Queue):
        assert load.queued + 1 <= limits.max_queue
    else:
        assert load.queued >= limits.max_queue
        assert load.running >= limits.max_running or load.queued > 0
        assert decision.reason


@given(loads)
def test_retry_after_is_a_time_that_a_client_can_use(load: Load) -> None:
    assert 1.0 <= retry_after(load) <= 60.0


def test_retry_after_follows_the_rate() -> None:
    assert retry_after(_load(9, 9, finished_per_s=0.1)) == 10.0
    assert retry_after(_load(9, 9, finished_per_s=5.0)) == 1.0
    assert retry_after(_load(9, 9, finished_per_s=0.001)) == 60.0


@given(rules, st.lists(st.booleans(), max_size=200))
def test_a_sequence_of_arrivals_and_departures_stays_within_the_limits(
    limits: AdmissionRules, arrivals: list[bool]
) -> None:
    """Driven as the gate drives it: counts stay within their limits, and a shed request finds both full."""
    running = queued = 0
    for arrives in arrivals:
        if arrives:
            decision = admit(_load(running, queued), limits)
            running += isinstance(decision, Admit)
            queued += isinstance(decision, Queue)
            if isinstance(decision, Shed):
                assert (running, queued) == (limits.max_running, limits.max_queue)
        elif running:
            running, queued = (running, queued - 1) if queued else (running - 1, 0)
        assert 0 <= running <= limits.max_running
        assert 0 <= queued <= limits.max_queue
