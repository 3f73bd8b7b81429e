"""Numbers of a run, kept in bounded space however long it is: histograms, totals, and totals by window of time."""

from __future__ import annotations

import msgspec

from pd_serve.sim.histogram import Histogram
from pd_serve.sim.outcome import Served
from pd_serve.types import EngineStats, Role


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must keep to count as good."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05

    def kept(self, served: Served) -> bool:
        return served.outcome == "ok" and served.first_token <= self.ttft_s and served.tpot <= self.tpot_s


class Window:
    """One stretch of time. Requests belong to the one in which they arrived."""

    __slots__ = ("arrived", "good", "ok", "pools", "ttft")

    def __init__(self) -> None:
        self.arrived = 0
        self.ok = 0
        self.good = 0
        self.ttft = Histogram()
        self.pools = {role: PoolWindow() for role in Role}


class PoolWindow:
    """Sums of the reports of one pool's replicas."""

    __slots__ = ("kv_share", "reports", "running", "waiting", "waiting_tokens")

    def __init__(self) -> None:
        self.reports = 0
        self.waiting = 0
        self.running = 0
        self.waiting_tokens = 0
        self.kv_share = 0.0


class Collector:
    """Hears of everything that a report speaks of.

    Args:
        window_s: length of a window; doubled, and neighbours merged, when there would be more than `max_windows`.
    """

    def __init__(self, slo: Slo, window_s: float, max_windows: int = 512) -> None:
        self.slo = slo
        self.window_s = window_s
        self._max_windows = max_windows
        self.outcomes: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.fallbacks: dict[str, int] = {}
        self.ttft = Histogram()
        self.tpot = Histogram()
        self.e2e = Histogram()
        self.queue = Histogram()
        self.gaps = {role: Histogram() for role in Role}
        self.pools = {role: PoolWindow() for role in Role}
        self.waiting = {role: Histogram() for role in Role}
        """Waiting sequences of one replica, as it reports them."""
        self.good = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.retries = 0
        self.waits = 0
        self.preempted = 0
        self.last = 0.0
        """When the last request ended."""
        self.windows: dict[int, Window] = {}

    def window(self, moment: float) -> Window:
        """The window that a moment lies in."""
        number = int(moment / self.window_s)
        while number >= self._max_windows:
            self._halve()
            number = int(moment / self.window_s)
        found = self.windows.get(number)
        if found is None:
            found = self.windows[number] = Window()
        return found

    def served(self, served: Served) -> None:
        """A request ended."""
        self.outcomes[served.outcome] = self.outcomes.get(served.outcome, 0) + 1
        window = self.window(served.arrived)
        window.arrived += 1
        self.last = max(self.last, served.arrived + served.finished)
        self.retries += served.retries
        self.waits += served.waits
        self.preempted += served.preempted
        if served.error:
            self.errors[served.error] = self.errors.get(served.error, 0) + 1
        if served.reason:
            self.reasons[served.reason] = self.reasons.get(served.reason, 0) + 1
        if served.fallback:
            self.fallbacks[served.fallback] = self.fallbacks.get(served.fallback, 0) + 1
        if served.outcome != "ok":
            return
        window.ok += 1
        good = self.slo.kept(served)
        window.good += good
        self.good += good
        self.prompt_tokens += served.prompt_tokens
        self.cached_tokens += max(served.cached_tokens, served.local_tokens)
        self.output_tokens += served.output_tokens
        self.ttft.add(served.first_token)
        window.ttft.add(served.first_token)
        self.e2e.add(served.finished)
        self.queue.add(served.admitted)
        if served.output_tokens > 1:
            self.tpot.add(served.tpot)

    def report(self, role: Role, stats: EngineStats, now: float) -> None:
        """A replica's counts, as it sends them to the ingresses."""
        share = stats.kv_tokens_used / max(stats.kv_tokens_total, 1)
        self.waiting[role].add(stats.waiting)
        for totals in (self.pools[role], self.window(now).pools[role]):
            totals.reports += 1
            totals.waiting += stats.waiting
            totals.running += stats.running
            totals.waiting_tokens += stats.waiting_prompt_tokens
            totals.kv_share += share

    def _halve(self) -> None:
        old, self.windows = self.windows, {}
        self.window_s *= 2
        for number, window in old.items():
            target = self.windows.setdefault(number // 2, Window())
            target.arrived += window.arrived
            target.ok += window.ok
            target.good += window.good
            target.ttft.merge(window.ttft)
            for role, pool in window.pools.items():
                into = target.pools[role]
                into.reports += pool.reports
                into.waiting += pool.waiting
                into.running += pool.running
                into.waiting_tokens += pool.waiting_tokens
                into.kv_share += pool.kv_share
