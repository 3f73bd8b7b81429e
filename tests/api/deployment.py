"""The demo, up once for all tests that ask it something: real Ray, real vLLM, prefill and decode apart."""

from __future__ import annotations

import time
from typing import Any

import httpx

from tests.api.ask import Server


class Deployment:
    """A running pd_serve application and what it says about itself."""

    def __init__(self, base_url: str, model: str, block_size: int) -> None:
        self.server = Server(base_url, model)
        self.block_size = block_size
        self._http = httpx.Client(base_url=base_url, timeout=30.0)

    def records(self, limit: int) -> list[dict[str, Any]]:
        """The last records, newest first."""
        found: list[dict[str, Any]] = self._http.get("/pd/records", params={"limit": limit}).json()
        return found

    def metrics(self) -> dict[str, float]:
        """Every pd_ sample by `name{labels}`."""
        lines = self._http.get("/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line.startswith("pd_"))
        return {name: float(value) for name, value in samples}

    def counters(self) -> dict[str, float]:
        """What the tests follow: hand-offs moved, fallbacks, bytes of KV."""
        metrics = self.metrics()
        return {
            "moved": metrics.get('pd_handoffs_total{outcome="moved"}', 0.0),
            "fallbacks": sum(value for name, value in metrics.items() if name.startswith("pd_fallbacks_total")),
            "kv_bytes": metrics.get("pd_kv_bytes_total", 0.0),
        }

    def assert_moved(self, last: int) -> None:
        """The last requests' KV was handed over."""
        outcomes = [(record["kv"] or {}).get("outcome") for record in self.records(last)]
        assert outcomes == ["moved"] * last

    def assert_quiet(self, within_s: float = 10.0) -> None:
        """Nothing runs, waits or is held, within 10 s (check Q)."""
        give_up = time.monotonic() + within_s
        while found := self._held():
            assert time.monotonic() < give_up, found
            time.sleep(0.2)

    def _held(self) -> dict[str, int]:
        view = self._http.get("/pd/replicas").json()
        names = ("waiting", "running", "waiting_prompt_tokens", "kv_tokens_used", "reserved_tokens", "handoffs_held")
        return {
            f"{replica['info']['id']}.{name}": replica["stats"].get(name, 0)
            for replica in (*view["prefill"], *view["decode"])
            for name in names
            if replica["stats"].get(name, 0)
        }
