"""What a decode replica has promised: room in KV tokens and sequences, kept until the engine itself accounts for it."""

from __future__ import annotations

import msgspec


class _Grant(msgspec.Struct):
    tokens: int
    sequences: int
    expires_at: float
    started: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine holds now, apart from grants."""

    tokens: int = 0
    sequences: int = 0


class Room:
    """Grants of one engine. Pure: callers pass `now` in seconds.

    A grant counts until its request has blocks (`settle`), is given up (`revoke`), or was never started and expires.

    Args:
        kv_tokens: tokens of KV that the engine holds.
        max_sequences: sequences that it runs at once.
    """

    def __init__(self, kv_tokens: int, max_sequences: int) -> None:
        self._kv_tokens = kv_tokens
        self._max_sequences = max_sequences
        self._grants: dict[str, _Grant] = {}

    def grant(self, request_id: str, tokens: int, sequences: int, load: Load, now: float, expires_at: float) -> str:
        """Reserve room; empty when granted, else what there is too little of: `kv` or `sequences`.

        A request that an empty engine could take is always granted there, whatever it asks for: it runs alone.
        Granting an id again replaces its grant.
        """
        self.expire(now)
        self._grants.pop(request_id, None)
        tokens, sequences = min(tokens, self._kv_tokens), min(sequences, self._max_sequences)
        if load.tokens + self.reserved_tokens + tokens > self._kv_tokens:
            return "kv"
        if load.sequences + self.reserved_sequences + sequences > self._max_sequences:
            return "sequences"
        self._grants[request_id] = _Grant(tokens, sequences, expires_at)
        return ""

    def start(self, request_id: str) -> None:
        """Its request is in the engine: the grant no longer expires, and its sequences are counted by the engine."""
        if grant := self._grants.get(request_id):
            grant.started = True
            grant.sequences = 0

    def settle(self, request_id: str) -> None:
        """The engine accounts for it, or it is over. Idempotent."""
        self._grants.pop(request_id, None)

    def revoke(self, request_id: str) -> None:
        """Give up a grant that was not started; one that was stays until `settle`. Idempotent."""
        grant = self._grants.get(request_id)
        if grant is not None and not grant.started:
            del self._grants[request_id]

    @property
    def reserved_tokens(self) -> int:
        return sum(grant.tokens for grant in self._grants.values())

    @property
    def reserved_sequences(self) -> int:
        return sum(grant.sequences for grant in self._grants.values())

    def expire(self, now: float) -> None:
        """Drop grants that were not started in time."""
        late = [request_id for request_id, g in self._grants.items() if not g.started and g.expires_at <= now]
        for request_id in late:
            del self._grants[request_id]
