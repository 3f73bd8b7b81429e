"""Deltas become the outputs that the application asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pd_serve.path.outputs import Output, Outputs, Want
from pd_serve.types import ChoiceDelta, Delta, TokenLogprob


def delta(*choices: ChoiceDelta, finished: bool = False, **rest: object) -> Delta:
    return Delta("r", choices, finished=finished, **rest)  # type: ignore[arg-type]


def step(index: int, text: str, *ids: int, reason: str | None = None, **rest: object) -> ChoiceDelta:
    return ChoiceDelta(index, text, ids, finish_reason=reason, **rest)  # type: ignore[arg-type]


def run(want: Want, deltas: list[Delta], *, logprobs: bool = False) -> list[Output]:
    outputs = Outputs(want, logprobs=logprobs)
    return [output for one in deltas if (output := outputs.add(one)) is not None]


TWO_STEPS = [
    delta(step(0, "He", 1), cached_tokens=7),
    delta(step(0, "llo", 2, 3, reason="length", cumulative_logprob=-0.5), finished=True),
]


def test_delta_gives_each_step_alone() -> None:
    first, last = run(Want.DELTA, TWO_STEPS)
    assert (first.choices[0].text, first.choices[0].token_ids, first.finished) == ("He", [1], False)
    assert (last.choices[0].text, last.choices[0].token_ids, last.finished) == ("llo", [2, 3], True)
    assert last.choices[0].finish_reason == "length"


def test_cumulative_gives_all_so_far_and_does_not_grow_afterwards() -> None:
    first, last = run(Want.CUMULATIVE, TWO_STEPS)
    assert (first.choices[0].text, first.choices[0].token_ids) == ("He", [1])
    assert (last.choices[0].text, last.choices[0].token_ids) == ("Hello", [1, 2, 3])
    assert last.choices[0].cumulative_logprob == -0.5


def test_final_only_gives_one_output_with_all_choices_in_order() -> None:
    (only,) = run(
        Want.FINAL_ONLY,
        [
            delta(step(1, "b", 4, reason="stop", stop_reason="x")),
            delta(step(0, "a", 3, reason="length"), finished=True),
        ],
    )
    assert [(choice.index, choice.text, choice.finish_reason) for choice in only.choices] == [
        (0, "a", "length"),
        (1, "b", "stop"),
    ]
    assert only.choices[1].stop_reason == "x"
    assert only.finished


def test_cached_tokens_stay_once_they_are_known() -> None:
    assert [output.cached_tokens for output in run(Want.DELTA, TWO_STEPS)] == [7, 7]


def test_a_delta_that_brings_nothing_is_not_shown_but_a_last_one_is() -> None:
    assert run(Want.DELTA, [delta(), delta(finished=True)]) == [
        Output(choices=[], finished=True, cached_tokens=None, prompt_logprobs=None)
    ]
    assert run(Want.CUMULATIVE, [delta()]) == []


def test_logprobs_are_a_list_exactly_when_they_were_asked_for() -> None:
    at = (TokenLogprob(1, -0.1, 1, "He"),)
    steps = [delta(step(0, "He", 1, logprobs=(at,))), delta(step(0, "", reason="stop"), finished=True)]
    assert [output.choices[0].logprobs for output in run(Want.DELTA, steps, logprobs=True)] == [[at], []]
    assert [output.choices[0].logprobs for output in run(Want.FINAL_ONLY, steps, logprobs=True)] == [[at]]
    assert [output.choices[0].logprobs for output in run(Want.DELTA, TWO_STEPS)] == [None, None]


def test_prompt_logprobs_come_once_in_deltas_and_stay_otherwise() -> None:
    at = (TokenLogprob(5, -1.0, 3, "x"),)
    steps = [delta(step(0, "a", 1), prompt_logprobs=(None, at)), delta(step(0, "b", 2, reason="stop"), finished=True)]
    assert [output.prompt_logprobs for output in run(Want.DELTA, steps)] == [[None, at], None]
    assert [output.prompt_logprobs for output in run(Want.FINAL_ONLY, steps)] == [[None, at]]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3)), max_size=20)
)
def test_joined_deltas_are_the_final_output(steps: list[tuple[int, str, list[int]]]) -> None:
    deltas = [delta(step(index, text, *ids)) for index, text, ids in steps] + [delta(finished=True)]
    joined: dict[int, tuple[str, list[int]]] = {}
    for output in run(Want.DELTA, deltas):
        for choice in output.choices:
            text, ids = joined.get(choice.index, ("", []))
            joined[choice.index] = (text + choice.text, ids + choice.token_ids)
    (final,) = run(Want.FINAL_ONLY, deltas)
    assert {choice.index: (choice.text, choice.token_ids) for choice in final.choices} == joined
