"""Starting one life of a vLLM engine."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

from pd_serve import compat
from pd_serve.config import AppConfig
from pd_serve.engine.base import EngineDescription
from pd_serve.engine.vllm_args import KvSetup, engine_args, environment, pool_of, transport_of
from pd_serve.engine.vllm_calls import describe_kv
from pd_serve.engine.vllm_identity import identity
from pd_serve.model_dir import is_hub_name, resolve_model
from pd_serve.types import KvAddress, Role

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from pd_serve.engine.vllm_monitor import Monitor


class Started:
    """A running engine: `llm`, its `monitor`, its `description`, and the bytes of one KV block of all layers and ranks.

    `block_bytes` is 0 without a KV connector.
    """

    def __init__(self, llm: AsyncLLM, monitor: Monitor, description: EngineDescription, block_bytes: int) -> None:
        self.llm = llm
        self.monitor = monitor
        self.description = description
        self.block_bytes = block_bytes


async def start_vllm(config: AppConfig, role: Role, ray_address: str) -> Started:
    """Load the model. Blocks the event loop meanwhile: AsyncLLM belongs to the loop that it is made on.

    Sets the environment variables that vLLM reads when it is imported.
    """
    model = resolve_model(config.model.path)
    os.environ.update(environment(config, role, offline=not is_hub_name(config.model.path)))
    kv = _kv_setup(config, role, model, ray_address)
    llm, monitor = _make_llm(engine_args(config, role, model=model, kv=kv))
    try:
        return await _describe(config, role, llm, monitor, kv)
    except BaseException:
        llm.shutdown()
        raise


def _kv_setup(config: AppConfig, role: Role, model: str, ray_address: str) -> KvSetup | None:
    if config.prefill is None:
        return None
    arguments = engine_args(config, role, model=model, kv=None)
    return KvSetup(
        ray_address=ray_address,
        engine_id=uuid.uuid4().hex,
        identity=identity(model, arguments, compat.engine_version()),
        parent_pid=os.getpid(),
    )


def _make_llm(arguments: dict[str, Any]) -> tuple[AsyncLLM, Monitor]:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from pd_serve.engine.vllm_monitor import Monitor

    if isinstance(transfer := arguments.get("kv_transfer_config"), dict):
        arguments = arguments | {"kv_transfer_config": KVTransferConfig(**transfer)}
    monitor = Monitor()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[lambda *_args: monitor])
    return llm, monitor


async def _describe(config: AppConfig, role: Role, llm: AsyncLLM, monitor: Monitor, kv: KvSetup | None) -> Started:
    cache, pool = llm.vllm_config.cache_config, pool_of(config, role)
    fingerprint, block_bytes, address = "", 0, KvAddress("none", "", pool.tensor_parallel_size)
    if kv is not None:
        fingerprint, block_bytes = await describe_kv(llm)
        address = KvAddress(transport_of(config), kv.engine_id, pool.tensor_parallel_size)
    description = EngineDescription(
        fingerprint=fingerprint,
        kv=address,
        block_size=cache.block_size,
        kv_tokens_total=(cache.num_gpu_blocks or 0) * cache.block_size,
        max_num_seqs=llm.vllm_config.scheduler_config.max_num_seqs,
        max_model_len=llm.model_config.max_model_len,
    )
    return Started(llm, monitor, description, block_bytes)
