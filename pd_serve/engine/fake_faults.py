"""Scripted faults of the fake engine: what goes wrong, at which stage, for which requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from pd_serve.kv.envelope import Envelope, checksum

Stage = Literal["before_prefill", "mid_prefill", "prefill_done", "mid_transfer", "transfer_done", "after_token_k"]
"""On the prefill side `mid_transfer` is before the KV is handed to the transport, on the decode side after it came."""

Action = Literal[
    "fail",  # this leg ends with EngineFailed; on decode, at mid_transfer, the transfer fails instead
    "hang",  # this leg makes no progress any more
    "slow",  # this leg stands still for `seconds`
    "stall",  # the whole engine stands still for `seconds`
    "die",  # the engine is dead: every leg fails, now and later
    "corrupt",  # what follows damages offered KV, at mid_transfer on the prefill side: one bit flips
    "truncate",  # the last page is cut short
    "drop_layer",  # one layer is missing, and the envelope says so
    "wrong_blocks",  # one block is missing, and the envelope says so
    "other_prompt",  # another prompt's KV comes in its place
    "other_generation",  # an envelope of an earlier life of the engine comes in its place
    "duplicate",  # it is offered twice
    "drop",  # it never comes
]
DAMAGE = frozenset(
    ("corrupt", "truncate", "drop_layer", "wrong_blocks", "other_prompt", "other_generation", "duplicate", "drop")
)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong."""

    stage: Stage
    action: Action
    request: str = ""
    """Only legs whose id begins with this."""
    token: int = 1
    """For `after_token_k`: k, the number of generated tokens after which it strikes."""
    seconds: float = 0.0
    """For `slow` and `stall`."""
    times: int | None = None
    """How often it strikes; None: always."""


class FaultScript:
    """The faults of one engine; they may be added while it runs."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._left: list[tuple[Fault, int | None]] = []
        self.struck = 0
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        self._left.append((fault, fault.times))

    def clear(self) -> None:
        self._left.clear()

    def strike(self, stage: Stage, request_id: str, token: int = 1, *, damage: bool = False) -> Fault | None:
        """The fault that happens here and now, counted as struck; None mostly.

        Args:
            damage: look for damage of KV, which is told apart from what happens to the leg.
        """
        for place, (fault, left) in enumerate(self._left):
            if (
                fault.stage == stage
                and (fault.action in DAMAGE) == damage
                and request_id.startswith(fault.request)
                and (stage != "after_token_k" or fault.token == token)
                and left != 0
            ):
                self._left[place] = (fault, None if left is None else left - 1)
                self.struck += 1
                return fault
        return None


def damage(action: Action, envelope: Envelope, pages: bytearray) -> list[tuple[Envelope, bytearray]]:
    """What is offered in place of this: none, one or two offers."""
    change = msgspec.structs.replace
    layer = envelope.blocks * envelope.page_bytes
    match action:
        case "corrupt":
            damaged = bytearray(pages)
            damaged[len(damaged) // 3] ^= 1
            return [(envelope, damaged)]
        case "truncate":
            return [(envelope, pages[:-1])]
        case "drop_layer":
            rest = pages[layer:]
            return [(change(envelope, layers=envelope.layers - 1, checksum=checksum(memoryview(rest))), rest)]
        case "wrong_blocks":
            rest = bytearray().join(
                pages[start + envelope.page_bytes : start + layer] for start in range(0, len(pages), layer)
            )
            return [(change(envelope, blocks=envelope.blocks - 1, checksum=checksum(memoryview(rest))), rest)]
        case "other_prompt":
            return [(change(envelope, prompt_hash=envelope.prompt_hash[::-1]), pages)]
        case "other_generation":
            return [(change(envelope, source=envelope.source + "-before"), pages)]
        case "duplicate":
            return [(envelope, pages), (envelope, bytearray(pages))]
        case "drop":
            return []
        case _:
            raise ValueError(f"{action} is not damage of one offer")
