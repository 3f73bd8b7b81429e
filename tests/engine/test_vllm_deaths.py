"""Engines that die. They run last: nothing is left for other tests (see conftest.py)."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.engine.vllm_asks import fresh_prompt, ids, outcome

if TYPE_CHECKING:
    from tests.engine.vllm_pair import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(240)]


# --------------------------------------------------------------------------------------------- deaths, so at the end


@pytest.mark.case("B15")
@pytest.mark.case("B35")
def test_a_prefill_engine_that_dies_after_its_offer(pair: Pair) -> None:
    import ray

    prompt = fresh_prompt(70)
    [expected] = pair.aggregated(pair.request(prompt, 6))
    pair.forget_prefixes()
    request = pair.request(prompt, 6)
    handoff = pair.handoff(request)
    ray.get(pair.prefill.prefill.remote(request.leg("p"), handoff))
    assert ray.get(pair.prefill.health.remote()) is None
    time.sleep(0.5)
    [child] = ray.get(pair.prefill.child_pids.remote())
    os.kill(child, signal.SIGKILL)
    time.sleep(1.5)
    deltas = ray.get(pair.decode.decode.remote(request.leg("d"), handoff), timeout=30)
    assert ids(deltas) == ids(expected)
    assert outcome(deltas) == "recomputed:lost"
    health = ray.get(pair.prefill.health.remote())
    assert health.kind == "EngineFailed"
    failed = ray.get(pair.prefill.prefill.remote(pair.request(prompt).leg("p"), pair.handoff(request)))
    assert failed.kind == "EngineFailed"


@pytest.mark.case("B35")
def test_a_stopped_engine_is_not_healthy(pair: Pair) -> None:
    import ray

    [child] = ray.get(pair.decode.child_pids.remote())
    assert ray.get(pair.decode.health.remote()) is None
    os.kill(child, signal.SIGSTOP)
    try:
        assert ray.get(pair.decode.health.remote()).kind == "EngineFailed"
    finally:
        os.kill(child, signal.SIGCONT)
    assert ray.get(pair.decode.health.remote()) is None


def test_no_engine_process_outlives_its_replica(pair: Pair) -> None:
    import psutil
    import ray

    [child] = ray.get(pair.decode.child_pids.remote())
    os.kill(ray.get(pair.decode.pid.remote()), signal.SIGKILL)
    gone, alive = psutil.wait_procs([psutil.Process(child)], timeout=5)
    assert gone
    assert not alive
