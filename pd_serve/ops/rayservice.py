"""A KubeRay RayService that serves a config file as it stands."""

from __future__ import annotations

import re
from typing import Any

import yaml

from pd_serve.config import AppConfig, Pool
from pd_serve.errors import ConfigError
from pd_serve.ops.check import check

SECRET = "pd-serve-api-keys"
"""Kubernetes secret whose entry `keys` holds the API keys, one `tenant:key` a line."""
HTTP_PORT = 8000
GRACE_S = 60
"""Seconds beyond the longest request that a leaving pod gets."""


def manifest(config: str, name: str, image: str) -> str:
    """The RayService as YAML text.

    The config's `applications` are carried as they are. Only `http_options.host` is set to all interfaces, which the
    service needs; therefore the API keys come from the secret `SECRET`, and without it every request is refused.

    Args:
        config: path of a Serve YAML file.
        name: of the RayService; a DNS label.
        image: container image built from cluster/Dockerfile.

    Raises:
        ConfigError: the config or the name is wrong.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", name):
        raise ConfigError(f"{name!r} is not a name for Kubernetes: small letters, digits and -, at most 42")
    checked = check(config, serve_schema=False, model=False)
    serve = {**checked.serve, "http_options": {**checked.serve.get("http_options", {}), "host": "0.0.0.0"}}
    serve["http_options"]["port"] = HTTP_PORT
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
        "template": _pod("ray-head", image, cpus=2.0, gpus=0.0, app=checked.app),
    }
    workers = [_worker_group(role, pool, image, checked.app) for role, pool in checked.app.pools.items()]
    ingress = Pool(replicas=checked.app.ingress.replicas, num_cpus=checked.app.ingress.num_cpus)
    workers.append(_worker_group("ingress", ingress, image, checked.app))
    resource = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve, sort_keys=False),
            "rayClusterConfig": {"headGroupSpec": head, "workerGroupSpecs": workers},
        },
    }
    return yaml.safe_dump(resource, sort_keys=False)


def _worker_group(role: str, pool: Pool, image: str, app: AppConfig) -> dict[str, Any]:
    """One pod a replica: an engine's GPUs are those of its pod."""
    return {
        "groupName": role,
        "replicas": pool.replicas,
        "minReplicas": pool.replicas,
        "maxReplicas": pool.replicas,
        "rayStartParams": {},
        "template": _pod("ray-worker", image, cpus=pool.num_cpus, gpus=pool.num_gpus, app=app),
    }


def _pod(container: str, image: str, *, cpus: float, gpus: float, app: AppConfig) -> dict[str, Any]:
    resources: dict[str, str] = {"cpu": str(max(1, round(cpus))), "memory": "16Gi"}
    if gpus:
        resources["nvidia.com/gpu"] = str(max(1, round(gpus)))
    keys = {
        "name": "PD_SERVE_API_KEYS",
        "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "keys", "optional": True}},
    }
    return {
        "spec": {
            "terminationGracePeriodSeconds": int(app.limits.total_timeout_s) + GRACE_S,
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "env": [keys],
                    "resources": {"requests": dict(resources), "limits": dict(resources)},
                    "ports": [{"containerPort": HTTP_PORT, "name": "serve"}],
                    "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
        }
    }
