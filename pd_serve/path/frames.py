"""Messages between ingress and replica, and their msgpack form.

A replica collects the deltas of all requests of one engine step into one `Frame` for each ingress: a token costs
tens of bytes and microseconds instead of a call.
"""

from __future__ import annotations

import time

import msgspec

from pd_serve.errors import ErrorInfo
from pd_serve.types import Delta, EngineStats, Handoff, PrefillResult, Request


class SubmitDecode(msgspec.Struct, frozen=True, tag="decode", array_like=True):
    """Ask for room and, if granted, generate. Answered by `Granted` or `Refused`, then frames."""

    request: Request
    handoff: Handoff | None
    budget_s: float
    emitted: tuple[int, ...] = ()


class SubmitPrefill(msgspec.Struct, frozen=True, tag="prefill", array_like=True):
    """Compute the prompt and offer its KV. Answered by `Prefilled` or `Failed`."""

    request: Request
    handoff: Handoff
    budget_s: float


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Nobody wants this leg any more. Not answered; unknown ids are ignored."""

    request_id: str


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw", array_like=True):
    """The KV of this hand-off will not come: recompute or fail now, not at the end of the lease."""

    handoff_id: str
    reason: str


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Answered by `Stats`; also makes a new ingress known to the replica."""


class Granted(msgspec.Struct, frozen=True, tag="granted", array_like=True):
    request_id: str


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    request_id: str
    error: ErrorInfo


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled", array_like=True):
    request_id: str
    result: PrefillResult


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The leg is over without a last delta."""

    request_id: str
    error: ErrorInfo


class Frame(msgspec.Struct, frozen=True, tag="frame", array_like=True):
    deltas: tuple[Delta, ...]


class Stats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """Sent every `STATS_PERIOD_S` and in answer to `Ping`."""

    stats: EngineStats
    healthy: bool
    draining: bool
    reason: str = ""


ToReplica = SubmitDecode | SubmitPrefill | Abort | Withdraw | Ping
ToIngress = Granted | Refused | Prefilled | Failed | Frame | Stats

STATS_PERIOD_S = 0.5
"""How often a replica reports its counts to each ingress."""

_encoder = msgspec.msgpack.Encoder()
_to_replica = msgspec.msgpack.Decoder(ToReplica)
_to_ingress = msgspec.msgpack.Decoder(ToIngress)


def encode(message: ToReplica | ToIngress) -> bytes:
    return _encoder.encode(message)


def decode_to_replica(data: bytes | memoryview) -> ToReplica:
    """Raises msgspec.DecodeError (or its ValidationError) when the bytes are not such a message."""
    return _to_replica.decode(data)


def decode_to_ingress(data: bytes | memoryview) -> ToIngress:
    """Raises msgspec.DecodeError (or its ValidationError) when the bytes are not such a message."""
    return _to_ingress.decode(data)


def budget(request: Request) -> float:
    """Seconds that the request has left on this process's clock, at most a year (so that it travels as a number)."""
    return min(request.deadline - time.monotonic(), 365 * 86400.0)


def rebase(request: Request, budget_s: float) -> Request:
    """The request with its deadline on the receiving process's own clock."""
    return msgspec.structs.replace(request, deadline=time.monotonic() + budget_s)
