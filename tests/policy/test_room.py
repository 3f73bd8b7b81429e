from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pd_serve.policy.room import Load, Room

IDS = ["a", "b", "c"]
EVENTS = st.tuples(
    st.sampled_from(["grant", "start", "settle", "revoke", "wait"]),
    st.sampled_from(IDS),
    st.integers(1, 150),
    st.integers(1, 5),
)


@given(st.lists(EVENTS, max_size=40))
def test_promises_never_exceed_what_there_is(events: list[tuple[str, str, int, int]]) -> None:
    room, now = Room(kv_tokens=100, max_sequences=4), 0.0
    for kind, request_id, tokens, sequences in events:
        match kind:
            case "grant":
                room.grant(request_id, tokens, sequences, Load(), now, now + 10)
            case "wait":
                now += tokens / 10
                room.expire(now)
            case _:
                getattr(room, kind)(request_id)
        assert 0 <= room.reserved_tokens <= 100
        assert 0 <= room.reserved_sequences <= 4
    for request_id in IDS:
        room.settle(request_id)
    assert room.reserved_tokens == room.reserved_sequences == 0


@given(st.integers(1, 10**6), st.integers(1, 100))
def test_an_empty_engine_takes_any_single_request(tokens: int, sequences: int) -> None:
    assert Room(100, 4).grant("a", tokens, sequences, Load(), 0.0, 10.0) == ""


def test_what_the_engine_holds_counts() -> None:
    room = Room(100, 4)
    assert room.grant("a", 50, 1, Load(tokens=60), 0.0, 10.0) == "kv"
    assert room.grant("a", 40, 1, Load(tokens=60, sequences=4), 0.0, 10.0) == "sequences"
    assert room.grant("a", 40, 1, Load(tokens=60, sequences=3), 0.0, 10.0) == ""
    assert room.grant("b", 1, 1, Load(tokens=60), 0.0, 10.0) == "kv"


def test_a_grant_ends_by_expiry_only_until_it_is_started() -> None:
    room = Room(100, 4)
    room.grant("a", 100, 1, Load(), 0.0, 10.0)
    room.start("a")
    room.expire(11.0)
    room.revoke("a")
    assert room.reserved_tokens == 100
    assert room.reserved_sequences == 0  # the engine counts it now
    room.settle("a")
    room.grant("b", 100, 1, Load(), 11.0, 20.0)
    assert room.grant("c", 100, 1, Load(), 19.0, 30.0) == "kv"
    assert room.grant("c", 100, 1, Load(), 20.0, 30.0) == ""
