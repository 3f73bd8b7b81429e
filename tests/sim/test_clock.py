import pytest

from pd_serve.sim.clock import Clock, Streams


def test_events_run_in_the_order_of_their_times_and_then_of_asking():
    clock, seen = Clock(), []
    clock.at(2.0, seen.append, "late")
    clock.at(1.0, seen.append, "first")
    clock.at(1.0, seen.append, "second")
    clock.after(0.0, seen.append, "now")
    clock.run()
    assert seen == ["now", "first", "second", "late"]
    assert clock.now == 2.0
    assert clock.events == 4


def test_an_event_may_ask_for_more_in_the_same_moment():
    clock, seen = Clock(), []

    def first():
        clock.after(0.0, seen.append, "from first")
        seen.append("first")

    clock.at(1.0, first)
    clock.at(1.0, seen.append, "second")
    clock.run()
    assert seen == ["first", "second", "from first"]


def test_run_until_stops_before_later_events_and_goes_on_from_there():
    clock, seen = Clock(), []
    clock.at(1.0, seen.append, 1)
    clock.at(3.0, seen.append, 3)
    clock.run(until=2.0)
    assert (seen, clock.now, clock.pending) == ([1], 2.0, 1)
    clock.run()
    assert (seen, clock.now, clock.pending) == ([1, 3], 3.0, 0)


def test_stop_ends_the_run_after_the_present_event():
    clock, seen = Clock(), []
    clock.at(1.0, clock.stop)
    clock.at(1.0, seen.append, 1)
    clock.run()
    assert (seen, clock.pending) == ([], 1)


def test_the_past_is_refused():
    clock = Clock()
    clock.at(1.0, lambda: None)
    clock.run()
    with pytest.raises(ValueError, match="before now"):
        clock.at(0.5, lambda: None)


def test_streams_are_equal_by_name_and_seed_and_apart_otherwise():
    def numbers(seed, name):
        stream = Streams(seed).get(name)
        return [stream.random() for _ in range(5)]

    assert numbers(1, "router0") == numbers(1, "router0")
    assert numbers(1, "router0") != numbers(1, "router1")
    assert numbers(1, "router0") != numbers(2, "router0")
    assert numbers(0, "arrivals")[0] == pytest.approx(0.462075411)  # the same in every process
