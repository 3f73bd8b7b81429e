"""The fake engine's scheduler: which sequences compute how many tokens in the next step. Pure.

As vLLM's: running sequences first, then waiting ones in the order in which they came, each as far as the step's token
budget and the free blocks allow; when blocks run out, the youngest running sequence gives up its own and starts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from pd_serve.engine.fake_blocks import Block, BlockPool, PrefixHashes
from pd_serve.engine.fake_model import FakeModel, KvCache
from pd_serve.engine.fake_sampling import Answer
from pd_serve.types import Handoff


class State(Enum):
    WAITING = auto()
    LOADING = auto()  # has its blocks, waits for KV to be put into them
    RUNNING = auto()
    HELD = auto()  # made to stand still by a scripted fault
    DONE = auto()


class Sequence:
    """One choice of one leg.

    Args:
        token_ids: the prompt, and what was emitted before.
        handoff: where the prompt's KV comes from, once: it is not asked for again after a preemption.
    """

    def __init__(
        self,
        leg_id: str,
        token_ids: tuple[int, ...],
        prompt_tokens: int,
        model: FakeModel,
        answer: Answer,
        salt: str | None,
        handoff: Handoff | None = None,
    ) -> None:
        self.leg_id = leg_id
        self.token_ids = list(token_ids)
        self.prompt_tokens = prompt_tokens
        self.answer = answer
        self.handoff = handoff
        self.cache = KvCache(model.layers)
        self.hashes = PrefixHashes(model.block_size, salt)
        self.blocks: list[Block] = []
        self.state = State.WAITING
        self.cached_tokens: int | None = None
        """Tokens that were in the prefix cache when it was first scheduled."""
        self.past_half = False
        """Whether it has been in the middle of its prompt, where a scripted fault may strike, once."""

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is not there yet; at least one before a token can be generated."""
        return len(self.token_ids) - len(self.cache)


class Chunk(NamedTuple):
    """One sequence's part of a step."""

    sequence: Sequence
    tokens: int


class Scheduler:
    """All unfinished sequences of one engine.

    Args:
        load: called with a sequence that got the blocks for its prompt and waits for KV; ends with `loaded`.
    """

    def __init__(
        self,
        model: FakeModel,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        load: Callable[[Sequence], None],
    ) -> None:
        self._model = model
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._load = load
        self.waiting: deque[Sequence] = deque()
        self.ready: deque[Sequence] = deque()
        """Loaded, with the blocks for their prompts; they go on before all waiting ones."""
        self.running: list[Sequence] = []
        self.aside: set[Sequence] = set()
        """Loading or held."""
        self.preemptions = 0
        self.computed_tokens = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It is finished or not wanted any more: free what it has. Idempotent."""
        self._take_out(sequence)
        sequence.state = State.DONE
        self._free(sequence)

    def loaded(self, sequence: Sequence) -> None:
        """KV was put into the sequence's cache, or never will be."""
        self.aside.discard(sequence)
        sequence.handoff = None
        self._keep_full_blocks(sequence, sequence.cached_tokens or 0)
        sequence.state = State.WAITING
        self.ready.append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """It keeps what it has and stands still until `resume`."""
        self._take_out(sequence)
        sequence.state = State.HELD
        self.aside.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        if sequence.state is State.HELD:
            self.aside.discard(sequence)
            sequence.state = State.RUNNING
            self.running.append(sequence)

    # ------------------------------------------------------------------------------------ a step

    def schedule(self) -> list[Chunk]:
        """The next step; blocks for its tokens are allocated."""
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        preemptions = self.preemptions
        for sequence in list(self.running):
            tokens = min(sequence.uncomputed, budget)
            if sequence.state is State.RUNNING and tokens and self._make_room(sequence, tokens):
                chunks.append(Chunk(sequence, tokens))
                budget -= tokens
        if self.preemptions == preemptions or not chunks:
            self._admit(budget, chunks)
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """Compute the chunk's tokens."""
        sequence, before = chunk.sequence, len(chunk.sequence.cache)
        self._model.compute(sequence.cache, sequence.token_ids[before : before + chunk.tokens])
        self.computed_tokens += chunk.tokens
        self._keep_full_blocks(sequence, before)

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        while budget > 0 and len(self.running) < self._max_num_seqs:
            if self.ready:
                sequence = self.ready.popleft()
                if not self._begin(sequence, budget, chunks):  # what it holds may be what all others wait for
                    self._free(sequence)
                    self.waiting.appendleft(sequence)
            elif self.waiting:
                sequence = self.waiting[0]
                self._take_cached(sequence)
                if not self._begin(sequence, budget, chunks):
                    self._free(sequence)
                    return
                self.waiting.popleft()
            else:
                return
            budget -= chunks[-1].tokens if chunks and chunks[-1].sequence is sequence else 0

    def _begin(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> bool:
        """Let it run, or load. False, and nothing changes, when there are not enough blocks."""
        if sequence.handoff is not None and self._lacks_a_block(sequence):
            if not self._grow(sequence, sequence.prompt_tokens):
                return False
            sequence.state = State.LOADING
            self.aside.add(sequence)
            self._load(sequence)
            return True
        tokens = min(sequence.uncomputed, budget)
        if not self._grow(sequence, len(sequence.cache) + tokens):
            return False
        sequence.state = State.RUNNING
        self.running.append(sequence)
        chunks.append(Chunk(sequence, tokens))
        return True

    def _take_cached(self, sequence: Sequence) -> None:
        """Begin with what the prefix cache has; the last token is always computed."""
        hashes = sequence.hashes.of(sequence.token_ids, (len(sequence.token_ids) - 1) // self._model.block_size)
        sequence.blocks = self._pool.match(hashes)
        for block in sequence.blocks:
            sequence.cache.append(block.content)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = len(sequence.cache)

    def _lacks_a_block(self, sequence: Sequence) -> bool:
        """Whether a full block of the prompt, its last token aside, is not here yet."""
        return (sequence.prompt_tokens - 1) // self._model.block_size > len(sequence.cache) // self._model.block_size

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        while not self._grow(sequence, len(sequence.cache) + tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for its first `tokens` tokens."""
        lacking = self._model.blocks(tokens) - len(sequence.blocks)
        new = self._pool.allocate(max(lacking, 0))
        if new is None:
            return False
        sequence.blocks += new
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.handoff = None
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.cache = KvCache(self._model.layers)

    def _keep_full_blocks(self, sequence: Sequence, before: int) -> None:
        size = self._model.block_size
        full = len(sequence.cache) // size
        hashes = sequence.hashes.of(sequence.token_ids, full)
        for number in range(before // size, full):
            content = sequence.cache.block(number * size, (number + 1) * size)
            self._pool.keep(sequence.blocks[number], hashes[number], content)

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            for queue in (self.waiting, self.ready):
                if sequence in queue:
                    queue.remove(sequence)
        self.aside.discard(sequence)
