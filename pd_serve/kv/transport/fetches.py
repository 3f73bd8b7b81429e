"""Bytes on their way to those who took them: every take ends by its deadline, whatever the fetch of them does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from pd_serve.errors import TransferFailed
from pd_serve.kv.transport.base import Payload

T = TypeVar("T")


class _Fetch(Generic[T]):
    def __init__(self, item: T, payload: Future[Payload], deadline: float) -> None:
        self.item: T | None = item
        self.payload = payload
        self.deadline = deadline


class Fetches(Generic[T]):
    """Turns items that were taken into payloads, in threads of its own. Thread-safe; no method blocks.

    A fetch under way cannot be stopped: it keeps its thread and its item until it returns, and what it returns after
    its end is dropped. One that has not begun lets go of its item at its end.

    Args:
        fetch: called with an item and the deadline (seconds, on the monotonic clock of the caller).
        threads: fetches that run at once. It bounds how many stuck ones it takes to hold up the others.
    """

    def __init__(self, fetch: Callable[[T, float], Payload], threads: int) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._open: dict[str, _Fetch[T]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pd-kv-fetch")

    def start(self, handoff_id: str, item: T, payload: Future[Payload], deadline: float) -> None:
        """Fetch `item`; `payload` ends once: with the result, or by `end`, `expire` or `close`."""
        fetch = _Fetch(item, payload, deadline)
        with self._lock:
            self._open[handoff_id] = fetch
        try:
            self._pool.submit(self._run, handoff_id, fetch)
        except RuntimeError:  # closed
            self.end(handoff_id, "lost")

    def end(self, handoff_id: str, reason: str) -> None:
        """Fail the payload with `reason`, if it is still on its way. Idempotent."""
        self._fail([handoff_id], reason)

    def expire(self, now: float) -> list[str]:
        """Fail every payload whose deadline has passed, with `expired`; returns their ids."""
        with self._lock:
            due = [handoff_id for handoff_id, fetch in self._open.items() if fetch.deadline <= now]
        return self._fail(due, "expired")

    def close(self) -> None:
        """Fail every payload with `lost`. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = list(self._open)
        self._fail(left, "lost")

    def _fail(self, handoff_ids: list[str], reason: str) -> list[str]:
        failed = []
        for handoff_id in handoff_ids:
            with self._lock:
                fetch = self._open.pop(handoff_id, None)
                if fetch is None:
                    continue
                fetch.item = None
            fetch.payload.set_exception(TransferFailed(reason))
            failed.append(handoff_id)
        return failed

    def _run(self, handoff_id: str, fetch: _Fetch[T]) -> None:
        item = fetch.item
        if item is None:
            return
        result: Payload | None = None
        failure: BaseException | None = None
        try:
            result = self._fetch(item, fetch.deadline)
        except BaseException as error:
            failure = error
        with self._lock:
            if self._open.get(handoff_id) is not fetch:
                return
            del self._open[handoff_id]
            fetch.item = None
        if result is not None:
            fetch.payload.set_result(result)
        else:
            fetch.payload.set_exception(failure)
