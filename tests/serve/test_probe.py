"""The first request of a replica: it must go through before the replica publishes itself."""

from __future__ import annotations

import pytest

from pd_serve.engine.fake import FakeEngine
from pd_serve.engine.fake_faults import Fault
from pd_serve.errors import EngineFailed
from pd_serve.kv.transport.in_process import InProcessEnd, Registry
from pd_serve.serve import probe as module
from pd_serve.serve.probe import probe
from tests.path.cluster import FAST


async def engine(*faults: Fault) -> FakeEngine:
    engine = FakeEngine(FAST, InProcessEnd(Registry(), engine_id="e"), faults)
    await engine.start()
    return engine


async def test_an_engine_that_answers_passes_and_keeps_nothing() -> None:
    tried = await engine()
    await probe(tried)
    stats = await tried.stats()
    assert tried.computed_tokens > 0
    assert (stats.running, stats.waiting, stats.reserved_tokens, stats.kv_tokens_used) == (0, 0, 0, 0)
    await tried.close()


async def test_an_engine_that_fails_its_first_request_does_not_pass() -> None:
    tried = await engine(Fault(stage="before_prefill", action="fail"))
    with pytest.raises(EngineFailed):
        await probe(tried)
    assert (await tried.stats()).reserved_tokens == 0
    await tried.close()


async def test_an_engine_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.2)
    tried = await engine(Fault(stage="after_token_k", action="hang"))
    with pytest.raises(EngineFailed, match="first request"):
        await probe(tried)
    await tried.close()
