"""Takes whose bytes do not come: they end in time, and hold up nobody else."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from pd_serve.errors import TransferFailed
from pd_serve.kv.envelope import Envelope
from pd_serve.kv.transport.base import Payload
from pd_serve.kv.transport.fetches import Fetches

ENVELOPE = Envelope(
    handoff_id="h",
    source="p",
    fingerprint="f",
    prompt_tokens=4,
    prompt_hash=b"",
    rank=0,
    layers=1,
    blocks=1,
    page_bytes=1,
)
THREADS = 2


class Item:
    """Bytes that come once `sent` is set."""

    def __init__(self, *, sent: bool = False) -> None:
        self.sent = threading.Event()
        self.begun = threading.Event()
        if sent:
            self.sent.set()


def fetch(item: Item, deadline: float) -> Payload:
    item.begun.set()
    assert item.sent.wait(30), "the test left a fetch behind"
    return Payload(ENVELOPE, memoryview(b"x"))


@pytest.fixture
def fetches() -> Iterator[Fetches[Item]]:
    fetches = Fetches(fetch, THREADS)
    yield fetches
    fetches.close()


def start(fetches: Fetches[Item], handoff_id: str, item: Item, deadline: float = 100.0) -> Future[Payload]:
    payload: Future[Payload] = Future()
    fetches.start(handoff_id, item, payload, deadline)
    return payload


def test_what_was_fetched_is_the_payload(fetches: Fetches[Item]) -> None:
    assert start(fetches, "h", Item(sent=True)).result(10).pages == b"x"
    assert fetches.expire(float("inf")) == []


ENDS: dict[str, Callable[[Fetches[Item]], object]] = {
    "prefill_failed": lambda fetches: fetches.end("h", "prefill_failed"),
    "expired": lambda fetches: fetches.expire(100.0),
    "lost": lambda fetches: fetches.close(),
}


@pytest.mark.case("B12")
@pytest.mark.parametrize("reason", ENDS)
def test_a_fetch_in_progress_does_not_keep_its_take(fetches: Fetches[Item], reason: str) -> None:
    item = Item()
    payload = start(fetches, "h", item)
    assert item.begun.wait(10)
    assert fetches.expire(99.9) == []
    assert not payload.done()
    ENDS[reason](fetches)
    with pytest.raises(TransferFailed, match=reason):
        payload.result(timeout=0)
    item.sent.set()  # too late: dropped, without a word


def test_stuck_fetches_end_with_those_that_wait_behind_them(fetches: Fetches[Item]) -> None:
    stuck = [Item() for _ in range(THREADS)]
    payloads = [start(fetches, f"stuck{n}", item, 5.0) for n, item in enumerate(stuck)]
    waiting = Item(sent=True)
    behind = start(fetches, "behind", waiting, 10.0)
    assert sorted(fetches.expire(5.0)) == ["stuck0", "stuck1"]
    assert fetches.expire(10.0) == ["behind"]
    for payload in (*payloads, behind):
        with pytest.raises(TransferFailed, match="expired"):
            payload.result(timeout=0)
    for item in stuck:
        item.sent.set()
    assert start(fetches, "next", Item(sent=True)).result(10)
    assert not waiting.begun.is_set()


def test_a_fetch_that_did_not_begin_lets_go_of_its_item(fetches: Fetches[Item]) -> None:
    stuck = [Item() for _ in range(THREADS)]
    for number, item in enumerate(stuck):
        start(fetches, f"stuck{number}", item)
    item = Item()
    gone = weakref.ref(item)
    start(fetches, "behind", item)
    del item
    fetches.end("behind", "cancelled")
    gc.collect()
    assert gone() is None
    for item in stuck:
        item.sent.set()


def test_an_id_that_is_used_again_does_not_get_the_former_result(fetches: Fetches[Item]) -> None:
    former, item = Item(), Item()
    start(fetches, "h", former)
    assert former.begun.wait(10)
    fetches.end("h", "cancelled")
    payload = start(fetches, "h", item)
    former.sent.set()
    assert item.begun.wait(10)
    time.sleep(0.05)
    assert not payload.done()
    item.sent.set()
    assert payload.result(10)


def test_a_failure_is_the_takes_failure() -> None:
    def lost(item: Item, deadline: float) -> Payload:
        raise TransferFailed("lost")

    fetches = Fetches(lost, THREADS)
    with pytest.raises(TransferFailed, match="lost"):
        start(fetches, "h", Item()).result(10)
    fetches.close()
    with pytest.raises(TransferFailed, match="lost"):
        start(fetches, "late", Item()).result(0)
