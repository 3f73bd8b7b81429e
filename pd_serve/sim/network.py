"""Links between nodes: how long moving bytes takes, by distance and by what else is under way.

Each end of a link (a device's or a node's way out, its way in, a rack's way up) is a server that serves in the order of
arrival, and a transfer is over when the slowest of the servers on its way has served it. First come, first served is
how the transports work (one queue of copies an engine) and costs a constant per transfer; fair sharing would have to
re-plan every transfer of the cluster whenever one begins or ends. The two differ in who is late, not in how much is
moved: every server works whenever it has work.
"""

from __future__ import annotations

import msgspec

from pd_serve.sim.clock import Clock


class Place(msgspec.Struct, frozen=True):
    """Where something runs."""

    node: int
    rack: int
    slot: int = 0
    """Which of the node's devices."""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One distance."""

    bytes_per_s: float
    """Of one way out, or in: a device's within its node, a node's to other nodes."""
    latency_s: float


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All distances."""

    node: Link
    """Within a node."""
    rack: Link
    """Between nodes of a rack."""
    across: Link
    """Between racks."""
    rack_uplink_bytes_per_s: float = float("inf")
    """What all nodes of a rack share on their way to other racks, in each direction."""
    wire_s: float = 0.0005
    """One message between an ingress and a replica, frames and grants alike."""


_Server = tuple[str, int, int]


class Network:
    """All links of a cluster."""

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock = clock
        self._links = links
        self._free_at: dict[_Server, float] = {}
        self.bytes: dict[str, int] = {"node": 0, "rack": 0, "across": 0}
        """Moved, by distance."""
        self.transfers = 0

    def move(self, source: Place, target: Place, nbytes: int) -> float:
        """Begin a transfer; returns the moment when its last byte is there."""
        distance, link = self.between(source, target)
        self.bytes[distance] += nbytes
        self.transfers += 1
        slots = (source.slot, target.slot) if distance == "node" else (-1, -1)
        arrives = self._serve(("out", source.node, slots[0]), nbytes, link.bytes_per_s)
        arrives = max(arrives, self._serve(("in", target.node, slots[1]), nbytes, link.bytes_per_s))
        if distance == "across":
            uplink = self._links.rack_uplink_bytes_per_s
            arrives = max(arrives, self._serve(("up", source.rack, -1), nbytes, uplink))
            arrives = max(arrives, self._serve(("down", target.rack, -1), nbytes, uplink))
        return arrives + link.latency_s

    def between(self, source: Place, target: Place) -> tuple[str, Link]:
        """Name and link of a distance."""
        if source.node == target.node:
            return "node", self._links.node
        if source.rack == target.rack:
            return "rack", self._links.rack
        return "across", self._links.across

    def _serve(self, server: _Server, nbytes: int, bytes_per_s: float) -> float:
        begins = max(self._free_at.get(server, 0.0), self._clock.now)
        ends = begins + nbytes / bytes_per_s
        self._free_at[server] = ends
        return ends
