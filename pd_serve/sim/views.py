"""What one ingress knows of each replica, and how old it is. The one place that makes views for the policies."""

from __future__ import annotations

from pd_serve.sim.rules import LiveConstants
from pd_serve.types import ClusterView, EngineStats, ReplicaInfo, ReplicaState, ReplicaView, Role

Answer = tuple[str, EngineStats, bool]
"""What a replica says of itself: id, counts, whether it is draining."""
_NO_STATS = EngineStats()


class Known:
    """One replica as one ingress knows it."""

    __slots__ = (
        "connected",
        "draining",
        "healthy",
        "heard_at",
        "info",
        "kv_tokens",
        "prompt_tokens",
        "requests",
        "stats",
    )

    def __init__(self, info: ReplicaInfo, now: float) -> None:
        self.info = info
        self.connected = True
        self.healthy = False
        self.draining = False
        self.heard_at = now
        self.stats = _NO_STATS
        self.requests = 0
        self.prompt_tokens = 0
        self.kv_tokens = 0

    def state(self, now: float, live: LiveConstants) -> ReplicaState:
        if self.draining:
            return ReplicaState.DRAINING
        if not self.connected or not self.healthy or now - self.heard_at > live.suspect_after_s:
            return ReplicaState.SUSPECT
        return ReplicaState.READY


class Views:
    """Everything that one ingress knows of the cluster. Own legs are known at once, all else by reports."""

    def __init__(self, live: LiveConstants) -> None:
        self._live = live
        self.known: dict[str, Known] = {}

    def add(self, info: ReplicaInfo, now: float) -> None:
        """The replica is named by the controller: it is connected to, and answers soon."""
        self.known[info.id] = Known(info, now)

    def remove(self, replica_id: str) -> None:
        """The controller does not name it any more. Its legs go on."""
        self.known.pop(replica_id, None)

    def report(self, replica_id: str, stats: EngineStats, draining: bool, now: float) -> None:
        """A replica's counts arrived."""
        if known := self.known.get(replica_id):
            known.stats, known.draining = stats, draining
            known.heard_at, known.healthy, known.connected = now, True, True

    def lose(self, replica_id: str) -> None:
        """The channel to it broke."""
        if known := self.known.get(replica_id):
            known.connected = known.healthy = False

    def silent(self, now: float) -> list[str]:
        """Replicas that were heard of so long ago that their legs are given up."""
        oldest = now - self._live.lost_after_s
        return [replica_id for replica_id, known in self.known.items() if known.connected and known.heard_at < oldest]

    def prefill_leg(self, replica_id: str, prompt_tokens: int, legs: int) -> None:
        """A prefill leg of this ingress began (`legs` = 1) or ended (-1) there."""
        if known := self.known.get(replica_id):
            known.requests += legs
            known.prompt_tokens += legs * prompt_tokens

    def decode_leg(self, replica_id: str, kv_tokens: int, legs: int) -> None:
        """The same for a decode leg."""
        if known := self.known.get(replica_id):
            known.requests += legs
            known.kv_tokens += legs * kv_tokens

    def view(self, now: float) -> ClusterView:
        prefill: list[ReplicaView] = []
        decode: list[ReplicaView] = []
        for known in self.known.values():
            view = ReplicaView(
                info=known.info,
                state=known.state(now, self._live),
                stats=known.stats,
                stats_age_s=now - known.heard_at,
                own_requests=known.requests,
                own_prompt_tokens=known.prompt_tokens,
                own_kv_tokens=known.kv_tokens,
            )
            (prefill if known.info.role is Role.PREFILL else decode).append(view)
        return ClusterView(now=now, prefill=tuple(prefill), decode=tuple(decode))
