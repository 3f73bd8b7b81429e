"""A replica of a prefill or decode pool: one engine, reached by ingresses over its own channel."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import ray
from ray import serve

from pd_serve.config import AppConfig
from pd_serve.engine.base import Engine, EngineDescription
from pd_serve.observe.counting import CountingSink
from pd_serve.observe.logs import log_through
from pd_serve.path.replica_host import ReplicaHost
from pd_serve.path.zmq_channel import ZmqHub
from pd_serve.serve.engines import make_engine
from pd_serve.serve.keys import KeyClaim
from pd_serve.serve.probe import probe
from pd_serve.types import ReplicaInfo, Role

logger = logging.getLogger(__name__)

SERVE_LOGGER = "ray.serve"
"""Whose handlers write a replica's log."""

DRAIN_MARGIN_S = 30.0
"""Between the end of draining and the moment when Ray Serve kills the replica: time to close the engine."""


class EngineReplica:
    """Ray Serve deployment of one role.

    Work does not come through Ray Serve, which therefore does not know of it: it is drained in `__del__`.
    """

    async def __init__(self, config: AppConfig, role: Role) -> None:  # type: ignore[misc] # awaited by Ray Serve
        log_through(SERVE_LOGGER)
        self._config = config
        self._role = role
        self._engine: Engine | None = None
        self._hub: ZmqHub | None = None
        self._host: ReplicaHost | None = None
        self._counts = CountingSink()
        self._claim = KeyClaim.of_this_replica()
        self._engine = engine = make_engine(config, role)
        try:
            description = await engine.start()
            await probe(engine)
            self._info = self._describe(await self._listen(engine), description)
        except BaseException:
            await engine.close()
            raise
        logger.info("%s serves at %s, KV at %s", self._info.id, self._info.address, self._info.kv)

    async def _listen(self, engine: Engine) -> str:
        """Open the channel; returns its address."""
        self._host = ReplicaHost(engine, self._counts)
        self._host.start()
        host, keys = ray.util.get_node_ip_address(), await self._claim.keys()
        self._hub = ZmqHub(host, keys, self._host.on_message, on_gone=self._host.ingress_gone)
        return self._hub.start()

    def _describe(self, address: str, engine: EngineDescription) -> ReplicaInfo:
        context = serve.get_replica_context()
        return ReplicaInfo(
            id=f"{context.deployment}#{context.replica_tag}",
            role=self._role,
            version=self._config.version,
            address=address,
            fingerprint=engine.fingerprint,
            kv=engine.kv,
            node=ray.get_runtime_context().get_node_id(),
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            kv_tokens_total=engine.kv_tokens_total,
        )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Reaches every ingress through Ray Serve (`serve/router_view.py`)."""
        info: dict[str, Any] = msgspec.to_builtins(self._info)
        return info

    async def check_health(self) -> None:
        """Raises EngineFailed; Ray Serve replaces the replica."""
        self._claim.check()
        if self._engine is not None:
            await self._engine.health()

    async def stats(self) -> dict[str, Any]:
        """The engine's counts, the legs that run, and `REPLICA_COUNTS` since the start, for operators and tests."""
        assert self._engine is not None and self._host is not None
        stats: dict[str, Any] = msgspec.to_builtins(await self._engine.stats())
        ended = {role.value: self._counts.by_label("legs", "outcome", role=role) for role in Role}
        lost = self._counts.total("ingresses_lost")
        return {**stats, "legs": self._host.legs, "legs_ended": ended, "ingresses_lost": lost}

    async def __del__(self) -> None:
        if self._host is not None:
            await self._host.drain(self._config.limits.total_timeout_s)
            await self._host.close()
        if self._hub is not None:
            await self._hub.close()
        self._claim.close()
        if self._engine is not None:
            await self._engine.close()
