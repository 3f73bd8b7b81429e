"""The fake engine's answers: what ends them, what is text, what is held back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.engine.fake_model import FakeModel, KvCache, words
from pd_serve.engine.fake_sampling import Answer, Sampling, prompt_logprobs, sampling_of
from pd_serve.errors import InvalidRequest
from pd_serve.types import ChoiceDelta, Request

MODEL = FakeModel(block_size=4)
LETTERS = "abcdefgh"


def letter(token_id: int) -> str:
    return LETTERS[token_id % len(LETTERS)]


def generate(
    sampling: Sampling, emitted: tuple[int, ...] = (), decoder: object = letter
) -> tuple[Answer, list[ChoiceDelta]]:
    """Let the model answer one prompt until the answer ends."""
    answer = Answer(MODEL, sampling, decoder, 0, emitted)  # type: ignore[arg-type]
    cache = KvCache(MODEL.layers)
    MODEL.compute(cache, (7, 8, 9, *emitted))
    deltas = []
    while answer.finish_reason is None:
        token_id = answer.sample(cache)
        MODEL.compute(cache, [token_id])
        deltas.append(answer.delta())
    return answer, deltas


def text(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens(deltas: list[ChoiceDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def test_length_ends_an_answer() -> None:
    answer, deltas = generate(Sampling(max_tokens=5))
    assert len(tokens(deltas)) == 5
    assert (answer.finish_reason, deltas[-1].stop_reason) == ("length", None)
    assert text(deltas) == "".join(map(letter, tokens(deltas)))


@given(st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3), st.integers(1, 60), st.booleans())
def test_a_stop_string_is_found_wherever_it_lies_and_never_shown(stops: list[str], limit: int, include: bool) -> None:
    """The joined deltas are the text up to the first stop string, and nothing once shown is taken back."""
    _, free = generate(Sampling(max_tokens=limit))
    whole, cut = "", None
    for token in tokens(free):
        whole += letter(token)
        ends = [(whole.find(stop), stop) for stop in stops if stop in whole]
        if ends:
            cut = whole[: ends[0][0] + (len(ends[0][1]) if include else 0)]
            break
    answer, deltas = generate(Sampling(max_tokens=limit, stop=stops, include_stop_str_in_output=include))
    assert text(deltas) == (whole if cut is None else cut)
    assert answer.finish_reason == ("length" if cut is None else "stop")
    assert tokens(deltas) == tokens(free)[: len(tokens(deltas))]


@given(st.integers(1, 20), st.integers(0, 19), st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=2))
def test_resuming_anywhere_gives_the_rest_of_the_same_answer(limit: int, cut: int, stops: list[str]) -> None:
    """`decode(..., emitted)`: tokens that the client has are not sent again, and the others are the same."""
    sampling = Sampling(max_tokens=limit, stop=stops)
    whole, deltas = generate(sampling)
    emitted = tokens(deltas)[: min(cut, len(tokens(deltas)) - 1)]
    rest, more = generate(sampling, emitted)
    assert emitted + tokens(more) == tokens(deltas)
    assert rest.finish_reason == whole.finish_reason
    shown = text(deltas[: len(emitted)])
    assert shown + text(more) == text(deltas)


def test_the_end_token_is_generated_but_is_no_text() -> None:
    eos = MODEL.eos_token_id
    forced = {eos: 100.0}
    answer, deltas = generate(Sampling(max_tokens=9, logit_bias=forced))
    assert (tokens(deltas), text(deltas), answer.finish_reason) == ((eos,), "", "stop")
    answer, deltas = generate(Sampling(max_tokens=3, logit_bias=forced, ignore_eos=True))
    assert (tokens(deltas), answer.finish_reason) == ((eos,) * 3, "length")
    answer, deltas = generate(Sampling(max_tokens=9, logit_bias=forced, min_tokens=4))
    assert tokens(deltas).index(eos) == 4
    assert answer.finish_reason == "stop"


def test_a_stop_token_names_itself_as_the_reason() -> None:
    _, free = generate(Sampling(max_tokens=5))
    third = tokens(free)[2]
    answer, deltas = generate(Sampling(max_tokens=5, stop_token_ids=[third]))
    assert tokens(deltas) == tokens(free)[:3]
    assert (answer.finish_reason, deltas[-1].stop_reason) == ("stop", third)
    assert text(deltas) == "".join(map(letter, tokens(free)[:2]))


def test_min_tokens_keeps_stop_strings_from_ending_an_answer() -> None:
    _, free = generate(Sampling(max_tokens=5))
    answer, deltas = generate(Sampling(max_tokens=5, stop=letter(tokens(free)[0]), min_tokens=2))
    assert len(tokens(deltas)) >= 2
    assert answer.finish_reason in ("stop", "length")


def test_logprobs() -> None:
    _, deltas = generate(Sampling(max_tokens=3, logprobs=2))
    for delta in deltas:
        assert delta.logprobs
        ((first, second),) = delta.logprobs
        assert (first.token_id, first.rank, second.rank) == (delta.token_ids[0], 1, 2)
        assert second.logprob < first.logprob <= 0
    assert deltas[-1].cumulative_logprob == pytest.approx(
        sum(delta.logprobs[0][0].logprob for delta in deltas if delta.logprobs)
    )
    asked = Request(id="r", prompt_token_ids=(5, 6, 7), max_tokens=1)
    of_prompt = prompt_logprobs(asked, Sampling(prompt_logprobs=1), MODEL, words)
    assert of_prompt
    assert [entry and entry[0].token_id for entry in of_prompt] == [None, 6, 7]


def test_the_parameters_of_a_request() -> None:
    def request(sampling: object, max_tokens: int = 10) -> Request:
        return Request(id="r", prompt_token_ids=(1,), max_tokens=max_tokens, sampling=msgspec.msgpack.encode(sampling))

    plain = sampling_of(Request(id="r", prompt_token_ids=(1,), max_tokens=7))
    assert (plain.max_tokens, plain.forced) == (7, None)
    read = sampling_of(request({"max_tokens": 3, "logit_bias": {5: 100.0, 6: -100.0}, "top_k": 4, "output_kind": 1}))
    assert (read.max_tokens, read.forced) == (3, 5)
    assert sampling_of(request({"stop": "x"})).stop_strings == ["x"]
    assert sampling_of(request({"stop": ["x", "y"]})).stop_strings == ["x", "y"]
    for wrong in ({"stop": 3}, {"min_tokens": "many"}, 7):
        with pytest.raises(InvalidRequest):
            sampling_of(request(wrong))


def test_seeds_choices_and_weights_give_other_tokens() -> None:
    cache = KvCache(MODEL.layers)
    MODEL.compute(cache, range(40))
    other = KvCache(MODEL.layers)
    FakeModel(weights="other").compute(other, range(40))
    drawn = [MODEL.next_token(cache, choice=choice, seed=seed) for choice in range(3) for seed in range(3)]
    assert len({*drawn, MODEL.next_token(other)}) == 10
    assert MODEL.fingerprint() != FakeModel(block_size=4, weights="other").fingerprint()
    assert all(0 <= token < MODEL.vocab_size for token in drawn)
