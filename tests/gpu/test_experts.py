"""A mixture of experts: its KV moves like any other, and expert parallelism reaches the engine."""

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


@pytest.fixture(scope="module")
def pair(ray_cluster: None, models: Path) -> Iterator[GpuPair]:
    from tests.gpu.gpu_pair import GpuPair, config, share_of_a_gpu

    pair = GpuPair(config(models / "small-moe", num_gpus=share_of_a_gpu(), enable_expert_parallel=True))
    yield pair
    pair.close()


def test_a_prompt_handed_over_equals_one_engine(pair: GpuPair) -> None:
    requests = [pair.request(fresh_prompt(200 + 37 * number), 16) for number in range(4)]
    expected = pair.aggregated(*requests)
    results = pair.both(*requests)
    assert [ids(deltas) for _, deltas in results] == [ids(deltas) for deltas in expected]
    assert {outcome(deltas) for _, deltas in results} == {"moved"}


def test_the_flag_reaches_both_engines(pair: GpuPair) -> None:
    for engine in (pair.prefill, pair.decode):
        found = pair.probe(engine)
        assert found["expert_parallel"] is True
        assert found["experts_here"] == {EXPERTS}  # one rank has them all


@pytest.mark.skipif(len(visible_gpus()) < 2, reason="needs two GPUs")
def test_experts_are_split_over_the_ranks(ray_cluster: None, models: Path) -> None:
    import ray

    from tests.gpu.gpu_pair import EngineActor, config

    ray.get(ray.remote(num_gpus=2)(_nothing).remote())  # once the pair has left its GPUs
    app = config(models / "small-moe", num_gpus=2, tensor_parallel_size=2, enable_expert_parallel=True)
    engine = EngineActor.options(num_gpus=2).remote(app.model_dump(), "decode")
    ray.get(engine.start.remote())
    found = ray.get(engine.rpc.remote("pd_test_probe"))
    assert found["expert_parallel"] is True
    assert found["experts_here"] == {EXPERTS // 2}
    ray.get(engine.close.remote())
    ray.kill(engine)


def _nothing() -> None:
    pass
