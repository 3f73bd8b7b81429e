"""What the simulator takes from the configuration, and the live path's own constants."""

from __future__ import annotations

import msgspec

from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.routing import RoutingRules


class LiveConstants(msgspec.Struct, frozen=True, kw_only=True):
    """Of `path/`, which stands above this floor; a test holds the two against each other."""

    stats_period_s: float = 0.5
    grant_timeout_s: float = 5.0
    suspect_after_s: float = 4.0
    lost_after_s: float = 9.0
    ping_period_s: float = 1.0
    """How often an ingress looks for replicas that fell silent."""
    wait_s: float = 0.5
    """How long a request waits for a change before it looks again anyway."""
    rate_window_s: float = 10.0
    """Over which the gate counts what finished."""
    remember: int = 4096
    """Hand-offs that a replica remembers after they ended."""


class PoolRules(msgspec.Struct, frozen=True, kw_only=True):
    """One pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    gpus: float
    """GPUs of one replica."""


class PathRules(msgspec.Struct, frozen=True, kw_only=True):
    """As `path.request.PathRules`, and what else of the configuration matters here."""

    admission: AdmissionRules
    routing: RoutingRules
    router: str
    first_token_timeout_s: float
    total_timeout_s: float
    no_replica_timeout_s: float
    lease_s: float
    settle_at_blocks: bool
    """When a decode replica stops counting a grant: when its engine has blocks for the request (the fake engine), or
    at the first token (vLLM, which does not say when it allocates)."""
    recompute: bool
    """`kv.load_failure_policy`: a hand-off that fails is recomputed, or fails the request."""
    max_model_len: int
    max_tokens: int
    """Output budget of requests that do not say one."""
    live: LiveConstants = LiveConstants()
