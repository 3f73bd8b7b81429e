"""How a hand-off travels inside a request: plain data on the way, typed again by whoever reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pd_serve.types import Handoff, Role

EXTRA_ARG = "kv_transfer_params"
"""The engine's own name for what travels with a request to the KV connector."""
_KEY = "pd_serve"


class HandoffParams(msgspec.Struct, frozen=True):
    """What one engine does in a hand-off: a prefill engine gives, a decode engine takes."""

    role: Role
    handoff: Handoff


def to_extra_args(params: HandoffParams) -> dict[str, Any]:
    """As `SamplingParams.extra_args`: nothing but dicts, strings and numbers."""
    return {EXTRA_ARG: {_KEY: msgspec.to_builtins(params)}}


def from_transfer_params(transfer_params: Mapping[str, Any] | None) -> HandoffParams | None:
    """What `to_extra_args` was given, or None for a request without a hand-off.

    Raises:
        msgspec.ValidationError: it is not such data.
    """
    data = (transfer_params or {}).get(_KEY)
    return None if data is None else msgspec.convert(data, HandoffParams)


def blocks_to_move(prompt_tokens: int, block_size: int) -> int:
    """Leading blocks of a prompt worth moving: the engine computes the last token again in any case."""
    return -(-(prompt_tokens - 1) // block_size)
