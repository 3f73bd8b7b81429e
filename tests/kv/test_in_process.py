from __future__ import annotations

import msgspec
import pytest

from pd_serve.errors import TransferFailed
from pd_serve.kv.envelope import Envelope
from pd_serve.kv.transport.in_process import InProcessEnd, Registry


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


ENVELOPE = Envelope(
    handoff_id="h",
    source="p",
    fingerprint="f",
    prompt_tokens=4,
    prompt_hash=b"",
    rank=0,
    layers=1,
    blocks=1,
    page_bytes=4,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ends(clock: Clock) -> tuple[InProcessEnd, InProcessEnd]:
    registry = Registry()
    return InProcessEnd(registry, "p", clock=clock), InProcessEnd(registry, "d", clock=clock)


def test_pages_arrive_and_are_let_go_of(ends: tuple[InProcessEnd, InProcessEnd]) -> None:
    source, target = ends
    pages = bytearray(b"abcd")
    take = target.take("h", 5.0)
    source.offer(target.address(), ENVELOPE, memoryview(pages), 5.0).result(timeout=0)
    pages[:] = b"xxxx"  # the sender may reuse its pages
    payload = take.result(timeout=0)
    assert bytes(payload.pages) == b"abcd"
    assert payload.envelope == ENVELOPE
    assert target.held() == 1
    target.release("h")
    assert target.held() == source.held() == 0


def test_an_offer_that_nobody_takes_expires(ends: tuple[InProcessEnd, InProcessEnd], clock: Clock) -> None:
    source, target = ends
    source.offer(target.address(), ENVELOPE, memoryview(b"abcd"), 5.0)
    assert target.held() == 1
    clock.now = 6.0
    assert target.held() == 0
    with pytest.raises(TransferFailed, match="expired"):
        target.take("h", 5.0).result(timeout=0)


def test_a_closed_or_unknown_peer_is_unreachable(ends: tuple[InProcessEnd, InProcessEnd]) -> None:
    source, target = ends
    address = target.address()
    take = target.take("h", 5.0)
    target.close()
    with pytest.raises(TransferFailed, match="lost"):
        take.result(timeout=0)
    with pytest.raises(TransferFailed, match="unreachable"):
        source.offer(address, ENVELOPE, memoryview(b"abcd"), 5.0).result(timeout=0)
    other_rank = msgspec.structs.replace(ENVELOPE, rank=1)
    with pytest.raises(TransferFailed, match="unreachable"):
        source.offer(source.address(), other_rank, memoryview(b"abcd"), 5.0).result(timeout=0)


def test_a_withdrawn_handoff_refuses_the_late_offer(ends: tuple[InProcessEnd, InProcessEnd]) -> None:
    source, target = ends
    take = target.take("h", 5.0)
    target.withdraw("h", "prefill_failed")
    with pytest.raises(TransferFailed, match="prefill_failed"):
        take.result(timeout=0)
    source.offer(target.address(), ENVELOPE, memoryview(b"abcd"), 5.0)
    assert target.held() == 0
