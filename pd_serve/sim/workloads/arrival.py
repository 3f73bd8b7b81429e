"""One request of a workload, with everything that the simulator, but not a policy, may know of it."""

from __future__ import annotations

import msgspec

UNIT_TOKENS = 512
"""Tokens that one hash id stands for in Mooncake's traces."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    at: float
    """Seconds since the beginning of the workload."""
    prompt_tokens: int
    output_tokens: int
    """Tokens that it will generate; no policy sees it."""
    units: tuple[int, ...] = ()
    """One id for each stretch of `UNIT_TOKENS` tokens of the prompt together with everything before it; the last one
    may be shorter. Equal ids, equal prefixes."""
    output_units: tuple[int, ...] = ()
    """The same of prompt and output together, from the prompt's last full stretch on, full stretches only: what the
    next turn of the conversation begins with."""
    max_tokens: int = 0
    """What the client asked for; 0 when it did not say."""
    tenant: str = ""
    session: str = ""
    """Turns of one conversation share it."""
    leaves_after_s: float = float("inf")
    """The client goes away so long after its arrival, if it has not been served."""
