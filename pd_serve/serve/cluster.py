"""The way to a Ray cluster: connect, deploy a Serve config, see how it is doing, take it down (see also `local_ray`).

Everything here runs in the process that calls it and imports Ray there. What is above `serve` reaches Ray through this
module only.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pd_serve.errors import PdServeError

_POLL_S = 0.4
_CONNECT_S = 5.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Failed|InvalidRequest)(?:\(\w+\))?: ")


class ClusterError(PdServeError):
    """Ray could not be reached or started, or an application did not come up."""


class DeploymentState(msgspec.Struct, frozen=True, kw_only=True):
    """How one Serve deployment is doing."""

    name: str
    status: str
    message: str = ""
    running: int = 0
    starting: int = 0
    other: int = 0


class AppState(msgspec.Struct, frozen=True, kw_only=True):
    """How a Serve application is doing. `status` is Serve's word: DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY, ..."""

    status: str = "NOT_STARTED"
    message: str = ""
    deployments: tuple[DeploymentState, ...] = ()


def connect(address: str = "auto") -> str:
    """Connect this process to a running cluster; return its address.

    Raises:
        ClusterError: there is none at `address`.
    """
    import ray

    _refuse_silence(address)
    try:
        context = ray.init(address=address, namespace="serve", log_to_driver=False, ignore_reinit_error=True)
    except Exception as error:
        raise ClusterError(f"no Ray cluster at {address}: {first_line(str(error))}") from error
    return str(context.address_info["gcs_address"])


def _refuse_silence(address: str) -> None:
    """Find out at once that nothing listens at `host:port`; Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"no Ray cluster at {address}: {error.strerror or error}") from error


def disconnect() -> None:
    """Leave the cluster; a local one that this process started ends."""
    import ray

    ray.shutdown()


def nodes() -> list[dict[str, float]]:
    """Resources of each living node, as Ray names them (CPU, GPU, memory, ...)."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def deploy(config: Mapping[str, Any]) -> str:
    """Hand a Serve config (the YAML file's content) to Serve, as `serve run` does; return the application's name.

    Returns at once; see `wait_running`.

    Raises:
        ClusterError: Serve refuses it.
    """
    from ray.serve._private import api
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(dict(config))
        client = api.serve_start(
            http_options=schema.http_options.model_dump(),
            proxy_location=schema.proxy_location,
            grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
            controller_options=schema.controller_options,
        )
        client.deploy_apps(schema, _blocking=False)
    except Exception as error:
        raise ClusterError(f"Serve did not take the config: {first_line(str(error))}") from error
    return str(schema.applications[0].name)


def state(application: str) -> AppState:
    """How the application is doing now."""
    from ray import serve

    found = serve.status().applications.get(application)
    if found is None:
        return AppState()
    deployments = []
    for name, deployment in found.deployments.items():
        replicas = {_word(key): count for key, count in deployment.replica_states.items()}
        running, starting = replicas.pop("RUNNING", 0), replicas.pop("STARTING", 0)
        deployments.append(
            DeploymentState(
                name=name,
                status=_word(deployment.status),
                message=deployment.message,
                running=running,
                starting=starting,
                other=sum(replicas.values()),
            )
        )
    return AppState(status=_word(found.status), message=found.message, deployments=tuple(deployments))


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def why(app: AppState) -> str:
    """One line that says why the application is not running: an error if there is one, else what it waits for."""
    troubled = [each for each in app.deployments if each.message and each.status != "HEALTHY"]
    for deployment in troubled:
        if errors_in(deployment.message):
            return f"{deployment.name}: {errors_in(deployment.message)[-1]}"
    if errors_in(app.message):
        return errors_in(app.message)[-1]
    if troubled:
        return f"{troubled[0].name}: {first_line(troubled[0].message)}"
    return first_line(app.message) if app.message else f"it is {app.status}"


def wait_running(
    application: str,
    timeout_s: float,
    seen: Callable[[AppState], None] = lambda _state: None,
    first_failure_ends: bool = False,
) -> AppState:
    """Wait until every deployment runs; `seen` is told each change.

    Args:
        first_failure_ends: do not wait for Serve's further tries with a replica that failed to start.

    Raises:
        ClusterError: it failed, or was not up after `timeout_s`; the message says why.
    """
    deadline = time.monotonic() + timeout_s
    last = AppState()
    while True:
        now = state(application)
        if now != last:
            seen(now)
            last = now
        if now.status == "RUNNING":
            return now
        if now.status in {"DEPLOY_FAILED", "UNHEALTHY"} or (first_failure_ends and _some_replica_failed(now)):
            raise ClusterError(f"{application} did not start: {why(now)}")
        if time.monotonic() > deadline:
            raise ClusterError(f"{application} did not start within {timeout_s:.0f} s: {why(now)}")
        time.sleep(_POLL_S)


def _some_replica_failed(app: AppState) -> bool:
    return any(each.status != "HEALTHY" and errors_in(each.message) for each in app.deployments)


def delete(application: str, timeout_s: float) -> bool:
    """Take the application down and let its replicas drain; False when that took longer than `timeout_s`."""
    from ray import serve

    serve.delete(application, _blocking=False)
    deadline = time.monotonic() + timeout_s
    while state(application).status != "NOT_STARTED":
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"


def errors_in(text: str) -> list[str]:
    """The lines of a status message or traceback that name an error, without the colours and module that Ray adds."""
    lines = [_COLOUR.sub("", line).strip() for line in text.splitlines()]
    return [line for line in lines if _ERROR.match(line) and not line.startswith("ray.exceptions.")]
