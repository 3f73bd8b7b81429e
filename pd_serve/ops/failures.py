"""What an operator's command reports in one or two lines and a non-zero exit."""

from __future__ import annotations

from pd_serve.errors import PdServeError


class OperationFailed(PdServeError):
    """A command could not do what it was asked; the message is all that the user needs to see."""
