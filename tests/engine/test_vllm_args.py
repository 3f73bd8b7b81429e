"""Config to engine arguments: pure, no vLLM needed."""

from __future__ import annotations

from typing import Any

import pytest

from pd_serve.config import AppConfig
from pd_serve.engine.vllm_args import KvSetup, engine_args, environment, transport_of
from pd_serve.types import Role

KV = KvSetup(ray_address="ray:1", engine_id="e1", identity="i", parent_pid=7)


def made(config: dict[str, Any], role: Role = Role.DECODE, kv: KvSetup | None = KV) -> dict[str, Any]:
    return engine_args(AppConfig.model_validate(config), role, model="dir", kv=kv)


@pytest.mark.parametrize(
    ("config", "argument", "value"),
    [
        ({"model": {"dtype": "float32"}}, "dtype", "float32"),
        ({"model": {"max_model_len": 77}}, "max_model_len", 77),
        ({"model": {"block_size": 64}}, "block_size", 64),
        ({"model": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype", "fp8"),
        ({"model": {"served_name": "x"}}, "served_model_name", "x"),
        ({"decode": {"max_num_seqs": 5}}, "max_num_seqs", 5),
        ({"decode": {"max_num_batched_tokens": 512}}, "max_num_batched_tokens", 512),
        ({"decode": {"max_num_batched_tokens": 8, "max_num_seqs": 9}}, "max_num_batched_tokens", 9),
        ({"decode": {"tensor_parallel_size": 2}}, "tensor_parallel_size", 2),
        ({"decode": {"enable_prefix_caching": False}}, "enable_prefix_caching", False),
        ({"decode": {"cpu_kv_cache_gib": 0.5}}, "kv_cache_memory_bytes", 2**29),
        ({"decode": {"num_gpus": 1, "gpu_memory_utilization": 0.5}}, "gpu_memory_utilization", 0.5),
        ({"decode": {"num_gpus": 1, "enforce_eager": False}}, "enforce_eager", False),
        ({"decode": {"enforce_eager": False}}, "enforce_eager", True),
        ({"model": {"engine_args": {"seed": 3}}}, "seed", 3),
        ({"decode": {"engine_args": {"seed": 4}}, "model": {"engine_args": {"seed": 3}}}, "seed", 4),
        ({"decode": {"engine_args": {"max_num_seqs": 6}}}, "max_num_seqs", 6),
    ],
)
def test_each_field_reaches_the_engine(config: dict[str, Any], argument: str, value: object) -> None:
    assert made(config)[argument] == value


def test_a_pool_does_not_get_the_other_ones_arguments() -> None:
    config = {"prefill": {"max_num_seqs": 3, "engine_args": {"seed": 1}}, "decode": {"max_num_seqs": 4}}
    assert made(config, Role.PREFILL)["max_num_seqs"] == 3
    assert made(config)["max_num_seqs"] == 4
    assert "seed" not in made(config)


@pytest.mark.parametrize(("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_the_connector_gets_its_settings(role: Role, kv_role: str) -> None:
    transfer = made({"kv": {"load_failure_policy": "fail", "checksum": False}}, role)["kv_transfer_config"]
    assert transfer["kv_role"] == kv_role
    assert transfer["kv_load_failure_policy"] == "fail"
    extra = transfer["kv_connector_extra_config"]
    assert extra == {
        "role": role.value,
        "transport": "object_store",
        "ray_address": "ray:1",
        "engine_id": "e1",
        "identity": "i",
        "checksum": False,
        "parent_pid": 7,
    }


def test_an_engine_that_hands_nothing_over_has_no_connector() -> None:
    arguments = made({"prefill": None}, kv=None)
    assert "kv_transfer_config" not in arguments
    assert "worker_extension_cls" not in arguments


def test_auto_is_the_object_store() -> None:
    assert transport_of(AppConfig()) == "object_store"


def test_environment() -> None:
    config = AppConfig.model_validate({"decode": {"num_cpus": 2.0, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}}})
    variables = environment(config, Role.DECODE, offline=True)
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(config, Role.DECODE, offline=False)
    gpu = AppConfig.model_validate({"decode": {"num_gpus": 2.0, "tensor_parallel_size": 2}})
    variables = environment(gpu, Role.DECODE, offline=True)
    assert "OMP_NUM_THREADS" not in variables
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in variables
