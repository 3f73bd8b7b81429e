"""A configuration becomes a graph of deployments, without Ray being started."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pd_serve.errors import ConfigError

pytestmark = pytest.mark.ray


def deployments(**args: Any) -> dict[str, Any]:
    """The bound deployments by name."""
    from pd_serve.app import build

    ingress = build(args)
    _, pools = ingress._bound_deployment.init_args
    bound = [ingress, *pools.values()]
    return {each._bound_deployment.name: each._bound_deployment for each in bound}


def test_pools_are_named_after_the_version() -> None:
    assert deployments(version="v7").keys() == {"ingress", "prefill-v7", "decode-v7"}
    assert deployments(prefill=None).keys() == {"ingress", "decode-v1"}


def test_what_a_pool_is_given() -> None:
    pool = {"replicas": 3, "num_cpus": 2.0, "env": {"OMP_NUM_THREADS": "7", "MINE": "1"}}
    decode = deployments(decode=pool)["decode-v1"]
    assert decode.num_replicas == 3
    assert decode.ray_actor_options["num_cpus"] == 2.0
    env = decode.ray_actor_options["runtime_env"]["env_vars"]
    assert (env["OMP_NUM_THREADS"], env["MINE"]) == ("7", "1")
    assert env["HF_HUB_OFFLINE"] == "1"


def test_replicas_may_finish_the_longest_request() -> None:
    limits = {"total_timeout_s": 900.0}
    for deployment in deployments(limits=limits).values():
        assert deployment._deployment_config.graceful_shutdown_timeout_s > 900


def test_every_mistake_is_told_in_one_short_message() -> None:
    with pytest.raises(ConfigError) as raised:
        deployments(decode={"replica": 2}, limits={"max_queue": -1})
    assert "decode.replica" in raised.value.message
    assert "limits.max_queue" in raised.value.message
    assert len(raised.value.message.splitlines()) == 2


def test_building_imports_no_engine() -> None:
    """The driver and Ray Serve's build task stay quick to start."""
    code = (
        "import sys; from pd_serve.app import build; build({});"
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
