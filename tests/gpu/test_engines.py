"""Prefill and decode apart on CUDA, in float32: equal to one engine doing both, for any prompt and batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pd_serve.ops.check_host import visible_gpus
from tests.engine.vllm_asks import fresh_prompt, ids, outcome

if TYPE_CHECKING:
    from tests.gpu.gpu_pair import GpuPair

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(400)]

B = 16
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 4
"""Of the model `small`: layers, k and v, heads, head size, bytes of a number."""
LENGTHS = [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 200, 1500]


@pytest.fixture(scope="module")
def pair(ray_cluster: None, models: Path) -> Iterator[GpuPair]:
    from tests.gpu.gpu_pair import GpuPair, config, share_of_a_gpu

    pair = GpuPair(config(models / "small", "float32", num_gpus=share_of_a_gpu()))
    yield pair
    pair.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_one_request_alone_equals_one_engine(pair: GpuPair, length: int) -> None:
    request = pair.request(fresh_prompt(length), 16)
    [expected] = pair.aggregated(request)
    [(prefilled, deltas)] = pair.both(request)
    assert ids(deltas) == ids(expected)
    assert ids(deltas)[0] == prefilled.token_id
    blocks = -(-(length - 1) // B)
    assert outcome(deltas) == ("moved" if blocks else "local:prefix_hit")
    assert deltas[-1].kv.bytes == prefilled.kv_bytes == blocks * B * KV_BYTES_PER_TOKEN
    assert pair.held() == [0, 0]


def test_many_at_once_equal_one_engine(pair: GpuPair) -> None:
    requests = [pair.request(fresh_prompt(20 + 90 * number), 16) for number in range(16)]
    expected = pair.aggregated(*requests)
    results = pair.both(*requests)
    assert [ids(deltas) for _, deltas in results] == [ids(deltas) for deltas in expected]
    assert {outcome(deltas) for _, deltas in results} == {"moved"}
    assert pair.held() == [0, 0]


def test_only_blocks_that_the_decode_engine_lacks_are_moved(pair: GpuPair) -> None:
    head, tail = fresh_prompt(3 * B), fresh_prompt(2 * B)
    request = pair.request(head + tail)
    [expected] = pair.aggregated(request)
    pair.both(pair.request(head + fresh_prompt(2)))
    [(prefilled, deltas)] = pair.both(pair.request(head + tail))
    assert ids(deltas) == ids(expected)
    assert (prefilled.cached_tokens, deltas[-1].kv.blocks) == (3 * B, 2)


def test_each_engine_has_the_gpu_that_ray_gave_it(pair: GpuPair) -> None:
    prefill, decode = pair.probe(pair.prefill), pair.probe(pair.decode)
    assert (prefill["visible"], decode["visible"]) == (1, 1)
    assert (prefill["uuid"] != decode["uuid"]) == (len(visible_gpus()) > 1)
