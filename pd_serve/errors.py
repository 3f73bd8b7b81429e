"""Typed errors, how they cross a hop, and the one table that turns them into HTTP."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on the wire: its class by name and what a client may read. No path, no traceback."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class PdServeError(Exception):
    """Base of every error that pd_serve raises on purpose.

    `blames_replica`: whether it counts against the health of the replica that it came from.
    `status`, `type`, `code`: its line in the HTTP table (OpenAI's error shape).
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    blames_replica: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> ErrorInfo:
        return ErrorInfo(type_name(self), self.message, self.param, self.retry_after_s)

    def to_openai(self) -> dict[str, dict[str, str | int | None]]:
        """Body of an HTTP answer in OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code or self.status,
            }
        }


class InvalidRequest(PdServeError):
    """The request itself is wrong; the same on every replica."""

    status, type = 400, "invalid_request_error"


class TooLarge(PdServeError):
    """The body of the HTTP request is larger than `limits.max_body_bytes`."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class Overloaded(PdServeError):
    """There is no room now; `retry_after_s` says when there may be."""

    status, type, code = 429, "rate_limit_error", "overloaded"


class DeadlineExceeded(PdServeError):
    """The request's time budget ran out before it was done."""

    status, type, code = 504, "timeout_error", "deadline_exceeded"


class NoReplica(PdServeError):
    """No replica can take the request: none is ready, or all that were tried failed."""

    status, type, code = 503, "server_error", "no_replica"


class EngineFailed(PdServeError):
    """An engine died, or raised something that is not the request's fault."""

    status, type, code = 502, "server_error", "engine_failed"
    blames_replica = True


class ReplicaLost(EngineFailed):
    """The replica went away, or fell silent, with the request on it."""

    code = "replica_lost"


class TransferFailed(PdServeError):
    """KV could not be moved and `kv.load_failure_policy` is `fail`."""

    status, type, code = 502, "server_error", "kv_transfer_failed"


class Draining(PdServeError):
    """The replica takes no new work; another should be chosen."""

    status, type, code = 503, "server_error", "draining"


class Cancelled(PdServeError):
    """The client left, or the request was aborted by an operator."""

    status, type, code = 499, "cancelled", "cancelled"


class ConfigError(PdServeError):
    """The configuration is wrong. One message may hold several lines, one mistake each."""

    status, type = 400, "invalid_config"


def type_name(error: PdServeError) -> str:
    return type(error).__name__


_KINDS: dict[str, type[PdServeError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        TooLarge,
        Overloaded,
        DeadlineExceeded,
        NoReplica,
        EngineFailed,
        ReplicaLost,
        TransferFailed,
        Draining,
        Cancelled,
        ConfigError,
    )
}


def from_wire(info: ErrorInfo) -> PdServeError:
    """The error that `to_wire` was called on. A kind that this version does not know is an `EngineFailed`."""
    kind = _KINDS.get(info.kind, EngineFailed)
    return kind(info.message, param=info.param, retry_after_s=info.retry_after_s)


def http_table() -> list[tuple[str, int, str, str | None]]:
    """(class, HTTP status, OpenAI type, code) of every error, for the documentation and its test."""
    return [(name, cls.status, cls.type, cls.code) for name, cls in _KINDS.items()]
