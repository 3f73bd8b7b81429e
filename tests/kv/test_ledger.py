from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.kv.ledger import Counts, Ledger, Outcome, Owner

IDS = [f"h{i}" for i in range(4)]
EVENTS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(IDS), st.floats(0.1, 20)),
    st.tuples(st.just("move"), st.sampled_from(IDS), st.sampled_from(list(Owner))),
    st.tuples(st.sampled_from(["done", "fail", "cancel"]), st.sampled_from(IDS), st.none()),
    st.tuples(st.just("wait"), st.none(), st.floats(0, 10)),
)


def conserved(counts: Counts) -> bool:
    ended = counts.done + counts.cancelled + sum(counts.failed.values())
    parts = [counts.started, counts.done, counts.cancelled, counts.held, counts.bytes, *counts.failed.values()]
    return counts.started == ended + counts.held and min(parts) >= 0 and counts.seconds >= 0


@given(st.lists(EVENTS, max_size=40))
def test_invariant_2_every_order_of_events_conserves_handoffs(events: list[tuple[str, object, object]]) -> None:
    """Whatever comes in whatever order: one owner while open, one end, one `Closed`, and the totals add up."""
    ledger, now, ends = Ledger(), 0.0, dict.fromkeys(IDS, 0)
    orders = {owner: n for n, owner in enumerate(Owner)}
    for kind, subject, value in events:
        match kind:
            case "open":
                known = ledger.owner(subject) is not None or ends[subject] > 0
                assert ledger.open(subject, now, value) is not known
            case "move":
                before = ledger.owner(subject)
                if before is not None and orders[value] < orders[before]:
                    with pytest.raises(ValueError, match="cannot go back"):
                        ledger.move(subject, value)
                    assert ledger.owner(subject) is before
                else:
                    assert ledger.move(subject, value, 100) is (before is not None)
                    assert ledger.owner(subject) is (value if before is not None else None)
            case "done" | "fail" | "cancel":
                before = ledger.owner(subject)
                args = (subject, now) if kind == "done" else (subject, now, "reason")
                closed = getattr(ledger, kind)(*args)
                assert (closed is not None) is (before is not None)
                if closed is not None:
                    assert closed.owner is before
                    ends[subject] += 1
            case _:
                now += value
                for closed in ledger.expire(now):
                    assert closed.outcome is Outcome.FAILED
                    assert closed.reason == "expired"
                    ends[closed.id] += 1
        assert conserved(ledger.counts())
        assert max(ends.values()) <= 1
    for closed in ledger.expire(float("inf")):
        ends[closed.id] += 1
    counts = ledger.counts()
    assert counts.held == ledger.held() == 0
    assert counts.started == sum(ends.values())


def test_a_handoff_that_arrives_is_counted_with_bytes_and_seconds() -> None:
    ledger = Ledger()
    assert ledger.open("h", now=10.0, lease_s=5.0)
    assert ledger.owner("h") is Owner.SOURCE
    assert ledger.move("h", Owner.TARGET, nbytes=64)
    closed = ledger.done("h", now=10.5)
    assert closed is not None
    assert (closed.nbytes, closed.seconds, closed.owner) == (64, 0.5, Owner.TARGET)
    assert ledger.counts() == Counts(started=1, done=1, bytes=64, seconds=0.5)


def test_a_late_event_is_refused() -> None:
    ledger = Ledger()
    ledger.open("h", 0.0, 5.0)
    ledger.cancel("h", 1.0, "aborted")
    assert not ledger.move("h", Owner.TARGET, 64)
    assert ledger.done("h", 2.0) is None
    assert not ledger.open("h", 3.0, 5.0)
    assert ledger.counts() == Counts(started=1, cancelled=1)


def test_closed_ids_are_forgotten_in_order() -> None:
    ledger = Ledger(remember=2)
    for handoff_id in ("a", "b", "c"):
        ledger.open(handoff_id, 0.0, 1.0)
        ledger.fail(handoff_id, 0.0, "lost")
    assert ledger.open("a", 0.0, 1.0)
    assert not ledger.open("c", 0.0, 1.0)
    assert ledger.counts().failed == {"lost": 3}
