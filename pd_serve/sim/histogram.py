"""A histogram of positive numbers that keeps every percentile to half a percent in bounded space."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, exp, floor, log

STEP = log(1.005)
"""Natural logarithm of the ratio between two neighbouring bounds."""
_SMALLEST = 1e-9


class Histogram:
    """Counts by logarithmic bins; sum, smallest and largest are exact."""

    __slots__ = ("bins", "count", "largest", "smallest", "total")

    def __init__(self) -> None:
        self.bins: dict[int, float] = {}
        self.count = 0
        self.total = 0.0
        self.smallest = float("inf")
        self.largest = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._note(value, value, count)
        number = floor(log(max(_SMALLEST, value)) / STEP)
        self.bins[number] = self.bins.get(number, 0) + count

    def add_between(self, low: float, high: float, count: int) -> None:
        """Add `count` values that lie evenly between the two."""
        first = floor(log(max(low, _SMALLEST)) / STEP)
        last = floor(log(max(high, _SMALLEST)) / STEP)
        if first == last:
            self._note(low, high, count)
            self.bins[first] = self.bins.get(first, 0) + count
            return
        self._note(low, high, count)
        bins, density, edge = self.bins, count / (high - low), low
        for number in range(first, last):
            above = exp((number + 1) * STEP)
            bins[number] = bins.get(number, 0) + density * (above - edge)
            edge = above
        bins[last] = bins.get(last, 0) + density * (high - edge)

    def _note(self, low: float, high: float, count: int) -> None:
        self.count += count
        self.total += (low + high) / 2 * count
        self.smallest = min(self.smallest, low)
        self.largest = max(self.largest, high)

    def merge(self, other: Histogram) -> None:
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count
        self.count += other.count
        self.total += other.total
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The smallest value that at least so many percent are not above; 0 when there is none."""
        if not self.count:
            return 0.0
        wanted, seen = percent / 100 * self.count, 0.0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted - 1e-9 * self.count:
                middle = exp((number + 0.5) * STEP)
                return min(max(middle, self.smallest), self.largest)
        return self.largest

    def percentiles(self, percents: Iterable[float]) -> dict[str, float]:
        return {f"p{percent:g}": self.percentile(percent) for percent in percents}


def exact_percentile(values: list[float], percent: float) -> float:
    """The same of numbers that are all at hand; 0 when there is none."""
    ordered = sorted(values)
    return ordered[max(ceil(percent / 100 * len(ordered)) - 1, 0)] if ordered else 0.0
