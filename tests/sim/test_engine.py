"""The engine's physics against closed forms."""

import msgspec
import pytest

from pd_serve.sim.blocks import Unit
from pd_serve.sim.clock import Clock
from pd_serve.sim.engine import Engine
from pd_serve.sim.histogram import Histogram
from pd_serve.sim.profile import attention_pairs, step_s
from pd_serve.sim.sequence import Sequence, Stage
from tests.sim.small import PROFILE, STEPS


class Ears:
    """Writes down what becomes of sequences."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.blocks: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.finished: dict[str, float] = {}

    def on_blocks(self, sequence):
        self.blocks[sequence.leg_id] = self.clock.now

    def on_first_token(self, sequence):
        self.first[sequence.leg_id] = self.clock.now

    def on_finished(self, sequence):
        self.finished[sequence.leg_id] = self.clock.now


class Bench:
    """One engine alone."""

    def __init__(self, kv_tokens: int = 64_000, seqs: int = 64, batched: int = 2048, **steps: float) -> None:
        self.clock = Clock()
        self.times = msgspec.structs.replace(STEPS, **steps)
        profile = msgspec.structs.replace(PROFILE, kv_tokens=kv_tokens, steps=self.times)
        self.gaps = Histogram()
        self.engine = Engine(self.clock, profile, seqs, batched, True, self.gaps.add_between)
        self.ears = Ears(self.clock)

    def sequence(self, name: str, prompt: int, output: int, units=(), takes_kv=False) -> Sequence:
        return Sequence(name, prompt, output, units, self.ears, takes_kv=takes_kv)

    def submit(self, name: str, prompt: int, output: int, units=(), at: float = 0.0) -> Sequence:
        sequence = self.sequence(name, prompt, output, units)
        self.clock.at(at, self.engine.submit, sequence)
        return sequence

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        return step_s(self.times, tokens, attention_pairs(context, tokens), 0, 0)

    def decode_s(self, sequences: int, context: int) -> float:
        return step_s(self.times, 0, 0.0, sequences, context)


def test_one_request_takes_exactly_the_profiles_times():
    bench = Bench()
    bench.submit("a", 1000, 50)
    bench.clock.run()
    first = bench.prefill_s(1000)
    assert bench.ears.first["a"] == pytest.approx(first, rel=1e-12)
    steps = sum(bench.decode_s(1, 1000 + number) for number in range(49))
    assert bench.ears.finished["a"] == pytest.approx(first + steps, rel=1e-12)


def test_decoding_costs_no_event_per_token():
    bench = Bench()
    bench.submit("a", 100, 10_000)
    bench.clock.run()
    assert bench.clock.events < 10


def test_a_batch_of_n_is_one_step_of_n_sequences():
    bench = Bench()
    for number in range(8):
        bench.submit(f"s{number}", 100, 20)
    bench.clock.run()
    first = step_s(bench.times, 800, 8 * attention_pairs(0, 100), 0, 0)
    steps = sum(bench.decode_s(8, 8 * (100 + number)) for number in range(19))
    for number in range(8):
        assert bench.ears.first[f"s{number}"] == pytest.approx(first, rel=1e-12)
        assert bench.ears.finished[f"s{number}"] == pytest.approx(first + steps, rel=1e-12)
    assert bench.gaps.count == 8 * 19
    assert bench.gaps.total == pytest.approx(8 * steps)


def test_a_long_prompt_is_computed_in_chunks():
    bench = Bench(batched=512)
    bench.submit("a", 1200, 1)
    bench.clock.run()
    expected = bench.prefill_s(512) + bench.prefill_s(512, 512) + bench.prefill_s(176, 1024)
    assert bench.ears.first["a"] == pytest.approx(expected, rel=1e-12)
    assert bench.ears.finished == bench.ears.first


def test_a_chunk_beside_decoding_slows_every_token():
    bench = Bench(batched=256)
    bench.submit("a", 16, 100)
    bench.submit("b", 1020, 1, at=0.05)
    bench.clock.run()
    # With one sequence decoding, 255 tokens of the budget are left for the prompt: four steps.
    mixed = [step_s(bench.times, 255, attention_pairs(255 * number, 255), 1, 0) for number in range(4)]
    alone = bench.decode_s(1, 100)
    assert bench.gaps.largest > mixed[-1] > 2 * alone
    assert bench.ears.first["b"] == pytest.approx(0.05 + sum(mixed), abs=2 * alone)


def test_who_joins_waits_for_the_present_step_only():
    bench = Bench()
    bench.submit("a", 100, 1000)
    bench.clock.run(until=1.0)
    bench.submit("b", 10, 2, at=1.0)
    bench.clock.run()
    step = step_s(bench.times, 10, attention_pairs(0, 10), 1, 300)
    assert 1.0 + step < bench.ears.first["b"] < 1.0 + step + 0.006


def test_leaving_and_joining_change_the_step_time():
    together = Bench(decode_sequence_s=0.01)
    together.submit("a", 10, 30)
    together.submit("b", 10, 10)
    together.clock.run()
    first = step_s(together.times, 20, 2 * attention_pairs(0, 10), 0, 0)
    nine = sum(together.decode_s(2, 2 * (10 + number)) for number in range(9))
    twenty = sum(together.decode_s(1, 10 + 9 + number) for number in range(20))
    assert together.ears.finished["b"] == pytest.approx(first + nine, rel=1e-12)
    assert together.ears.finished["a"] == pytest.approx(first + nine + twenty, rel=1e-12)


def test_a_loaded_prompt_needs_one_decode_step_for_its_first_token():
    bench = Bench()
    sequence = bench.sequence("a", 1000, 3, takes_kv=True)
    bench.engine.submit(sequence)
    bench.clock.run(until=0.5)
    assert sequence.stage is Stage.LOADING
    assert bench.engine.kv_tokens_used == 1008  # the blocks are there before the KV is
    bench.clock.at(0.5, bench.engine.loaded, sequence, True)
    bench.clock.run()
    steps = [bench.decode_s(1, 999 + number) for number in range(3)]
    assert bench.ears.first["a"] == pytest.approx(0.5 + steps[0], rel=1e-12)
    assert bench.ears.finished["a"] == pytest.approx(0.5 + sum(steps), rel=1e-12)
    assert bench.gaps.count == 2
    assert bench.engine.computed_tokens == 0


def test_a_load_that_failed_is_computed_here():
    bench = Bench()
    sequence = bench.sequence("a", 1000, 1, takes_kv=True)
    bench.engine.submit(sequence)
    bench.clock.at(0.5, bench.engine.loaded, sequence, False)
    bench.clock.run()
    assert bench.ears.first["a"] == pytest.approx(0.5 + bench.prefill_s(1000), rel=1e-12)
    assert bench.engine.computed_tokens == 1000


def test_a_cached_prefix_is_not_computed_again():
    bench = Bench()
    units = (Unit(1, 32, 512), Unit(2, 32, 1024))
    bench.submit("a", 1030, 1, units)
    again = bench.submit("b", 1030, 1, units, at=1.0)
    bench.clock.run()
    assert again.cached_tokens == 1024
    assert bench.ears.first["b"] == pytest.approx(1.0 + bench.prefill_s(6, 1024), rel=1e-12)


def test_the_last_token_is_always_computed():
    bench = Bench()
    units = (Unit(1, 32, 512),)
    bench.submit("a", 512, 1, units)
    again = bench.submit("b", 512, 1, units, at=1.0)
    bench.clock.run()
    assert again.cached_tokens == 496
    assert bench.ears.first["b"] == pytest.approx(1.0 + bench.prefill_s(16, 496), rel=1e-12)


def test_a_turns_output_is_found_by_the_next_turn():
    bench = Bench()
    first = bench.submit("a", 500, 100, (Unit(1, 31, 496),))
    first.output_units = (Unit(2, 32, 512),)
    following = bench.submit("b", 620, 1, (Unit(2, 32, 512), Unit(3, 6, 608)), at=5.0)
    bench.clock.run()
    assert following.cached_tokens == 512
    assert bench.engine.blocks.used == 0


def test_no_more_than_max_num_seqs_run():
    bench = Bench(seqs=2)
    for name in "abc":
        bench.submit(name, 16, 20)
    bench.clock.run()
    assert bench.ears.first["a"] == bench.ears.first["b"]
    assert bench.ears.first["c"] > bench.ears.finished["a"]


def test_who_does_not_fit_waits_and_holds_nothing():
    bench = Bench(kv_tokens=160)
    bench.submit("a", 100, 20)
    waiting = bench.submit("b", 100, 20)
    bench.clock.run(until=0.05)
    assert (waiting.stage, waiting.blocks_held) == (Stage.WAITING, 0)
    bench.clock.run()
    assert bench.ears.blocks["b"] == pytest.approx(bench.ears.finished["a"])


def test_the_youngest_gives_up_its_blocks_and_starts_again():
    bench = Bench(kv_tokens=320)
    bench.submit("a", 100, 150)
    young = bench.submit("b", 100, 150)
    bench.clock.run()
    assert bench.engine.scheduler.preemptions >= 1
    assert young.preempted >= 1
    assert bench.ears.finished["a"] < bench.ears.finished["b"]
    assert set(bench.ears.first) == set(bench.ears.finished) == {"a", "b"}
    assert bench.gaps.count == 2 * 149  # each token once, however often one started again
    assert bench.engine.blocks.used == 0


def test_an_aborted_sequence_leaves_with_the_present_step():
    bench = Bench()
    sequence = bench.submit("a", 100, 1000)
    bench.clock.run(until=0.1)
    bench.engine.abort(sequence)
    assert bench.engine.blocks.used > 0
    bench.clock.run(until=0.1 + 0.006)
    assert (sequence.stage, bench.engine.blocks.used) == (Stage.DONE, 0)
    bench.clock.run()
    assert not bench.ears.finished


def test_aborts_of_what_does_not_run_act_at_once():
    bench = Bench(seqs=1)
    bench.submit("a", 100, 100)
    waiting = bench.submit("b", 100, 10)
    bench.clock.run(until=0.1)
    bench.engine.abort(waiting)
    loading = bench.sequence("c", 100, 10, takes_kv=True)
    bench.engine.abort(loading)
    assert not bench.engine.scheduler.waiting
    bench.clock.run()
    assert set(bench.ears.finished) == {"a"}


def test_a_frozen_engine_goes_on_where_it_stood():
    bench = Bench()
    bench.submit("a", 100, 100)
    bench.clock.at(0.2, bench.engine.freeze)
    bench.clock.at(5.2, bench.engine.thaw)
    bench.clock.run()
    undisturbed = Bench()
    undisturbed.submit("a", 100, 100)
    undisturbed.clock.run()
    assert bench.ears.finished["a"] == pytest.approx(undisturbed.ears.finished["a"] + 5.0, rel=1e-12)


def test_a_straggler_is_slower_from_the_next_step_on():
    bench = Bench(decode_context_s=0.0)
    bench.submit("a", 100, 100)
    bench.clock.at(0.2, bench.engine.slow_down, 10.0)
    bench.clock.run()
    step = bench.decode_s(1, 100)
    assert bench.gaps.largest == pytest.approx(10 * step)
    assert bench.gaps.smallest == pytest.approx(step)


def test_kv_in_use_grows_with_every_block():
    bench = Bench()
    bench.submit("a", 16, 1000)
    bench.clock.run(until=bench.prefill_s(16) + 40.5 * bench.decode_s(1, 36))
    assert bench.engine.kv_tokens_used == 64  # 16 of the prompt and 40 generated


def test_waiting_prompt_tokens_are_those_to_be_computed():
    bench = Bench(seqs=1)
    bench.submit("a", 100, 100)
    bench.submit("b", 70, 10)
    bench.clock.run(until=0.1)
    assert bench.engine.scheduler.waiting_prompt_tokens == 70
