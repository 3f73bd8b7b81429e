"""A sink that keeps its numbers in memory: for tests, the simulator and tools that read counts back."""

from __future__ import annotations

from collections import Counter, defaultdict

_Key = tuple[str, tuple[tuple[str, str], ...]]


class CountingSink:
    """Counts, sums and last values, by name and labels. One event loop, no threads."""

    def __init__(self) -> None:
        self._counts: Counter[_Key] = Counter()
        self._sums: defaultdict[_Key, float] = defaultdict(float)
        self._gauges: dict[_Key, float] = {}
        self._lowest: dict[str, float] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        self._sums[_key(name, labels)] += value

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._counts[_key(name, labels)] += 1
        self._sums[_key(name, labels)] += value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._gauges[_key(name, labels)] = value
        self._lowest[name] = min(value, self._lowest.get(name, value))

    def total(self, name: str, **labels: str) -> float:
        """Sum of everything counted or observed under this name and at least these labels."""
        return sum(value for key, value in self._sums.items() if _matches(key, name, labels))

    def observed(self, name: str, **labels: str) -> int:
        """How many values were observed under this name and at least these labels."""
        return sum(number for key, number in self._counts.items() if _matches(key, name, labels))

    def last(self, name: str, **labels: str) -> float:
        """The gauge's last value; 0 when it was never set."""
        return self._gauges.get(_key(name, labels), 0.0)

    def lowest(self) -> float:
        """The smallest value that any gauge ever had; 0 when none was ever negative."""
        return min(self._lowest.values(), default=0.0)

    def by_label(self, name: str, label: str, **others: str) -> dict[str, float]:
        """Sums under this name and at least these other labels, by one label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for key, value in self._sums.items():
            if _matches(key, name, others):
                sums[dict(key[1]).get(label, "")] += value
        return dict(sums)


def _key(name: str, labels: dict[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))


def _matches(key: _Key, name: str, labels: dict[str, str]) -> bool:
    return key[0] == name and labels.items() <= dict(key[1]).items()
