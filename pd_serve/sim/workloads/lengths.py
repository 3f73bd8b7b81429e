"""How long prompts and answers are, and who shares a prefix with whom."""

from __future__ import annotations

import bisect
import hashlib
import random
from itertools import accumulate
from math import log

P90 = 1.2816
"""Of the standard normal distribution."""


def exponential(rng: random.Random, mean: float, most: int) -> int:
    """At least 1, at most `most`."""
    return min(int(rng.expovariate(1.0 / max(mean - 0.5, 0.5))) + 1, most)


def lognormal(rng: random.Random, median: float, p90: float, most: int) -> int:
    """At least 1, at most `most`."""
    return max(min(round(median * rng.lognormvariate(0.0, log(p90 / median) / P90)), most), 1)


def pareto(rng: random.Random, least: float, shape: float, most: int) -> int:
    return min(round(least * rng.paretovariate(shape)), most)


class Zipf:
    """Ranks from 0 on, the k-th drawn in proportion to `1 / k ** exponent`."""

    def __init__(self, ranks: int, exponent: float) -> None:
        self._upto = list(accumulate(1.0 / (rank + 1) ** exponent for rank in range(ranks)))

    def draw(self, rng: random.Random) -> int:
        return bisect.bisect_left(self._upto, rng.random() * self._upto[-1])

    def share(self, ranks: int) -> float:
        """Of all draws, those of the first `ranks` ranks."""
        share: float = self._upto[ranks - 1] / self._upto[-1]
        return share


def unit_id(*content: object) -> int:
    """A hash id for a stretch of a prompt that is made of this content, everything before it included."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")
