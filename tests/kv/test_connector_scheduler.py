"""The scheduler side alone: what it asks of the workers for every way that a request can go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from pd_serve.kv.connector_metadata import (  # noqa: E402
    LoadResult,
    PdMetadata,
    PdStats,
    PdWorkerMetadata,
    reports_in,
)
from pd_serve.kv.connector_scheduler import SchedulerSide  # noqa: E402
from pd_serve.kv.params import EXTRA_ARG, HandoffParams, to_extra_args  # noqa: E402
from pd_serve.types import Handoff, KvAddress, KvOutcome, Role, hash_tokens  # noqa: E402

B = 16
PROMPT = list(range(100, 150))  # 50 tokens: 4 blocks, the last one with 2 tokens


def handoff(handoff_id: str = "h") -> Handoff:
    return Handoff(
        id=handoff_id,
        prompt_tokens=len(PROMPT),
        prompt_hash=hash_tokens(PROMPT),
        source=KvAddress("in_process", "p"),
        target=KvAddress("in_process", "d"),
        lease_s=9.0,
    )


def request(request_id: str, role: Role | None = Role.DECODE, handoff_id: str = "h") -> Any:
    """As much of vLLM's Request as the connector reads."""
    extra = to_extra_args(HandoffParams(role, handoff(handoff_id)))[EXTRA_ARG] if role is not None else None
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=extra,
        num_prompt_tokens=len(PROMPT),
        prompt_token_ids=PROMPT,
        cache_salt=None,
        skip_reading_prefix_cache=False,
    )


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def step(new: Any = (), cached: Any = (), resumed: Any = (), scheduled: dict[str, int] | None = None) -> Any:
    """A SchedulerOutput. `new`: (request id, block ids, computed tokens); `cached` the same, with new blocks only."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=c) for r, b, c in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _, _ in cached],
            resumed_req_ids=set(resumed),
            new_block_ids=[(b,) if b else None for _, b, _ in cached],
            num_computed_tokens=[c for _, _, c in cached],
        ),
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
    )


def ended(request_id: str, failure: str = "", handoff_id: str = "h", block_ids: list[int] | None = None) -> Any:
    result = LoadResult(
        request_id=request_id,
        handoff_id=handoff_id,
        failure=failure,
        block_ids=block_ids or [1, 2],
        bytes=64,
        wait_s=1.0,
        copy_s=0.5,
    )
    return SimpleNamespace(kv_connector_worker_meta=PdWorkerMetadata([result]))


@pytest.fixture
def side() -> SchedulerSide:
    return SchedulerSide(B, ranks=1)


def load(side: SchedulerSide, r: Any, local: int = 0) -> PdMetadata:
    external, later = side.new_matched_tokens(r, local)
    assert (external, later) == (len(PROMPT) - local, True)
    side.allocated(r, blocks(10, 11, 12, 13), external)
    return side.build_metadata(step())


# --------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize(("local", "skip", "ids"), [(0, 0, [10, 11, 12, 13]), (16, 1, [11, 12, 13]), (48, 3, [13])])
def test_only_missing_blocks_are_loaded(side: SchedulerSide, local: int, skip: int, ids: list[int]) -> None:
    [job] = load(side, request("a"), local).loads
    assert (job.request_id, job.handoff, job.skip, job.block_ids) == ("a", handoff(), skip, ids)
    side.connector_output(ended("a"))
    report = side.take_reports()["h"]
    assert (report.outcome, report.bytes, report.blocks) == (KvOutcome.MOVED, 64, 2)
    side.allocated(request("a"), blocks(10, 11, 12, 13), 0)
    side.finished(request("a"))
    assert side.build_metadata(step()) == PdMetadata(idle=True)


def test_a_prompt_with_only_its_last_token_missing_loads_nothing(side: SchedulerSide) -> None:
    r = request("a")
    r.num_prompt_tokens = 49
    assert side.new_matched_tokens(r, 48) == (0, False)
    side.allocated(r, blocks(1, 2, 3, 4), 0)
    assert side.build_metadata(step()).drops == [("h", "prefix_hit")]
    assert side.take_reports()["h"].outcome is KvOutcome.LOCAL


def test_a_request_whose_load_the_scheduler_declines_is_recomputed(side: SchedulerSide) -> None:
    r = request("a")
    side.new_matched_tokens(r, 0)
    side.allocated(r, blocks(1, 2, 3, 4), 0)
    assert side.build_metadata(step()).drops == [("h", "not_allowed")]
    assert side.take_reports()["h"].outcome is KvOutcome.RECOMPUTED


def test_a_request_that_may_not_read_cached_kv_takes_none(side: SchedulerSide) -> None:
    r = request("a")
    r.skip_reading_prefix_cache = True
    assert side.new_matched_tokens(r, 0) == (0, False)
    side.allocated(r, blocks(1, 2, 3, 4), 0)
    assert side.build_metadata(step()).drops == [("h", "not_allowed")]
    assert side.take_reports()["h"].outcome is KvOutcome.RECOMPUTED


def test_a_handoff_is_used_once_whatever_happens_later(side: SchedulerSide) -> None:
    r = request("a")
    load(side, r)
    side.connector_output(ended("a", "checksum"))
    assert side.take_reports()["h"].reason == "checksum"
    assert side.new_matched_tokens(r, 0) == (0, False)  # no local prefix: the request starts over
    side.allocated(r, blocks(1, 2, 3, 4), 0)
    assert side.new_matched_tokens(r, 0) == (0, False)  # preempted later
    side.finished(r)
    again = request("b")
    assert side.new_matched_tokens(again, 0) == (0, False)  # and nobody else may use it
    side.finished(again)
    assert side.build_metadata(step()) == PdMetadata(idle=True)


def test_abort_before_the_load_drops_the_handoff(side: SchedulerSide) -> None:
    side.finished(request("a"))
    assert side.build_metadata(step()).drops == [("h", "aborted")]
    side.new_matched_tokens(request("b", handoff_id="g"), 0)
    side.finished(request("b", handoff_id="g"))
    assert side.build_metadata(step()).drops == [("g", "aborted")]


def test_abort_during_the_load_cancels_it_and_still_reports(side: SchedulerSide) -> None:
    load(side, request("a"))
    side.finished(request("a"))
    assert side.build_metadata(step()).cancels == ["h"]
    side.connector_output(ended("a", "cancelled"))
    assert side.take_reports()["h"].reason == "cancelled"


def test_with_two_ranks_a_load_ends_when_both_have_ended() -> None:
    side = SchedulerSide(B, ranks=2)
    load(side, request("a"))
    side.connector_output(ended("a"))
    assert side.take_reports() == {}
    side.connector_output(ended("a", "checksum"))
    assert side.take_reports()["h"].reason == "checksum"


# --------------------------------------------------------------------------------------------- children of one request


def test_children_wait_for_the_first_and_follow_by_prefix_hit(side: SchedulerSide) -> None:
    first, second = request("0_r"), request("1_r")
    load(side, first)
    assert side.new_matched_tokens(second, 0) == (None, False)
    side.connector_output(ended("0_r"))
    assert side.new_matched_tokens(second, 0) == (None, False)  # arrived, but not in the prefix cache yet
    side.allocated(first, blocks(1, 2, 3, 4), 0)
    assert side.new_matched_tokens(second, 48) == (0, False)
    side.allocated(second, blocks(1, 2, 3, 5), 0)
    assert side.build_metadata(step()) == PdMetadata(idle=True)
    assert list(side.take_reports()) == ["h"]


def test_a_child_that_comes_after_the_first_ended_computes(side: SchedulerSide) -> None:
    load(side, request("0_r"))
    side.connector_output(ended("0_r"))
    side.allocated(request("0_r"), blocks(1, 2, 3, 4), 0)
    side.finished(request("0_r"))
    assert side.new_matched_tokens(request("1_r"), 0) == (0, False)


@pytest.mark.parametrize("loading", [False, True])
def test_the_next_child_goes_on_when_the_first_leaves(side: SchedulerSide, loading: bool) -> None:
    first, second = request("0_r"), request("1_r")
    if loading:
        load(side, first)
    else:
        side.new_matched_tokens(first, 0)
    assert side.new_matched_tokens(second, 0) == (None, False)
    side.finished(first)
    if loading:
        assert side.new_matched_tokens(second, 0) == (0, False)
        assert side.build_metadata(step()).cancels == ["h"]
    else:
        load(side, second)


# --------------------------------------------------------------------------------------------- prefill


def prefill_begins(side: SchedulerSide, r: Any) -> None:
    assert side.new_matched_tokens(r, 0) == (0, False)
    side.allocated(r, blocks(), 0)


def test_a_prompt_is_saved_in_the_step_that_completes_it(side: SchedulerSide) -> None:
    prefill_begins(side, request("a", Role.PREFILL))
    assert side.build_metadata(step(new=[("a", [5, 6], 0)], scheduled={"a": 32})).saves == []
    [job] = side.build_metadata(step(cached=[("a", [7, 8], 32)], scheduled={"a": 18})).saves
    assert (job.handoff, job.block_ids, job.prompt_hash) == (handoff(), [5, 6, 7, 8], hash_tokens(PROMPT))
    assert side.build_metadata(step(cached=[("a", [9], 50)], scheduled={"a": 1})).saves == []
    side.finished(request("a", Role.PREFILL))


def test_a_preempted_prefill_is_saved_from_its_new_blocks(side: SchedulerSide) -> None:
    prefill_begins(side, request("a", Role.PREFILL))
    side.build_metadata(step(new=[("a", [5, 6], 0)], scheduled={"a": 32}))
    resumed = step(cached=[("a", [1, 2, 3, 4], 0)], resumed=["a"], scheduled={"a": 50})
    [job] = side.build_metadata(resumed).saves
    assert job.block_ids == [1, 2, 3, 4]


def test_an_aborted_prefill_is_not_saved(side: SchedulerSide) -> None:
    r = request("a", Role.PREFILL)
    prefill_begins(side, r)
    side.build_metadata(step(new=[("a", [5, 6], 0)], scheduled={"a": 32}))
    side.finished(r)
    assert side.build_metadata(step(cached=[("a", [7, 8], 32)], scheduled={"a": 18})).saves == []


# --------------------------------------------------------------------------------------------- both


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"pd_serve": {"role": "decode"}}])
def test_requests_without_a_handoff_are_left_alone(side: SchedulerSide, params: Any) -> None:
    r = request("a", None)
    r.kv_transfer_params = params
    assert side.new_matched_tokens(r, 0) == (0, False)
    side.allocated(r, blocks(1), 0)
    side.finished(r)
    assert side.build_metadata(step(new=[("a", [1], 0)], scheduled={"a": 50})) == PdMetadata()
    assert side.take_reports() == {}


def test_reports_survive_the_way_to_the_front_end(side: SchedulerSide) -> None:
    load(side, request("a"))
    side.connector_output(ended("a"))
    reports = side.take_reports()
    stats = PdStats.of(reports).aggregate(PdStats.of({}))
    assert reports_in(stats.data) == reports
    assert reports_in(None) == {}
