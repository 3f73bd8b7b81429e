"""Config to vLLM's engine arguments and environment: pure."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_serve.config import AppConfig, Pool
from pd_serve.types import Role

CONNECTOR_MODULE = "pd_serve.kv.connector"
WORKER_EXTENSION = "pd_serve.kv.connector_extension.KvExtension"


class KvSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What one life of an engine knows about its KV connector."""

    ray_address: str
    engine_id: str
    identity: str
    parent_pid: int


def pool_of(config: AppConfig, role: Role) -> Pool:
    """Raises KeyError when the config has no such pool."""
    return config.pools[role.value]


def engine_args(config: AppConfig, role: Role, *, model: str, kv: KvSetup | None) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs; `kv_transfer_config` as a dict.

    What a pool's `engine_args` say wins over `model.engine_args`, and both over what is derived here.

    Args:
        model: what `model.path` resolved to.
        kv: None for an engine that hands nothing over.
    """
    pool = pool_of(config, role)
    arguments: dict[str, Any] = {
        "model": model,
        "served_model_name": config.model.served_name,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "block_size": config.model.block_size,
        "kv_cache_dtype": config.model.kv_cache_dtype,
        "tensor_parallel_size": pool.tensor_parallel_size,
        "max_num_seqs": pool.max_num_seqs,
        "max_num_batched_tokens": max(pool.max_num_batched_tokens, pool.max_num_seqs),
        "enable_prefix_caching": pool.enable_prefix_caching,
        "enforce_eager": pool.enforce_eager,
        "disable_log_stats": True,
    }
    if pool.num_gpus == 0:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": int(pool.cpu_kv_cache_gib * 2**30)}
    else:
        arguments["gpu_memory_utilization"] = pool.gpu_memory_utilization
    if pool.tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = "uni"
    if kv is not None:
        arguments["worker_extension_cls"] = WORKER_EXTENSION
        arguments["kv_transfer_config"] = _kv_transfer_config(config, role, kv)
    return arguments | config.model.engine_args | pool.engine_args


def environment(config: AppConfig, role: Role, *, offline: bool) -> dict[str, str]:
    """Environment variables that vLLM reads when it is imported; what a pool's `env` says wins.

    Args:
        offline: the model is local, nothing has to be fetched.
    """
    pool = pool_of(config, role)
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if offline:
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if pool.tensor_parallel_size == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and worker in one child: starts in half the time
    if pool.num_gpus == 0:
        # Several engines share the machine: `auto` would bind all of them to the same cores.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, int(pool.num_cpus)))}
    return variables | pool.env


def _kv_transfer_config(config: AppConfig, role: Role, kv: KvSetup) -> dict[str, Any]:
    return {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
        "engine_id": kv.engine_id,
        "kv_load_failure_policy": config.kv.load_failure_policy,
        "kv_connector_extra_config": {
            "role": role.value,
            "transport": transport_of(config),
            "ray_address": kv.ray_address,
            "engine_id": kv.engine_id,
            "identity": kv.identity,
            "checksum": config.kv.checksum,
            "parent_pid": kv.parent_pid,
        },
    }


def transport_of(config: AppConfig) -> str:
    """The transport that `auto` stands for: the fastest that both pools have."""
    return "object_store" if config.kv.transport == "auto" else config.kv.transport
