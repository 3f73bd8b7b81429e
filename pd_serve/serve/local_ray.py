"""A Ray cluster of one node that belongs to the process that starts it."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from pd_serve.serve.cluster import ClusterError, first_line
from pd_serve.serve.haproxy import write_wrapper


@dataclass(frozen=True, kw_only=True)
class LocalRay:
    """A Ray cluster of one node that belongs to this process and ends with it."""

    temp_dir: str
    """Short (Unix sockets below it): everything that Ray and Serve write goes here."""
    num_cpus: int | None = None
    num_gpus: int | None = None
    object_store_bytes: int | None = None
    dashboard: bool = False
    metrics_port: int = 0
    stats_port: int = 0
    """HAProxy's two ports."""
    gcs_port: int = 0
    """0 lets Ray choose; another is known before Ray's processes start, so they inherit RAY_ADDRESS."""


INGRESS_PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections."""
INGRESS_PORTS_EACH = 50


def local_environment(local: LocalRay) -> dict[str, str]:
    """Prepare the temp dir, and say which environment a private Ray needs.

    HAProxy is on, all files are in the temp dir, engines have the priority of any process, and Ray has a token of its
    own (not the user's) without which nobody on the machine gets in.
    """
    temp = Path(local.temp_dir)
    haproxy = temp / "haproxy"
    for directory in (haproxy, temp / "tmp"):
        directory.mkdir(parents=True, exist_ok=True)
    token = temp / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    env = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_wrapper(temp)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # 30 by default, however idle the ingress is
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TMPDIR": str(temp / "tmp"),
    }
    # Ports of ingress replicas are given out from 30000 on by every Serve alone: on one machine, two of them would send
    # their clients to each other's replicas for a moment.
    first = INGRESS_PORTS.start + INGRESS_PORTS_EACH * secrets.randbelow(len(INGRESS_PORTS) // INGRESS_PORTS_EACH)
    env["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] = str(first)
    env["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"] = str(first + INGRESS_PORTS_EACH)
    ports = {"METRICS": local.metrics_port, "STATS": local.stats_port}
    env |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(port) for name, port in ports.items() if port}
    if local.gcs_port:
        env["RAY_GCS_SERVER_PORT"] = str(local.gcs_port)
    return env


def start_local(local: LocalRay) -> str:
    """Start Ray below this process and connect to it; return its address. Set `local_environment` before.

    Raises:
        ClusterError: Ray did not start.
    """
    import ray

    if local.gcs_port:
        os.environ["RAY_ADDRESS"] = f"{ray.util.get_node_ip_address()}:{local.gcs_port}"
    try:
        context = ray.init(
            address="local",
            namespace="serve",
            num_cpus=local.num_cpus,
            num_gpus=local.num_gpus,
            object_store_memory=local.object_store_bytes,
            include_dashboard=local.dashboard,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=local.temp_dir,
        )
    except Exception as error:
        raise ClusterError(f"Ray did not start: {first_line(str(error))}") from error
    return str(context.address_info["gcs_address"])
