"""One request inside a simulated engine."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Protocol

from pd_serve.sim.blocks import Unit


class Stage(Enum):
    NEW = auto()  # on its way into the engine
    WAITING = auto()
    LOADING = auto()  # has its blocks, waits for KV to be put into them
    READY = auto()  # loaded, waits to be scheduled again
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class Listener(Protocol):
    """Who hears what becomes of a sequence. Called between two steps."""

    def on_blocks(self, sequence: Sequence) -> None:
        """It has blocks for its prompt: the grant is the engine's now, and KV may be loaded when it is LOADING."""
        ...

    def on_first_token(self, sequence: Sequence) -> None: ...

    def on_finished(self, sequence: Sequence) -> None: ...


class Sequence:
    """What one engine knows of one leg.

    Args:
        prompt_tokens: length of the prompt.
        output_tokens: tokens that it will generate; only the engine knows.
        units: the prompt's units, from its beginning.
        output_units: units that its output completes.
        takes_kv: the prompt's KV comes from another engine.
    """

    __slots__ = (
        "cached_tokens",
        "computed",
        "finish_at",
        "generated",
        "held",
        "held_blocks",
        "joined",
        "last_token_at",
        "leg_id",
        "listener",
        "matched",
        "output_tokens",
        "output_units",
        "owner",
        "phase",
        "preempted",
        "private",
        "prompt_tokens",
        "stage",
        "takes_kv",
        "target",
        "units",
    )

    def __init__(
        self,
        leg_id: str,
        prompt_tokens: int,
        output_tokens: int,
        units: tuple[Unit, ...],
        listener: Listener,
        owner: Any = None,
        takes_kv: bool = False,
        output_units: tuple[Unit, ...] = (),
    ) -> None:
        self.leg_id = leg_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.units = units
        self.output_units = output_units
        self.listener = listener
        self.owner = owner
        """The listener's own mark."""
        self.takes_kv = takes_kv
        self.stage = Stage.NEW
        self.target = prompt_tokens
        """Tokens whose KV must be there before the next one is generated."""
        self.computed = 0
        """Tokens whose KV is there; while it decodes, what it had when it joined (see `joined`)."""
        self.generated = 0
        """Tokens generated before it last joined the decode batch."""
        self.cached_tokens = -1
        """Of the prompt in the prefix cache when it was first scheduled; -1 before."""
        self.matched = 0
        self.held: list[Unit] = []
        """Units that it holds, and in the next line their blocks."""
        self.held_blocks = 0
        self.private = 0
        """Blocks that it has besides its units."""
        self.joined = 0
        """The engine's count of steps when it joined the decode batch."""
        self.finish_at = 0
        """That count when it will be done."""
        self.phase = 0
        """It needs another block before every step whose count is this, modulo the block size."""
        self.last_token_at = 0.0
        self.preempted = 0

    @property
    def uncomputed(self) -> int:
        return self.target - self.computed

    @property
    def blocks_held(self) -> int:
        return self.private + self.held_blocks

    def add(self, unit: Unit) -> None:
        """Some of its private blocks became a unit."""
        self.held.append(unit)
        self.held_blocks += unit.blocks
        self.private -= unit.blocks
