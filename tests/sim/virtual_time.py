"""An event loop on virtual time: sleeping costs nothing, and what depends on time comes out the same in every run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """In place of waiting, moves the time on."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that will never come")
        self.now += max(timeout, 0.0)
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end; `time.monotonic` is the loop's time meanwhile."""
    selector = _Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop._clock_resolution = 1e-9  # type: ignore[attr-defined]
    with patch.object(loop, "time", lambda: selector.now), patch("time.monotonic", lambda: selector.now):
        try:
            return loop.run_until_complete(main)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
