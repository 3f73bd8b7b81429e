"""When requests arrive: endless, ascending times in seconds.

Real arrivals are burstier than a Poisson process: gamma-distributed gaps fit them better (BurstGPT, arXiv:2401.17644;
ServeGen, arXiv:2505.09999, which also finds Weibull).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import cos, pi

from pd_serve.sim.clock import Streams

BURST_FACTOR = 3.0
BURST_S = 60.0


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Independent arrivals, `rate` a second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def gamma(rate: float, rng: random.Random, variation: float = 2.0) -> Iterator[float]:
    """Gaps whose standard deviation is `variation` times their mean; 1 is a Poisson process."""
    shape = 1.0 / (variation * variation)
    now = 0.0
    while True:
        now += rng.gammavariate(shape, 1.0 / (rate * shape))
        yield now


def modulated(
    rate: float, rng: random.Random, factor: float = 4.0, calm_s: float = 60.0, busy_s: float = 15.0
) -> Iterator[float]:
    """A Poisson process that is calm or busy, `factor` times as many then, for exponential times of those means;
    `rate` a second on average."""
    calm_rate = rate * (calm_s + busy_s) / (calm_s + factor * busy_s)
    now, busy = 0.0, False
    change = rng.expovariate(1.0 / calm_s)
    while True:
        ahead = now + rng.expovariate(calm_rate * (factor if busy else 1.0))
        if ahead < change:
            now = ahead
            yield now
            continue
        now, busy = change, not busy
        change = now + rng.expovariate(1.0 / (busy_s if busy else calm_s))


def day(peak_rate: float, streams: Streams, day_s: float = 86_400.0, peak_to_trough: float = 8.0) -> Iterator[float]:
    """A day that begins at its trough, with bursts: on average 24 a day, each `BURST_FACTOR` times as many for
    `BURST_S` seconds.

    Args:
        peak_rate: requests a second at the peak, outside of bursts.
        day_s: length of a day; shorter ones are steeper.
    """
    rng, bursts = streams.get("day"), _bursts(streams.get("bursts"), day_s / 24)
    begins = next(bursts)
    now, highest = 0.0, peak_rate * BURST_FACTOR
    while True:
        now += rng.expovariate(highest)
        while begins + BURST_S <= now:
            begins = next(bursts)
        burst = BURST_FACTOR if begins <= now else 1.0
        if rng.random() * highest < day_rate(now, peak_rate, day_s, peak_to_trough) * burst:
            yield now


def day_rate(now: float, peak_rate: float, day_s: float, peak_to_trough: float) -> float:
    """Requests a second outside of bursts."""
    trough = peak_rate / peak_to_trough
    return trough + (peak_rate - trough) * (1.0 - cos(2.0 * pi * now / day_s)) / 2.0


def _bursts(rng: random.Random, mean_gap_s: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += BURST_S + rng.expovariate(1.0 / max(mean_gap_s - BURST_S, 1.0))
        yield now
