"""What is served with: bfloat16, FlashAttention, graphs for decode; and the settings of a pool reach its engine."""

from __future__ import annotations

import subprocess
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


@pytest.fixture(scope="module")
def pair(ray_cluster: None, models: Path) -> Iterator[GpuPair]:
    """Prefill on the last GPU and decode on the first, the other way round than Ray would have it."""
    from tests.gpu.gpu_pair import GpuPair, config, share_of_a_gpu

    gpus = visible_gpus()
    pair = GpuPair(config(models / "small", "bfloat16", num_gpus=share_of_a_gpu(), devices=(gpus[-1], gpus[0])))
    yield pair
    pair.close()


@pytest.mark.parametrize("length", [B + 1, 4 * B + 1, 12 * B + 1, 100 * B + 1])
def test_moved_blocks_are_as_good_as_cached_ones(pair: GpuPair, length: int) -> None:
    """Only the last token is computed both times, so that the same kernels run and the numbers are the same."""
    request = pair.request(fresh_prompt(length), 16)
    expected = pair.repeated(request)
    assert expected[0].cached_tokens == length - 1
    [(_, deltas)] = pair.both(request)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == "moved"
    assert deltas[0].cached_tokens == 0
    assert pair.held() == [0, 0]


def test_enforce_eager_decides_on_graphs(pair: GpuPair) -> None:
    eager, graphs = pair.probe(pair.prefill), pair.probe(pair.decode)
    assert (eager["cudagraph_mode"], eager["graphs"]) == ("NONE", 0)
    assert graphs["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert graphs["graphs"] > 0


def test_each_engine_is_on_the_gpu_that_its_pool_names(pair: GpuPair) -> None:
    uuids = gpu_uuids()
    prefill, decode = pair.probe(pair.prefill), pair.probe(pair.decode)
    assert (prefill["device"], decode["device"]) == ("cuda", "cuda")
    assert (prefill["visible"], decode["visible"]) == (1, 1)
    assert (prefill["uuid"], decode["uuid"]) == (uuids[-1], uuids[0])


def gpu_uuids() -> list[str]:
    """In the order of CUDA_VISIBLE_DEVICES' numbers."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", ",".join(visible_gpus())]
    found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return [uuid.removeprefix("GPU-") for uuid in found]
