"""Two worker sides joined by the in-process transport: real tensors, real threads, no engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

import torch  # noqa: E402

from pd_serve.kv.connector_metadata import LoadJob, LoadResult, PdMetadata, SaveJob, Settings  # noqa: E402
from pd_serve.kv.connector_worker import WorkerSide  # noqa: E402
from pd_serve.kv.transport.in_process import InProcessEnd, Registry  # noqa: E402
from pd_serve.types import Handoff, Role, hash_tokens  # noqa: E402

PROMPT = list(range(40))
SOURCE_BLOCKS, TARGET_BLOCKS = [3, 1, 6], [5, 0, 2]


def settings(role: Role, engine_id: str) -> Settings:
    return Settings(role=role, transport="in_process", ray_address="", engine_id=engine_id, identity="i")


class Ends:
    def __init__(self, packing: str = "") -> None:
        registry = Registry()
        self.caches = [{f"layer.{n}": torch.rand(8, 2, 16, 4) for n in range(3)} for _ in range(2)]
        roles = [(Role.PREFILL, "p"), (Role.DECODE, "d")]
        self.source, self.target = (
            WorkerSide(settings(role, name), 0, InProcessEnd(registry, name)) for role, name in roles
        )
        self.source.register(self.caches[0], "")
        self.target.register(self.caches[1], packing)

    def handoff(self, handoff_id: str = "h", lease_s: float = 20.0) -> Handoff:
        return Handoff(
            id=handoff_id,
            prompt_tokens=len(PROMPT),
            prompt_hash=hash_tokens(PROMPT),
            source=self.source.transport.address(),
            target=self.target.transport.address(),
            lease_s=lease_s,
        )

    def save(self, handoff: Handoff, prompt: list[int] = PROMPT) -> None:
        job = SaveJob(handoff=handoff, block_ids=SOURCE_BLOCKS, prompt_hash=hash_tokens(prompt))
        self.source.run_saves(PdMetadata(saves=[job]))

    def load(self, handoff: Handoff, skip: int = 0) -> None:
        job = LoadJob(request_id="r", handoff=handoff, block_ids=TARGET_BLOCKS[skip:], skip=skip)
        self.target.start_loads(PdMetadata(loads=[job]))

    def finished(self, within_s: float = 10.0) -> LoadResult:
        """The one load that ends, as the engine's steps would learn of it."""
        until = time.monotonic() + within_s
        while not self.target.collect_finished(PdMetadata(idle=True)):
            assert time.monotonic() < until
        metadata = self.target.worker_metadata()
        assert metadata is not None
        [result] = metadata.results
        failed = set() if result.cancelled or not result.failure else set(result.block_ids)
        assert self.target.failed_blocks() == failed
        assert self.target.collect_finished(PdMetadata()) == set()
        assert self.target.worker_metadata() is None
        return result

    def counts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What both sides say once nothing is under way."""
        until = time.monotonic() + 10
        while self.source.stats()["held"] or self.target.stats()["held"] or self.target.stats()["loading"]:
            assert time.monotonic() < until
        return self.source.stats()["gives"], self.target.stats()["takes"]

    def equal(self, skip: int = 0) -> bool:
        return all(
            torch.equal(self.caches[1][name][TARGET_BLOCKS[skip:]], cache[SOURCE_BLOCKS[skip:]])
            for name, cache in self.caches[0].items()
        )


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.source.close()
    ends.target.close()


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("load_first", [True, False])
def test_pages_get_into_their_blocks(ends: Ends, skip: int, load_first: bool) -> None:
    untouched = {name: cache.clone() for name, cache in ends.caches[1].items()}
    handoff = ends.handoff()
    if load_first:
        ends.load(handoff, skip)
        assert ends.target.collect_finished(PdMetadata()) == set()
        ends.save(handoff)
    else:
        ends.save(handoff)
        ends.load(handoff, skip)
    result = ends.finished()
    assert (result.request_id, result.failure, result.cancelled) == ("r", "", False)
    assert result.bytes == len(TARGET_BLOCKS[skip:]) * ends.target.blocks.block_bytes
    assert ends.equal(skip)
    others = [block for block in range(8) if block not in TARGET_BLOCKS[skip:]]
    assert all(torch.equal(cache[others], untouched[name][others]) for name, cache in ends.caches[1].items())
    gives, takes = ends.counts()
    assert (gives["started"], gives["done"], takes["started"], takes["done"]) == (1, 1, 1, 1)


@pytest.mark.case("B16")
@pytest.mark.case("B70")
def test_invariant_4_not_a_byte_of_a_mismatch_is_scattered() -> None:
    for ends, prompt, reason in ((Ends(), PROMPT[1:], "other_prompt"), (Ends(packing="x"), PROMPT, "fingerprint")):
        before = {name: cache.clone() for name, cache in ends.caches[1].items()}
        handoff = ends.handoff()
        ends.save(handoff, prompt)
        ends.load(handoff)
        assert ends.finished().failure == reason
        assert all(torch.equal(cache, before[name]) for name, cache in ends.caches[1].items())
        assert ends.counts()[1]["failed"] == {reason: 1}


def test_the_gathered_blocks_may_be_reused_at_once(ends: Ends) -> None:
    handoff = ends.handoff()
    expected = {name: cache[SOURCE_BLOCKS].clone() for name, cache in ends.caches[0].items()}
    ends.save(handoff)
    for cache in ends.caches[0].values():
        cache.zero_()
    ends.load(handoff)
    assert ends.finished().failure == ""
    assert all(torch.equal(ends.caches[1][name][TARGET_BLOCKS], pages) for name, pages in expected.items())


@pytest.mark.case("B12")
def test_a_cancelled_load_ends_once_and_refuses_what_comes_late(ends: Ends) -> None:
    handoff = ends.handoff()
    ends.load(handoff)
    ends.target.start_loads(PdMetadata(cancels=["h", "never-known"]))
    result = ends.finished()
    assert result.cancelled
    assert result.failure == "cancelled"
    ends.save(handoff)
    gives, takes = ends.counts()
    assert takes["cancelled"] == 1
    assert gives["held"] == takes["held"] == 0


def test_withdrawn_dropped_and_expired(ends: Ends) -> None:
    ends.load(ends.handoff("w"))
    ends.target.withdraw("w", "prefill_failed")
    assert ends.finished().failure == "prefill_failed"
    ends.target.start_loads(PdMetadata(drops=[("x", "prefix_hit")]))
    ends.save(ends.handoff("x"))
    ends.load(ends.handoff("e", lease_s=0.1))
    time.sleep(0.2)
    ends.target.stats()  # the in-process transport looks at leases when it is used
    assert ends.finished().failure == "expired"
    takes = ends.counts()[1]
    assert takes["failed"] == {"prefill_failed": 1, "expired": 1}
    assert takes["cancelled"] == 1
    assert takes["started"] == 3


def test_a_peer_that_is_gone(ends: Ends) -> None:
    handoff = ends.handoff()
    ends.target.close()
    ends.save(handoff)
    until = time.monotonic() + 10
    while ends.source.stats()["gives"]["failed"] != {"unreachable": 1}:
        assert time.monotonic() < until
    assert ends.source.stats()["held"] == 0


def test_the_same_handoff_is_saved_once(ends: Ends) -> None:
    handoff = ends.handoff()
    ends.save(handoff)
    ends.save(handoff)
    ends.load(handoff)
    assert ends.finished().failure == ""
    assert ends.counts()[0]["started"] == 1


def test_many_at_once(ends: Ends) -> None:
    handoffs = [ends.handoff(f"h{n}") for n in range(40)]
    for number, handoff in enumerate(handoffs):
        (ends.save if number % 2 else ends.load)(handoff)
    for number, handoff in enumerate(handoffs):
        (ends.load if number % 2 else ends.save)(handoff)
    results: list[LoadResult] = []
    until = time.monotonic() + 20
    while len(results) < 40:
        assert time.monotonic() < until
        if ends.target.collect_finished(PdMetadata(idle=True)):
            metadata = ends.target.worker_metadata()
            assert metadata is not None
            results += metadata.results
    assert sorted(r.handoff_id for r in results) == sorted(h.id for h in handoffs)
    assert not any(r.failure for r in results)
    gives, takes = ends.counts()
    assert gives["done"] == takes["done"] == 40


def test_fingerprints_are_equal_for_equal_engines_only() -> None:
    one, other = Ends(), Ends(packing="x")
    assert one.source.describe() == one.target.describe()
    assert other.source.describe()["fingerprint"] != other.target.describe()["fingerprint"]
