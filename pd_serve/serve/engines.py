"""Which engine a replica runs: the one that the configuration names, with its end of the KV transport."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import ray

from pd_serve.config import AppConfig
from pd_serve.engine.base import Engine
from pd_serve.types import Role

if TYPE_CHECKING:
    from pd_serve.engine.fake import FakeSettings


def make_engine(config: AppConfig, role: Role) -> Engine:
    """An engine that is not started. Call it in a Ray worker: engines move KV through that worker's cluster."""
    ray_address = ray.get_runtime_context().gcs_address
    if config.engine == "fake":
        return _fake_engine(config, role, ray_address)
    from pd_serve.engine.vllm import VllmEngine

    return VllmEngine(config, role, ray_address=ray_address)


def _fake_engine(config: AppConfig, role: Role, ray_address: str) -> Engine:
    from pd_serve.engine.fake import FakeEngine
    from pd_serve.kv.transport.object_store import ObjectStoreEnd

    end = ObjectStoreEnd(ray_address, secrets.token_hex(8), receives=role is Role.DECODE)
    return FakeEngine(fake_settings(config, role), end)


def fake_settings(config: AppConfig, role: Role) -> FakeSettings:
    """The fake engine that the configuration describes."""
    from pd_serve.engine.fake import FakeSettings
    from pd_serve.engine.fake_model import FakeModel
    from pd_serve.engine.fake_timing import Timing

    pool = config.pools[role.value]
    return FakeSettings(
        model=FakeModel(weights=config.version, block_size=config.model.block_size),
        timing=Timing(prefill_tokens_per_s=config.fake.prefill_tokens_per_s, decode_step_s=config.fake.decode_step_s),
        kv_tokens=config.fake.kv_tokens,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        enable_prefix_caching=pool.enable_prefix_caching,
        load_failure_policy=config.kv.load_failure_policy,
        checksum=config.kv.checksum,
    )
