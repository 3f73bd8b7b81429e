"""Going on from tokens that were generated elsewhere: prompt and emitted tokens together are the new prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd_serve.errors import InvalidRequest
from pd_serve.types import Request

if TYPE_CHECKING:
    from vllm import SamplingParams


def resumable(params: SamplingParams) -> bool:
    """Whether tokens, text, stop and finish reason come out as if the engine had generated the emitted tokens itself.

    True for one greedy choice without anything that looks at earlier output: penalties, minimum length, stop strings
    (which may span the seam), grammars, logprobs, banned or forced words.
    """
    return (
        params.temperature == 0.0
        and params.n == 1
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and params.min_tokens == 0
        and not params.stop
        and params.structured_outputs is None
        and params.logprobs is None
        and params.prompt_logprobs is None
        and not params.bad_words
        and not getattr(params, "thinking_token_budget", None)
        and not getattr(params, "repetition_detection", None)
    )


def resumed(request: Request, params: SamplingParams, emitted: tuple[int, ...]) -> tuple[Request, SamplingParams]:
    """The request that goes on after `emitted`.

    Raises:
        InvalidRequest: it would not be exact, or nothing is left to generate.
    """
    if not resumable(params):
        raise InvalidRequest("this request cannot be continued from tokens that were generated elsewhere")
    left = request.max_tokens - len(emitted)
    if left < 1:
        raise InvalidRequest("all tokens of this request were generated already")
    params.max_tokens = left
    prompt = request.prompt_token_ids + emitted
    return msgspec.structs.replace(request, prompt_token_ids=prompt, max_tokens=left), params
