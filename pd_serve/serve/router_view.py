"""Ray Serve's request router, used for what it knows: the replicas of a deployment. Requests go past it."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter


class ReplicaFollower(RequestRouter):
    """Publishes the replica set of its deployment in `pd_serve.serve.replica_view`."""

    def update_replicas(self, replicas: list[Any]) -> None:
        from pd_serve.serve import replica_view

        super().update_replicas(replicas)
        deployment = self._deployment_id
        replica_view.publish(deployment.app_name, deployment.name, [replica.replica_metadata for replica in replicas])

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Any replica: nothing but an operator's own call comes this way."""
        return [candidate_replicas]


ROUTER_CLASS = f"{__name__}:{ReplicaFollower.__name__}"
