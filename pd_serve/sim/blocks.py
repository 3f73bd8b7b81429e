"""A replica's KV blocks: what its sequences hold, and the prefix cache that lives in the rest.

Content is known by the trace's hash ids, each standing for one stretch of a prompt together with everything before it
(512 tokens in Mooncake's traces): here a unit. A unit is cached and evicted as a whole.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec


class Unit(msgspec.Struct, frozen=True, gc=False):
    """One stretch of a prompt."""

    id: int
    blocks: int
    """Full KV blocks in it."""
    end: int
    """Tokens of the prompt up to its last full block."""


def units_of(ids: tuple[int, ...], first: int, tokens: int, unit_tokens: int, block_size: int) -> tuple[Unit, ...]:
    """Units of a sequence of `tokens` tokens, `ids` being those from number `first` on. Units without a full block
    are left out."""
    units = []
    for number, unit_id in enumerate(ids, first):
        start, end = number * unit_tokens // block_size, min((number + 1) * unit_tokens, tokens) // block_size
        if end > start:
            units.append(Unit(unit_id, end - start, end * block_size))
    return tuple(units)


class Blocks:
    """All blocks of one engine: `total == free + cached (idle) + held units + private`.

    Args:
        total: how many there are.
        caching: keep units that no sequence holds, until the room is needed; the least recently used go first.
    """

    def __init__(self, total: int, caching: bool) -> None:
        self.total = total
        self.free = total
        self.idle: OrderedDict[int, int] = OrderedDict()
        """Blocks of cached units that no sequence holds, by unit id, least recently used first."""
        self.held: dict[int, list[int]] = {}
        """[holders, blocks] of units that sequences hold."""
        self.idle_blocks = 0
        self.evicted = 0
        """Blocks of units that were given up for room."""
        self._caching = caching

    @property
    def available(self) -> int:
        """Blocks that a sequence could get now."""
        return self.free + self.idle_blocks

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.total - self.free - self.idle_blocks

    def match(self, units: tuple[Unit, ...]) -> int:
        """How many units from the first on are here."""
        held, idle = self.held, self.idle
        for number, unit in enumerate(units):
            holders = held.get(unit.id)
            if (holders[1] if holders is not None else idle.get(unit.id)) != unit.blocks:
                return number
        return len(units)

    def blocks_if_held(self, units: tuple[Unit, ...], matched: int) -> int:
        """How many available blocks holding the first `matched` units takes."""
        idle = self.idle
        return sum(idle.get(unit.id, 0) for unit in units[:matched])

    def hold(self, unit: Unit) -> None:
        """One more sequence holds this unit, which is here."""
        holders = self.held.get(unit.id)
        if holders is not None:
            holders[0] += 1
            return
        blocks = self.idle.pop(unit.id)
        self.idle_blocks -= blocks
        self.held[unit.id] = [1, blocks]

    def take(self, blocks: int) -> bool:
        """Make `blocks` blocks private to a sequence. False, and nothing changes, when there are not enough."""
        if blocks > self.free + self.idle_blocks:
            return False
        self.make_free(blocks)
        self.free -= blocks
        return True

    def make_free(self, blocks: int) -> None:
        """Give up cached units until so many blocks, of those that are available, hold nothing."""
        while self.free < blocks:
            _, given_up = self.idle.popitem(last=False)
            self.idle_blocks -= given_up
            self.free += given_up
            self.evicted += given_up

    def publish(self, unit: Unit) -> bool:
        """Private blocks of a sequence became this unit, which it now holds. False when another copy is here: the
        blocks stay private."""
        if not self._caching or unit.id in self.held or unit.id in self.idle:
            return False
        self.held[unit.id] = [1, unit.blocks]
        return True

    def unpublish(self, unit: Unit) -> bool:
        """The unit's only holder takes its blocks back as private ones. False when it has other holders."""
        holders = self.held.get(unit.id)
        if holders is None or holders[0] > 1:
            return False
        del self.held[unit.id]
        return True

    def release(self, units: list[Unit], private: int) -> None:
        """A sequence is over. The end of a prefix is given up before its beginning."""
        self.free += private
        for unit in reversed(units):
            holders = self.held[unit.id]
            holders[0] -= 1
            if holders[0] == 0:
                del self.held[unit.id]
                self.idle[unit.id] = holders[1]
                self.idle_blocks += holders[1]
