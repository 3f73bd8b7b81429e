"""What the fake engine honours of the sampling parameters, and when an answer ends.

The rules are vLLM's: the end token is generated but is not text, a stop string is cut out of the text, text that could
still become a stop string is held back, and nothing ends before `min_tokens`.
"""

from __future__ import annotations

import msgspec

from pd_serve.engine.fake_model import Decoder, FakeModel, KvCache
from pd_serve.errors import InvalidRequest
from pd_serve.types import ChoiceDelta, LogprobsAtPosition, Request, TokenLogprob

FORCING_BIAS = 50.0
"""A `logit_bias` from here on decides the token."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of vLLM's SamplingParams that the fake engine honours; it ignores the others."""

    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def forced(self) -> int | None:
        """The token that `logit_bias` lets win, if there is one."""
        strong = {token: bias for token, bias in (self.logit_bias or {}).items() if bias >= FORCING_BIAS}
        return max(strong, key=lambda token: strong[token]) if strong else None


def sampling_of(request: Request) -> Sampling:
    """Raises InvalidRequest when the request's sampling parameters cannot be read."""
    if not request.sampling:
        return Sampling(max_tokens=request.max_tokens)
    try:
        sampling = msgspec.msgpack.decode(request.sampling, type=Sampling)
    except msgspec.DecodeError as error:
        raise InvalidRequest("the sampling parameters cannot be read") from error
    limit = min(sampling.max_tokens or request.max_tokens, request.max_tokens)
    return msgspec.structs.replace(sampling, max_tokens=limit)


class Answer:
    """One choice's output so far.

    Args:
        index: of the choice.
        emitted: tokens that the client already has; they count, but are not sent again.
    """

    def __init__(
        self, model: FakeModel, sampling: Sampling, decoder: Decoder, index: int, emitted: tuple[int, ...] = ()
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._model = model
        self._sampling = sampling
        self._decoder = decoder
        self._ends = set(sampling.stop_token_ids or ()) | (set() if sampling.ignore_eos else {model.eos_token_id})
        self._text = ""
        self._sent_tokens = self._sent_chars = 0
        self._logprob = 0.0
        self._logprobs: list[LogprobsAtPosition] = []
        for token_id in emitted:
            self._add(token_id)
        self._sent_tokens, self._sent_chars = len(self.token_ids), self._safe_chars()
        self._logprobs.clear()

    def sample(self, cache: KvCache) -> int:
        """Generate the next token from the sequence's cache."""
        sampling = self._sampling
        banned = self._ends if len(self.token_ids) < sampling.min_tokens else frozenset[int]()
        forced = sampling.forced
        if forced is None or forced in banned:
            token_id = self._model.next_token(cache, choice=self.index, seed=sampling.seed or 0, banned=banned)
        else:
            token_id = forced
        self._note_logprobs(token_id, cache)
        self._add(token_id)
        return token_id

    def _add(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        early = len(self.token_ids) < self._sampling.min_tokens
        if token_id in self._ends and not early:
            self._end("stop", None if token_id == self._model.eos_token_id else token_id)
            return
        before = len(self._text)
        self._text += self._decoder(token_id)
        if not early and (found := self._find_stop(before)):
            start, stop = found
            self._text = self._text[: start + (len(stop) if self._sampling.include_stop_str_in_output else 0)]
            self._end("stop", stop)
        elif len(self.token_ids) >= (self._sampling.max_tokens or 1):
            self._end("length", None)

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self._stop_reason = finish_reason, stop_reason

    def _find_stop(self, new_from: int) -> tuple[int, str] | None:
        """The first stop string that ends in the text from `new_from` on."""
        for stop in self._sampling.stop_strings:
            start = self._text.find(stop, max(new_from - len(stop) + 1, 0))
            if start >= 0:
                return start, stop
        return None

    def _note_logprobs(self, token_id: int, cache: KvCache) -> None:
        wanted = self._sampling.logprobs
        if wanted is not None:
            logprob = -(cache.digest() % 1000) / 1000
            self._logprob += logprob
            self._logprobs.append(_ranked(token_id, logprob, wanted, self._model, self._decoder))

    def _safe_chars(self) -> int:
        """Length of the text that no later token can take back."""
        if self.finish_reason is not None:
            return len(self._text)
        held = max((len(stop) for stop in self._sampling.stop_strings), default=1) - 1
        return max(len(self._text) - held, self._sent_chars)

    def delta(self) -> ChoiceDelta:
        """What was added since the last call."""
        safe = self._safe_chars()
        asked = self._sampling.logprobs is not None
        delta = ChoiceDelta(
            index=self.index,
            text=self._text[self._sent_chars : safe],
            token_ids=tuple(self.token_ids[self._sent_tokens :]),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            cumulative_logprob=self._logprob if asked else None,
            logprobs=tuple(self._logprobs) if asked else None,
        )
        self._sent_chars, self._sent_tokens = safe, len(self.token_ids)
        self._logprobs.clear()
        return delta


def prompt_logprobs(
    request: Request, sampling: Sampling, model: FakeModel, decoder: Decoder
) -> tuple[LogprobsAtPosition | None, ...] | None:
    """One entry a prompt token, the first without any; None when they were not asked for."""
    if (wanted := sampling.prompt_logprobs) is None:
        return None
    rest = request.prompt_token_ids[1:]
    return (None, *(_ranked(token_id, -(token_id % 1000) / 1000, wanted, model, decoder) for token_id in rest))


def _ranked(token_id: int, logprob: float, wanted: int, model: FakeModel, decoder: Decoder) -> LogprobsAtPosition:
    """The token itself and those that come next to it, `wanted` in all and at least one."""
    tokens = [(token_id + rank) % model.vocab_size for rank in range(max(wanted, 1))]
    return tuple(TokenLogprob(token, logprob - rank, rank + 1, decoder(token)) for rank, token in enumerate(tokens))
