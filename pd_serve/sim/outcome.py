"""What the simulator remembers of one finished request."""

from __future__ import annotations

import msgspec


class Served(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request from arrival to end. Times are seconds since its arrival."""

    id: str
    arrived: float
    """Seconds since the beginning."""
    outcome: str
    """`ok`, `failed`, `cancelled` or `shed`, as in the live records."""
    error: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    """Tokens that the client got."""
    prefill: str
    """The prefill replica of the last attempt, or empty."""
    decode: str
    reason: str
    """Of the last plan."""
    fallback: str
    """Why the decode replica computed a prompt that was planned to be handed over."""
    attempts: int
    """Plans that were tried; refusals for want of room do not count."""
    retries: int
    """Those that followed a failure."""
    waits: int
    cached_tokens: int
    """Prompt tokens that the replica which computed the prompt had in its cache."""
    local_tokens: int
    """Prompt tokens that the decode replica had in its cache, of those that would have had to be moved."""
    moved_bytes: int
    admitted: float
    planned: float
    granted: float
    prefilled: float
    first_token: float
    """0 when there was none, as with the times above."""
    finished: float
    preempted: int

    @property
    def tpot(self) -> float:
        """Mean seconds between two tokens; 0 for less than two."""
        if self.output_tokens < 2:
            return 0.0
        return (self.finished - self.first_token) / (self.output_tokens - 1)
