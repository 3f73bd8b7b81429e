"""The fake engine's KV blocks: a bounded pool with a prefix cache, as vLLM's."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from pd_serve.types import hash_tokens

Content: TypeAlias = "tuple[array[int], ...]"
"""KV of one block's tokens, one array a layer."""


class Block:
    """Room for `block_size` tokens. Full blocks of the prefix cache keep their content after their last user left."""

    __slots__ = ("content", "hash", "users")

    def __init__(self) -> None:
        self.users = 0
        self.hash: bytes | None = None
        self.content: Content = ()


class BlockPool:
    """All blocks of one engine.

    Args:
        blocks: how many there are.
        prefix_caching: keep full blocks, the least recently used are reused first.
    """

    def __init__(self, blocks: int, prefix_caching: bool) -> None:
        self.total = blocks
        self._free: OrderedDict[Block, None] = OrderedDict((Block(), None) for _ in range(blocks))
        self._cached: dict[bytes, Block] = {}
        self._prefix_caching = prefix_caching

    @property
    def used(self) -> int:
        """Blocks that a sequence has."""
        return self.total - len(self._free)

    def match(self, hashes: Iterable[bytes]) -> list[Block]:
        """Take the cached blocks of the longest prefix of `hashes`."""
        taken: list[Block] = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            self._free.pop(block, None)
            block.users += 1
            taken.append(block)
        return taken

    def allocate(self, blocks: int) -> list[Block] | None:
        """Take so many empty blocks; None, and nothing is taken, when there are not enough."""
        if blocks > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(blocks)]
        for block in taken:
            self._forget(block)
            block.users = 1
        return taken

    def keep(self, block: Block, block_hash: bytes, content: Content) -> None:
        """The block is full: others with the same prefix may use it."""
        if self._prefix_caching and block.hash is None and block_hash not in self._cached:
            block.hash, block.content = block_hash, content
            self._cached[block_hash] = block

    def release(self, blocks: Sequence[Block]) -> None:
        """Give blocks back. The end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            block.users -= 1
            if block.users == 0:
                self._free[block] = None

    def _forget(self, block: Block) -> None:
        if block.hash is not None:
            del self._cached[block.hash]
        block.hash, block.content = None, ()


class PrefixHashes:
    """Hash of each full block of one sequence together with everything before it, made as far as it is asked for."""

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        self._hashes: list[bytes] = [hash_tokens((), salt)]

    def of(self, token_ids: Sequence[int], blocks: int) -> list[bytes]:
        """Hashes of the first `blocks` blocks of `token_ids`, of which earlier calls gave a prefix."""
        size = self._block_size
        for number in range(len(self._hashes) - 1, blocks):
            block = array("q", token_ids[number * size : (number + 1) * size])
            self._hashes.append(hashlib.sha256(self._hashes[-1] + block.tobytes()).digest())
        return self._hashes[1 : blocks + 1]
