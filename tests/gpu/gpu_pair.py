"""A prefill and a decode engine on this machine's GPUs, each in a Ray actor as a Serve replica would hold it."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import ray

from pd_serve.config import AppConfig
from pd_serve.ops.check_host import visible_gpus
from pd_serve.ops.conformance_run import EXACT_FLOAT32
from pd_serve.types import Delta, PrefillResult, Request, Role
from tests.engine.vllm_pair import EngineActor, handoff, request
from tests.gpu.probe import PROBE

KV_CACHE_BYTES = 256 * 2**20
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def config(
    model: Path,
    dtype: str,
    *,
    num_gpus: float,
    tensor_parallel_size: int = 1,
    devices: tuple[str, str] | None = None,
    **engine_args: Any,
) -> AppConfig:
    """Small caches, prefill without graphs and decode with them.

    Args:
        devices: CUDA_VISIBLE_DEVICES of the prefill and of the decode engine, in place of what Ray gives them.
        engine_args: further ones of both pools.
    """
    pool = {
        "num_gpus": num_gpus,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": 0.1,
        "max_num_seqs": 16,
    }
    env = {**EXACT_FLOAT32, "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # that one would be compiled first
    prefill_env, decode_env = ({**env, "CUDA_VISIBLE_DEVICES": ids} for ids in devices) if devices else (env, env)
    shared = {"worker_extension_cls": PROBE, "kv_cache_memory_bytes": KV_CACHE_BYTES, **engine_args}
    return AppConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype, "block_size": 16, "max_model_len": 2048},
            "prefill": {**pool, "enforce_eager": True, "engine_args": shared, "env": prefill_env},
            "decode": {**pool, "engine_args": {**shared, "compilation_config": DECODE_GRAPHS}, "env": decode_env},
        }
    )


def share_of_a_gpu() -> float:
    """GPUs of each engine: one where there are enough for two engines, else half of the one there is."""
    return 1.0 if len(visible_gpus()) > 1 else 0.5


class GpuPair:
    """Starts both at once and waits.

    Args:
        ray_gpus: how many GPUs Ray reserves for each; None: as the config says.
    """

    def __init__(self, config: AppConfig, ray_gpus: float | None = None) -> None:
        self._numbers = itertools.count()
        self.config = config
        self._ray_gpus = ray_gpus
        self.prefill = self._actor(Role.PREFILL)
        self.decode = self._actor(Role.DECODE)
        self.source, self.target = ray.get([self.prefill.start.remote(), self.decode.start.remote()])

    def _actor(self, role: Role) -> Any:
        num_gpus = self.config.pools[role.value].num_gpus if self._ray_gpus is None else self._ray_gpus
        return EngineActor.options(num_gpus=num_gpus).remote(self.config.model_dump(), role.value)

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(engine.close.remote(), timeout=30)
            ray.kill(engine)

    def request(self, prompt: list[int], max_tokens: int = 12) -> Request:
        return request(f"r{next(self._numbers)}", prompt, max_tokens)

    def aggregated(self, *requests: Request) -> list[list[Delta]]:
        """Each computed by the decode engine alone, all at once, on empty prefix caches, which are empty afterwards."""
        self.forget_prefixes()
        deltas: list[list[Delta]] = ray.get([self.decode.decode.remote(r.leg("a")) for r in requests])
        self.forget_prefixes()
        return deltas

    def repeated(self, request: Request) -> list[Delta]:
        """Computed by the decode engine alone, the second time, with the prompt in its prefix cache."""
        self.forget_prefixes()
        ray.get(self.decode.decode.remote(request.leg("a")))
        deltas: list[Delta] = ray.get(self.decode.decode.remote(request.leg("b")))
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
