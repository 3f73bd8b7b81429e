"""Whether a replica whose legs fail gets more: it may be healthy by its own report and still fail at everything."""

from __future__ import annotations

FAILURES = 3
"""Legs in a row that may fail by the replica's fault."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Trust:
    """Of one replica. After FAILURES in a row it gets nothing for a while, then the next leg is its probe: a failure
    doubles the pause, a success ends the matter."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._until = 0.0

    def worked(self, finished: bool = True) -> None:
        """A leg ended well."""
        if finished:
            self._in_a_row = 0

    def failed(self, now: float) -> None:
        """A leg failed, and not by the request's fault."""
        self._in_a_row += 1
        beyond = self._in_a_row - FAILURES
        if beyond >= 0:
            self._until = now + min(FIRST_PAUSE_S * 2.0**beyond, LONGEST_PAUSE_S)

    def suspended(self, now: float) -> bool:
        return self._in_a_row >= FAILURES and now < self._until
