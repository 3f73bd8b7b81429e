"""The fake engine's scheduler, cache and blocks, without an event loop."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_serve.engine.fake_blocks import BlockPool, PrefixHashes
from pd_serve.engine.fake_model import FakeModel, KvCache, words
from pd_serve.engine.fake_sampling import Answer, Sampling
from pd_serve.engine.fake_scheduler import Scheduler, Sequence, State
from pd_serve.types import Handoff, KvAddress
from tests.path.cluster import expected, prompt, request

MODEL = FakeModel(block_size=4)
HANDOFF = Handoff(
    id="h",
    prompt_tokens=0,
    prompt_hash=b"",
    source=KvAddress("in_process", "p"),
    target=KvAddress("in_process", "d"),
    lease_s=1.0,
)


def sequence(
    tokens: tuple[int, ...], max_tokens: int = 3, salt: str | None = None, handoff: Handoff | None = None
) -> Sequence:
    answer = Answer(MODEL, Sampling(max_tokens=max_tokens), words, 0)
    return Sequence("leg", tokens, len(tokens), MODEL, answer, salt, handoff)


class Rig:
    """A scheduler that is stepped by hand."""

    def __init__(self, blocks: int = 100, max_num_seqs: int = 8, budget: int = 64, caching: bool = True) -> None:
        self.pool = BlockPool(blocks, caching)
        self.loading: list[Sequence] = []
        self.scheduler = Scheduler(MODEL, self.pool, max_num_seqs, budget, self.loading.append)

    def step(self) -> list[tuple[Sequence, int]]:
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            one = chunk.sequence
            self.scheduler.advance(chunk)
            if one.uncomputed == 0:
                one.token_ids.append(one.answer.sample(one.cache))
                if one.answer.finish_reason:
                    self.scheduler.remove(one)
        return [(chunk.sequence, chunk.tokens) for chunk in chunks]

    def run(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("it never ends")


def right(one: Sequence) -> tuple[int, ...]:
    return expected(request(one.token_ids[: one.prompt_tokens], max_tokens=len(one.answer.token_ids)), MODEL)


def test_prompts_are_computed_in_chunks_within_the_steps_budget() -> None:
    rig = Rig(budget=10)
    first, second = sequence(prompt(23, 1)), sequence(prompt(12, 2))
    rig.scheduler.add(first)
    rig.scheduler.add(second)
    steps = [rig.step() for _ in range(4)]
    assert steps[0] == [(first, 10)]
    assert steps[1] == [(first, 10)]
    assert steps[2] == [(first, 3), (second, 7)]
    assert steps[3] == [(first, 1), (second, 5)]
    assert all(sum(tokens for _, tokens in step) <= 10 for step in steps)


def test_no_more_sequences_run_than_may() -> None:
    rig = Rig(max_num_seqs=2)
    for seed in range(5):
        rig.scheduler.add(sequence(prompt(8, seed)))
    assert len(rig.step()) == 2
    rig.run()
    assert rig.pool.used == 0


def test_a_prefix_is_computed_once() -> None:
    rig = Rig()
    first, second = sequence(prompt(20, 1)), sequence((*prompt(20, 1)[:13], 1, 2, 3))
    for one in (first, second):
        rig.scheduler.add(one)
        rig.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert rig.scheduler.computed_tokens == (20 + 2) + (16 - 12 + 2)
    assert tuple(second.answer.token_ids) == right(second)


def test_the_last_prompt_token_is_always_computed() -> None:
    rig = Rig()
    for _ in range(2):
        one = sequence(prompt(16, 1))
        rig.scheduler.add(one)
        rig.run()
    assert one.cached_tokens == 12


def test_salts_do_not_share_prefixes() -> None:
    """Invariant 9."""
    rig = Rig()
    cached = []
    for salt in ("a", "b", None, "", "a"):
        one = sequence(prompt(20, 1), salt=salt)
        rig.scheduler.add(one)
        rig.run()
        cached.append(one.cached_tokens)
    assert cached == [0, 0, 0, 16, 16]  # no salt and an empty salt are the same


def test_without_prefix_caching_nothing_is_found() -> None:
    rig = Rig(caching=False)
    for _ in range(2):
        one = sequence(prompt(20, 1))
        rig.scheduler.add(one)
        rig.run()
    assert one.cached_tokens == 0


def test_when_blocks_run_out_the_youngest_starts_again() -> None:
    rig = Rig(blocks=8)
    old, young = sequence(prompt(12, 1), max_tokens=12), sequence(prompt(12, 2), max_tokens=12)
    rig.scheduler.add(old)
    rig.scheduler.add(young)
    rig.run()
    assert rig.scheduler.preemptions > 0
    for one in (old, young):
        assert tuple(one.answer.token_ids) == right(one)
    assert rig.pool.used == 0


def test_a_hand_off_is_not_asked_for_again_after_a_preemption() -> None:
    rig = Rig(blocks=8)
    other = sequence(prompt(12, 1), max_tokens=12)
    moved = sequence(prompt(12, 2), max_tokens=12, handoff=HANDOFF)
    rig.scheduler.add(other)
    rig.scheduler.add(moved)
    rig.step()
    assert rig.loading == [moved]
    source = KvCache(MODEL.layers)
    MODEL.compute(source, moved.token_ids)
    MODEL.put(moved.cache, memoryview(MODEL.pages(source, 12)), 11)
    rig.scheduler.loaded(moved)
    rig.run()
    assert rig.loading == [moved]
    assert rig.scheduler.preemptions > 0
    assert tuple(moved.answer.token_ids) == right(moved)


def test_what_a_loaded_sequence_holds_does_not_block_all_others() -> None:
    """Loaded, but out of blocks for its next token while an older one waits for its blocks: both still end."""
    rig = Rig(blocks=6, max_num_seqs=1)
    running = sequence(prompt(8, 1), max_tokens=16)
    loaded = sequence(prompt(8, 2), max_tokens=16, handoff=HANDOFF)
    rig.scheduler.add(running)
    rig.step()
    rig.scheduler._max_num_seqs = 2
    rig.scheduler.add(loaded)
    rig.step()
    rig.scheduler._max_num_seqs = 1
    source = KvCache(MODEL.layers)
    MODEL.compute(source, loaded.token_ids)
    MODEL.put(loaded.cache, memoryview(MODEL.pages(source, 8)), 7)
    rig.scheduler.loaded(loaded)
    rig.run()
    for one in (running, loaded):
        assert one.answer.finish_reason == "length"
        assert tuple(one.answer.token_ids) == right(one)


@given(st.integers(1, 60), st.data())
def test_pages_carry_the_whole_cache(tokens: int, data: st.DataObject) -> None:
    """Out of one cache and into another, whatever the other has already: the same numbers, the same next token."""
    source = KvCache(MODEL.layers)
    MODEL.compute(source, prompt(tokens))
    pages = MODEL.pages(source, tokens)
    assert len(pages) == MODEL.layers * MODEL.blocks(tokens) * MODEL.page_bytes
    target = KvCache(MODEL.layers)
    MODEL.compute(target, prompt(tokens)[: data.draw(st.integers(0, tokens))])
    MODEL.put(target, memoryview(bytes(pages)), tokens)
    assert target.layers == source.layers
    assert target.digest() == source.digest()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 12))
def test_a_hash_names_a_block_and_everything_before_it(token_ids: list[int], changed: int) -> None:
    other = [*token_ids]
    other[changed % len(other)] += 1
    blocks = len(token_ids) // 4
    mine, again, others = (PrefixHashes(4, "s") for _ in range(3))
    assert mine.of(token_ids, blocks // 2) == again.of(token_ids, blocks)[: blocks // 2]
    assert mine.of(token_ids, blocks) == again.of(token_ids, blocks)
    same = (changed % len(other)) // 4
    for number, (a, b) in enumerate(zip(mine.of(token_ids, blocks), others.of(other, blocks), strict=True)):
        assert (a == b) == (number < same)


class Blocks(RuleBasedStateMachine):
    """Invariant 2 inside the fake engine: a block is used or free, never both, and comes back when its users leave."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, prefix_caching=True)
        self.taken: list[list[object]] = []
        self.kept: dict[bytes, object] = {}

    @rule(blocks=st.integers(0, 13))
    def allocate(self, blocks: int) -> None:
        free = self.pool.total - self.pool.used
        new = self.pool.allocate(blocks)
        assert (new is None) == (blocks > free)
        if new is not None:
            assert all(block.users == 1 and block.hash is None for block in new)
            self.taken.append(list(new))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), name=st.binary(min_size=1, max_size=1))
    def keep(self, data: st.DataObject, name: bytes) -> None:
        blocks = data.draw(st.sampled_from(self.taken))
        if blocks:
            self.pool.keep(blocks[0], name, ())  # type: ignore[arg-type]

    @rule(names=st.lists(st.binary(min_size=1, max_size=1), max_size=3))
    def match(self, names: list[bytes]) -> None:
        found = self.pool.match(names)
        assert [block.hash for block in found] == names[: len(found)]
        self.taken.append(list(found))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.pool.release(blocks)  # type: ignore[arg-type]

    @invariant()
    def what_is_used_is_what_was_taken(self) -> None:
        assert self.pool.used == len({id(block) for blocks in self.taken for block in blocks})


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=25, stateful_step_count=30)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8), st.booleans(), st.integers(0, 3)), max_size=8),
    st.integers(10, 30),
    st.integers(1, 4),
    st.integers(1, 40),
    st.data(),
)
def test_every_sequence_ends_rightly_whatever_the_pressure(
    wanted: list[tuple[int, int, bool, int]], blocks: int, max_num_seqs: int, budget: int, data: st.DataObject
) -> None:
    """Any mix of lengths, hand-offs, aborts and shared prefixes under any limits: right tokens, no block left."""
    rig = Rig(blocks, max_num_seqs, budget)
    sequences = [
        sequence(prompt(length, seed), max_tokens, handoff=HANDOFF if moved else None)
        for length, max_tokens, moved, seed in wanted
    ]
    for one in sequences:
        rig.scheduler.add(one)
    for _ in range(3000):
        stepped = rig.step()
        if rig.loading and (not stepped or data.draw(st.booleans())):
            one = rig.loading.pop(0)
            if one.state is not State.LOADING:
                continue
            if data.draw(st.booleans(), label="KV comes"):
                source = KvCache(MODEL.layers)
                MODEL.compute(source, one.token_ids)
                MODEL.put(one.cache, memoryview(MODEL.pages(source, one.prompt_tokens)), one.prompt_tokens - 1)
            rig.scheduler.loaded(one)
        elif not stepped:
            break
        if data.draw(st.integers(0, 30), label="abort") == 30:
            rig.scheduler.remove(data.draw(st.sampled_from(sequences)))
    else:
        raise AssertionError("it never ends")
    for one in sequences:
        assert one.state is State.DONE
        assert tuple(one.answer.token_ids) == right(one)
    assert rig.pool.used == 0
    assert not (rig.scheduler.waiting or rig.scheduler.ready or rig.scheduler.running or rig.scheduler.aside)
