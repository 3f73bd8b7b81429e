"""What every test of the pair of engines says and asks; imports nothing heavy."""

from __future__ import annotations

import random
from typing import Any

B = 32  # the smallest block of vLLM's CPU attention
_random = random.Random(7)


def fresh_prompt(tokens: int) -> list[int]:
    """No test ever meets another test's prefix."""
    return [_random.randrange(1000, 40000) for _ in range(tokens)]


def ids(deltas: Any, index: int = 0) -> list[int]:
    assert isinstance(deltas, list), deltas
    return [t for d in deltas for choice in d.choices if choice.index == index for t in choice.token_ids]


def text(deltas: Any, index: int = 0) -> str:
    return "".join(choice.text for d in deltas for choice in d.choices if choice.index == index)


def outcome(deltas: Any) -> str:
    """How the decode engine came by the KV, with its reason."""
    assert isinstance(deltas, list), deltas
    kv = deltas[-1].kv
    return f"{kv.outcome}:{kv.reason}" if kv.reason else str(kv.outcome)
