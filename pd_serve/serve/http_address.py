"""Where this cluster's HTTP server listens."""

from __future__ import annotations

import ipaddress


async def on_loopback() -> bool:
    """Whether only this machine can reach the HTTP server. Call it in a Serve replica."""
    from ray.serve.context import _get_global_client

    options = await _get_global_client()._controller.get_http_config.remote()
    return is_loopback(options.host)


def is_loopback(host: str | None) -> bool:
    """Whether `host` names the local machine alone; a name that is not `localhost` could be anything."""
    if host is None:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
