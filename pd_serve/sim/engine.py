"""A simulated engine: vLLM's scheduling on a profile's step times.

Between changes of its batch an engine's steps can be foretold, so there is one event a change and none a token. As in
vLLM, running sequences come first, then loaded ones, then waiting ones in the order in which they came; a prompt is
computed in chunks beside the sequences that generate; a prompt is only begun when all of it fits
(`scheduler_reserve_full_isl`); when blocks run out, the youngest running sequence gives up its own and starts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pd_serve.sim.batch import DecodeBatch
from pd_serve.sim.blocks import Blocks
from pd_serve.sim.clock import Clock
from pd_serve.sim.profile import Profile, attention_pairs, step_s
from pd_serve.sim.sequence import Sequence, Stage
from pd_serve.sim.stretch import Stretch

TokenGaps = Callable[[float, float, int], None]
"""Called with (shortest, longest, how many): times between tokens of one request, evenly spread between the two."""


class Engine:
    """One engine, one data-parallel rank.

    Args:
        gaps: told of the times between tokens.
    """

    def __init__(
        self,
        clock: Clock,
        profile: Profile,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        caching: bool,
        gaps: TokenGaps,
    ) -> None:
        self._clock = clock
        self._times = profile.steps
        self.block_size = profile.block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._gaps = gaps
        self.slowness = 1.0
        """Factor on every step: a straggler's is above 1."""
        self.blocks = Blocks(profile.kv_tokens // profile.block_size, caching)
        self.batch = DecodeBatch(profile.block_size)
        self.waiting: deque[Sequence] = deque()
        self.loading: dict[Sequence, None] = {}
        self.ready: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        """Prefilling and decoding, in the order in which they were let in."""
        self._prefilling: dict[Sequence, None] = {}
        self._fresh: list[Sequence] = []
        """In the decode batch, their first token comes with the next step."""
        self.doomed: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int]] = []
        self._stretch: Stretch | None = None
        self._version = 0
        self._frozen_at: float | None = None
        self._blocked = False
        """Who waits cannot be let in before something leaves."""
        self._planned = False
        self.preemptions = 0
        self.computed_tokens = 0
        """Prompt tokens computed."""
        self.busy_s = 0.0

    # ------------------------------------------------------------------------------------ from outside

    def submit(self, sequence: Sequence) -> None:
        sequence.stage = Stage.WAITING
        self.waiting.append(sequence)
        self._look_again(len(self.waiting) == 1)

    def loaded(self, sequence: Sequence, ok: bool) -> None:
        """KV was put into the sequence's blocks, or never will be: then it computes the prompt itself."""
        del self.loading[sequence]
        sequence.takes_kv = False
        if ok:
            sequence.computed = sequence.target - 1
            self._publish(sequence, sequence.computed)
        sequence.stage = Stage.READY
        self.ready.append(sequence)
        self._look_again(True)

    def abort(self, sequence: Sequence) -> None:
        """Nobody wants it any more. What runs ends with the present step. Idempotent."""
        if sequence.stage in (Stage.NEW, Stage.DONE):
            sequence.stage = Stage.DONE
            return
        if sequence in self.running and self._stretch is not None:
            self.doomed.append(sequence)
            self._cut()
            return
        if sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        elif sequence.stage is Stage.READY:
            self.ready.remove(sequence)
        self.loading.pop(sequence, None)
        self._remove(sequence)
        self._blocked = False
        self._look_again(True)

    def freeze(self) -> None:
        """Stand still, in the middle of a step, until `thaw`."""
        self._frozen_at = self._clock.now
        self._version += 1

    def thaw(self) -> None:
        if self._frozen_at is None:
            return
        frozen_s, self._frozen_at = self._clock.now - self._frozen_at, None
        if self._stretch is not None:
            self._stretch.start += frozen_s
            self._schedule_end(self._stretch)
        else:
            self._look_again(True)

    def slow_down(self, slowness: float) -> None:
        """Steps take so many times as long, from the next one on."""
        self.slowness = slowness
        self._cut()

    def kill(self) -> None:
        """Never do anything again."""
        self._version += 1
        self._frozen_at = self._clock.now

    # ------------------------------------------------------------------------------------ counts

    @property
    def kv_tokens_used(self) -> int:
        done = self._stretch.done(self._clock.now) if self._stretch and self._frozen_at is None else 0
        return (self.blocks.used + self.batch.blocks_for(done)) * self.block_size

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens that are to be computed here and are not."""
        waiting = sum(sequence.uncomputed for sequence in self.waiting if not sequence.takes_kv)
        ready = sum(sequence.uncomputed for sequence in self.ready)
        return waiting + ready + sum(sequence.uncomputed for sequence in self._prefilling)

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not over."""
        return [*self.running, *self.ready, *self.loading, *self.waiting]

    # ------------------------------------------------------------------------------------ steps

    def _look_again(self, may_go: bool) -> None:
        """Something can perhaps be let in: now when idle, else after the present step."""
        if self._frozen_at is not None:
            return
        if self._stretch is None:
            if not self._planned:
                self._planned = True
                self._clock.after(0.0, self._begin, self._version)
        elif may_go and (self.ready or not self._blocked) and len(self.running) < self._max_num_seqs:
            self._cut()

    def _begin(self, version: int) -> None:
        self._planned = False
        if version == self._version and self._stretch is None:
            self._plan()

    def _cut(self) -> None:
        if self._stretch is not None and self._frozen_at is None and self._stretch.cut(self._clock.now):
            self._version += 1
            self._schedule_end(self._stretch)

    def _schedule_end(self, stretch: Stretch) -> None:
        self._clock.at(max(stretch.end, self._clock.now), self._ended, self._version)

    def _ended(self, version: int) -> None:
        if version != self._version or self._stretch is None:
            return
        stretch, self._stretch = self._stretch, None
        self.busy_s += stretch.elapsed(stretch.steps)
        self._count_gaps(stretch)
        self.blocks.take(self.batch.blocks_for(stretch.steps))
        self.batch.advance(stretch.steps)
        fresh, self._fresh = self._fresh, []
        for sequence in fresh:
            self._publish(sequence, sequence.target)
            sequence.listener.on_first_token(sequence)
        for sequence, tokens in self._chunks:
            self._computed(sequence, tokens)
        self._chunks.clear()
        for sequence in self.batch.finished():
            self._finish(sequence)
        for sequence in self.doomed:
            if sequence.stage is not Stage.DONE:
                self._remove(sequence)
        self.doomed.clear()
        self._plan()

    def _count_gaps(self, stretch: Stretch) -> None:
        sequences = self.batch.size - len(self._fresh)
        if sequences:
            last = stretch.first_s + stretch.growth_s * (stretch.steps - 1)
            self._gaps(stretch.first_s, last, sequences * stretch.steps)

    def _computed(self, sequence: Sequence, tokens: int) -> None:
        """A chunk of the sequence's prompt is done; with the last one comes a token."""
        sequence.computed += tokens
        self.computed_tokens += tokens
        self._publish(sequence, sequence.computed)
        if sequence.uncomputed:
            return
        del self._prefilling[sequence]
        sequence.generated += 1
        if sequence.generated == 1:
            sequence.listener.on_first_token(sequence)
        else:  # it was preempted
            gap = self._clock.now - sequence.last_token_at
            self._gaps(gap, gap, 1)
        if sequence.generated == sequence.output_tokens:
            self._finish(sequence)
        else:
            self.batch.join(sequence, 0)

    def _finish(self, sequence: Sequence) -> None:
        decoding = sequence.stage is Stage.DECODE
        self._remove(sequence, keep_output=decoding)
        sequence.listener.on_finished(sequence)

    # ------------------------------------------------------------------------------------ scheduling

    def _plan(self) -> None:
        batch = self.batch
        preempted = self._make_room()
        if not preempted:
            self._admit()
        budget = self._max_num_batched_tokens - batch.size
        prompt_tokens, attention = 0, 0.0
        for sequence in self._prefilling:
            tokens = min(sequence.target - sequence.computed, budget)
            if tokens <= 0:
                break
            self._chunks.append((sequence, tokens))
            attention += attention_pairs(sequence.computed, tokens)
            prompt_tokens += tokens
            budget -= tokens
        if not prompt_tokens and not batch.size:
            return
        first = self.slowness * step_s(self._times, prompt_tokens, attention, batch.size, batch.context)
        growth = self.slowness * self._times.decode_context_s * batch.size
        steps = 1
        if not prompt_tokens and not self._fresh:
            steps = max(batch.steps_within(self.blocks.available, batch.steps_to_finish()), 1)
        self._stretch = Stretch(self._clock.now, first, growth, steps)
        self._version += 1
        self._schedule_end(self._stretch)

    def _make_room(self) -> bool:
        """Preempt until the next step's blocks are there. True when it was needed."""
        needed = False
        while self.batch.blocks_for(1) > self.blocks.available:
            self._preempt(next(reversed(self.running)))
            needed = True
        return needed

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preempted += 1
        if sequence in self._fresh:
            self._fresh.remove(sequence)
        self._take_out(sequence)
        self._free(sequence)
        sequence.last_token_at = self._clock.now
        sequence.target = sequence.prompt_tokens + sequence.generated
        sequence.stage = Stage.WAITING
        self.waiting.appendleft(sequence)

    def _admit(self) -> None:
        budget = self._max_num_batched_tokens - self.batch.size - sum(s.uncomputed for s in self._prefilling)
        self._blocked = False
        while budget > 0 and len(self.running) < self._max_num_seqs:
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
                    self._blocked = True
                    return
                self.waiting.popleft()
            else:
                return
            if sequence.stage is Stage.PREFILL:
                budget -= sequence.uncomputed
            elif sequence.stage is Stage.DECODE:
                budget -= 1
        self._blocked = True

    def _admit_ready(self, sequence: Sequence) -> bool:
        """Its KV was loaded: it generates. Or the load failed: it computes what the cache did not have."""
        if sequence.uncomputed == 1:
            another = sequence.computed % self.block_size == 0
            if self.batch.blocks_for(1) + another > self.blocks.available:
                return False
            self.batch.join(sequence, 1)
            self._fresh.append(sequence)
        else:
            lacking = -(-sequence.target // self.block_size) - sequence.blocks_held
            if not self.blocks.take(max(lacking, 0)):
                return False
            sequence.private += max(lacking, 0)
            sequence.stage = Stage.PREFILL
            self._prefilling[sequence] = None
        self.running[sequence] = None
        return True

    def _admit_waiting(self, sequence: Sequence) -> bool:
        """Give it the cached units and blocks for all the rest; it runs, or loads. False, and nothing changes, when
        there are not enough blocks."""
        blocks, size = self.blocks, self.block_size
        matched = blocks.match(sequence.units)
        cached = min(sequence.units[matched - 1].end, (sequence.target - 1) // size * size) if matched else 0
        loads = sequence.takes_kv and (sequence.target - 1) // size > cached // size
        lacking = -(-(sequence.target - loads) // size) - sum(unit.blocks for unit in sequence.units[:matched])
        lacking = max(lacking, 0)
        if lacking > blocks.available - blocks.blocks_if_held(sequence.units, matched) - self.batch.blocks_for(1):
            return False
        for unit in sequence.units[:matched]:
            blocks.hold(unit)
        blocks.take(lacking)
        sequence.held = list(sequence.units[:matched])
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
            self._prefilling[sequence] = None
        sequence.listener.on_blocks(sequence)
        return True

    # ------------------------------------------------------------------------------------ blocks

    def _publish(self, sequence: Sequence, tokens: int) -> None:
        """The units in the first `tokens` tokens, whose KV is there, are there for others."""
        units = sequence.units
        while sequence.matched < len(units) and units[sequence.matched].end <= tokens:
            unit = units[sequence.matched]
            if self.blocks.publish(unit):
                sequence.held.append(unit)
                sequence.private -= unit.blocks
            sequence.matched += 1

    def _publish_output(self, sequence: Sequence) -> None:
        """What the next turn of the conversation begins with is there for it. The prompt's last unit, when it is not
        full, becomes part of a full one."""
        first = sequence.output_units[0]
        tail = sequence.held[-1] if sequence.held else None
        if tail is not None and first.end - first.blocks * self.block_size < tail.end and self.blocks.unpublish(tail):
            sequence.held.pop()
            sequence.private += tail.blocks
        for unit in sequence.output_units:
            if unit.blocks <= sequence.private and self.blocks.publish(unit):
                sequence.held.append(unit)
                sequence.private -= unit.blocks

    def _remove(self, sequence: Sequence, keep_output: bool = False) -> None:
        """It is over: nothing here refers to it any more."""
        self._take_out(sequence)
        if sequence in self._fresh:
            self._fresh.remove(sequence)
        if keep_output and sequence.output_units:
            self._publish_output(sequence)
        self._free(sequence)
        sequence.stage = Stage.DONE

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.DECODE:
            self.batch.leave(sequence)
            held = sum(unit.blocks for unit in sequence.held)
            sequence.private = -(-sequence.computed // self.block_size) - held
        self.running.pop(sequence, None)
        self._prefilling.pop(sequence, None)

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.held, sequence.private)
        sequence.held = []
        sequence.private = 0
        sequence.matched = 0
        sequence.computed = 0
