from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.errors import TransferFailed
from pd_serve.kv.transport.inbox import Inbox

IDS = ["a", "b", "c"]
EVENTS = st.tuples(
    st.sampled_from(["deliver", "take", "withdraw", "release", "wait"]), st.sampled_from(IDS), st.floats(0.1, 5)
)


@given(st.lists(EVENTS, max_size=40))
def test_every_take_ends_once_and_nothing_is_held_after_the_leases(events: list[tuple[str, str, float]]) -> None:
    inbox: Inbox[str] = Inbox()
    now, takes, served = 0.0, list[tuple[str, Future[str]]](), list[str]()
    for kind, handoff_id, value in events:
        match kind:
            case "deliver":
                inbox.deliver(handoff_id, handoff_id, now, value)
            case "take":
                takes.append((handoff_id, inbox.take(handoff_id, now, value)))
            case "withdraw":
                inbox.close_id(handoff_id, "withdrawn")
            case "release":
                inbox.close_id(handoff_id, "released")
            case _:
                now += value
                inbox.expire(now)
    inbox.expire(float("inf"))
    for handoff_id, future in takes:
        assert future.done()
        if future.exception() is None:
            assert future.result() == handoff_id
            served.append(handoff_id)
    assert len(served) == len(set(served)), "an item was given out twice"
    for handoff_id in IDS:
        inbox.close_id(handoff_id, "released")
    assert inbox.held() == inbox.waiting() == 0


def test_first_come_offer_or_take() -> None:
    inbox: Inbox[int] = Inbox()
    early = inbox.take("a", 0.0, 1.0)
    assert inbox.deliver("a", 1, 0.0, 1.0)
    assert inbox.deliver("b", 2, 0.0, 1.0)
    assert (early.result(), inbox.take("b", 0.0, 1.0).result(), inbox.held()) == (1, 2, 2)


@pytest.mark.parametrize("reason", ["withdrawn", "prefill_failed"])
def test_withdrawing_ends_the_take_and_refuses_the_offer(reason: str) -> None:
    inbox: Inbox[int] = Inbox()
    take = inbox.take("a", 0.0, 100.0)
    inbox.close_id("a", reason)
    with pytest.raises(TransferFailed, match=reason):
        take.result(timeout=0)
    assert not inbox.deliver("a", 1, 0.0, 1.0)
    with pytest.raises(TransferFailed, match=reason):
        inbox.take("a", 0.0, 1.0).result(timeout=0)


def test_shut_ends_everything() -> None:
    inbox: Inbox[int] = Inbox()
    take = inbox.take("a", 0.0, 100.0)
    inbox.deliver("b", 1, 0.0, 100.0)
    inbox.shut()
    with pytest.raises(TransferFailed, match="lost"):
        take.result(timeout=0)
    assert inbox.held() == 0
    assert not inbox.deliver("c", 1, 0.0, 1.0)


def test_threads_get_each_item_once() -> None:
    inbox: Inbox[int] = Inbox()
    ids = [str(n) for n in range(300)]
    sender = threading.Thread(target=lambda: [inbox.deliver(i, int(i), 0.0, 9.0) for i in ids])
    sender.start()
    takes = [inbox.take(i, 0.0, 9.0) for i in ids]
    sender.join()
    assert [take.result(timeout=5) for take in takes] == [int(i) for i in ids]


def test_it_says_why_an_id_is_closed() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.deliver("a", 1, 0.0, 1.0)
    inbox.take("a", 0.0, 1.0)
    assert inbox.refusal("a") == ""
    inbox.close_id("a", "withdrawn")
    assert inbox.refusal("a") == "withdrawn"
    inbox.shut()
    assert inbox.refusal("b") == "lost"
