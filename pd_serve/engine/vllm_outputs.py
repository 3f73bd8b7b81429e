"""vLLM's request outputs as our deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pd_serve.engine.vllm_monitor import NOT_REPORTED
from pd_serve.kv.params import blocks_to_move
from pd_serve.types import ChoiceDelta, Delta, KvOutcome, KvReport, LogprobsAtPosition, Request, TokenLogprob

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput


def delta(
    output: RequestOutput, request: Request, kv: KvReport, told: KvReport | None, *, first: bool, block_size: int
) -> Delta:
    """One step of one request.

    Args:
        output: with `RequestOutputKind.DELTA`, so that it holds what is new.
        kv: what became of the prompt's KV; goes with the last delta, and before that as soon as it is known.
        told: the report that an earlier delta carried.
        first: whether it is the request's first output, which alone carries the prompt's logprobs.
    """
    news = kv not in (told, NOT_REPORTED)
    cached = _cached_tokens(output, request, kv, block_size) if first or output.finished else None
    return Delta(
        request.id,
        tuple(_choice(choice) for choice in output.outputs),
        finished=output.finished,
        cached_tokens=cached,
        prompt_logprobs=_prompt_logprobs(output.prompt_logprobs) if first and output.prompt_logprobs else None,
        kv=kv if output.finished or news else None,
    )


def _cached_tokens(output: RequestOutput, request: Request, kv: KvReport, block_size: int) -> int | None:
    """Prompt tokens that were in this engine's own cache: vLLM counts those that were moved in as well."""
    if kv.outcome is not KvOutcome.MOVED:
        return output.num_cached_tokens
    return (blocks_to_move(len(request.prompt_token_ids), block_size) - kv.blocks) * block_size


def _choice(choice: CompletionOutput) -> ChoiceDelta:
    return ChoiceDelta(
        choice.index,
        choice.text,
        tuple(choice.token_ids),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        cumulative_logprob=choice.cumulative_logprob,
        logprobs=tuple(_position(p) for p in choice.logprobs) if choice.logprobs is not None else None,
    )


def _prompt_logprobs(positions: Sequence[Mapping[int, Logprob] | None]) -> tuple[LogprobsAtPosition | None, ...]:
    return tuple(None if position is None else _position(position) for position in positions)


def _position(position: Mapping[int, Logprob]) -> LogprobsAtPosition:
    """In the engine's order: the sampled (or prompt) token comes first."""
    return tuple(
        TokenLogprob(token_id, entry.logprob, entry.rank, entry.decoded_token) for token_id, entry in position.items()
    )
