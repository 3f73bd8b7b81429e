"""The seam between hand-offs and whatever carries their bytes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import msgspec

from pd_serve.kv.envelope import Envelope
from pd_serve.types import KvAddress


class Payload(msgspec.Struct, frozen=True):
    """KV as it arrived. `pages` is read-only and valid until the hand-off is released."""

    envelope: Envelope
    pages: memoryview
    """uint8 [layers * blocks * page_bytes], layers outermost."""


class Transport(Protocol):
    """One rank's end. Thread-safe; nothing but `wait_ready` blocks: slow work happens behind the returned futures.

    A hand-off id is used once. Futures fail with `TransferFailed`; its message is one reason word
    (`lost`, `expired`, `unreachable`, `withdrawn`, or what `withdraw` was given) that becomes a metric label.
    """

    def address(self) -> KvAddress:
        """Where peers reach this end."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Return when peers can reach this end. Raises TransferFailed (`unreachable`) when they cannot in time."""
        ...

    def offer(self, target: KvAddress, envelope: Envelope, pages: memoryview, lease_s: float) -> Future[None]:
        """Give one hand-off's KV to `target`, which frees it after `lease_s` if nobody takes it.

        Done when `target` has it and this end no longer needs `pages`.
        """
        ...

    def take(self, handoff_id: str, lease_s: float) -> Future[Payload]:
        """The KV of a hand-off addressed to this end, once it is offered and here.

        Fails with `expired` after `lease_s`, counted from this call, in whatever state the hand-off then is.
        """
        ...

    def withdraw(self, handoff_id: str, reason: str) -> None:
        """End a `take` that is not done yet, with `reason`, and refuse a later offer of this id. Idempotent."""
        ...

    def release(self, handoff_id: str) -> None:
        """The KV was copied, or is not wanted: let go of every reference to it. Idempotent."""
        ...

    def held(self) -> int:
        """Hand-offs whose bytes this end keeps alive."""
        ...

    def close(self) -> None:
        """End every take with `lost` and let go of everything. Idempotent."""
        ...
