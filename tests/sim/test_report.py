import msgspec
import pytest

from pd_serve.sim.collect import Collector, Slo
from pd_serve.sim.histogram import exact_percentile
from pd_serve.sim.report import Report, report
from pd_serve.types import Role
from tests.sim.small import request, simulate, spec


@pytest.fixture(scope="module")
def run():
    rows = [request(at=0.05 * n, prompt=600 + n, output=5 + n % 40, units=(n % 7, 99 + n)) for n in range(400)]
    rows.append(request(at=21.0, prompt=40_000))
    cluster, served = simulate(spec(prefill=2, decode=2, window_s=2.0, slo=Slo(ttft_s=0.02, tpot_s=0.006)), rows)
    return report(cluster), served


def test_latencies_are_those_of_the_single_requests(run):
    numbers, served = run
    ok = [one for one in served if one.outcome == "ok"]
    for quantiles, values in (
        (numbers.ttft, [one.first_token for one in ok]),
        (numbers.tpot, [one.tpot for one in ok if one.output_tokens > 1]),
        (numbers.e2e, [one.finished for one in ok]),
    ):
        assert quantiles.count == len(values)
        assert quantiles.mean == pytest.approx(sum(values) / len(values))
        assert quantiles.p50 == pytest.approx(exact_percentile(values, 50), rel=0.01)
        assert quantiles.p99 == pytest.approx(exact_percentile(values, 99), rel=0.01)
        assert quantiles.largest == max(values)


def test_goodput_counts_what_kept_both_limits_of_all_that_wanted_an_answer(run):
    numbers, served = run
    good = sum(one.outcome == "ok" and one.first_token <= 0.02 and one.tpot <= 0.006 for one in served)
    assert 0 < good < 400
    assert numbers.slo_attainment == pytest.approx(good / 401)
    assert numbers.goodput_per_s == pytest.approx(good / numbers.seconds)
    assert numbers.errors == {"InvalidRequest": 1}


def test_gaps_between_tokens_are_counted_once_each(run):
    numbers, served = run
    tokens = sum(one.output_tokens - 1 for one in served if one.outcome == "ok")
    itl = numbers.pools["decode"].itl
    assert itl.count == tokens
    seconds = sum(one.finished - one.first_token for one in served if one.outcome == "ok")
    assert itl.mean * itl.count == pytest.approx(seconds)
    assert numbers.pools["prefill"].itl.count == 0


def test_sums_by_pool_and_in_total(run):
    numbers, served = run
    assert numbers.transfers == 400
    assert sum(numbers.transfer_bytes.values()) == sum(-(-one.prompt_tokens // 16) * 16_000 for one in served[:-1])
    assert numbers.gpu_seconds == pytest.approx(4 * numbers.seconds)
    assert numbers.hit_rate > 0.3
    for pool in numbers.pools.values():
        assert 0 < pool.busy_share < 1
        assert pool.gpu_seconds == pytest.approx(2 * numbers.seconds)
    assert numbers.pools["decode"].running_mean > 0


def test_windows_add_up_to_the_whole(run):
    numbers, _ = run
    assert sum(window.arrived for window in numbers.windows) == numbers.arrived == 401
    assert sum(window.ok for window in numbers.windows) == numbers.outcomes["ok"]
    assert all(window.gpus == {"prefill": 2.0, "decode": 2.0} for window in numbers.windows)
    assert [window.at for window in numbers.windows] == [2.0 * n for n in range(len(numbers.windows))]


def test_a_report_is_json(run):
    numbers, _ = run
    assert msgspec.json.decode(msgspec.json.encode(numbers), type=Report) == numbers


def test_windows_are_merged_instead_of_becoming_many():
    collector = Collector(Slo(), 1.0, max_windows=4)
    for moment in range(40):
        window = collector.window(float(moment))
        window.arrived += 1
        window.ttft.add(1.0)
        window.pools[Role.DECODE].reports += 1
    assert len(collector.windows) <= 4
    assert collector.window_s == 16.0
    assert [window.arrived for _, window in sorted(collector.windows.items())] == [16, 16, 8]
    assert sum(window.ttft.count for window in collector.windows.values()) == 40
    assert sum(window.pools[Role.DECODE].reports for window in collector.windows.values()) == 40
