"""A prefill and a decode engine on this machine's GPUs, each in a Ray actor as a Serve replica would hold it."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import ray

from pd_serve.config import AppConfig
from pd_serve.ops.check_host import visible_gpus
from pd_serve.types import Delta, PrefillResult, Request, Role
from tests.engine.vllm_pair import EngineActor, handoff, request
from tests.gpu.probe import PROBE

KV_CACHE_BYTES = 256 * 2**20
# Batches must not change greedy answers: nothing else would be comparable in bfloat16. FlashInfer would compile first.
ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def config(model: Path, *, num_gpus: float, tensor_parallel_size: int = 1, **engine_args: Any) -> AppConfig:
    """Small caches, prefill without graphs and decode with them.

    Args:
        engine_args: further ones of both pools.
    """
    pool = {
        "num_gpus": num_gpus,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": 0.1,
        "max_num_seqs": 16,
        "env": ENVIRONMENT,
    }
    shared = {"worker_extension_cls": PROBE, "kv_cache_memory_bytes": KV_CACHE_BYTES, **engine_args}
    return AppConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16", "block_size": 16, "max_model_len": 2048},
            "prefill": {**pool, "enforce_eager": True, "engine_args": shared},
            "decode": {**pool, "engine_args": {**shared, "compilation_config": DECODE_GRAPHS}},
        }
    )


def share_of_a_gpu() -> float:
    """GPUs of each engine: one where there are enough for two engines, else half of the one there is."""
    return 1.0 if len(visible_gpus()) > 1 else 0.5


class GpuPair:
    """Starts both at once and waits."""

    def __init__(self, config: AppConfig) -> None:
        self._numbers = itertools.count()
        self.config = config
        self.prefill = self._actor(Role.PREFILL)
        self.decode = self._actor(Role.DECODE)
        self.source, self.target = ray.get([self.prefill.start.remote(), self.decode.start.remote()])

    def _actor(self, role: Role) -> Any:
        num_gpus = self.config.pools[role.value].num_gpus
        return EngineActor.options(num_gpus=num_gpus).remote(self.config.model_dump(), role.value)

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(engine.close.remote(), timeout=30)
            ray.kill(engine)

    def request(self, prompt: list[int], max_tokens: int = 12) -> Request:
        return request(f"r{next(self._numbers)}", prompt, max_tokens)

    def aggregated(self, *requests: Request) -> list[list[Delta]]:
        """Each computed by the decode engine alone, all at once, on empty prefix caches."""
        self.forget_prefixes()
        deltas: list[list[Delta]] = ray.get([self.decode.decode.remote(r.leg("a")) for r in requests])
        self.forget_prefixes()
        return deltas

    def both(self, *requests: Request) -> list[tuple[PrefillResult, list[Delta]]]:
        """Each handed over, all at once."""
        handoffs = [handoff(r, self.source, self.target) for r in requests]
        decoded = [self.decode.decode.remote(r.leg("d"), h) for r, h in zip(requests, handoffs, strict=True)]
        computed = [self.prefill.prefill.remote(r.leg("p"), h) for r, h in zip(requests, handoffs, strict=True)]
        return list(zip(ray.get(computed), ray.get(decoded), strict=True))

    def forget_prefixes(self) -> None:
        ray.get([self.prefill.reset_prefix_cache.remote(), self.decode.reset_prefix_cache.remote()])

    def probe(self, engine: Any) -> dict[str, Any]:
        found: dict[str, Any] = ray.get(engine.rpc.remote("pd_test_probe"))
        return found

    def held(self) -> list[int]:
        return [stats.handoffs_held for stats in ray.get([self.prefill.stats.remote(), self.decode.stats.remote()])]
