"""Who gets a request: pure functions of (request, view, config, tried, rng)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pd_serve.types import ClusterView, Plan, ReplicaState, ReplicaView, Request


class Rng(Protocol):
    """What a policy needs of a random generator (random.Random has it)."""

    def random(self) -> float: ...


class RoutingRules(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that routing reads."""

    min_handoff_tokens: int
    """Shorter prompts are computed where they decode."""
    prefill_on_decode: bool = False
    """Never hand over."""


class NoPlan(msgspec.Struct, frozen=True):
    """No replica can take the request now."""

    reason: str


Router = Callable[[Request, ClusterView, RoutingRules, frozenset[str], Rng], Plan | NoPlan]
"""`tried`: ids of replicas on which this request failed already."""


def least_loaded(
    request: Request, view: ClusterView, rules: RoutingRules, tried: frozenset[str], rng: Rng
) -> Plan | NoPlan:
    """The decode replica with the smallest share of its KV or of its sequences spoken for, whichever is larger, and the
    prefill replica of the same fingerprint with the fewest prompt tokens to compute; ties are broken at random, so that
    ingresses do not herd."""
    decodes = _usable(view.decode, tried)
    if not decodes:
        return NoPlan("no decode replica is ready" if view.decode else "there is no decode replica")
    scores = {decode.info.id: fullness(decode) for decode in decodes}
    decode = min(decodes, key=lambda candidate: (scores[candidate.info.id], rng.random()))
    if local := _why_local(request, rules):
        return Plan(decode=decode.info.id, reason=local, scores=scores)

    prefills = [
        prefill for prefill in _usable(view.prefill, tried) if prefill.info.fingerprint == decode.info.fingerprint
    ]
    if not prefills:
        return Plan(decode=decode.info.id, reason="no_prefill_replica", scores=scores)
    scores |= {prefill.info.id: float(prompt_backlog(prefill)) for prefill in prefills}
    prefill = min(prefills, key=lambda candidate: (scores[candidate.info.id], rng.random()))
    return Plan(decode=decode.info.id, prefill=prefill.info.id, reason="least_loaded", scores=scores)


def _why_local(request: Request, rules: RoutingRules) -> str:
    if rules.prefill_on_decode:
        return "forced_prefill_on_decode"
    if request.decode_only:
        return request.decode_only
    if len(request.prompt_token_ids) < rules.min_handoff_tokens:
        return "short_prompt"
    return ""


def _usable(replicas: Sequence[ReplicaView], tried: frozenset[str]) -> list[ReplicaView]:
    return [replica for replica in replicas if replica.state is ReplicaState.READY and replica.info.id not in tried]


def fullness(replica: ReplicaView) -> float:
    """Share of the replica's KV, or of the sequences that it runs at once, that is used or promised. Its own report and
    what this ingress has there since are alternatives, not a sum: the report contains what it had seen of ours."""
    stats, info = replica.stats, replica.info
    tokens = max(stats.kv_tokens_used + stats.reserved_tokens, replica.own_kv_tokens)
    sequences = max(stats.running + stats.waiting, replica.own_requests)
    return max(tokens / max(info.kv_tokens_total, 1), sequences / max(info.max_num_seqs, 1))


def prompt_backlog(replica: ReplicaView) -> int:
    """Prompt tokens that wait to be computed there."""
    return max(replica.stats.waiting_prompt_tokens, replica.own_prompt_tokens)


ROUTERS: dict[str, Router] = {"least_loaded": least_loaded}
"""By the name that `routing.policy` uses."""
