import random

import pytest

from pd_serve.errors import ConfigError
from pd_serve.sim.fit import MeasuredStep, fit_steps, predicted
from tests.sim.small import STEPS


def rows(noise=0.0, seed=1):
    rng = random.Random(seed)
    shapes = [(tokens, batch, context) for tokens in (64, 512, 2048, 8192) for batch in (1, 4) for context in (0, 1000)]
    shapes += [(0, batch, batch * context) for batch in (1, 4, 16, 64) for context in (100, 1000, 8000)]
    made = []
    for tokens, batch, context in shapes:
        row = MeasuredStep(tokens=tokens, batch=batch, context=context, seconds=1.0)
        seconds = predicted(STEPS, row) * (1 + rng.gauss(0, noise))
        made.append(MeasuredStep(tokens=tokens, batch=batch, context=context, seconds=seconds))
    return made


def test_exact_steps_give_back_their_times():
    fit = fit_steps(rows())
    for name in STEPS.__struct_fields__:
        assert getattr(fit.steps, name) == pytest.approx(getattr(STEPS, name), rel=1e-6), name
    assert fit.prefill_worst < 1e-9
    assert fit.decode_worst < 1e-9


def test_noise_is_averaged_out_and_reported():
    fit = fit_steps([row for seed in range(20) for row in rows(0.05, seed)])
    assert fit.steps.prefill_token_s == pytest.approx(STEPS.prefill_token_s, rel=0.05)
    assert fit.steps.decode_base_s == pytest.approx(STEPS.decode_base_s, rel=0.05)
    assert fit.prefill_error == pytest.approx(0.05, rel=0.2)
    assert fit.decode_error == pytest.approx(0.05, rel=0.2)
    assert fit.decode_worst > fit.decode_error


def test_no_term_is_negative():
    flat = [row for row in rows() if not row.tokens]
    falling = [
        MeasuredStep(tokens=tokens, batch=1, context=0, seconds=0.01 + 1e-5 * tokens - 1e-10 * tokens * tokens)
        for tokens in (100, 1000, 5000, 20_000)
    ]
    fit = fit_steps(falling + flat)
    assert fit.steps.prefill_attention_s == 0.0
    assert fit.steps.prefill_token_s > 0
    assert fit.prefill_error > 0.01


@pytest.mark.parametrize(
    "poor",
    [
        [],
        [row for row in rows() if not row.tokens],
        [row for row in rows() if row.tokens in (0, 512) and row.context == 0],
        [row for row in rows() if row.tokens or row.batch == 1],
        [row for row in rows() if row.tokens or row.context == 1000 * row.batch],
    ],
)
def test_rows_that_cannot_tell_the_terms_apart_are_refused(poor):
    with pytest.raises(ConfigError, match="cannot be told apart"):
        fit_steps(poor)


def test_a_step_without_time_is_refused():
    with pytest.raises(ConfigError, match="no time"):
        fit_steps([*rows(), MeasuredStep(tokens=10, batch=1, context=0, seconds=0.0)])
