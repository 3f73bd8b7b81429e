"""The decode batch's counts against counting each token."""

from hypothesis import given
from hypothesis import strategies as st

from pd_serve.sim.batch import DecodeBatch
from pd_serve.sim.sequence import Sequence

BLOCK = 4


def joined(batch: DecodeBatch, prompt: int, output: int) -> Sequence:
    sequence = Sequence("s", prompt, output, (), listener=None)
    sequence.generated = 1
    batch.join(sequence, 0)
    return sequence


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(2, 40)), min_size=1, max_size=6),
    before=st.integers(0, 9),
    steps=st.integers(0, 30),
    free=st.integers(0, 30),
)
def test_counts_are_those_of_the_single_sequences(lengths, before, steps, free):
    batch = DecodeBatch(BLOCK)
    batch.advance(before)
    sequences = [joined(batch, prompt, output) for prompt, output in lengths]
    growth = [sum(blocks(p + n) - blocks(p) for p, _ in lengths) for n in range(steps + 1)]
    assert batch.blocks_for(steps) == growth[-1]
    assert batch.steps_within(free, steps) == max(n for n in range(steps + 1) if growth[n] <= free)
    assert batch.steps_to_finish() == min(output - 1 for _, output in lengths)

    batch.advance(batch.steps_to_finish())
    done = batch.finished()
    assert {id(s) for s in done} == {
        id(s) for s, (_, output) in zip(sequences, lengths, strict=True) if output == min(o for _, o in lengths)
    }
    for sequence in done:
        batch.leave(sequence)
        assert sequence.generated == sequence.output_tokens
    left = [s for s in sequences if s not in done]
    assert batch.size == len(left)
    assert batch.context == sum(s.prompt_tokens + batch.steps - s.joined for s in left)


def test_one_that_left_does_not_finish():
    batch = DecodeBatch(BLOCK)
    gone, stays = joined(batch, 10, 3), joined(batch, 10, 6)
    batch.leave(gone)
    assert batch.steps_to_finish() == 5
    batch.advance(5)
    assert batch.finished() == [stays]
