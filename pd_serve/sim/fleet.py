"""Which replicas there were when, where they stood, and what they add up to."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from pd_serve.sim.network import Place
from pd_serve.sim.spec import Layout
from pd_serve.types import Role

if TYPE_CHECKING:
    from pd_serve.sim.replica import Replica


class Life:
    """One replica from the decision to start it until it is gone. It uses its GPUs all the time."""

    __slots__ = ("ended", "gpus", "role", "started")

    def __init__(self, role: Role, gpus: float, started: float) -> None:
        self.role = role
        self.gpus = gpus
        self.started = started
        self.ended = float("inf")

    def within(self, begins: float, ends: float) -> float:
        """Seconds of it that lie between the two."""
        return max(min(self.ended, ends) - max(self.started, begins), 0.0)


class Totals:
    """Sums over replicas."""

    __slots__ = ("busy_s", "computed_tokens", "evicted", "hit_tokens", "preemptions", "prompt_tokens")

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.computed_tokens = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self.evicted = 0
        self.preemptions = 0

    def add(self, replica: Replica) -> None:
        engine = replica.engine
        self.busy_s += engine.busy_s
        self.computed_tokens += engine.computed_tokens
        self.preemptions += engine.scheduler.preemptions
        self.evicted += engine.blocks.evicted
        self.hit_tokens += replica.hit_tokens
        self.prompt_tokens += replica.prompt_tokens


class Slots:
    """Which places are free."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._next = 0
        self._free: dict[int, list[tuple[int, int]]] = {}

    def take(self, gpus: float) -> Place:
        """The first free place for a replica with so many GPUs; those without one take the place of one."""
        size, per_node = self._size(gpus), self._layout.gpus_per_node
        if self._free.get(size):
            node, slot = heapq.heappop(self._free[size])
        else:
            if self._next % per_node + size > per_node:
                self._next = (self._next // per_node + 1) * per_node
            node, slot = divmod(self._next, per_node)
            self._next += size
        return Place(node, node // self._layout.nodes_per_rack, slot)

    def give_back(self, place: Place, gpus: float) -> None:
        heapq.heappush(self._free.setdefault(self._size(gpus), []), (place.node, place.slot))

    def _size(self, gpus: float) -> int:
        return min(max(int(-(-gpus // 1)), 1), self._layout.gpus_per_node)


def mixed(pools: dict[Role, int]) -> list[Role]:
    """Roles of all replicas in the order in which they are placed, each pool spread evenly over the whole."""
    places = [((number + 0.5) / count, role) for role, count in pools.items() for number in range(count)]
    return [role for _, role in sorted(places)]
