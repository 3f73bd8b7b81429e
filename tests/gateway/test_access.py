"""Access: default deny, keys as hashes, closed without keys beyond this machine (cases B72, B74)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pd_serve.errors import ConfigError
from pd_serve.gateway.access import Access
from pd_serve.gateway.keys import KeyRing, load_keys, parse_keys
from pd_serve.path import context
from pd_serve.serve.http_address import is_loopback

KEY = "SENTINEL-12345"


async def _who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(context.tenant.get())


def _client(keys: KeyRing, **options: Any) -> httpx.AsyncClient:
    inner = Starlette(routes=[Route(path, _who) for path in ("/v1/models", "/metrics", "/livez", "/tokenize")])
    app = Access(inner, keys, **{"loopback_only": True, **options})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/metrics", "//v1/models", "/V1/models", "/%76%31/models"])
async def test_b72_every_route_but_health_needs_a_key(path: str) -> None:
    async with _client(parse_keys(f"team-a:{KEY}", "keys")) as client:
        for headers in ({}, {"Authorization": "Bearer wrong-key-1"}, {"Authorization": f"Basic {KEY}"}):
            response = await client.get(path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/livez")).status_code == 200


async def test_a_key_names_its_tenant() -> None:
    async with _client(parse_keys(f"# ours\n\nteam-a:{KEY}\nother-key-9", "keys")) as client:
        response = await client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        assert (response.status_code, response.text) == (200, "team-a")
        response = await client.get("/v1/models", headers={"x-api-key": "other-key-9"})
        assert response.status_code == 200
        assert response.text not in ("", "other-key-9")
        both = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer another-key")]
        assert (await client.get("/v1/models", headers=both)).status_code == 401


async def test_a_websocket_without_a_key_is_closed_before_it_is_accepted() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    app = Access(Starlette(), parse_keys(KEY, "keys"), loopback_only=True)
    await app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_without_keys_only_this_machine_is_served() -> None:
    nobody = KeyRing(())
    async with _client(nobody) as client:
        assert (await client.get("/v1/models")).status_code == 200
    async with _client(nobody, loopback_only=False) as client:
        assert (await client.get("/v1/models")).status_code == 403
        assert (await client.get("/livez")).status_code == 200


async def test_metrics_can_be_opened_to_scrapers() -> None:
    async with _client(parse_keys(KEY, "keys"), metrics_open=True) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


def test_b74_no_key_in_logs_reprs_or_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = parse_keys(f"team-a:{KEY}", "keys")
    Access(Starlette(), keys, loopback_only=True)
    found = keys.find(KEY.encode())
    assert found is not None and KEY not in f"{found!r} {found.shown} {keys!r} {vars(keys)!r}"
    with pytest.raises(ConfigError) as error:
        parse_keys(f"{KEY}\n{KEY}", "keys.txt")
    assert str(error.value) == "keys.txt:2: this key stands there twice"
    with pytest.raises(ConfigError) as error:
        parse_keys("tiny", "keys.txt")
    assert "tiny" not in str(error.value)
    assert KEY not in caplog.text


def test_keys_of_file_and_variable_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"team-a:{KEY}\n")
    keys = load_keys(str(file), "team-b:another-key-1")
    assert {key.tenant for key in keys} == {"team-a", "team-b"}
    assert len(load_keys(None, "")) == 0
    for bad, reason in (("", "no key"), ("\x00", "characters")):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=reason):
            load_keys(str(file), "")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(str(tmp_path / "missing"), "")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), (None, False)],
)
def test_what_counts_as_loopback(host: str | None, loopback: bool) -> None:
    assert is_loopback(host) is loopback
