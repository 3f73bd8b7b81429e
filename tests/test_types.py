"""Messages: what they carry survives the wire; what identifies a prompt tells prompts apart."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.errors import ErrorInfo
from pd_serve.path import frames
from pd_serve.types import Delta, EngineStats, NullSink, Request, Sink, hash_tokens

ids = st.lists(st.integers(0, 2**40), max_size=20)
salts = st.none() | st.text(max_size=8)


@given(ids, salts)
def test_a_hash_depends_on_every_token_and_the_salt(token_ids: list[int], salt: str | None) -> None:
    whole = hash_tokens(token_ids, salt)
    assert whole == hash_tokens(tuple(token_ids), salt)
    assert len(whole) == 32
    assert whole != hash_tokens([*token_ids, 0], salt)
    assert whole != hash_tokens(token_ids, (salt or "") + "x")
    if len(set(token_ids)) > 1:
        assert whole != hash_tokens(token_ids[1:] + token_ids[:1], salt) or token_ids[1:] + token_ids[:1] == token_ids


def test_fields_do_not_run_into_each_other() -> None:
    """Case B79: joins such as [1, 23] and [12, 3], or a salt that looks like tokens."""
    joins = [([1, 23], None), ([12, 3], None), ([123], None), ([3], "12"), ([], "123"), ([], "\x01"), ([1], "")]
    assert len({hash_tokens(token_ids, salt) for token_ids, salt in joins}) == len(joins)


def test_a_hash_is_the_same_in_every_process() -> None:
    """Case B79: whatever PYTHONHASHSEED is, prefill and decode agree."""
    code = "from pd_serve.types import hash_tokens; print(hash_tokens([1, 2, 3], 's').hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert seen == {hash_tokens([1, 2, 3], "s").hex()}


def test_a_leg_has_its_own_id_and_everything_else_of_its_request() -> None:
    asked = Request(id="r", prompt_token_ids=(1, 2), max_tokens=3, tenant="t", cache_salt="s", sampling=b"x")
    leg = asked.leg("1d")
    assert leg.id == "r.1d"
    assert msgspec.structs.replace(leg, id="r") == asked


def _values(of: object) -> st.SearchStrategy[object]:
    return st.from_type(of)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", get_args(frames.ToReplica), ids=lambda kind: kind.__name__)
def test_messages_to_replicas_survive_the_wire(kind: type[frames.ToReplica]) -> None:
    @given(_values(kind))
    def check(message: frames.ToReplica) -> None:
        assert frames.decode_to_replica(frames.encode(message)) == message

    check()


@pytest.mark.parametrize("kind", get_args(frames.ToIngress), ids=lambda kind: kind.__name__)
def test_messages_to_ingresses_survive_the_wire(kind: type[frames.ToIngress]) -> None:
    @given(_values(kind))
    def check(message: frames.ToIngress) -> None:
        assert frames.decode_to_ingress(frames.encode(message)) == message

    check()


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    for decode in (frames.decode_to_replica, frames.decode_to_ingress):
        try:
            decode(data)
        except msgspec.DecodeError:
            continue


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        frames.decode_to_replica(frames.encode(frames.Granted("r")))
    with pytest.raises(msgspec.DecodeError):
        frames.decode_to_ingress(frames.encode(frames.Ping()))


def test_a_deadline_is_moved_to_the_receivers_clock() -> None:
    asked = Request(id="r", prompt_token_ids=(1,), max_tokens=1, deadline=time.monotonic() + 5.0)
    assert 4.9 < frames.budget(asked) <= 5.0
    moved = frames.rebase(asked, 5.0)
    assert 4.9 < moved.deadline - time.monotonic() <= 5.0
    endless = frames.budget(Request(id="r", prompt_token_ids=(1,), max_tokens=1))
    assert 0 < endless < float("inf")
    assert frames.rebase(asked, -1.0).deadline < time.monotonic()


def test_a_token_costs_tens_of_bytes() -> None:
    from pd_serve.types import ChoiceDelta

    deltas = tuple(Delta(f"cmpl-{n:032x}-0.1d", (ChoiceDelta(0, " word", (31_337,)),)) for n in range(64))
    assert len(frames.encode(frames.Frame(deltas))) / 64 < 80


def test_what_is_quiescent_is_zero() -> None:
    assert not any(msgspec.structs.astuple(EngineStats()))


def test_counting_nowhere() -> None:
    sink: Sink = NullSink()
    sink.count("a", 1.0, b="c")
    sink.observe("a", 1.0)
    sink.gauge("a", 1.0)
    assert ErrorInfo("EngineFailed", "x").retry_after_s is None
