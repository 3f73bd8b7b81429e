"""The invariants of docs/architecture.md that concern counts, checked on a cluster at any moment between two events.

Each check compares what is counted with what is there: outcomes with requests, ledgers with sequences and transfers,
blocks with their holders.
"""

from __future__ import annotations

from collections import Counter

from pd_serve.sim.blocks import Blocks
from pd_serve.sim.cluster import Cluster
from pd_serve.sim.engine import Engine
from pd_serve.sim.replica import Replica
from pd_serve.sim.sequence import Sequence, Stage


def audit(cluster: Cluster) -> list[str]:
    """What does not hold, one line each; nothing when all is well."""
    wrong = [*_requests(cluster)]
    for replica in cluster.replicas.values():
        wrong += _legs(replica)
        wrong += _handoffs(replica)
        wrong += _blocks(replica.engine)
    return wrong


def at_rest(cluster: Cluster) -> list[str]:
    """What is still held although nothing runs any more."""
    wrong = audit(cluster)
    for ingress in cluster.ingresses:
        for name, left in (("running", ingress.running), ("queued", ingress.queued), ("waiting", ingress.waiting)):
            if left:
                wrong.append(f"{ingress.name}: {len(left)} requests are {name}")
        for replica_id, known in ingress.views.known.items():
            if known.requests or known.prompt_tokens or known.kv_tokens:
                wrong.append(f"{ingress.name} believes that it has legs on {replica_id}")
    for replica in cluster.replicas.values():
        stats = replica.stats()
        held = stats.waiting + stats.running + stats.kv_tokens_used + stats.reserved_tokens + stats.handoffs_held
        if held or replica.kv.inbox or replica.sequences:
            wrong.append(f"{replica.info.id} still holds something: {stats}")
    return wrong


def _requests(cluster: Cluster) -> list[str]:
    """Invariant 1: accepted = ok + failed + cancelled + running + queued; shed counted apart."""
    wrong = []
    accepted = sum(ingress.accepted for ingress in cluster.ingresses)
    here = sum(len(ingress.running) + len(ingress.queued) for ingress in cluster.ingresses)
    outcomes = cluster.collector.outcomes
    ended = sum(outcomes.get(outcome, 0) for outcome in ("ok", "failed", "cancelled"))
    if accepted != ended + here:
        wrong.append(f"requests: accepted {accepted} != ended {ended} + running and queued {here}")
    if cluster.arrived != accepted + outcomes.get("shed", 0):
        wrong.append(f"requests: arrived {cluster.arrived} != accepted {accepted} + shed {outcomes.get('shed', 0)}")
    for ingress in cluster.ingresses:
        rules = ingress.rules.admission
        if len(ingress.running) > rules.max_running or len(ingress.queued) > rules.max_queue:
            wrong.append(f"{ingress.name} runs or queues more than it may")
        if any(run not in ingress.running for run in ingress.waiting):
            wrong.append(f"{ingress.name}: a request waits that does not run")
    return wrong


def _legs(replica: Replica) -> list[str]:
    legs = replica.legs
    ended = legs.ok + legs.failed + legs.aborted + legs.lost
    wrong = []
    if legs.started != ended + len(replica.sequences):
        wrong.append(f"{replica.info.id}: legs started {legs.started} != ended {ended} + {len(replica.sequences)}")
    known = set(replica.sequences.values())
    doomed = set(replica.engine.doomed)
    strays = set(replica.engine.scheduler.sequences) - known - doomed
    return [*wrong, *(f"{replica.info.id}: the engine runs {stray.leg_id}, which is over" for stray in strays)]


def _handoffs(replica: Replica) -> list[str]:
    """Invariant 2: what the ledger says is held is what is there; every hand-off left by exactly one edge."""
    kv, name = replica.kv, replica.info.id
    wrong = []
    if kv.takes.held() != len(kv.loads):
        wrong.append(f"{name}: the ledger holds {kv.takes.held()} takes, {len(kv.loads)} sequences wait for KV")
    if set(kv.loads.values()) != set(replica.engine.scheduler.loading):
        wrong.append(f"{name}: other sequences load than the engine believes")
    ids = [*kv.loads, *kv.inbox]
    ids = [handoff_id for handoff_id in ids if (kv.takes.owner(handoff_id) is None) == (handoff_id in kv.loads)]
    wrong += [f"{name}: hand-off {handoff_id} has no owner, or two" for handoff_id in ids]
    for side, ledger in (("gives", kv.gives), ("takes", kv.takes)):
        counts = ledger.counts()
        if counts.started != counts.done + counts.cancelled + counts.held + sum(counts.failed.values()):
            wrong.append(f"{name}: {side} do not add up: {counts}")
    return wrong


def _blocks(engine: Engine) -> list[str]:
    blocks: Blocks = engine.blocks
    wrong = []
    holders: Counter[int] = Counter()
    private = 0
    for sequence in engine.scheduler.sequences:
        holders.update(unit.id for unit in sequence.held)
        if sequence.held_blocks != sum(unit.blocks for unit in sequence.held):
            wrong.append(f"blocks: {sequence.leg_id} miscounts its units")
        private += _private(engine, sequence)
    if {unit: held[0] for unit, held in blocks.held.items()} != dict(holders):
        wrong.append("blocks: units are not held by those who are counted")
    held = sum(count for _, count in blocks.held.values())
    if sum(blocks.idle.values()) != blocks.idle_blocks:
        wrong.append("blocks: idle ones do not add up")
    if blocks.free + blocks.idle_blocks + held + private != blocks.total or min(blocks.free, private) < 0:
        wrong.append(f"blocks: {blocks.free} free + {blocks.idle_blocks} idle + {held} + {private} != {blocks.total}")
    if set(blocks.held) & set(blocks.idle):
        wrong.append("blocks: a unit is held and idle")
    return wrong


def _private(engine: Engine, sequence: Sequence) -> int:
    if sequence.stage is not Stage.DECODE:
        return sequence.private
    tokens = sequence.computed + engine.batch.steps - sequence.joined
    return -(-tokens // engine.scheduler.block_size) - sum(unit.blocks for unit in sequence.held)
