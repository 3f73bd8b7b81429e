"""What a finished record leaves in the log: one line of JSON, which never holds a prompt or an answer."""

from __future__ import annotations

import logging

import msgspec

from pd_serve.path.record import Record

logger = logging.getLogger("pd_serve.records")


def log_record(record: Record) -> None:
    """Log one finished request: as a warning when it departed from its plan or failed, else as information.

    `fallbacks` has the reason of each prompt that was computed on decode though it was planned to be handed over.
    """
    fallbacks = [attempt.fallback for attempt in record.attempts if attempt.fallback]
    level = logging.WARNING if fallbacks or record.outcome == "failed" else logging.INFO
    if logger.isEnabledFor(level):
        line = {"event": "request", **msgspec.to_builtins(record), "fallbacks": fallbacks}
        del line["started"]  # on this process's own clock
        logger.log(level, "%s", msgspec.json.encode(line).decode())


def log_through(name: str) -> None:
    """Everything that pd_serve logs goes through the handlers of the logger of this name, at its level."""
    logging.getLogger("pd_serve").parent = logging.getLogger(name)
