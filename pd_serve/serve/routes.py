"""Our own routes beside vLLM's: whether the application lives and is ready, and what it did with the last requests."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from pd_serve.path import context
from pd_serve.path.pools import Pools
from pd_serve.path.record import Record, Recorder
from pd_serve.types import ReplicaState, ReplicaView, Role

OPERATOR = "operator"
"""A key of this tenant sees what concerns all tenants, and the replicas."""
_OPERATORS_ONLY = {
    "error": {
        "message": f"a key of the tenant `{OPERATOR}` is needed",
        "type": "permission_error",
        "param": None,
        "code": "operator_only",
    }
}


def _sees_all() -> bool:
    """Whether the asker is an operator. Without keys whoever gets here is on this machine (gateway/access.py)."""
    return context.tenant.get() in ("", OPERATOR)


def routes(pools: Pools, recorder: Recorder, roles: tuple[Role, ...]) -> APIRouter:
    """The routes of one ingress.

    Args:
        roles: the pools that the configuration has; each must have a ready replica for the application to be ready.
    """
    router = APIRouter()

    @router.get("/livez")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    async def ready() -> JSONResponse:
        reasons = {role.value: not_ready(role, _replicas(pools, role)) for role in roles}
        is_ready = not any(reasons.values())
        pools_state = {role: reason or "ready" for role, reason in reasons.items()}
        return JSONResponse({"ready": is_ready, "pools": pools_state}, status_code=200 if is_ready else 503)

    @router.get("/pd/replicas")
    async def replicas() -> JSONResponse:
        if not _sees_all():
            return JSONResponse(_OPERATORS_ONLY, status_code=403)
        return JSONResponse(msgspec.to_builtins(pools.view()))

    @router.get("/pd/records")
    async def records(limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> JSONResponse:
        tenant = None if _sees_all() else context.tenant.get()
        return JSONResponse([summary(record) for record in recorder.recent(limit, tenant)])

    return router


def _replicas(pools: Pools, role: Role) -> tuple[ReplicaView, ...]:
    view = pools.view()
    return view.prefill if role is Role.PREFILL else view.decode


def not_ready(role: Role, replicas: tuple[ReplicaView, ...]) -> str:
    """Why the pool can take no work, or an empty string when it can. Names no replica: anyone may read it."""
    if any(replica.state is ReplicaState.READY for replica in replicas):
        return ""
    if not replicas:
        return f"no {role.value} replica has started"
    states = Counter(f"{each.state.value}: {each.reason}" if each.reason else each.state.value for each in replicas)
    return ", ".join(f"{number} {state}" for state, number in sorted(states.items()))


def summary(record: Record) -> dict[str, Any]:
    """The record with where the time went: what its last attempt did, in flat fields. Seconds and bytes; None when it
    did not happen."""
    last = record.attempts[-1] if record.attempts else None
    prefill = last.prefill if last else None
    decode_s = None
    if record.finished_at is not None and record.first_token_at is not None:
        decode_s = record.finished_at - record.first_token_at
    flat: dict[str, Any] = msgspec.to_builtins(record)
    return {
        **flat,
        "prefill_replica": last.prefill_replica if last else None,
        "prefill_s": prefill.seconds if prefill else None,
        "kv_outcome": record.kv.outcome.value if record.kv else None,
        "kv_bytes": record.kv.bytes if record.kv else None,
        "kv_s": record.kv.copy_s if record.kv else None,
        "decode_replica": last.decode_replica if last else None,
        "decode_s": decode_s,
        "ttft_s": record.first_token_at,
    }
