from __future__ import annotations

import json

import msgspec
import pytest

from pd_serve.kv.params import EXTRA_ARG, HandoffParams, blocks_to_move, from_transfer_params, to_extra_args
from pd_serve.types import Handoff, KvAddress, Role, hash_tokens

HANDOFF = Handoff(
    id="h",
    prompt_tokens=3,
    prompt_hash=hash_tokens([1, 2, 3]),
    source=KvAddress("object_store", "p"),
    target=KvAddress("object_store", "d", 2),
    lease_s=2.5,
)


@pytest.mark.parametrize("role", list(Role))
def test_a_handoff_travels_as_plain_data(role: Role) -> None:
    params = HandoffParams(role, HANDOFF)
    travelled = json.loads(json.dumps(to_extra_args(params)))
    assert from_transfer_params(travelled[EXTRA_ARG]) == params


@pytest.mark.parametrize("foreign", [None, {}, {"do_remote_prefill": True}])
def test_requests_without_a_handoff(foreign: dict[str, object] | None) -> None:
    assert from_transfer_params(foreign) is None


@pytest.mark.parametrize("wrong", [1, {}, {"role": "decode"}, {"role": "x", "handoff": {}}])
def test_wrong_data_is_refused(wrong: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_transfer_params({"pd_serve": wrong})


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 0), (2, 1), (15, 1), (16, 1), (17, 1), (18, 2), (32, 2), (33, 2), (34, 3)]
)
def test_the_last_token_is_never_worth_a_block(tokens: int, blocks: int) -> None:
    assert blocks_to_move(tokens, 16) == blocks
