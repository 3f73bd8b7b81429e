"""Turns the deltas of one request into what an HTTP application reads: each step, all so far, or the end alone."""

from __future__ import annotations

from enum import Enum

import msgspec

from pd_serve.types import ChoiceDelta, Delta, LogprobsAtPosition


class Want(Enum):
    """Which outputs the application asked for (vLLM's RequestOutputKind, by the same names)."""

    CUMULATIVE = "CUMULATIVE"
    DELTA = "DELTA"
    FINAL_ONLY = "FINAL_ONLY"


class ChoiceOutput(msgspec.Struct, kw_only=True):
    """One choice: what the last step added to it, or everything so far."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAtPosition] | None = None


class Output(msgspec.Struct, kw_only=True):
    """What the application is given at one moment."""

    choices: list[ChoiceOutput]
    finished: bool
    cached_tokens: int | None
    prompt_logprobs: list[LogprobsAtPosition | None] | None


class Outputs:
    """Accumulates the deltas of one request.

    Args:
        want: which outputs to give.
        logprobs: whether token logprobs were asked for; then a choice's are a list, if an empty one.
    """

    def __init__(self, want: Want, *, logprobs: bool) -> None:
        self._want = want
        self._logprobs = logprobs
        self._choices: dict[int, ChoiceOutput] = {}
        self._cached_tokens: int | None = None
        self._prompt_logprobs: list[LogprobsAtPosition | None] | None = None

    def add(self, delta: Delta) -> Output | None:
        """The output that this delta completes, or None when it completes none that was asked for."""
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        if self._want is Want.DELTA:
            return self._step(delta)
        for change in delta.choices:
            self._merge(change)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = [*(self._prompt_logprobs or ()), *delta.prompt_logprobs]
        if self._want is Want.FINAL_ONLY:
            return self._output(sorted(self._choices), finished=True) if delta.finished else None
        if not delta.choices and not delta.finished:
            return None
        return self._output([change.index for change in delta.choices], finished=delta.finished)

    def _step(self, delta: Delta) -> Output | None:
        if not delta.choices and not delta.finished and delta.prompt_logprobs is None:
            return None
        return Output(
            choices=[self._fresh(change) for change in delta.choices],
            finished=delta.finished,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=None if delta.prompt_logprobs is None else list(delta.prompt_logprobs),
        )

    def _output(self, indices: list[int], *, finished: bool) -> Output:
        return Output(
            choices=[self._copy(self._choices[index]) for index in indices],
            finished=finished,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _merge(self, change: ChoiceDelta) -> None:
        so_far = self._choices.get(change.index)
        if so_far is None:
            self._choices[change.index] = self._fresh(change)
            return
        so_far.text += change.text
        so_far.token_ids.extend(change.token_ids)
        so_far.finish_reason = change.finish_reason
        so_far.stop_reason = change.stop_reason
        if change.cumulative_logprob is not None:
            so_far.cumulative_logprob = change.cumulative_logprob
        if so_far.logprobs is not None:
            so_far.logprobs.extend(change.logprobs or ())

    def _fresh(self, change: ChoiceDelta) -> ChoiceOutput:
        return ChoiceOutput(
            index=change.index,
            text=change.text,
            token_ids=list(change.token_ids),
            finish_reason=change.finish_reason,
            stop_reason=change.stop_reason,
            cumulative_logprob=change.cumulative_logprob,
            logprobs=list(change.logprobs or ()) if self._logprobs else None,
        )

    @staticmethod
    def _copy(choice: ChoiceOutput) -> ChoiceOutput:
        """What was handed out must not grow in the reader's hands."""
        return msgspec.structs.replace(
            choice,
            token_ids=list(choice.token_ids),
            logprobs=None if choice.logprobs is None else list(choice.logprobs),
        )
