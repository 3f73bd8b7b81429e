"""What vLLM's exceptions and outputs mean, without an engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm import exceptions  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402

from pd_serve import compat  # noqa: E402
from pd_serve.engine.vllm_calls import typed_errors  # noqa: E402
from pd_serve.engine.vllm_monitor import NOT_REPORTED  # noqa: E402
from pd_serve.engine.vllm_outputs import delta  # noqa: E402
from pd_serve.errors import EngineFailed, InvalidRequest  # noqa: E402
from pd_serve.types import KvOutcome, KvReport, Request  # noqa: E402

HAS_CLASS = hasattr(exceptions, "VLLMClientError")
REFUSED = exceptions.VLLMValidationError("top_k must be positive", parameter="top_k")
RECOMPUTED = KvReport(outcome=KvOutcome.RECOMPUTED, reason="expired")


def test_what_vllm_refuses_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequest) as caught, typed_errors("the engine failed"):
        raise REFUSED
    assert caught.value.param == "top_k"


def test_a_bare_value_error_is_the_requests_fault_only_where_vllm_has_no_class_for_it() -> None:
    with pytest.raises(EngineFailed if HAS_CLASS else InvalidRequest), typed_errors("the engine failed"):
        raise ValueError("not enough values to unpack")


def test_where_vllm_has_no_class_for_it_a_value_error_is_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(exceptions, "VLLMClientError", raising=False)
    assert compat.is_request_error(ValueError())
    assert not compat.is_request_error(RuntimeError())


@pytest.mark.parametrize("error", [REFUSED, ValueError("bad")])
def test_a_call_of_no_request_fails_by_the_engines_fault(error: Exception) -> None:
    with pytest.raises(EngineFailed), typed_errors("the engine failed", its_fault=True):
        raise error


def step(*, finished: bool = False) -> RequestOutput:
    choice = CompletionOutput(0, "x", [5], None, None, finish_reason="length" if finished else None)
    return RequestOutput("r", None, [1, 2, 3], None, [choice], finished, num_cached_tokens=0)


def told(kvs: list[KvReport]) -> list[KvReport | None]:
    """What the deltas of as many steps carry, when this was known at each."""
    request, before, carried = Request(id="r", prompt_token_ids=(1, 2, 3), max_tokens=9), None, list[KvReport | None]()
    for number, kv in enumerate(kvs):
        output = step(finished=number == len(kvs) - 1)
        carried.append(delta(output, request, kv, before, first=number == 0, block_size=16).kv)
        before = carried[-1] or before
    return carried


def test_invariant_8_the_report_goes_with_the_first_and_the_last_delta() -> None:
    assert told([RECOMPUTED] * 4) == [RECOMPUTED, None, None, RECOMPUTED]
    assert told([RECOMPUTED]) == [RECOMPUTED]


def test_a_report_that_comes_after_the_first_output_goes_with_the_next_delta() -> None:
    hit = KvReport(outcome=KvOutcome.LOCAL, reason="prefix_hit")
    assert told([NOT_REPORTED, hit, hit, hit]) == [None, hit, None, hit]
    assert told([NOT_REPORTED, NOT_REPORTED]) == [None, NOT_REPORTED]
