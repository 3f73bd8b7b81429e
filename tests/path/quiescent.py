"""Check Q of the public failure cases: after the last response nothing is left, and the next request works.

It holds for every way in which requests may have ended, and so it is where invariants 1 and 2 are checked after every
test of the path.
"""

from __future__ import annotations

import asyncio
import time

from pd_serve.errors import DeadlineExceeded
from tests.path.cluster import Answer, Cluster, Ingress, Node, expected, request


async def check_quiescent(cluster: Cluster, tasks: int, limit_s: float = 10.0) -> None:
    """Within `limit_s`: no request anywhere, no KV held anywhere, no task left over; then one plain request succeeds.

    Args:
        tasks: asyncio tasks that the test had before the cluster was started, the test's own included.
    """
    give_up = time.monotonic() + limit_s
    while left := await leftovers(cluster, tasks):
        assert time.monotonic() < give_up, "\n".join(["still there:", *left])
        await asyncio.sleep(0.005)
    for ingress in cluster.ingresses:
        check_requests_conserved(ingress)
    for node in cluster.nodes:
        check_legs_conserved(node)
        check_handoffs_conserved(node)
    if cluster.can_serve:
        await check_works(cluster)


async def leftovers(cluster: Cluster, tasks: int) -> list[str]:
    left: list[str] = []

    def note(what: str, number: float) -> None:
        if number:
            left.append(f"{what}: {number}")

    for place, ingress in enumerate(cluster.ingresses):
        view = ingress.pools.view()
        note(f"ingress {place} running", ingress.sink.last("requests_running"))
        note(f"ingress {place} queued", ingress.sink.last("requests_queued"))
        note(f"ingress {place} own legs", sum(replica.own_requests for replica in (*view.prefill, *view.decode)))
    for node in cluster.nodes:
        stats = await node.engine.stats()
        note(f"{node.name} legs", node.host.legs)
        for name in (
            "waiting",
            "running",
            "waiting_prompt_tokens",
            "kv_tokens_used",
            "reserved_tokens",
            "handoffs_held",
        ):
            note(f"{node.name} {name}", getattr(stats, name))
        note(f"{node.name} hand-offs given away", node.engine.sent.held())
        note(f"{node.name} hand-offs received", node.engine.received.held())
        note(f"{node.name} KV in transport", node.transport.held())
    expected_tasks = tasks + 2 * sum(len(_replicas(ingress)) for ingress in cluster.ingresses)
    expected_tasks += sum((not node.dead) + 1 for node in cluster.nodes)
    note("asyncio tasks too many", max(len(asyncio.all_tasks()) - expected_tasks, 0))
    return left


def _replicas(ingress: Ingress) -> list[str]:
    view = ingress.pools.view()
    return [replica.info.id for replica in (*view.prefill, *view.decode)]


def check_requests_conserved(ingress: Ingress) -> None:
    """Invariant 1: every request that came ended in exactly one outcome, and no count was ever negative."""
    sink = ingress.sink
    outcomes = sink.by_label("requests", "outcome")
    assert set(outcomes) <= {"ok", "failed", "cancelled", "shed"}
    assert ingress.asked == len(ingress.records) == sum(outcomes.values())
    assert sink.total("requests_accepted") == ingress.asked - outcomes.get("shed", 0)
    assert sink.lowest() >= 0
    for record in ingress.records:
        assert record.finished_at is not None
        assert (record.error is None) == (record.outcome == "ok")


def check_legs_conserved(node: Node) -> None:
    """Invariant 1, for each pool: every leg that was submitted ended in exactly one outcome."""
    for role, submitted in node.submitted.items():
        assert node.sink.total("legs", role=role) == submitted, node.sink.by_label("legs", "outcome")


def check_handoffs_conserved(node: Node) -> None:
    """Invariant 2: every hand-off that was opened left by exactly one edge."""
    for ledger in (node.engine.sent, node.engine.received):
        counts = ledger.counts()
        assert counts.held == 0
        assert counts.started == counts.done + counts.cancelled + sum(counts.failed.values())


async def check_works(cluster: Cluster) -> None:
    """One plain request to each ingress is answered rightly."""
    for node in cluster.nodes:
        node.engine.script.clear()
    for ingress in cluster.ingresses:
        for _ in range(20):
            asked = request(50, max_tokens=3, seed=ingress.asked + 1000)
            answer = await asyncio.wait_for(ingress.outcome(asked), 10.0)
            if not isinstance(answer, DeadlineExceeded):  # some tests leave very little time
                break
        assert isinstance(answer, Answer)
        assert answer.tokens() == expected(asked)
