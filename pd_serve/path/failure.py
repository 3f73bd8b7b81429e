"""How an error of the path reaches the edge as what it is, past an HTTP application that knows only its own errors.

The edge opens a `Failure` around each HTTP request; the engine client, deep inside, notes the typed error there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pd_serve.errors import PdServeError


class Failure:
    """The first typed error of one HTTP request, or None."""

    def __init__(self) -> None:
        self.error: PdServeError | None = None


_current: ContextVar[Failure | None] = ContextVar("pd_serve_failure", default=None)


@contextmanager
def watched() -> Iterator[Failure]:
    """Inside the block, and in every task started from it, `note` writes to the yielded object."""
    failure = Failure()
    token = _current.set(failure)
    try:
        yield failure
    finally:
        _current.reset(token)


def note(error: PdServeError) -> None:
    """Remember why this request failed. Outside of a watched request this does nothing."""
    failure = _current.get()
    if failure is not None and failure.error is None:
        failure.error = error
