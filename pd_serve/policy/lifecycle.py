"""What happens next to a request when something went wrong: pure, driven by the live path and by the simulator."""

from __future__ import annotations

import msgspec

from pd_serve.errors import Draining, EngineFailed, NoReplica, Overloaded, PdServeError

MAX_RETRIES = 2
"""Attempts after the first that a request may cost, refusals for want of room not counted."""


class Progress(msgspec.Struct, frozen=True):
    """How far a request has come."""

    retries: int = 0
    tried: frozenset[str] = frozenset()
    emitted_tokens: int = 0
    """Tokens that the client has."""


class Retry(msgspec.Struct, frozen=True):
    """Plan again, without the replicas in `progress.tried`."""

    progress: Progress
    reason: str


class Wait(msgspec.Struct, frozen=True):
    """Plan again when something changed."""

    reason: str


class Fail(msgspec.Struct, frozen=True):
    """Tell the client."""

    error: PdServeError


def after_decode_failure(error: PdServeError, decode: str, progress: Progress) -> Retry | Wait | Fail:
    """The decode leg on replica `decode` ended with `error`.

    Want of room waits for room. A replica that failed or leaves is not asked again, and another is, as long as the
    client has seen nothing. Everything else is the client's to know.
    """
    if progress.emitted_tokens:
        return Fail(error)
    if isinstance(error, Overloaded):
        return Wait("decode_full")
    if not isinstance(error, EngineFailed | Draining):
        return Fail(error)
    if progress.retries >= MAX_RETRIES:
        return Fail(error)
    tried = Progress(progress.retries + 1, progress.tried | {decode}, progress.emitted_tokens)
    return Retry(tried, type(error).__name__)


def without_plan(reason: str, waited_s: float, patience_s: float) -> Wait | Fail:
    """No replica can take it. One may come (a restart, a scale-up), so it waits, but not longer than `patience_s`."""
    if waited_s >= patience_s:
        return Fail(NoReplica(f"{reason} after {waited_s:.0f} s", retry_after_s=patience_s))
    return Wait(reason)
