"""What a simulated engine computes in its next step, as vLLM's scheduler decides it. No time in here.

Running sequences come first, then loaded ones, then waiting ones in the order in which they came; a prompt is computed
in chunks beside the sequences that generate; a prompt is only begun when all of it fits (`scheduler_reserve_full_isl`);
when blocks run out, the youngest running sequence gives up its own and starts again.
"""

from __future__ import annotations

from collections import deque

from pd_serve.sim.batch import DecodeBatch
from pd_serve.sim.blocks import Blocks, Unit
from pd_serve.sim.sequence import Sequence, Stage


class Scheduler:
    """All sequences of one engine that are not over."""

    def __init__(self, blocks: Blocks, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.batch = DecodeBatch(block_size)
        self.waiting: deque[Sequence] = deque()
        self.loading: dict[Sequence, None] = {}
        self.ready: deque[Sequence] = deque()
        """Loaded, with the blocks for their prompts."""
        self.running: dict[Sequence, None] = {}
        """Prefilling and decoding, in the order in which they were let in."""
        self.prefilling: dict[Sequence, None] = {}
        self.fresh: list[Sequence] = []
        """In the decode batch; their first token comes with the next step."""
        self.blocked = False
        """Who waits cannot be let in before something leaves."""
        self.preemptions = 0
        self._own_units = 0

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.ready, *self.loading, *self.waiting]

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.running) + len(self.ready) + len(self.loading) + len(self.waiting)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens that are to be computed here and are not."""
        waiting = sum(sequence.uncomputed for sequence in self.waiting if not sequence.takes_kv)
        ready = sum(sequence.uncomputed for sequence in self.ready)
        return waiting + ready + sum(sequence.uncomputed for sequence in self.prefilling)

    # ------------------------------------------------------------------------------------ a step

    def schedule(self, now: float) -> list[tuple[Sequence, int]]:
        """The next step: chunks of prompts, beside one token for each sequence of the batch."""
        if self.batch.size:
            preemptions = self.preemptions
            while self.batch.blocks_for(1) > self.blocks.available:
                self._preempt(next(reversed(self.running)), now)
            self.blocks.make_free(self.batch.blocks_for(1))  # who runs is served before who waits
            if self.preemptions == preemptions:
                self._admit()
        else:
            self._admit()
        chunks: list[tuple[Sequence, int]] = []
        if self.prefilling:
            budget = self._max_num_batched_tokens - self.batch.size
            for sequence in self.prefilling:
                if budget <= 0:
                    break
                tokens = min(sequence.uncomputed, budget)
                chunks.append((sequence, tokens))
                budget -= tokens
        return chunks

    def _admit(self) -> None:
        self.blocked = False
        if not self.ready and not self.waiting:
            return
        budget = self._max_num_batched_tokens - self.batch.size
        if self.prefilling:
            budget -= sum([sequence.uncomputed for sequence in self.prefilling])
        while budget > 0 and len(self.running) < self.max_num_seqs:
            if self.ready:
                sequence = self.ready.popleft()
                if not self._admit_ready(sequence):  # what it holds may be what all others wait for
                    self._free(sequence)
                    sequence.stage = Stage.WAITING
                    self.waiting.appendleft(sequence)
                    continue
            elif self.waiting:
                sequence = self.waiting[0]
                if not self._admit_waiting(sequence):
                    break
                self.waiting.popleft()
            else:
                return
            if sequence.stage is Stage.PREFILL:
                budget -= sequence.uncomputed
            elif sequence.stage is Stage.DECODE:
                budget -= 1
        self.blocked = True

    def _admit_ready(self, sequence: Sequence) -> bool:
        """Its KV was loaded: it generates. Or the load failed: it computes what the cache did not have."""
        if sequence.uncomputed == 1:
            another = sequence.computed % self.block_size == 0
            if self.batch.blocks_for(1) + another > self.blocks.available:
                return False
            self.batch.join(sequence, 1)
            self.fresh.append(sequence)
        else:
            lacking = max(-(-sequence.target // self.block_size) - sequence.blocks_held, 0)
            if not self.blocks.take(lacking):
                return False
            sequence.private += lacking
            sequence.stage = Stage.PREFILL
            self.prefilling[sequence] = None
        self.running[sequence] = None
        return True

    def _admit_waiting(self, sequence: Sequence) -> bool:
        """Give it the cached units and blocks for all the rest; it runs, or loads. False, and nothing changes, when
        there are not enough blocks."""
        blocks, size, units = self.blocks, self.block_size, sequence.units
        matched = blocks.match(units)
        cached = min(units[matched - 1].end, (sequence.target - 1) // size * size) if matched else 0
        loads = sequence.takes_kv and (sequence.target - 1) // size > cached // size
        shared = units[matched - 1].end // size if matched else 0
        lacking = max(-(-(sequence.target - loads) // size) - shared, 0)
        if lacking > blocks.available - blocks.blocks_if_held(units, matched) - self.batch.blocks_for(1):
            return False
        for unit in units[:matched]:
            blocks.hold(unit)
        blocks.take(lacking)
        sequence.held = list(units[:matched])
        sequence.held_blocks = shared
        sequence.matched = matched
        sequence.private = lacking
        sequence.computed = cached
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached
        if loads:
            sequence.stage = Stage.LOADING
            self.loading[sequence] = None
        else:
            sequence.stage = Stage.PREFILL
            self.running[sequence] = None
            self.prefilling[sequence] = None
        sequence.listener.on_blocks(sequence)
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self.preemptions += 1
        sequence.preempted += 1
        self._take_out(sequence)
        self._keep_own(sequence)
        self._free(sequence)
        sequence.last_token_at = now
        sequence.target = sequence.prompt_tokens + sequence.generated
        sequence.stage = Stage.WAITING
        self.waiting.appendleft(sequence)

    # ------------------------------------------------------------------------------------ changes

    def loaded(self, sequence: Sequence, ok: bool) -> None:
        """KV was put into the sequence's blocks, or never will be: then it computes the prompt itself."""
        del self.loading[sequence]
        sequence.takes_kv = False
        if ok:
            sequence.computed = sequence.target - 1
            self.publish(sequence, sequence.computed)
        sequence.stage = Stage.READY
        self.ready.append(sequence)

    def prefilled(self, sequence: Sequence) -> None:
        """Its prompt is computed, and its next token generated, which was not the last one."""
        del self.prefilling[sequence]
        self.batch.join(sequence, 0)

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """The units in the first `tokens` tokens, whose KV is there, are there for others."""
        units = sequence.units
        while sequence.matched < len(units) and units[sequence.matched].end <= tokens:
            unit = units[sequence.matched]
            if self.blocks.publish(unit):
                sequence.add(unit)
            sequence.matched += 1

    def remove(self, sequence: Sequence, keep_output: bool = False) -> None:
        """It is over: nothing here refers to it any more."""
        if sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        elif sequence.stage is Stage.READY:
            self.ready.remove(sequence)
        elif sequence.stage is Stage.LOADING:
            del self.loading[sequence]
        self._take_out(sequence)
        if keep_output and sequence.output_units:
            self._publish_output(sequence)
        self._free(sequence)
        sequence.stage = Stage.DONE

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.DECODE:
            self.batch.leave(sequence)
            sequence.private = -(-sequence.computed // self.block_size) - sequence.held_blocks
            if sequence in self.fresh:
                self.fresh.remove(sequence)
        self.running.pop(sequence, None)
        self.prefilling.pop(sequence, None)

    def _keep_own(self, sequence: Sequence) -> None:
        """What a preempted sequence computed stays in the cache, where it finds it again if nobody needed the room."""
        cached = sequence.held[-1].end if sequence.held else 0
        blocks = sequence.computed // self.block_size - cached // self.block_size
        if blocks <= 0 or sequence.held_blocks * self.block_size != cached:
            return
        for number in range(blocks):
            self._own_units += 1
            own = Unit(-self._own_units, 1, cached + (number + 1) * self.block_size)
            if self.blocks.publish(own):
                sequence.add(own)
        sequence.units = tuple(sequence.held)

    def _publish_output(self, sequence: Sequence) -> None:
        """What the next turn of the conversation begins with is there for it. The prompt's last unit, when it is not
        full, becomes part of a full one."""
        first = sequence.output_units[0]
        tail = sequence.held[-1] if sequence.held else None
        if tail is not None and first.end - first.blocks * self.block_size < tail.end and self.blocks.unpublish(tail):
            sequence.held.pop()
            sequence.held_blocks -= tail.blocks
            sequence.private += tail.blocks
        for unit in sequence.output_units:
            if unit.blocks <= sequence.private and self.blocks.publish(unit):
                sequence.add(unit)

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.held, sequence.private)
        sequence.held = []
        sequence.held_blocks = 0
        sequence.private = 0
        sequence.matched = 0
        sequence.computed = 0
