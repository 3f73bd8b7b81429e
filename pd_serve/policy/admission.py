"""Whether a request is taken in: a pure bound on what runs and what waits."""

from __future__ import annotations

import msgspec


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that admission reads."""

    max_running: int
    max_queue: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one ingress has in hand."""

    running: int
    queued: int
    finished_per_s: float
    """Requests that left in the last seconds, a second; 0 when unknown."""


class Admit(msgspec.Struct, frozen=True):
    """Run it now."""


class Queue(msgspec.Struct, frozen=True):
    """Let it wait; there is a place in the queue."""


class Shed(msgspec.Struct, frozen=True):
    """Refuse it."""

    reason: str
    retry_after_s: float
    """When, at the present rate, the queue will have a free place."""


def admit(load: Load, rules: AdmissionRules) -> Admit | Queue | Shed:
    """First come, first served: run while there is room, wait while the queue has room, else refuse."""
    if load.running < rules.max_running and load.queued == 0:
        return Admit()
    if load.queued < rules.max_queue:
        return Queue()
    return Shed("queue_full", retry_after(load))


def retry_after(load: Load) -> float:
    """Seconds until one of the queued requests leaves the queue, at the present rate; 1 to 60."""
    return min(max(1.0 / load.finished_per_s if load.finished_per_s > 0 else 1.0, 1.0), 60.0)
