import random

import pytest

from pd_serve.sim.histogram import Histogram, exact_percentile


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_percentiles_are_within_half_a_percent(percent):
    rng = random.Random(1)
    values = [rng.lognormvariate(-3, 2) for _ in range(5000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.percentile(percent) == pytest.approx(exact_percentile(values, percent), rel=0.006)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert (histogram.smallest, histogram.largest, histogram.count) == (min(values), max(values), 5000)


def test_a_range_counts_as_its_values():
    spread, single = Histogram(), Histogram()
    spread.add_between(0.010, 0.020, 1000)
    for number in range(1000):
        single.add(0.010 + 0.010 * (number + 0.5) / 1000)
    assert spread.mean == pytest.approx(single.mean)
    assert sum(spread.bins.values()) == pytest.approx(1000)
    for percent in (10, 50, 99):
        assert spread.percentile(percent) == pytest.approx(single.percentile(percent), rel=0.006)


def test_one_value_is_given_back_as_it_is():
    histogram = Histogram()
    histogram.add(0.0123, 7)
    assert histogram.percentiles((50, 99)) == {"p50": 0.0123, "p99": 0.0123}


def test_nothing_and_zero():
    histogram = Histogram()
    assert (histogram.percentile(50), histogram.mean) == (0.0, 0.0)
    histogram.add(0.0)
    assert (histogram.percentile(50), histogram.largest) == (0.0, 0.0)


def test_space_is_bounded_by_the_range_not_by_the_count():
    histogram, rng = Histogram(), random.Random(2)
    for _ in range(50_000):
        histogram.add(rng.uniform(0.001, 1.0))
    assert len(histogram.bins) < 1500


def test_merge():
    first, second = Histogram(), Histogram()
    first.add(1.0)
    second.add(3.0, 3)
    first.merge(second)
    assert (first.count, first.mean, first.percentile(99)) == (4, 2.5, 3.0)
