"""What a config asks of machines: CPUs, GPUs and a port, against what there is."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from pd_serve.config import AppConfig
from pd_serve.config_yaml import KeyPath

Node = dict[str, float]
"""What one machine of a cluster has, as Ray names it: CPU, GPU, ..."""


def this_machine() -> list[Node]:
    """A cluster of this machine alone, as a private Ray would see it."""
    return [{"CPU": float(os.cpu_count() or 1), "GPU": float(_gpus())}]


def _gpus() -> int:
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip() not in {"", "-1", "NoDevFiles"}]
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return sorted((number for number in numbers if number.isdigit()), key=int)


def spare_gpus(app: AppConfig, visible: Sequence[str]) -> tuple[int | None, dict[str, str]]:
    """How to run `app` and another process side by side on the GPUs of this machine.

    Returns:
        How many GPUs Ray may use (None: all), and the environment of the other process: its GPUs are the ones that are
        left. Where none is left it shares those of the app.
    """
    needed = math.ceil(sum(pool.replicas * pool.num_gpus for pool in app.pools.values()))
    if not needed or needed >= len(visible):
        return None, {}
    return needed, {"CUDA_VISIBLE_DEVICES": ",".join(visible[needed:])}


def resource_mistakes(app: AppConfig, nodes: Sequence[Node]) -> Iterator[tuple[KeyPath, str]]:
    """(path under args, what is wrong) where the nodes could never hold what the config asks for."""
    groups = {"ingress": (app.ingress.replicas, {"CPU": app.ingress.num_cpus, "GPU": 0.0})}
    groups |= {role: (pool.replicas, {"CPU": pool.num_cpus, "GPU": pool.num_gpus}) for role, pool in app.pools.items()}
    fits = True
    for role, (_count, bundle) in groups.items():
        for resource, amount in bundle.items():
            largest = max((node.get(resource, 0.0) for node in nodes), default=0.0)
            if amount > largest:
                fits = False
                key = "num_cpus" if resource == "CPU" else "num_gpus"
                yield (role, key), f"each replica needs {amount:g} {resource}s; the largest node has {largest:g}"
    if fits:
        for resource in ("CPU", "GPU"):
            yield from _in_all(groups, nodes, resource)
    for role, pool in app.pools.items():
        if 0 < pool.num_gpus < pool.tensor_parallel_size and pool.tensor_parallel_size > 1:
            text = f"is {pool.num_gpus:g}, less than tensor_parallel_size {pool.tensor_parallel_size}"
            yield (role, "num_gpus"), text


def _in_all(groups: dict[str, tuple[int, Node]], nodes: Sequence[Node], resource: str) -> Iterator[tuple[KeyPath, str]]:
    needed = sum(count * bundle[resource] for count, bundle in groups.values())
    there = sum(node.get(resource, 0.0) for node in nodes)
    if needed > there:
        parts = ", ".join(
            f"{role} {count} x {bundle[resource]:g}" for role, (count, bundle) in groups.items() if bundle[resource]
        )
        yield (), f"needs {needed:g} {resource}s in all ({parts}); the cluster has {there:g}"


def port_problem(host: str, port: int) -> str:
    """Why nothing can listen at this address, or empty."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use{_user_of(port)}; choose another with --port"
            return f"cannot listen on {host}:{port}: {error.strerror or error}"
    return ""


def _user_of(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def cluster_at(address: str) -> list[Node]:
    """What each node of a running cluster has.

    Raises:
        ClusterError: there is none at `address`.
    """
    from pd_serve.serve import cluster

    cluster.connect(address)
    try:
        return cluster.nodes()
    finally:
        cluster.disconnect()
