"""The ingress: vLLM's own HTTP application in a Ray Serve deployment, over our request path."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import zmq.asyncio
from prometheus_client import REGISTRY
from ray import serve

from pd_serve.compat import allow_no_device
from pd_serve.config import AppConfig, api_keys_text
from pd_serve.gateway.access import Access
from pd_serve.gateway.asgi import App
from pd_serve.gateway.body_limit import BodyLimit
from pd_serve.gateway.disconnect import DisconnectOnCancel
from pd_serve.gateway.error_shape import OneErrorShape
from pd_serve.gateway.keys import load_keys
from pd_serve.observe.logs import log_record, log_through
from pd_serve.observe.metrics import PrometheusSink
from pd_serve.observe.replica_gauges import ReplicaGauges
from pd_serve.observe.request_metrics import count_record
from pd_serve.path.channel import IngressWire
from pd_serve.path.pools import Pools
from pd_serve.path.record import Record, Recorder
from pd_serve.path.request import PathRules, RequestPath
from pd_serve.path.zmq_channel import ZmqIngressWire
from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.routing import ROUTERS, RoutingRules
from pd_serve.serve import replica_view
from pd_serve.serve.http_address import on_loopback
from pd_serve.serve.keys import KeyClaim
from pd_serve.serve.replicas import SERVE_LOGGER
from pd_serve.serve.routes import not_ready, routes
from pd_serve.types import ReplicaInfo, Role, Sink

if TYPE_CHECKING:
    from pd_serve.path.client import PdEngineClient

logger = logging.getLogger(__name__)


def path_rules(config: AppConfig) -> PathRules:
    """The part of the configuration that the path reads."""
    limits = config.limits
    return PathRules(
        admission=AdmissionRules(max_running=limits.max_running, max_queue=limits.max_queue),
        routing=RoutingRules(
            min_handoff_tokens=config.min_handoff_tokens,
            prefill_on_decode=config.routing.force == "prefill_on_decode",
        ),
        first_token_timeout_s=limits.first_token_timeout_s,
        total_timeout_s=limits.total_timeout_s,
        no_replica_timeout_s=limits.no_replica_timeout_s,
        lease_s=config.kv.lease_s,
    )


class IngressApp:
    """Ray Serve deployment of the HTTP side.

    Args:
        config: the application's.
        pools: a handle to the deployment of each role, used to follow its replicas.
        sink: where this process counts; Prometheus's default registry, which `/metrics` exports, when None.
    """

    async def __init__(  # type: ignore[misc] # awaited by Ray Serve
        self, config: AppConfig, pools: Mapping[Role, Any], sink: Sink | None = None
    ) -> None:
        log_through(SERVE_LOGGER)
        self._config = config
        self._handles = pools
        self._claim = KeyClaim.of_this_replica()
        self._client: PdEngineClient | None = None
        self._context = zmq.asyncio.Context()
        sink = sink or PrometheusSink()
        self._recorder = Recorder(write=functools.partial(_write, sink=sink))
        self._pools = Pools(await self._connector())
        REGISTRY.register(ReplicaGauges(self._pools.view))
        self._path = RequestPath(
            self._pools, ROUTERS[config.routing.policy], path_rules(config), self._recorder, sink, random.Random()
        )
        for role, handle in pools.items():
            self._follow(role, handle)

    async def _connector(self) -> Callable[[ReplicaInfo], IngressWire]:
        keys = await self._claim.keys()
        return lambda info: ZmqIngressWire(self._context, info.address, keys)

    def _follow(self, role: Role, handle: Any) -> None:
        """Ray Serve's router for `handle` tells its thread of replicas; this loop takes them over."""
        loop = asyncio.get_running_loop()

        def on_change(replicas: Sequence[replica_view.Metadata]) -> None:
            infos = [info for replica in replicas if (info := _info(replica))]
            loop.call_soon_threadsafe(functools.partial(self._pools.follow, role, infos))

        replica_view.follow(handle.app_name, handle.deployment_name, on_change)
        handle.options()  # starts the router without a request

    async def __serve_build_asgi_app__(self) -> App:
        """vLLM's application, wrapped; its state is complete before Ray Serve starts its lifespan."""
        allow_no_device()
        from pd_serve.compat_http import application, config_without_engine, server_args
        from pd_serve.path.client import PdEngineClient

        args = server_args(self._config)
        self._client = client = PdEngineClient(config_without_engine(args), self._path, self._can_decode)
        app = await application(client, args)
        app.include_router(routes(self._pools, self._recorder, tuple(self._handles)))
        limited = BodyLimit(app, self._config.limits.max_body_bytes)
        return DisconnectOnCancel(OneErrorShape(await self._guarded(limited)))

    async def _guarded(self, app: App) -> App:
        access = self._config.access
        keys = load_keys(access.keys_file, api_keys_text())
        return Access(app, keys, loopback_only=await on_loopback(), metrics_open=access.metrics_open)

    def _can_decode(self) -> bool:
        return not not_ready(Role.DECODE, self._pools.view().decode)

    async def check_health(self) -> None:
        self._claim.check()

    async def __del__(self) -> None:
        self._claim.close()
        await self._pools.close()
        if self._client is not None:
            self._client.shutdown()
        self._context.destroy(linger=0)


def _write(record: Record, sink: Sink) -> None:
    count_record(record, sink)
    log_record(record)


def _info(replica: replica_view.Metadata) -> ReplicaInfo | None:
    try:
        return msgspec.convert(replica, ReplicaInfo)
    except msgspec.ValidationError as error:
        logger.error("a replica describes itself in a way that this ingress does not understand: %s", error)
        return None


Ingress = serve.ingress()(IngressApp)
