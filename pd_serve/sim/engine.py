"""A simulated engine: what its scheduler decides, on a profile's step times.

Between changes of its batch an engine's steps can be foretold, so there is one event a change and none a token.
"""

from __future__ import annotations

from collections.abc import Callable

from pd_serve.sim.blocks import Blocks
from pd_serve.sim.clock import Clock
from pd_serve.sim.profile import Profile, attention_pairs, step_s
from pd_serve.sim.scheduler import Scheduler
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
        self._gaps = gaps
        self.blocks = Blocks(profile.kv_tokens // profile.block_size, caching)
        self.scheduler = Scheduler(self.blocks, profile.block_size, max_num_seqs, max_num_batched_tokens)
        self.batch = self.scheduler.batch
        self.slowness = 1.0
        """Factor on every step: a straggler's is above 1."""
        self.doomed: list[Sequence] = []
        """Aborted; they leave with the present step."""
        self._chunks: list[tuple[Sequence, int]] = []
        self._stretch: Stretch | None = None
        self._version = 0
        self._frozen_at: float | None = None
        self._begins = False
        self.computed_tokens = 0
        """Prompt tokens computed."""
        self.busy_s = 0.0

    # ------------------------------------------------------------------------------------ from outside

    def submit(self, sequence: Sequence) -> None:
        sequence.stage = Stage.WAITING
        self.scheduler.waiting.append(sequence)
        self._look_again()

    def loaded(self, sequence: Sequence, ok: bool) -> None:
        """KV was put into the sequence's blocks, or never will be: then it computes the prompt itself."""
        self.scheduler.loaded(sequence, ok)
        self.scheduler.blocked = False
        self._look_again()

    def abort(self, sequence: Sequence) -> None:
        """Nobody wants it any more. What runs ends with the present step. Idempotent."""
        if sequence.stage in (Stage.NEW, Stage.DONE):
            sequence.stage = Stage.DONE
        elif sequence in self.scheduler.running and self._stretch is not None:
            self.doomed.append(sequence)
            self._cut()
        else:
            self.scheduler.remove(sequence)
            self.scheduler.blocked = False
            self._look_again()

    def freeze(self) -> None:
        """Stand still, in the middle of a step, until `thaw`."""
        self._frozen_at = self._clock.now
        self._version += 1
        self._begins = False

    def thaw(self) -> None:
        if self._frozen_at is None:
            return
        frozen_s, self._frozen_at = self._clock.now - self._frozen_at, None
        if self._stretch is not None:
            self._stretch.start += frozen_s
            self._schedule_end(self._stretch)
        else:
            self._look_again()

    def slow_down(self, slowness: float) -> None:
        """Steps take so many times as long, from the next one on."""
        self.slowness = slowness
        self._cut()

    def kill(self) -> None:
        """Never do anything again."""
        self._version += 1
        self._frozen_at = self._clock.now

    @property
    def kv_tokens_used(self) -> int:
        """Tokens of KV that sequences have blocks for."""
        used, stretch = self.blocks.used, self._stretch
        if stretch is not None and self._frozen_at is None:  # a step's blocks are allocated when it begins
            used += self.batch.blocks_for(min(stretch.done(self._clock.now) + 1, stretch.steps))
        return used * self.scheduler.block_size

    # ------------------------------------------------------------------------------------ steps

    def _look_again(self) -> None:
        """Something can perhaps be let in: now when idle, else after the present step."""
        if self._frozen_at is not None:
            return
        if self._stretch is not None:
            scheduler = self.scheduler
            if not scheduler.blocked and len(scheduler.running) < scheduler.max_num_seqs:
                self._cut()
        elif not self._begins:
            self._begins = True
            self._clock.after(0.0, self._begin, self._version)

    def _begin(self, version: int) -> None:
        if version == self._version and self._stretch is None:
            self._begins = False
            self._plan()

    def _cut(self) -> None:
        if self._stretch is not None and self._frozen_at is None and self._stretch.cut(self._clock.now):
            self._version += 1
            self._schedule_end(self._stretch)

    def _schedule_end(self, stretch: Stretch) -> None:
        self._clock.at(max(stretch.end, self._clock.now), self._ended, self._version)

    def _plan(self) -> None:
        scheduler, batch = self.scheduler, self.batch
        self._chunks = chunks = scheduler.schedule(self._clock.now)
        if not chunks and not batch.size:
            return
        prompt_tokens, attention = 0, 0.0
        for sequence, tokens in chunks:
            prompt_tokens += tokens
            attention += attention_pairs(sequence.computed, tokens)
        first = self.slowness * step_s(self._times, prompt_tokens, attention, batch.size, batch.context)
        growth = self.slowness * self._times.decode_context_s * batch.size
        steps = 1
        if not chunks and not scheduler.fresh:
            steps = max(batch.steps_within(self.blocks.available, batch.steps_to_finish()), 1)
        self._stretch = Stretch(self._clock.now, first, growth, steps)
        self._version += 1
        self._schedule_end(self._stretch)

    def _ended(self, version: int) -> None:
        if version != self._version or self._stretch is None:
            return
        stretch, self._stretch = self._stretch, None
        self.busy_s += stretch.elapsed(stretch.steps)
        self._generated(stretch)
        for sequence, tokens in self._chunks:
            self._computed(sequence, tokens)
        for sequence in self.batch.finished():
            self._finish(sequence, keep_output=True)
        if self.doomed:
            for sequence in self.doomed:
                if sequence.stage is not Stage.DONE:
                    self.scheduler.remove(sequence)
            self.doomed.clear()
        self._plan()

    def _generated(self, stretch: Stretch) -> None:
        """Each sequence of the batch got a token in each step."""
        batch, scheduler = self.batch, self.scheduler
        if not batch.size:
            return
        gaps = batch.size - len(scheduler.fresh)
        if gaps:
            last = stretch.first_s + stretch.growth_s * (stretch.steps - 1)
            self._gaps(stretch.first_s, last, gaps * stretch.steps)
        self.blocks.take(batch.blocks_for(stretch.steps))
        batch.advance(stretch.steps)
        if scheduler.fresh:
            fresh, scheduler.fresh = scheduler.fresh, []
            for sequence in fresh:
                scheduler.publish(sequence, sequence.target)
                sequence.listener.on_first_token(sequence)

    def _computed(self, sequence: Sequence, tokens: int) -> None:
        """A chunk of the sequence's prompt is done; with the last one comes a token."""
        sequence.computed += tokens
        self.computed_tokens += tokens
        self.scheduler.publish(sequence, sequence.computed)
        if sequence.uncomputed:
            return
        sequence.generated += 1
        if sequence.generated == 1:
            sequence.listener.on_first_token(sequence)
        else:  # it was preempted
            gap = self._clock.now - sequence.last_token_at
            self._gaps(gap, gap, 1)
        if sequence.generated == sequence.output_tokens:
            self._finish(sequence, keep_output=False)
        else:
            self.scheduler.prefilled(sequence)

    def _finish(self, sequence: Sequence, keep_output: bool) -> None:
        self.scheduler.remove(sequence, keep_output)
        sequence.listener.on_finished(sequence)
