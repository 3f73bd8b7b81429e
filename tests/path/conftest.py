"""A cluster of fake engines for each test, checked for leftovers after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pd_serve.path import frames, pools, replica_host
from tests.path.cluster import Cluster
from tests.path.quiescent import check_quiescent

Start = Callable[..., Awaitable[Cluster]]


@pytest.fixture
def fast_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports, pings and patience of the wires, about ten times faster."""
    monkeypatch.setattr(frames, "STATS_PERIOD_S", 0.02)
    monkeypatch.setattr(pools, "PING_S", 0.05)
    monkeypatch.setattr(pools, "RECONNECT_S", 0.02)
    monkeypatch.setattr(pools, "GRANT_TIMEOUT_S", 3.0)
    monkeypatch.setattr(pools, "SUSPECT_AFTER_S", 0.4)
    monkeypatch.setattr(pools, "LOST_AFTER_S", 1.2)
    monkeypatch.setattr(replica_host, "INGRESS_SILENCE_S", 1.0)


@pytest.fixture
async def start(fast_clocks: None, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Start]:
    """Starts clusters (`Cluster.start`'s arguments); check Q is made of each when the test is over."""
    tasks = len(asyncio.all_tasks())
    started: list[Cluster] = []

    async def start(*args: Any, **options: Any) -> Cluster:
        cluster = await Cluster.start(*args, **options)
        started.append(cluster)
        return cluster

    yield start
    try:
        assert len(started) <= 1, "tasks are counted for one cluster a test"
        for cluster in started:
            await check_quiescent(cluster, tasks + 1)
    finally:
        for cluster in started:
            await cluster.close()
    lost = [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.ERROR]
    assert not lost, [record.getMessage() for record in lost]
