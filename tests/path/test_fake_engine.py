"""The fake engine by itself: it behaves as `engine/base.py` says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest

from pd_serve.engine.fake import FakeEngine, FakeSettings
from pd_serve.engine.fake_faults import Fault
from pd_serve.engine.fake_model import FakeModel
from pd_serve.engine.fake_timing import Pacer, Timing
from pd_serve.errors import EngineFailed, InvalidRequest, Overloaded
from pd_serve.kv.transport.in_process import InProcessEnd, Registry
from pd_serve.types import Delta, Handoff, KvOutcome, Request, hash_tokens
from tests.path.cluster import FAST, expected, fast, prompt, request, until


class Pair:
    """A prefill and a decode engine that share a registry."""

    def __init__(self, settings: FakeSettings = FAST) -> None:
        registry = Registry()
        self.ends = [InProcessEnd(registry, "p"), InProcessEnd(registry, "d")]
        self.prefill, self.decode = (FakeEngine(settings, end) for end in self.ends)

    def handoff(self, asked: Request, lease_s: float = 5.0) -> Handoff:
        return Handoff(
            id=f"{asked.id}.1",
            prompt_tokens=len(asked.prompt_token_ids),
            prompt_hash=hash_tokens(asked.prompt_token_ids, asked.cache_salt),
            source=self.ends[0].address(),
            target=self.ends[1].address(),
            lease_s=lease_s,
        )


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    both = Pair()
    for engine in (both.prefill, both.decode):
        await engine.start()
    yield both
    for engine in (both.prefill, both.decode):
        stats = await engine.stats()
        assert (stats.waiting, stats.running, stats.kv_tokens_used, stats.reserved_tokens) == (0, 0, 0, 0)
        assert stats.handoffs_held == 0
        await engine.close()


async def run(
    engine: FakeEngine, asked: Request, handoff: Handoff | None = None, emitted: tuple[int, ...] = ()
) -> list[Delta]:
    return [delta async for delta in engine.decode(asked, handoff, emitted)]


def tokens(deltas: list[Delta], index: int = 0) -> tuple[int, ...]:
    return tuple(token for d in deltas for c in d.choices if c.index == index for token in c.token_ids)


async def test_what_it_says_about_itself() -> None:
    engine = FakeEngine(FAST, InProcessEnd(Registry(), "x"))
    described = await engine.start()
    assert described.fingerprint == FAST.model.fingerprint()
    assert described.kv.engine_id == "x"
    assert (described.block_size, described.max_num_seqs, described.max_model_len) == (16, 64, 2048)
    assert described.kv_tokens_total == FAST.kv_tokens
    assert engine.capabilities(request(20)).resume
    assert not engine.capabilities(request(20, n=2)).resume
    await engine.close()


async def test_too_little_kv_for_the_longest_request_is_said_at_the_start() -> None:
    engine = FakeEngine(fast(kv_tokens=2047), InProcessEnd(Registry(), "x"))
    with pytest.raises(EngineFailed, match="max_model_len is 2048"):
        await engine.start()


async def test_kv_moves_and_the_answer_is_the_same(pair: Pair) -> None:
    asked = request(100)
    local = await run(pair.prefill, msgspec.structs.replace(asked, id="local"))
    handoff = pair.handoff(asked)
    moved, result = await asyncio.gather(run(pair.decode, asked, handoff), pair.prefill.prefill(asked, handoff))
    assert tokens(moved) == tokens(local) == expected(asked)
    report, model = moved[-1].kv, FAST.model
    assert report
    assert (report.outcome, report.blocks) == (KvOutcome.MOVED, 7)
    assert report.bytes == result.kv_bytes == model.layers * 7 * model.page_bytes
    assert report.wait_s >= 0 <= report.copy_s
    assert (result.generated_tokens, result.token_id) == (1, expected(asked)[0])
    assert result.cached_tokens + result.computed_tokens == 100
    assert [delta.finished for delta in moved] == [False] * 7 + [True]
    assert [delta.kv for delta in moved] == [report, *[None] * 6, report]
    for ledger in (pair.prefill.sent, pair.decode.received):
        assert (ledger.counts().done, ledger.counts().bytes) == (1, report.bytes)


async def test_decode_computes_only_the_last_token_of_a_moved_prompt(pair: Pair) -> None:
    asked = request(100, max_tokens=1)
    handoff = pair.handoff(asked)
    await asyncio.gather(run(pair.decode, asked, handoff), pair.prefill.prefill(asked, handoff))
    assert (pair.prefill.computed_tokens, pair.decode.computed_tokens) == (100, 1)


async def test_moved_kv_is_in_decodes_prefix_cache(pair: Pair) -> None:
    asked = request(100)
    handoff = pair.handoff(asked)
    await asyncio.gather(run(pair.decode, asked, handoff), pair.prefill.prefill(asked, handoff))
    again = await run(pair.decode, msgspec.structs.replace(asked, id="again"))
    assert again[0].cached_tokens == 96
    assert tokens(again) == expected(asked)


async def test_resuming_gives_the_rest(pair: Pair) -> None:
    """`decode(..., emitted)`: as if it had generated `emitted` itself; exact at every place."""
    asked = request(50, max_tokens=6)
    whole = expected(asked)
    for cut in range(7):
        leg = msgspec.structs.replace(asked, id=f"cut{cut}")
        deltas = await run(pair.decode, leg, emitted=whole[:cut])
        assert tokens(deltas) == whole[cut:]
        assert deltas[-1].finished
        assert deltas[-1].choices[0].finish_reason == "length"
        assert "".join(c.text for d in deltas for c in d.choices) == "".join(f"<{t}> " for t in whole[cut:])


async def test_resuming_on_moved_kv(pair: Pair) -> None:
    asked = request(50, max_tokens=6)
    handoff, whole = pair.handoff(asked), expected(asked)
    deltas, _ = await asyncio.gather(
        run(pair.decode, asked, handoff, emitted=whole[:1]), pair.prefill.prefill(asked, handoff)
    )
    assert tokens(deltas) == whole[1:]
    assert deltas[-1].kv
    assert deltas[-1].kv.outcome is KvOutcome.MOVED


async def test_a_hand_off_of_another_prompt_is_refused(pair: Pair) -> None:
    """Invariant 4: a hand-off that names another prompt is not even taken."""
    asked = request(100)
    handoff = msgspec.structs.replace(pair.handoff(asked), prompt_hash=hash_tokens(prompt(100, 9)))
    deltas = await run(pair.decode, asked, handoff)
    assert tokens(deltas) == expected(asked)
    assert deltas[-1].kv
    assert (deltas[-1].kv.outcome, deltas[-1].kv.reason) == (KvOutcome.RECOMPUTED, "other_prompt")


async def test_a_hand_off_is_used_once(pair: Pair) -> None:
    """Invariant 2: neither side takes an id that it has seen before."""
    asked = request(100)
    handoff = pair.handoff(asked)
    await asyncio.gather(run(pair.decode, asked, handoff), pair.prefill.prefill(asked, handoff))
    with pytest.raises(EngineFailed, match="used before"):
        await pair.prefill.prefill(msgspec.structs.replace(asked, id="again"), handoff)
    fresh = request(100, seed=5)
    again = msgspec.structs.replace(pair.handoff(fresh), id=handoff.id)
    deltas = await run(pair.decode, fresh, again)
    assert deltas[-1].kv
    assert (deltas[-1].kv.outcome, deltas[-1].kv.reason) == (KvOutcome.RECOMPUTED, "taken")


async def test_withdrawn_kv_is_not_waited_for(pair: Pair) -> None:
    asked = request(100)
    handoff = pair.handoff(asked, lease_s=60.0)
    leg = asyncio.create_task(run(pair.decode, asked, handoff))
    await asyncio.sleep(0.01)
    await pair.decode.withdraw(handoff.id, "prefill_EngineFailed")
    deltas = await asyncio.wait_for(leg, 10.0)
    assert deltas[-1].kv
    assert deltas[-1].kv.reason == "prefill_EngineFailed"
    assert tokens(deltas) == expected(asked)
    await pair.prefill.prefill(asked, handoff)
    assert pair.ends[1].held() == 0  # what comes late is kept by nobody


async def test_a_grant_holds_room_until_the_blocks_are_there(pair: Pair) -> None:
    engine = FakeEngine(fast(max_num_seqs=2), InProcessEnd(Registry(), "x"))
    await engine.start()
    first, second, third = (request(100, seed=seed) for seed in range(3))
    await engine.grant(first)
    await engine.grant(second)
    assert (await engine.stats()).reserved_tokens == 2 * 108
    with pytest.raises(Overloaded, match="sequences"):
        await engine.grant(third)
    engine.revoke(second.id)
    await engine.grant(third)
    engine.revoke(third.id)
    async with aclosing(engine.decode(first)) as deltas:
        await anext(deltas)
        stats = await engine.stats()
        assert (stats.reserved_tokens, stats.running) == (0, 1)
        assert 100 <= stats.kv_tokens_used <= 128
    assert (await engine.stats()).kv_tokens_used == 0
    await engine.close()


async def test_room_is_counted_in_kv_too() -> None:
    engine = FakeEngine(fast(kv_tokens=2048), InProcessEnd(Registry(), "x"))
    await engine.start()
    await engine.grant(request(1000, max_tokens=1000))
    with pytest.raises(Overloaded, match="kv"):
        await engine.grant(request(100))
    await engine.close()


async def test_a_grant_expires() -> None:
    engine = FakeEngine(fast(max_num_seqs=1, grant_s=0.05), InProcessEnd(Registry(), "x"))
    await engine.start()
    await engine.grant(request(100))
    await asyncio.sleep(0.06)
    assert (await engine.stats()).reserved_tokens == 0
    await engine.grant(request(100))
    await engine.close()


@pytest.mark.parametrize(
    "wrong",
    [request(()), request(2000, max_tokens=100), request((1, 49_152)), request((1, -1)), request(5, sampling=b"\xc1")],
    ids=["empty", "too long", "beyond the vocabulary", "negative", "unreadable"],
)
async def test_a_wrong_request_is_the_requests_fault(pair: Pair, wrong: Request) -> None:
    with pytest.raises(InvalidRequest):
        await run(pair.decode, wrong)
    asked = request(50)
    assert tokens(await run(pair.decode, asked)) == expected(asked)


async def test_a_dead_engine_says_so() -> None:
    pair = Pair()
    await pair.decode.start()
    leg = asyncio.create_task(run(pair.decode, request(100, max_tokens=500)))
    await until(lambda: pair.decode.computed_tokens, "it runs")
    pair.decode.die("out of memory")
    calls = [leg, run(pair.decode, request(20)), pair.decode.grant(request(20)), pair.decode.health()]
    for call in calls:
        with pytest.raises(EngineFailed, match="out of memory"):
            await call
    handoff = pair.handoff(asked := request(100))
    with pytest.raises(EngineFailed, match="out of memory"):
        await pair.decode.prefill(asked, handoff)
    stats = await pair.decode.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens_used, stats.handoffs_held) == (0, 0, 0, 0)
    await pair.decode.close()
    await pair.decode.close()


async def test_health_sees_a_step_that_does_not_end() -> None:
    engine = FakeEngine(fast(overdue_s=0.05), InProcessEnd(Registry(), "x"))
    await engine.start()
    await engine.health()
    engine.stall(0.3)
    leg = asyncio.create_task(run(engine, asked := request(50)))
    await asyncio.sleep(0.15)
    with pytest.raises(EngineFailed, match="late"):
        await engine.health()
    assert tokens(await leg) == expected(asked)
    await engine.health()
    await engine.close()


async def test_a_batch_decodes_at_the_pace_of_one() -> None:
    """Steps take their time whatever the batch, and a run of them takes their sum."""
    engine = FakeEngine(fast(decode_step_s=0.005), InProcessEnd(Registry(), "x"))
    await engine.start()
    began = time.monotonic()
    await asyncio.gather(*(run(engine, request(20, max_tokens=40, seed=seed)) for seed in range(16)))
    took = time.monotonic() - began
    assert took > 0.95 * 40 * 0.005
    assert took < 16 * 40 * 0.005  # one after the other would take this
    await engine.close()


async def test_prompts_take_their_time() -> None:
    engine = FakeEngine(fast(prefill_tokens_per_s=10_000.0), InProcessEnd(Registry(), "x"))
    await engine.start()
    began = time.monotonic()
    await run(engine, request(1000, max_tokens=1))
    assert time.monotonic() - began > 0.095
    await engine.close()


async def test_a_pause_is_not_caught_up() -> None:
    pacer = Pacer()
    await pacer.step(0.001)
    pacer.pause()
    await asyncio.sleep(0.03)
    began = time.monotonic()
    await pacer.step(0.02)
    assert time.monotonic() - began > 0.019
    assert Timing(prefill_tokens_per_s=1000.0, decode_step_s=0.5).step_s(100, 3) == pytest.approx(0.6)


async def test_scripted_faults_are_data() -> None:
    """They strike the legs that they name, as often as they say."""
    faults = [
        Fault(stage="after_token_k", token=2, action="fail", request="bad", times=2),
        Fault(stage="before_prefill", action="slow", seconds=0.05, request="slow"),
    ]
    engine = FakeEngine(FAST, InProcessEnd(Registry(), "x"), faults)
    await engine.start()
    for leg, fails in (("bad1", True), ("good", False), ("bad2", True), ("bad3", False)):
        asked = Request(id=leg, prompt_token_ids=prompt(20), max_tokens=4)
        try:
            assert tokens(await run(engine, asked)) == expected(asked)
            assert not fails
        except EngineFailed:
            assert fails
    began = time.monotonic()
    await run(engine, Request(id="slow1", prompt_token_ids=prompt(20), max_tokens=1))
    assert time.monotonic() - began > 0.05
    assert engine.script.struck == 3
    await engine.close()


async def test_text_comes_from_the_decoder_it_is_given() -> None:
    engine = FakeEngine(FAST, InProcessEnd(Registry(), "x"), decoder=lambda token_id: "ab"[token_id % 2])
    await engine.start()
    asked = request(30, max_tokens=12)
    deltas = await run(engine, asked)
    assert "".join(c.text for d in deltas for c in d.choices) == "".join("ab"[t % 2] for t in expected(asked))
    await engine.close()


async def test_other_weights_give_other_tokens_and_another_fingerprint() -> None:
    model = FakeModel(weights="v2", block_size=16)
    engine = FakeEngine(fast(model=model), InProcessEnd(Registry(), "x"))
    described = await engine.start()
    asked = request(50)
    assert tokens(await run(engine, asked)) == expected(asked, model) != expected(asked)
    assert described.fingerprint != FAST.model.fingerprint()
    await engine.close()
