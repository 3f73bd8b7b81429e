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
from pd_serve.types import (
    ChoiceDelta,
    Delta,
    EngineStats,
    Handoff,
    KvAddress,
    KvOutcome,
    KvReport,
    LogprobsAtPosition,
    NullSink,
    PrefillResult,
    Request,
    Sink,
    TokenLogprob,
    hash_tokens,
)

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


REQUEST = Request(
    id="cmpl-1.1d",
    prompt_token_ids=(1, 2, 3),
    max_tokens=5,
    n=2,
    sampling=b"\x80",
    cache_salt="salt",
    priority=-1,
    tenant="t",
    deadline=float("inf"),
    decode_only="echo",
    block_hashes=(b"\x00" * 32,),
)
ADDRESS = KvAddress("object_store", "engine-1", 2)
HANDOFF = Handoff(id="h", prompt_tokens=3, prompt_hash=b"\xff", source=ADDRESS, target=ADDRESS, lease_s=1.5)
LOGPROBS: LogprobsAtPosition = (TokenLogprob(1, -0.5, 1, "a"), TokenLogprob(2, -1.5, None, None))
REPORT = KvReport(outcome=KvOutcome.RECOMPUTED, reason="lost", bytes=2**40, blocks=3, wait_s=0.1, copy_s=0.2)
DELTAS = (
    Delta("r", ()),
    Delta("r", (ChoiceDelta(0, "", ()),)),
    Delta(
        "r",
        (
            ChoiceDelta(0, "\u00e9\n", (1, 2**40), "stop", 7),
            ChoiceDelta(1, "x", (3,), "stop", "END", -0.5, (LOGPROBS,)),
        ),
        finished=True,
        cached_tokens=16,
        prompt_logprobs=(None, LOGPROBS),
        kv=REPORT,
    ),
)
RESULT = PrefillResult(token_id=9, cached_tokens=1, computed_tokens=2, generated_tokens=1, kv_bytes=2**40, seconds=0.5)
ERROR = ErrorInfo("Overloaded", "full", None, 1.5)
TO_REPLICA: list[frames.ToReplica] = [
    frames.SubmitDecode(REQUEST, HANDOFF, 1.5, (4, 5)),
    frames.SubmitDecode(Request(id="r", prompt_token_ids=(), max_tokens=1), None, 1.5),
    frames.SubmitPrefill(REQUEST, HANDOFF, -1.0),
    frames.Abort("r"),
    frames.Withdraw("h", "prefill_EngineFailed"),
    frames.Ping(),
]
TO_INGRESS: list[frames.ToIngress] = [
    frames.Granted("r"),
    frames.Refused("r", ERROR),
    frames.Prefilled("r", RESULT),
    frames.Failed("r", ErrorInfo("EngineFailed", "\u00e9")),
    frames.Frame(DELTAS),
    frames.Frame(()),
    frames.Stats(EngineStats(waiting=1, kv_tokens_total=2**40), healthy=False, draining=True, reason="late"),
]


def test_every_kind_of_message_is_among_the_examples() -> None:
    assert {type(message) for message in TO_REPLICA} == set(get_args(frames.ToReplica))
    assert {type(message) for message in TO_INGRESS} == set(get_args(frames.ToIngress))


@pytest.mark.parametrize("message", TO_REPLICA, ids=lambda message: type(message).__name__)
def test_messages_to_replicas_survive_the_wire(message: frames.ToReplica) -> None:
    assert frames.decode_to_replica(frames.encode(message)) == message


@pytest.mark.parametrize("message", TO_INGRESS, ids=lambda message: type(message).__name__)
def test_messages_to_ingresses_survive_the_wire(message: frames.ToIngress) -> None:
    assert frames.decode_to_ingress(frames.encode(message)) == message


@given(ids, st.text(max_size=20), st.none() | st.integers(0, 2**31), st.booleans())
def test_any_tokens_and_text_survive_the_wire(
    token_ids: list[int], text: str, cached_tokens: int | None, finished: bool
) -> None:
    frame = frames.Frame((Delta("r", (ChoiceDelta(0, text, tuple(token_ids)),), finished, cached_tokens),))
    assert frames.decode_to_ingress(frames.encode(frame)) == frame


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
