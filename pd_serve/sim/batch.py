"""The sequences of one engine that generate, one token each in every step, without an event for each token."""

from __future__ import annotations

import heapq

from pd_serve.sim.sequence import Sequence, Stage


class DecodeBatch:
    """Counts that say everything about any number of steps between two changes.

    Args:
        block_size: tokens in a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.size = 0
        self.steps = 0
        """Steps of the engine so far: each generating sequence got one token in each since it joined."""
        self.context = 0
        """Tokens of KV that the next step reads."""
        self._phases = [0] * block_size
        """How many sequences need another block before a step, by the step's number modulo the block size."""
        self._finishing: list[tuple[int, int, Sequence]] = []
        self._joins = 0

    def join(self, sequence: Sequence, tokens: int) -> None:
        """The sequence generates from the next step on; it has KV of all of its tokens but those of `tokens` less
        than its target (0, or 1 when the next step's token is its first)."""
        sequence.stage = Stage.DECODE
        sequence.computed = sequence.target - tokens
        sequence.joined = self.steps
        sequence.finish_at = self.steps + sequence.output_tokens - sequence.generated
        sequence.phase = (self.steps - sequence.computed) % self._block_size
        self._phases[sequence.phase] += 1
        self.size += 1
        self.context += sequence.computed
        self._joins += 1
        heapq.heappush(self._finishing, (sequence.finish_at, self._joins, sequence))

    def leave(self, sequence: Sequence) -> None:
        """It finished, was preempted or aborted. Its counts are brought up to now."""
        steps = self.steps - sequence.joined
        sequence.generated += steps
        sequence.computed += steps
        sequence.finish_at = -1  # what lies in the heap is void
        self._phases[sequence.phase] -= 1
        self.size -= 1
        self.context -= sequence.computed

    def advance(self, steps: int) -> None:
        self.steps += steps
        self.context += self.size * steps

    def finished(self) -> list[Sequence]:
        """Sequences that generated their last token in the last step; they are still in the batch."""
        done = []
        heap = self._finishing
        while heap and heap[0][0] <= self.steps:
            finish_at, _, sequence = heapq.heappop(heap)
            if sequence.finish_at == finish_at:
                done.append(sequence)
        return done

    def steps_to_finish(self) -> int:
        """Steps until a sequence generates its last token. The batch is not empty."""
        heap = self._finishing
        while heap[0][2].finish_at != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] - self.steps

    def blocks_for(self, steps: int) -> int:
        """Blocks that the next `steps` steps need."""
        rounds, rest = divmod(steps, self._block_size)
        start = self.steps % self._block_size
        blocks = sum(self._phases[start : start + rest])
        if start + rest > self._block_size:
            blocks += sum(self._phases[: start + rest - self._block_size])
        return rounds * self.size + blocks

    def steps_within(self, blocks: int, most: int) -> int:
        """How many of the next `most` steps `blocks` blocks are enough for."""
        if (most // self._block_size + 1) * self.size <= blocks:
            return most
        rounds = min(blocks // self.size, most // self._block_size)
        steps, left = rounds * self._block_size, blocks - rounds * self.size
        while steps < most:
            left -= self._phases[(self.steps + steps) % self._block_size]
            if left < 0:
                break
            steps += 1
        return steps
