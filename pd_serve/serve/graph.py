"""The graph of deployments: a pool for each role, and the ingress in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from pd_serve.config import AppConfig, Pool
from pd_serve.config_file import app_config
from pd_serve.engine.vllm_args import environment
from pd_serve.model_dir import is_hub_name
from pd_serve.serve.replicas import DRAIN_MARGIN_S, EngineReplica
from pd_serve.serve.router_view import ROUTER_CLASS
from pd_serve.types import Role

UNBOUNDED = 1_000_000
"""For limits of Ray Serve's that must not bite: our own admission decides."""
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 15.0


def build(args: Mapping[str, Any]) -> Any:
    """The application that `args` (an `AppConfig` as plain data) describe, for `serve run` and `serve.run`.

    Raises:
        ConfigError: with one line for every mistake.
    """
    config = app_config(args)
    pools = {Role(name): _pool(config, Role(name), pool) for name, pool in config.pools.items()}
    return _ingress(config).bind(config, pools)


def _pool(config: AppConfig, role: Role, pool: Pool) -> Any:
    deployment = serve.deployment(
        EngineReplica,
        name=f"{role.value}-{config.version}",
        num_replicas=pool.replicas,
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "runtime_env": {"env_vars": replica_env(config, role)},
        },
        request_router_config=RequestRouterConfig(request_router_class=ROUTER_CLASS),
        **_lifecycle(config),
    )
    return deployment.bind(config, role)


def _ingress(config: AppConfig) -> Any:
    from pd_serve.serve.ingress import Ingress

    return serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=config.ingress.replicas,
        ray_actor_options={
            "num_cpus": config.ingress.num_cpus,
            "runtime_env": {"env_vars": _ingress_env(config)},
        },
        logging_config={"enable_access_log": False},  # the record of a request says more
        **_lifecycle(config),
    )


def _lifecycle(config: AppConfig) -> dict[str, Any]:
    """Options by which Ray Serve lets us decide who may enter, and every replica finish what it has begun."""
    return {
        "max_ongoing_requests": UNBOUNDED,
        "graceful_shutdown_timeout_s": config.limits.total_timeout_s + DRAIN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
    }


def replica_env(config: AppConfig, role: Role) -> dict[str, str]:
    """Environment of a pool's replicas: what vLLM and OpenMP read before our code runs; the pool's `env` wins."""
    if config.engine == "vllm":
        return environment(config, role, offline=_is_local(config))
    return dict(config.pools[role.value].env)


def _ingress_env(config: AppConfig) -> dict[str, str]:
    """A model that lies on a disk must not be asked for on a hub."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if _is_local(config) else {}
    return {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **offline}


def _is_local(config: AppConfig) -> bool:
    return not is_hub_name(config.model.path)
