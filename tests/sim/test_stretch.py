import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.sim.stretch import Stretch


def test_steps_grow_evenly():
    stretch = Stretch(start=10.0, first_s=0.1, growth_s=0.01, steps=4)
    assert stretch.elapsed(1) == pytest.approx(0.1)
    assert stretch.end == pytest.approx(10.0 + 0.10 + 0.11 + 0.12 + 0.13)


@given(
    first=st.floats(1e-4, 10.0),
    growth=st.one_of(st.just(0.0), st.floats(1e-9, 0.1)),
    steps=st.integers(1, 2000),
    part=st.floats(0.0, 1.1),
)
def test_done_is_the_largest_number_of_steps_that_are_over(first, growth, steps, part):
    stretch = Stretch(5.0, first, growth, steps)
    now = 5.0 + part * stretch.elapsed(steps)
    done = stretch.done(now)
    assert 0 <= done <= steps
    assert done == 0 or stretch.start + stretch.elapsed(done) <= now
    assert done == steps or stretch.start + stretch.elapsed(done + 1) > now


def test_cut_ends_with_the_step_that_runs():
    stretch = Stretch(0.0, 1.0, 0.0, 10)
    assert stretch.cut(2.5)
    assert stretch.end == 3.0
    assert not stretch.cut(2.7)


def test_cut_in_the_last_step_changes_nothing():
    stretch = Stretch(0.0, 1.0, 0.0, 3)
    assert not stretch.cut(2.5)
    assert stretch.steps == 3
