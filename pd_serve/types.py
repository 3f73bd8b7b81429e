"""Messages and views: the frozen data that passes between parts of pd_serve.

Types that cross a process boundary are `msgspec.Struct`s and travel as msgpack. Everything here is plain data:
ids, numbers, token ids. Times are seconds; a `deadline` is on the holder's own monotonic clock and is re-based
whenever a message crosses a process (see `path/frames.py`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class Role(StrEnum):
    """Which pool a replica belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


class KvOutcome(StrEnum):
    """How a decode engine came by a prompt's KV cache."""

    MOVED = "moved"  # taken from the prefill replica
    LOCAL = "local"  # planned without a prefill replica, or all of it was in the decode replica's own cache
    RECOMPUTED = "recomputed"  # should have been moved; computed on the decode replica instead (a counted fallback)


# --------------------------------------------------------------------------------------------- requests


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `generate`, rendered and tokenized once at the ingress.

    In engines and on wires `id` is the id of one leg (see `leg`), so that a retried request never meets its own
    earlier attempt.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Upper bound on generated tokens of each choice."""
    n: int = 1
    sampling: bytes = b""
    """The engine's own sampling parameters (vLLM's SamplingParams) as msgpack. Only the engine reads them."""
    cache_salt: str | None = None
    """Separates the prefix caches of those that must not share one."""
    priority: int = 0
    tenant: str = ""
    length_class: str = "default"
    deadline: float = float("inf")
    decode_only: str = ""
    """Why this request must not be handed over (its prompt has to be run where it decodes), or empty."""
    block_hashes: tuple[bytes, ...] = ()

    def leg(self, suffix: str) -> Request:
        """The same request under the id of one of its legs."""
        return msgspec.structs.replace(self, id=f"{self.id}.{suffix}")


class KvAddress(msgspec.Struct, frozen=True):
    """Where an engine's connector can be reached for KV, valid for one life of that engine.

    `engine_id` is made anew at each engine start: KV addressed to a former life is refused, never misread.
    """

    transport: str
    engine_id: str
    ranks: int = 1


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """One request's KV on its way from a prefill to a decode engine."""

    id: str
    prompt_tokens: int
    prompt_hash: bytes
    """`hash_tokens` of the prompt: KV of another prompt is refused."""
    source: KvAddress
    target: KvAddress
    lease_s: float
    """After this time whoever still holds the KV frees it."""


def hash_tokens(token_ids: Sequence[int], salt: str | None = None) -> bytes:
    """sha256 over length-prefixed salt and token ids (as int64): equal in every process, whatever PYTHONHASHSEED."""
    tagged = (salt or "").encode()
    digest = hashlib.sha256(len(tagged).to_bytes(8, "little") + tagged)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill replica reports once the prompt is computed and its KV is offered."""

    token_id: int
    """Prefill's own first token; only `kv.first_token` may send it to the client."""
    cached_tokens: int
    """Prompt tokens that the prefill replica already had."""
    computed_tokens: int
    generated_tokens: int
    """Tokens that the engine sampled for this leg: 1 unless the prefill clamp failed (case B03)."""
    kv_bytes: int
    seconds: float
    """From submission to the engine until its output."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int | None
    text: str | None


LogprobsAtPosition = tuple[TokenLogprob, ...]


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one engine step added to one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[LogprobsAtPosition, ...] | None = None


class KvReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request's KV on the decode side.

    It goes with the first delta, or as soon as it is known, so that it is not lost when the request ends early; and
    with the last delta, whose word is final.
    """

    outcome: KvOutcome
    reason: str = ""
    bytes: int = 0
    blocks: int = 0
    wait_s: float = 0.0
    """From the decode engine's allocation of blocks until the KV could be taken."""
    copy_s: float = 0.0
    """From then until its last byte was in place."""


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one engine step added to one request."""

    request_id: str
    choices: tuple[ChoiceDelta, ...]
    finished: bool = False
    cached_tokens: int | None = None
    prompt_logprobs: tuple[LogprobsAtPosition | None, ...] | None = None
    kv: KvReport | None = None


# --------------------------------------------------------------------------------------------- replicas


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's counts at one moment. Never negative; all zero when quiescent but for capacities."""

    waiting: int = 0
    running: int = 0
    waiting_prompt_tokens: int = 0
    kv_tokens_total: int = 0
    kv_tokens_used: int = 0
    reserved_tokens: int = 0
    """Granted to requests whose blocks are not allocated yet."""
    handoffs_held: int = 0
    """Hand-offs whose KV this engine, or a store on its behalf, holds now."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica publishes about itself, once, when it is ready to serve."""

    id: str
    role: Role
    version: str
    address: str
    """ZMQ endpoint of its channel."""
    fingerprint: str
    """Equal on two replicas exactly when KV of one is valid on the other (invariant 6)."""
    kv: KvAddress
    node: str = ""
    block_size: int = 16
    max_num_seqs: int = 1
    kv_tokens_total: int = 0


class ReplicaState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"  # failed or fell silent; gets no new work until it answers again


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as this ingress sees it now."""

    info: ReplicaInfo
    state: ReplicaState = ReplicaState.READY
    reason: str = ""
    """Why it is not ready, for people; empty when it is."""
    stats: EngineStats = EngineStats()
    stats_age_s: float = 0.0
    own_requests: int = 0
    """This ingress's own unfinished legs there (known at once, unlike `stats`)."""
    own_prompt_tokens: int = 0
    """Prompt tokens of this ingress's own prefills there that are not finished."""
    own_kv_tokens: int = 0
    """Prompt plus output budget of this ingress's own unfinished decode legs there."""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot that a policy decides on."""

    now: float
    prefill: tuple[ReplicaView, ...] = ()
    decode: tuple[ReplicaView, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who does what for one request. `prefill is None`: the decode replica computes the prompt itself."""

    decode: str
    prefill: str | None = None
    reason: str
    scores: dict[str, float] = {}


# --------------------------------------------------------------------------------------------- counting


class Sink(Protocol):
    """Where counts go. Lower floors are handed one; `observe.metrics` has the table of names."""

    def count(self, name: str, value: float = 1.0, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...

    def gauge(self, name: str, value: float, **labels: str) -> None: ...


class NullSink:
    """Counts nowhere; for callers that do not observe."""

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        pass

    def observe(self, name: str, value: float, **labels: str) -> None:
        pass

    def gauge(self, name: str, value: float, **labels: str) -> None:
        pass
