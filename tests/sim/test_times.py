from itertools import islice, pairwise

import pytest

from pd_serve.sim.clock import Streams
from pd_serve.sim.workloads import times


def gaps(arrivals, count=20_000):
    moments = list(islice(arrivals, count))
    assert all(a <= b for a, b in pairwise(moments))
    return [b - a for a, b in pairwise(moments)]


def mean_and_variation(values):
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        (times.poisson(10.0, Streams(1).get("a")), 1.0),
        (times.gamma(10.0, Streams(1).get("a"), variation=2.0), 2.0),
        (times.gamma(10.0, Streams(1).get("a"), variation=1.0), 1.0),
    ],
)
def test_rate_and_burstiness_are_as_asked_for(arrivals, variation):
    mean, measured = mean_and_variation(gaps(arrivals))
    assert mean == pytest.approx(0.1, rel=0.05)
    assert measured == pytest.approx(variation, rel=0.1)


def test_modulated_keeps_the_rate_and_is_burstier():
    mean, variation = mean_and_variation(gaps(times.modulated(10.0, Streams(3).get("a")), 60_000))
    assert mean == pytest.approx(0.1, rel=0.1)
    assert variation > 1.15


def test_a_day_rises_to_its_peak_and_has_bursts():
    day_s, peak = 7200.0, 20.0
    assert times.day_rate(0.0, peak, day_s, 8.0) == pytest.approx(peak / 8)
    assert times.day_rate(day_s / 2, peak, day_s, 8.0) == pytest.approx(peak)
    arrivals = list(islice(times.day(peak, Streams(5), day_s), 90_000))
    by_minute = [0] * 120
    for moment in arrivals:
        if moment < day_s:
            by_minute[int(moment // 60)] += 1
    expected = [60 * times.day_rate(60 * minute + 30, peak, day_s, 8.0) for minute in range(120)]
    ratios = [seen / wanted for seen, wanted in zip(by_minute, expected, strict=True)]
    assert sorted(ratios)[40] == pytest.approx(1.0, abs=0.15)  # most minutes have no burst
    assert sum(ratio > 1.8 for ratio in ratios) >= 8
    assert max(ratios) < 3.6


def test_the_same_seed_gives_the_same_times():
    assert list(islice(times.day(5.0, Streams(1)), 50)) == list(islice(times.day(5.0, Streams(1)), 50))
    assert list(islice(times.day(5.0, Streams(1)), 50)) != list(islice(times.day(5.0, Streams(2)), 50))
