"""What happens next to a request when something went wrong: pure, driven by the live path and by the simulator."""

from __future__ import annotations

import msgspec

from pd_serve.errors import Draining, EngineFailed, NoReplica, Overloaded, PdServeError

MAX_RETRIES = 2
"""Attempts after the first that a request may cost, refusals for want of room not counted."""


DECODE_FULL = "decode_full"
NO_REPLICA = "no_replica"
"""Reasons to wait."""


class Progress(msgspec.Struct, frozen=True):
    """How far a request has come."""

    retries: int = 0
    tried: frozenset[str] = frozenset()
    emitted_tokens: int = 0
    """Tokens that the client has."""
    refused: frozenset[str] = frozenset()
    """Replicas that had no room when they were asked; asked again once something changed."""
    last_error: PdServeError | None = None
    """What ended the last attempt."""

    @property
    def avoid(self) -> frozenset[str]:
        """Replicas that are not asked now."""
        return self.tried | self.refused


class Retry(msgspec.Struct, frozen=True):
    """Plan again, without the replicas in `progress.avoid`."""

    progress: Progress
    reason: str


class Wait(msgspec.Struct, frozen=True):
    """Plan again when something changed."""

    reason: str


class Fail(msgspec.Struct, frozen=True):
    """Tell the client."""

    error: PdServeError


def after_decode_failure(error: PdServeError, decode: str, progress: Progress) -> Retry | Fail:
    """The decode leg on replica `decode` ended with `error`.

    One that has no room is not asked again until something changed, one that failed or leaves never again, and another
    is, as long as the client has seen nothing. Everything else is the client's to know.
    """
    if progress.emitted_tokens:
        return Fail(error)
    if isinstance(error, Overloaded):
        return Retry(msgspec.structs.replace(progress, refused=progress.refused | {decode}), DECODE_FULL)
    if not isinstance(error, EngineFailed | Draining) or progress.retries >= MAX_RETRIES:
        return Fail(error)
    tried = msgspec.structs.replace(
        progress, retries=progress.retries + 1, tried=progress.tried | {decode}, last_error=error
    )
    return Retry(tried, type(error).__name__)


def without_plan(reason: str, waited_s: float, patience_s: float, progress: Progress) -> Wait | Fail:
    """No replica can take it.

    If some are only full it waits for room, as long as its own budget lasts. Otherwise one may come (a restart, a
    scale-up), so it waits, but not longer than `patience_s`; then the client is told what the last attempt ended with.
    """
    if progress.refused:
        return Wait(DECODE_FULL)
    if waited_s >= patience_s:
        gone = NoReplica(f"{reason} after {waited_s:.0f} s", retry_after_s=patience_s)
        return Fail(progress.last_error or gone)
    return Wait(NO_REPLICA)
