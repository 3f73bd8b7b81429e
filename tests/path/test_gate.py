"""The queue in front of the path."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from pd_serve.errors import DeadlineExceeded, Overloaded
from pd_serve.observe.counting import CountingSink
from pd_serve.path.gate import Gate
from pd_serve.path.line import Line
from pd_serve.policy.admission import AdmissionRules


def gate(max_running: int = 1, max_queue: int = 10) -> tuple[Gate, CountingSink]:
    sink = CountingSink()
    return Gate(AdmissionRules(max_running=max_running, max_queue=max_queue), sink), sink


class Visitor:
    """One request at the gate; it stays until it is told to leave."""

    def __init__(self, to: Gate, until_s: float = 60.0) -> None:
        self.inside = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(to, time.monotonic() + until_s))

    async def _visit(self, to: Gate, until: float) -> None:
        async with to.admitted(until):
            self.inside = True
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    to, sink = gate(max_running=2)
    visitors = [Visitor(to) for _ in range(5)]
    for number, visitor in enumerate(visitors):
        await settle()
        assert [v.inside for v in visitors] == [n < number + 2 for n in range(5)]
        await visitor.leave()
    assert (to.load().running, to.load().queued) == (0, 0)
    assert sink.total("requests_accepted") == 5


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    to, sink = gate(max_queue=1)
    visitors = [Visitor(to) for _ in range(2)]
    await settle()
    with pytest.raises(Overloaded) as refused:
        async with to.admitted(time.monotonic() + 1):
            pytest.fail("it was let in")
    assert refused.value.retry_after_s == 1.0
    assert sink.total("requests_accepted") == 2
    for visitor in visitors:
        await visitor.leave()


async def test_the_wait_has_a_deadline() -> None:
    """Invariant 7."""
    to, sink = gate()
    first, late = Visitor(to), Visitor(to, until_s=0.02)
    with pytest.raises(DeadlineExceeded):
        await late.task
    assert (to.load().running, to.load().queued) == (1, 0)
    await first.leave()
    assert sink.last("requests_running") == sink.last("requests_queued") == 0


async def test_one_that_gave_up_is_passed_over_before_it_knows() -> None:
    """Two things in one turn of the loop: the running one leaves, and the next one is cancelled (case B27)."""
    to, sink = gate()
    first, gives_up, third = Visitor(to), Visitor(to), Visitor(to)
    await settle()
    first._leave.set()
    first.task.cancel()
    gives_up.task.cancel()
    await asyncio.gather(first.task, gives_up.task, return_exceptions=True)
    await settle()
    assert third.inside
    assert (to.load().running, to.load().queued) == (1, 0)
    await third.leave()
    assert sink.lowest() == 0


async def test_one_that_gives_up_when_it_is_let_in_passes_its_turn_on() -> None:
    to, _ = gate()
    first, let_in, third = Visitor(to), Visitor(to), Visitor(to)
    await settle()
    leaving = asyncio.create_task(first.leave())
    for _ in range(10):
        if to.load().queued == 1:
            break
        await asyncio.sleep(0)
    let_in.task.cancel()  # its turn has come, but it has not run since
    await asyncio.gather(leaving, let_in.task, return_exceptions=True)
    await settle()
    assert not let_in.inside
    assert third.inside
    await third.leave()
    assert (to.load().running, to.load().queued) == (0, 0)


# ---------------------------------------------------------------------------------------------------- the line


async def test_only_the_first_in_line_goes_on() -> None:
    line = Line()
    order: list[int] = []

    async def one(number: int) -> None:
        with line.place() as place:
            if number == 0:
                place.join()
            waited = await place.turn(time.monotonic() + 10)
            assert waited == (number > 0)
            order.append(number)
            await asyncio.sleep(0.001)
            assert order[-1] == number  # nobody else went on meanwhile

    await asyncio.gather(*(one(number) for number in range(5)))
    assert order == list(range(5))
    assert len(line) == 0


async def test_an_empty_line_stops_nobody() -> None:
    line = Line()
    with line.place() as place:
        assert not await place.turn(time.monotonic())
        assert len(line) == 0


async def test_those_who_leave_the_line_let_others_pass() -> None:
    line = Line()
    async with AsyncExitStack() as stack:
        first, second, third = (stack.enter_context(line.place()) for _ in range(3))
        first.join()
        waiting = [asyncio.create_task(place.turn(time.monotonic() + 10)) for place in (second, third)]
        await settle()
        waiting[0].cancel()
        second.leave()
        first.leave()
        first.leave()
        assert await waiting[1]
        third.join()
        assert not await third.turn(time.monotonic())
    assert len(line) == 0


async def test_a_turn_that_does_not_come_ends_with_the_budget() -> None:
    """Invariant 7."""
    line = Line()
    with line.place() as first, line.place() as second:
        first.join()
        with pytest.raises(DeadlineExceeded):
            await second.turn(time.monotonic() + 0.01)
