"""What happens next to a request when something went wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve import errors
from pd_serve.errors import Draining, EngineFailed, NoReplica, Overloaded, PdServeError, ReplicaLost
from pd_serve.policy.lifecycle import MAX_RETRIES, Fail, Progress, Retry, Wait, after_decode_failure, without_plan

ALL = [errors.from_wire(errors.ErrorInfo(name, "it went wrong")) for name, *_ in errors.http_table()]
any_error = st.sampled_from(ALL)


@pytest.mark.parametrize("error", [EngineFailed("x"), ReplicaLost("x"), Draining("x")])
def test_a_replica_that_failed_or_leaves_is_not_asked_again(error: PdServeError) -> None:
    step = after_decode_failure(error, "d1", Progress(tried=frozenset({"d0"})))
    assert step == Retry(Progress(1, frozenset({"d0", "d1"}), last_error=error), type(error).__name__)


def test_want_of_room_asks_the_others_then_waits_and_costs_no_retry() -> None:
    before = Progress(retries=MAX_RETRIES, tried=frozenset({"d0"}))
    step = after_decode_failure(Overloaded("full"), "d1", before)
    assert step == Retry(Progress(MAX_RETRIES, frozenset({"d0"}), refused=frozenset({"d1"})), "decode_full")
    assert step.progress.avoid == {"d0", "d1"}
    assert without_plan("no decode replica is ready", 1e9, 10.0, step.progress) == Wait("decode_full")


@pytest.mark.parametrize("error", [e for e in ALL if not isinstance(e, EngineFailed | Draining | Overloaded)])
def test_everything_else_is_the_clients_to_know(error: PdServeError) -> None:
    assert after_decode_failure(error, "d1", Progress()) == Fail(error)


@given(any_error, st.integers(0, 5), st.integers(1, 1000))
def test_after_the_first_token_every_error_ends_the_request(error: PdServeError, retries: int, emitted: int) -> None:
    """Invariant 3: nothing is generated anew once the client has a token."""
    assert after_decode_failure(error, "d", Progress(retries, frozenset(), emitted)) == Fail(error)


@given(st.lists(any_error, max_size=40))
def test_attempts_are_bounded_whatever_happens(failures: list[PdServeError]) -> None:
    """Invariant 7: at most MAX_RETRIES attempts after the first, each on a replica that was not tried."""
    progress, attempts = Progress(), 0
    for number, error in enumerate(failures):
        attempts += not isinstance(error, Overloaded)
        step = after_decode_failure(error, f"d{number}", progress)
        if isinstance(step, Fail):
            assert step.error is error
            break
        assert len(step.progress.avoid) == len(progress.avoid) + 1
        progress = step.progress
    assert attempts <= MAX_RETRIES + 1


def test_no_replica_is_waited_for_but_not_for_ever() -> None:
    assert without_plan("there is no decode replica", 9.9, 10.0, Progress()) == Wait("no_replica")
    step = without_plan("there is no decode replica", 10.0, 10.0, Progress())
    assert isinstance(step, Fail)
    assert isinstance(step.error, NoReplica)
    assert step.error.retry_after_s == 10.0


def test_when_all_that_were_tried_failed_the_client_hears_how() -> None:
    failed = EngineFailed("it fell over")
    step = without_plan("no decode replica is ready", 10.0, 10.0, Progress(1, frozenset({"d"}), last_error=failed))
    assert step == Fail(failed)
