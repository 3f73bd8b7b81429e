"""Which replicas a deployment has now, passed from Ray Serve's router thread to whoever follows it.

Ray Serve copies the module of a router class by value, so what is shared with the rest of the process stands here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Metadata = Mapping[str, Any]
"""What one replica's `record_replica_metadata` returned."""
OnChange = Callable[[Sequence[Metadata]], None]
"""Called on the router's thread with all replicas of the deployment that are ready."""

_lock = threading.Lock()
_replicas: dict[tuple[str, str], Sequence[Metadata]] = {}
_followers: dict[tuple[str, str], OnChange] = {}


def publish(application: str, deployment: str, replicas: Sequence[Metadata]) -> None:
    """The deployment has exactly these replicas now."""
    with _lock:
        _replicas[application, deployment] = replicas
        if follower := _followers.get((application, deployment)):
            follower(replicas)


def follow(application: str, deployment: str, on_change: OnChange) -> None:
    """Call `on_change` with the replicas known so far, and at each change. One follower a deployment."""
    with _lock:
        _followers[application, deployment] = on_change
        on_change(_replicas.get((application, deployment), ()))
