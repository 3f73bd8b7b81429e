from itertools import islice, pairwise

import pytest

from pd_serve.sim.clock import Streams
from pd_serve.sim.workloads import times
from pd_serve.sim.workloads.agent import agent
from pd_serve.sim.workloads.arrival import UNIT_TOKENS
from pd_serve.sim.workloads.lengths import Zipf
from pd_serve.sim.workloads.single import batch, rag, shared_prefix_chat

KINDS = {"chat": shared_prefix_chat, "rag": rag, "batch": batch, "agent": agent}


def make(kind, seed=1, count=3000):
    streams = Streams(seed)
    arrivals = times.poisson(5.0, streams.get("arrivals"))
    return list(islice(KINDS[kind](arrivals, streams), count))


def reusable(rows):
    """Share of the prompt tokens that an endless cache would have had."""
    seen, hits = set(), 0
    for row in rows:
        for number, unit in enumerate(row.units):
            if unit not in seen:
                break
            hits += min(UNIT_TOKENS, row.prompt_tokens - number * UNIT_TOKENS)
        seen.update(row.units)
        seen.update(row.output_units)
    return hits / sum(row.prompt_tokens for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_has_an_id_for_each_stretch_and_times_ascend(kind):
    rows = make(kind)
    assert all(len(row.units) == -(-row.prompt_tokens // UNIT_TOKENS) for row in rows)
    assert all(len(set(row.units)) == len(row.units) for row in rows)
    assert all(row.output_tokens >= 1 for row in rows)
    assert all(before.at <= after.at for before, after in pairwise(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_workload(kind):
    assert make(kind, 7, 300) == make(kind, 7, 300)
    assert make(kind, 7, 300) != make(kind, 8, 300)


@pytest.mark.parametrize(
    ("kind", "output", "share"), [("chat", 200, (0.5, 0.7)), ("rag", 150, (0.3, 0.6)), ("batch", 300, (0, 0))]
)
def test_lengths_and_reuse_are_as_described(kind, output, share):
    rows = make(kind, count=6000)
    assert sum(row.output_tokens for row in rows) / len(rows) == pytest.approx(output, rel=0.06)
    assert share[0] <= reusable(rows) <= share[1]


def test_equal_ids_mean_equal_prefixes():
    for kind in KINDS:
        before = {}
        for row in make(kind):
            for number, unit in enumerate(row.units):
                assert before.setdefault(unit, row.units[:number]) == row.units[:number]


def test_an_agents_turn_begins_with_everything_before_it():
    sessions = {}
    for row in make("agent"):
        sessions.setdefault(row.session, []).append(row)
    followed = 0
    for turns in sessions.values():
        for before, after in pairwise(turns):
            tokens = before.prompt_tokens + before.output_tokens
            full = before.prompt_tokens // UNIT_TOKENS
            assert after.prompt_tokens > tokens
            assert after.units[:full] + after.units[full : tokens // UNIT_TOKENS] == (
                before.units[:full] + before.output_units
            )
            assert after.at >= before.at
            followed += 1
    assert followed > 1000
    assert reusable(make("agent")) > 0.7


def test_three_percent_of_the_documents_get_three_fifths_of_the_requests():
    assert Zipf(10_000, 0.96).share(300) == pytest.approx(0.6, abs=0.02)
