"""A mixture of experts, spread over two GPUs where there are two: its KV moves, and each rank has its part."""

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

EXPERTS = 8
RANKS = min(2, len(visible_gpus()))


@pytest.fixture(scope="module")
def pair(ray_cluster: None, models: Path) -> Iterator[GpuPair]:
    """Both engines on the same GPUs, which Ray cannot give to two: the pools name them."""
    from tests.gpu.gpu_pair import GpuPair, config

    gpus = ",".join(visible_gpus()[:RANKS])
    app = config(
        models / "small-moe",
        "float32",
        num_gpus=RANKS,
        tensor_parallel_size=RANKS,
        devices=(gpus, gpus),
        enable_expert_parallel=True,
    )
    pair = GpuPair(app, ray_gpus=0)
    yield pair
    pair.close()


def test_prompts_handed_over_equal_one_engine(pair: GpuPair) -> None:
    requests = [pair.request(fresh_prompt(200 + 37 * number), 16) for number in range(4)]
    expected = pair.aggregated(*requests)
    results = pair.both(*requests)
    assert [ids(deltas) for _, deltas in results] == [ids(deltas) for deltas in expected]
    assert {outcome(deltas) for _, deltas in results} == {"moved"}


def test_expert_parallelism_reaches_both_engines(pair: GpuPair) -> None:
    for engine in (pair.prefill, pair.decode):
        found = pair.probe(engine)
        assert found["expert_parallel"] is True
        assert found["experts_here"] == [EXPERTS // RANKS]
