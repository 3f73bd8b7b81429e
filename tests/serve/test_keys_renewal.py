"""A claim on the channel keys outlives whatever Ray raises, and is bounded in time. Without a cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

pytestmark = pytest.mark.ray


class Holder:
    """Stands for the actor's handle; `answers` are what its calls bring, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls = 0
        self.claim = self

    async def remote(self) -> Any:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_renewal_goes_on_after_any_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pd_serve.errors import EngineFailed
    from pd_serve.path.zmq_channel import ChannelKeys
    from pd_serve.serve import keys

    mine, others = ChannelKeys.generate(), ChannelKeys.generate()
    holder = Holder(mine, RuntimeError("Failed to reach the GCS\nat 10.0.0.7"), ConnectionError("gone"), mine, others)
    monkeypatch.setattr(keys, "_holder", lambda *_: holder)
    caplog.set_level(logging.WARNING, logger="pd_serve.serve.keys")
    claim = keys.KeyClaim("app", forget_s=0.04)
    assert await claim.keys() == mine
    while holder.calls < 4:
        claim.check()
        await asyncio.sleep(0.005)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "RuntimeError: Failed to reach the GCS" in said[0]
    assert "10.0.0.7" not in said[0]
    for _ in range(1000):
        if holder.calls >= 6:
            break
        await asyncio.sleep(0.01)
    with pytest.raises(EngineFailed, match="replaced"):
        claim.check()
    claim.close()


async def test_a_claim_that_hangs_has_an_end_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from pd_serve.errors import EngineFailed
    from pd_serve.serve import keys

    monkeypatch.setattr(keys, "CLAIM_S", 0.2)
    monkeypatch.setattr(keys, "_holder", lambda *_: time.sleep(0.5))
    claim, ticks = keys.KeyClaim("app"), 0
    asking = asyncio.create_task(claim.keys())
    while not asking.done():
        await asyncio.sleep(0.01)
        ticks += 1
    with pytest.raises(EngineFailed, match="did not answer"):
        await asking
    assert ticks > 5
    claim.close()
