"""Step times of a profile from measured steps: least squares on relative errors, no term below 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pd_serve.errors import ConfigError
from pd_serve.sim.profile import StepTimes, attention_pairs, step_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[Any]


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine step of a kind of work: prompts only, or generating only."""

    tokens: int
    """Prompt tokens computed."""
    batch: int
    """Prompts that these belong to, equally long; or sequences that generated."""
    context: int
    """Tokens that each prompt had before; or tokens of KV of all generating sequences together."""
    seconds: float

    @property
    def attention(self) -> float:
        return self.batch * attention_pairs(self.context, self.tokens // self.batch)


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and how far the measured steps are from it."""

    steps: StepTimes
    prefill_error: float
    """Root mean square of the relative errors."""
    prefill_worst: float
    decode_error: float
    decode_worst: float


def fit_steps(rows: Sequence[MeasuredStep]) -> Fit:
    """Step times from measured steps of both kinds.

    Raises:
        ConfigError: the rows do not tell the terms apart: too few, or all of one length, batch or context.
    """
    prefill = [row for row in rows if row.tokens > 0]
    decode = [row for row in rows if row.tokens == 0]
    base, token, attention = _solve("prompt lengths", [(1.0, row.tokens, row.attention) for row in prefill], prefill)
    step, sequence, context = _solve("batches and contexts", [(1.0, row.batch, row.context) for row in decode], decode)
    steps = StepTimes(
        prefill_base_s=base,
        prefill_token_s=token,
        prefill_attention_s=attention,
        decode_base_s=step,
        decode_sequence_s=sequence,
        decode_context_s=context,
    )
    errors = {kind: _errors(steps, kind_rows) for kind, kind_rows in (("prefill", prefill), ("decode", decode))}
    return Fit(
        steps=steps,
        prefill_error=errors["prefill"][0],
        prefill_worst=errors["prefill"][1],
        decode_error=errors["decode"][0],
        decode_worst=errors["decode"][1],
    )


def predicted(steps: StepTimes, row: MeasuredStep) -> float:
    """Seconds of a measured step by these times."""
    if row.tokens:
        return step_s(steps, row.tokens, row.attention, 0, 0)
    return step_s(steps, 0, 0.0, row.batch, row.context)


def _solve(what: str, terms: list[tuple[float, float, float]], rows: list[MeasuredStep]) -> tuple[float, float, float]:
    """Coefficients of the three terms; those that would be negative are 0 and the others are fitted without them."""
    import numpy as np

    if any(row.seconds <= 0 or row.batch < 1 for row in rows):
        raise ConfigError("a measured step has a batch below 1, or no time")
    matrix = np.array(terms, dtype=float).reshape(-1, 3)
    if _rank(matrix) < 3:
        raise ConfigError(f"the measured steps have too few different {what}: three terms cannot be told apart")
    weighted = matrix / np.array([[row.seconds] for row in rows])
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, used], np.ones(len(rows)), rcond=None)
        if min(found) >= 0 or len(used) == 1:
            break
        used.pop(int(np.argmin(found * _scale(weighted[:, used]))))
    coefficients = [0.0, 0.0, 0.0]
    for position, value in zip(used, found, strict=True):
        coefficients[position] = max(float(value), 0.0)
    return coefficients[0], coefficients[1], coefficients[2]


def _rank(matrix: Matrix) -> int:
    import numpy as np

    return int(np.linalg.matrix_rank(matrix / _scale(matrix), tol=1e-6)) if len(matrix) else 0


def _scale(matrix: Matrix) -> Matrix:
    """Size of each column."""
    import numpy as np

    size: Matrix = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    return size


def _errors(steps: StepTimes, rows: list[MeasuredStep]) -> tuple[float, float]:
    """Root mean square and largest of the relative errors."""
    errors = [abs(predicted(steps, row) / row.seconds - 1.0) for row in rows]
    return (sum(error * error for error in errors) / len(errors)) ** 0.5, max(errors)
