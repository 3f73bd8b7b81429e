"""The prefill clamp, the way of sampling parameters, and outputs: with vLLM's own types, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from pd_serve import compat
from pd_serve.engine import handoff as legs
from pd_serve.engine.vllm_resume import resumable, resumed
from pd_serve.errors import InvalidRequest
from pd_serve.kv.params import EXTRA_ARG, from_transfer_params
from pd_serve.types import Handoff, KvAddress, Request, Role

pytestmark = pytest.mark.vllm

HANDOFF = Handoff(
    id="h",
    prompt_tokens=3,
    prompt_hash=b"x" * 32,
    source=KvAddress("object_store", "p"),
    target=KvAddress("object_store", "d"),
    lease_s=2.0,
)

RICH: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "max_tokens": 33,
    "min_tokens": 4,
    "logprobs": 3,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {1: 2.0},
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["x"],
    "extra_args": {"k": [1, {"z": None}]},
}


def test_sampling_parameters_survive_the_wire() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    for fields in [{}, RICH, {"structured_outputs": StructuredOutputsParams(json={"type": "object"})}]:
        params = compat.new_sampling(**fields)
        assert compat.decode_sampling(compat.encode_sampling(params)) == params


@pytest.mark.case("B01")
@pytest.mark.case("B03")
@pytest.mark.case("B04")
def test_the_prefill_leg_is_built_from_an_allow_list() -> None:
    """Every field but these has the engine's default: a field that vLLM adds tomorrow cannot leak in."""
    params, default = legs.prefill_sampling(HANDOFF), compat.new_sampling()
    changed = {name for name in params.__struct_fields__ if getattr(params, name) != getattr(default, name)}
    greedy = compat.new_sampling(temperature=0.0)
    by_greedy = {name for name in greedy.__struct_fields__ if getattr(greedy, name) != getattr(default, name)}
    assert changed - by_greedy == {"max_tokens", "ignore_eos", "detokenize", "extra_args"}
    assert (params.max_tokens, params.temperature, params.ignore_eos, params.n) == (1, 0.0, True, 1)
    travelled = from_transfer_params(params.extra_args[EXTRA_ARG])
    assert travelled is not None
    assert (travelled.role, travelled.handoff) == (Role.PREFILL, HANDOFF)


@pytest.mark.case("B26")
@pytest.mark.parametrize("handoff", [HANDOFF, None])
def test_what_the_caller_put_in_place_of_a_handoff_is_dropped(handoff: Handoff | None) -> None:
    evil = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1}
    params = legs.decode_sampling(compat.new_sampling(extra_args={EXTRA_ARG: evil, "mine": 1}), handoff)
    assert params.extra_args["mine"] == 1
    travelled = from_transfer_params(params.extra_args.get(EXTRA_ARG))
    assert (travelled.handoff if travelled else None) == handoff
    assert "remote_host" not in str(params.extra_args)


def test_deltas_are_asked_for_with_the_requests_own_bounds() -> None:
    from vllm.sampling_params import RequestOutputKind

    params = compat.as_deltas(compat.new_sampling(max_tokens=5, n=1), 9, 2)
    assert (params.output_kind, params.max_tokens, params.n) == (RequestOutputKind.DELTA, 9, 2)


@pytest.mark.parametrize("field", sorted(RICH.keys() & {
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "stop", "min_tokens", "logprobs",
    "prompt_logprobs", "bad_words",
}))  # fmt: skip
def test_going_on_is_refused_where_it_would_not_be_exact(field: str) -> None:
    fields = {"temperature": 0.0, field: RICH[field]}
    if field == "n":
        fields["temperature"] = 1.0
    assert not resumable(compat.new_sampling(**fields))


def test_going_on_makes_the_emitted_tokens_part_of_the_prompt() -> None:
    request = Request(id="r", prompt_token_ids=(1, 2), max_tokens=10)
    params = compat.as_deltas(compat.new_sampling(temperature=0.0), 10, 1)
    assert resumable(params)
    longer, left = resumed(request, params, (3, 4, 5))
    assert (longer.prompt_token_ids, longer.max_tokens, left.max_tokens) == ((1, 2, 3, 4, 5), 7, 7)
    with pytest.raises(InvalidRequest):
        resumed(request, params, tuple(range(10)))


def test_bad_sampling_bytes_are_the_requests_fault() -> None:
    import msgspec

    with pytest.raises(msgspec.MsgspecError):
        compat.decode_sampling(b"\xc1")
    bad = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(Exception) as caught:
        compat.decode_sampling(bad)
    assert isinstance(caught.value, msgspec.MsgspecError) or compat.is_request_error(caught.value)
