"""Invariants 1, 2, 3 and 7 while requests end in every way at once, sampled all along and not only at the end."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import pytest

from pd_serve.engine.fake_faults import Fault
from pd_serve.errors import PdServeError
from pd_serve.path.record import Record
from pd_serve.types import Request, Role
from tests.path.cluster import Answer, Cluster, Ingress, expected, fast, request, rules
from tests.path.conftest import Start, fast_clocks, start

__all__ = ["fast_clocks", "start"]  # fixtures

MAX_RUNNING, MAX_QUEUE, MAX_NUM_SEQS = 12, 20, 6


def _faulty(role: Role) -> list[Fault]:
    """Legs of requests whose id begins with `f` fail in many places, `h` hang in one, `s` are slow in one."""
    if role is Role.PREFILL:
        return [
            Fault(stage="before_prefill", action="fail", request="f0"),
            Fault(stage="mid_prefill", action="fail", request="f1"),
            Fault(stage="prefill_done", action="fail", request="f2"),
            Fault(stage="mid_transfer", action="corrupt", request="f3"),
            Fault(stage="mid_transfer", action="truncate", request="f4"),
            Fault(stage="mid_transfer", action="slow", seconds=0.05, request="s0"),
            Fault(stage="mid_prefill", action="hang", request="h0"),
        ]
    return [
        Fault(stage="transfer_done", action="fail", request="f5"),
        Fault(stage="after_token_k", token=2, action="fail", request="f6"),
        Fault(stage="mid_transfer", action="fail", request="f7"),
        Fault(stage="after_token_k", token=3, action="slow", seconds=0.05, request="s1"),
        Fault(stage="after_token_k", token=3, action="hang", request="h1"),
    ]


def _any_request(rng: random.Random, number: int) -> Request:
    kind = rng.choice(["ok"] * 6 + ["f0", "f1", "f2", "f3", "f4", "f5", "f6", "f7", "s0", "s1", "h0", "h1"])
    asked = request(
        rng.choice([5, 16, 40, 200]), max_tokens=rng.choice([1, 2, 8]), seed=number, n=rng.choice([1, 1, 2])
    )
    budget_s = 0.2 if kind.startswith("h") else 60.0
    return msgspec.structs.replace(asked, id=f"{kind}-{number}", deadline=time.monotonic() + budget_s)


def check_conserved_now(ingress: Ingress) -> None:
    """Invariant 1: accepted = ok + failed + cancelled + running + queued; shed counted apart; never negative.
    Invariant 7: what runs and what waits is within its bounds."""
    sink = ingress.sink
    outcomes = sink.by_label("requests", "outcome")
    ended = sum(outcomes.get(outcome, 0) for outcome in ("ok", "failed", "cancelled"))
    running, queued = sink.last("requests_running"), sink.last("requests_queued")
    assert sink.total("requests_accepted") == ended + running + queued
    assert ingress.asked == sink.total("requests_accepted") + outcomes.get("shed", 0)
    assert 0 <= running <= MAX_RUNNING
    assert 0 <= queued <= MAX_QUEUE


async def check_bounded_now(cluster: Cluster) -> None:
    """Invariants 2 and 7: an engine never runs, promises or holds more than it has."""
    for node in cluster.nodes:
        stats = await node.engine.stats()
        assert min(msgspec.structs.astuple(stats)) >= 0
        assert stats.kv_tokens_used <= stats.kv_tokens_total
        assert stats.running <= (MAX_NUM_SEQS if node.role is Role.DECODE else 64)
        assert node.transport.held() <= stats.handoffs_held
        if node.role is Role.DECODE:
            assert node.transport.held() <= node.engine.received.held() + MAX_NUM_SEQS


class Clients:
    """Everybody who asks, and what each was told."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.told: dict[str, Answer | PdServeError | TimeoutError] = {}

    def send(self, ingress: Ingress, asked: Request, leaves_after_s: float | None) -> None:
        self.tasks.append(asyncio.create_task(self._ask(ingress, asked, leaves_after_s)))

    async def _ask(self, ingress: Ingress, asked: Request, leaves_after_s: float | None) -> None:
        answer = Answer()
        try:
            async with asyncio.timeout(leaves_after_s):
                async for delta in ingress.stream(asked):
                    answer.deltas.append(delta)
            self.told[asked.id] = answer
        except (PdServeError, TimeoutError) as error:
            complete = bool(answer.deltas) and answer.last.finished  # it left with everything in hand
            self.told[asked.id] = answer if complete else error
        for index in range(asked.n):
            tokens = answer.tokens(index)
            assert tokens == expected(asked, index=index)[: len(tokens)]  # Invariant 3


def check_record(record: Record, told: Answer | PdServeError | TimeoutError) -> None:
    """What is written down is what the client was told."""
    if isinstance(told, Answer):
        assert record.outcome == "ok"
        assert record.output_tokens == sum(len(c.token_ids) for d in told.deltas for c in d.choices)
    elif isinstance(told, TimeoutError):
        assert record.outcome == "cancelled"
    else:
        assert record.outcome in ("failed", "shed")
        assert record.error == type(told).__name__


@pytest.mark.parametrize("seed", range(2))
async def test_invariant_1_requests_are_conserved_whatever_ends_them(start: Start, seed: int) -> None:
    """Invariants 1, 2, 3 and 7 under a random mix of successes, faults, deadlines, cancellations and refusals."""
    rng = random.Random(seed)
    cluster = await start(
        prefills=2,
        decodes=2,
        ingresses=2,
        decode_settings=fast(max_num_seqs=MAX_NUM_SEQS, kv_tokens=4096),
        rules=rules(max_running=MAX_RUNNING, max_queue=MAX_QUEUE, lease_s=0.3, no_replica_timeout_s=0.3),
    )
    for node in cluster.nodes:
        for fault in _faulty(node.role):
            node.engine.script.add(fault)

    async def check_now() -> None:
        for ingress in cluster.ingresses:
            check_conserved_now(ingress)
        await check_bounded_now(cluster)

    clients = Clients()
    for number in range(80):
        leaves_after_s = rng.random() * 0.1 if rng.random() < 0.3 else None
        clients.send(rng.choice(cluster.ingresses), _any_request(rng, number), leaves_after_s)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.01)
            await check_now()
    while not all(task.done() for task in clients.tasks):
        await asyncio.sleep(0.01)
        await check_now()
    await asyncio.gather(*clients.tasks)

    records = {record.id: record for ingress in cluster.ingresses for record in ingress.records}
    assert records.keys() == clients.told.keys()
    assert {record.outcome for record in records.values()} >= {"ok", "failed", "cancelled"}
    for request_id, told in clients.told.items():
        check_record(records[request_id], told)
