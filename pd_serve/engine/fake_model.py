"""The fake engine's model: what a token's KV is, and which token follows from it.

A token's KV is one 64-bit number a layer, a hash over everything up to it. The next token is a hash over the whole
cache, so KV that is wrong, partial, misplaced or another request's shows at once as other tokens; and a sequence that
goes on from prompt plus emitted tokens meets the very cache that an unbroken one has.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Callable, Sequence, Set

import msgspec

_MASK = (1 << 64) - 1
_ITEM_BYTES = 8

Decoder = Callable[[int], str]
"""Text of one token."""


def words(token_id: int) -> str:
    """The text of a token where no tokenizer is wanted."""
    return f"<{token_id}> "


class FakeModel(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed part: everything that two engines must share to exchange KV."""

    weights: str = "fake"
    """Models with other weights give other tokens."""
    vocab_size: int = 49_152
    eos_token_id: int = 2
    eos_period: int = 0
    """One token in so many is the end of the answer; 0: it never ends by itself."""
    layers: int = 2
    block_size: int = 16

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block_size * _ITEM_BYTES

    def fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    # ------------------------------------------------------------------------------------ compute

    def compute(self, cache: KvCache, token_ids: Sequence[int]) -> None:
        """Append the KV of these tokens to the cache."""
        last = cache.layers[0][-1] if len(cache) else zlib.crc32(self.weights.encode())
        numbers = array("Q")
        for token_id in token_ids:
            last = _mix(last ^ (token_id * 0x9E3779B97F4A7C15 & _MASK))
            numbers.append(last)
        cache.append(
            [numbers if not layer else array("Q", (n ^ _mask(layer) for n in numbers)) for layer in range(self.layers)]
        )

    def next_token(self, cache: KvCache, *, choice: int = 0, seed: int = 0, banned: Set[int] = frozenset()) -> int:
        """The token that follows. Other choices and seeds give other ones; `banned` ones are never given."""
        number = _mix(cache.digest() ^ _mix(choice ^ (seed << 8) & _MASK))
        while True:
            ends = self.eos_period and number % self.eos_period == 0
            token_id = self.eos_token_id if ends else (number >> 16) % self.vocab_size
            if token_id not in banned and (ends or token_id != self.eos_token_id):
                return token_id
            number = _mix(number + 1)

    # ------------------------------------------------------------------------------------ pages

    def pages(self, cache: KvCache, tokens: int) -> bytearray:
        """The first `tokens` tokens as whole pages, uint8 [layers * blocks * page_bytes], layers outermost."""
        size = self.blocks(tokens) * self.page_bytes
        return bytearray().join(cache.part(layer, 0, tokens).ljust(size, b"\0") for layer in range(self.layers))

    def put(self, cache: KvCache, pages: memoryview, tokens: int) -> None:
        """Append what the cache lacks of the first `tokens` tokens, out of pages as `pages` makes them."""
        size = pages.nbytes // self.layers
        have = len(cache) * _ITEM_BYTES
        cache.append(
            [
                array("Q", pages[layer * size + have : layer * size + tokens * _ITEM_BYTES].tobytes())
                for layer in range(self.layers)
            ]
        )


class KvCache:
    """KV of one sequence."""

    def __init__(self, layers: int) -> None:
        self.layers = [array("Q") for _ in range(layers)]
        self._digests = [0] * layers

    def __len__(self) -> int:
        """Tokens whose KV is here."""
        return len(self.layers[0])

    def append(self, layers: Sequence[array[int]]) -> None:
        """Add the KV of further tokens, one array a layer."""
        for number, (mine, new) in enumerate(zip(self.layers, layers, strict=True)):
            mine.extend(new)
            self._digests[number] = zlib.crc32(new, self._digests[number])

    def part(self, layer: int, start: int, end: int) -> bytes:
        """KV of the tokens from `start` to `end` in one layer."""
        return self.layers[layer][start:end].tobytes()

    def block(self, start: int, end: int) -> tuple[array[int], ...]:
        """KV of the tokens from `start` to `end`, one array a layer."""
        return tuple(layer[start:end] for layer in self.layers)

    def digest(self) -> int:
        """64 bits over every number of every layer."""
        digest = len(self)
        for part in self._digests:
            digest = _mix(digest << 32 & _MASK ^ part)
        return digest


def _mix(number: int) -> int:
    """A bijection of 64 bits in which every bit of the input moves about half of the output (splitmix64's)."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def _mask(layer: int) -> int:
    return _mix(layer)
