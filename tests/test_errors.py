"""Errors keep their class across every hop and have one line in one table."""

from __future__ import annotations

import inspect

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve import errors
from pd_serve.errors import EngineFailed, ErrorInfo, PdServeError, from_wire, http_table, type_name

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, PdServeError) and cls is not PdServeError
]
texts = st.text(max_size=40)


def test_every_error_is_in_the_table() -> None:
    assert {name for name, *_ in http_table()} == {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_status_and_openais_shape(cls: type[PdServeError]) -> None:
    assert 400 <= cls.status < 600
    body = cls("it went wrong", param="prompt").to_openai()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == "it went wrong"
    assert body["error"]["type"]
    assert body["error"]["code"]


@given(st.sampled_from(CLASSES), texts, st.none() | texts, st.none() | st.floats(0, 100))
def test_an_error_survives_a_hop(
    cls: type[PdServeError], message: str, param: str | None, retry_after_s: float | None
) -> None:
    error = cls(message, param=param, retry_after_s=retry_after_s)
    data = msgspec.msgpack.encode(error.to_wire())
    arrived = from_wire(msgspec.msgpack.decode(data, type=ErrorInfo))
    assert type(arrived) is cls
    assert (arrived.message, arrived.param, arrived.retry_after_s) == (message, param, retry_after_s)
    assert arrived.to_openai() == error.to_openai()
    assert type_name(arrived) == cls.__name__


def test_an_error_of_another_version_is_the_engines() -> None:
    assert type(from_wire(ErrorInfo("SomethingNew", "x"))) is EngineFailed


def test_a_fault_of_the_request_is_not_the_replicas() -> None:
    """Invariant 10: only an engine's own failure counts against its replica."""
    blaming = {cls.__name__ for cls in CLASSES if cls.blames_replica}
    assert blaming == {"EngineFailed", "ReplicaLost"}
    assert all(cls.status >= 500 for cls in CLASSES if cls.blames_replica)


def test_what_the_client_may_retry_is_told_apart_from_what_it_may_not() -> None:
    statuses = {name: status for name, status, *_ in http_table()}
    assert statuses["InvalidRequest"] == 400
    assert statuses["Overloaded"] == 429
    assert statuses["NoReplica"] == statuses["Draining"] == 503
    assert statuses["DeadlineExceeded"] == 504
