"""Our own routes: who sees whose records, and what readiness says to anyone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pd_serve.gateway.access import Access
from pd_serve.gateway.keys import KeyRing, parse_keys
from pd_serve.path.record import Record, Recorder
from pd_serve.serve.routes import not_ready, routes
from pd_serve.types import ClusterView, KvAddress, ReplicaInfo, ReplicaState, ReplicaView, Request, Role

KEYS = parse_keys("team-a:key-of-team-a\nteam-b:key-of-team-b\noperator:key-of-operator", "keys")


def replica(name: str, state: ReplicaState = ReplicaState.READY, reason: str = "") -> ReplicaView:
    info = ReplicaInfo(
        id=name, role=Role.DECODE, version="v1", address="tcp://10.0.0.7:1", fingerprint="f", kv=KvAddress("x", "e")
    )
    return ReplicaView(info=info, state=state, reason=reason)


class Pools:
    """What the routes read of the real ones."""

    def __init__(self, decode: Sequence[ReplicaView]) -> None:
        self._decode = tuple(decode)

    def view(self) -> ClusterView:
        return ClusterView(now=0.0, decode=self._decode)


def client(keys: KeyRing, *decode: ReplicaView) -> httpx.AsyncClient:
    recorder = Recorder()
    for number, tenant in enumerate(["team-a", "team-b", "team-a", ""]):
        recorder.finished(Record.open(Request(id=f"r{number}", prompt_token_ids=(1,), max_tokens=1, tenant=tenant)))
    app = FastAPI()
    app.include_router(routes(Pools(decode), recorder, (Role.DECODE,)))  # type: ignore[arg-type]
    guarded: Any = Access(app, keys, loopback_only=True)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded), base_url="http://test")


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{tenant}"}


@pytest.mark.parametrize(
    ("tenant", "ids"), [("team-a", ["r2", "r0"]), ("team-b", ["r1"]), ("operator", ["r3", "r2", "r1", "r0"])]
)
async def test_a_tenant_sees_its_own_records_and_an_operator_all(tenant: str, ids: list[str]) -> None:
    async with client(KEYS) as http:
        records = (await http.get("/pd/records", headers=bearer(tenant))).json()
        assert [record["id"] for record in records] == ids
        newest = (await http.get("/pd/records", params={"limit": 1}, headers=bearer(tenant))).json()
        assert [record["id"] for record in newest] == ids[:1]


async def test_replicas_are_for_operators() -> None:
    async with client(KEYS, replica("decode-v1#1")) as http:
        assert (await http.get("/pd/replicas")).status_code == 401
        refused = await http.get("/pd/replicas", headers=bearer("team-a"))
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "operator_only"
        assert "10.0.0.7" not in refused.text
        seen = (await http.get("/pd/replicas", headers=bearer("operator"))).json()
        assert seen["decode"][0]["info"]["address"] == "tcp://10.0.0.7:1"


async def test_without_keys_everything_is_visible() -> None:
    async with client(KeyRing([]), replica("decode-v1#1")) as http:
        assert len((await http.get("/pd/records")).json()) == 4
        assert (await http.get("/pd/replicas")).status_code == 200


async def test_readiness_says_why_not_to_anyone_and_names_no_replica() -> None:
    suspect = [replica(f"decode-v1#{n}", ReplicaState.SUSPECT, "the engine does not answer") for n in range(2)]
    async with client(KEYS, *suspect, replica("decode-v1#9", ReplicaState.DRAINING)) as http:
        answer = await http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json() == {
            "ready": False,
            "pools": {"decode": "1 draining, 2 suspect: the engine does not answer"},
        }
    async with client(KEYS, *suspect, replica("decode-v1#9")) as http:
        assert (await http.get("/readyz")).json() == {"ready": True, "pools": {"decode": "ready"}}


def test_a_pool_without_replicas_says_so() -> None:
    assert not_ready(Role.PREFILL, ()) == "no prefill replica has started"
