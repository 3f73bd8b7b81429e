"""How long the fake engine's steps take."""

from __future__ import annotations

import asyncio

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of one engine."""

    prefill_tokens_per_s: float = 50_000.0
    """Prompt tokens computed in a second."""
    decode_step_s: float = 0.01
    """Seconds of a step that generates, whatever its batch."""

    def step_s(self, prompt_tokens: int, decodes: int) -> float:
        """Seconds of a step with so many prompt tokens and so many sequences that generate."""
        return prompt_tokens / self.prefill_tokens_per_s + (self.decode_step_s if decodes else 0.0)


CATCH_UP_S = 0.05
"""A run of steps that is later than this stays late."""


class Pacer:
    """Sleeps through steps so that a run of them takes their sum, although each sleep wakes a little late."""

    def __init__(self) -> None:
        self._due = 0.0
        self._idle = True

    def pause(self) -> None:
        """There is nothing to do: the next step begins when it comes."""
        self._idle = True

    async def step(self, seconds: float) -> None:
        """Return when a step, which follows the last one at once, is over."""
        now = asyncio.get_running_loop().time()
        began = now if self._idle else max(self._due, now - CATCH_UP_S)
        self._due, self._idle = began + seconds, False
        await asyncio.sleep(max(self._due - now, 0.0))
