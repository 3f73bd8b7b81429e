"""vLLM's EngineClient over the request path: what vLLM's own HTTP application talks to instead of an engine."""

from __future__ import annotations

import copy
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NoReturn

import msgspec
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from pd_serve.compat import REASONING_ARG, put_reasoning
from pd_serve.compat_http import TASKS, GenerationError
from pd_serve.errors import InvalidRequest, PdServeError
from pd_serve.path import context, failure
from pd_serve.path.outputs import ChoiceOutput, Output, Outputs, Want
from pd_serve.path.request import RequestPath
from pd_serve.types import LogprobsAtPosition, Request

INTERNAL_ARGS = ("kv_transfer_params", "ec_transfer_params", REASONING_ARG)
"""What travels between engines and may not come from outside (case B26)."""
MAX_ID_CHARS = 128
"""Of the id that the application made, in part out of a header of the client's."""


class PathFailed(GenerationError):
    """A typed error of the path in a form that vLLM's application answers, or ends a stream, with."""

    def __init__(self, error: PdServeError) -> None:
        super().__init__(error.message)
        known = {status.value for status in HTTPStatus}
        self.status_code = HTTPStatus(error.status if error.status in known else 500)


class PdEngineClient(EngineClient):
    """One ingress's engine client.

    Args:
        config: made without an engine (`compat_http.config_without_engine`).
        path: where requests go.
        ready: whether a request could be served now; asked by vLLM's `/health`.
    """

    def __init__(self, config: VllmConfig, path: RequestPath, ready: Callable[[], bool]) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self._path = path
        self._ready = ready

    # ------------------------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **unused: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of the kind that `sampling_params.output_kind` names, until the finished one.

        `unused` is what other vLLM versions pass, and what we decide ourselves (`data_parallel_rank`, `kv_hints`).

        Raises:
            VLLMValidationError: the request itself is wrong, or of a sort that is not served.
            PathFailed: anything else; the typed error is noted for the edge (`path.failure`).
        """
        try:
            checked = self._checked(prompt, sampling_params, request_id, lora_request, tokenization_kwargs)
            reasoning = put_reasoning(reasoning_ended, reasoning_parser_kwargs)
            request = _request(checked, sampling_params, request_id, priority, reasoning)
            outputs = Outputs(
                Want(sampling_params.output_kind.name),
                logprobs=sampling_params.logprobs is not None or bool(getattr(sampling_params, "logprob_token_ids", 0)),
            )
            text = extract_prompt_components(self.model_config, prompt).text or prompt_text
            token_ids = list(request.prompt_token_ids)
            async with aclosing(self._path.generate(request)) as deltas:
                async for delta in deltas:
                    output = outputs.add(delta)
                    if output is not None:
                        yield _request_output(output, request_id, text, token_ids)
        except InvalidRequest as error:
            failure.note(error)
            raise VLLMValidationError(error.message, parameter=error.param) from error
        except PdServeError as error:
            failure.note(error)
            raise PathFailed(error) from error

    def _checked(
        self, prompt: Any, params: SamplingParams, request_id: str, lora_request: Any, tokenization_kwargs: Any
    ) -> EngineCoreRequest:
        """The request as an engine would take it in, so that a wrong one costs no hop.

        Raises:
            VLLMValidationError: it is wrong, or needs what we do not serve.
        """
        if lora_request is not None:
            raise VLLMValidationError("LoRA adapters are not served here", parameter="model")
        if isinstance(prompt, AsyncGenerator):
            raise VLLMValidationError("streaming input is not served here", parameter="prompt")
        if isinstance(prompt, EngineCoreRequest):
            raise VLLMValidationError("prompts that were processed elsewhere are not served here", parameter="prompt")
        if self.model_config.is_encoder_decoder:
            raise VLLMValidationError("encoder-decoder models are not served here", parameter="model")
        # Validation writes into nested parameters (which structured output backend it chose), which engines must not
        # take for the caller's wish.
        trial = copy.copy(params)
        trial.structured_outputs = copy.copy(params.structured_outputs)
        checked: EngineCoreRequest = self.input_processor.process_inputs(
            request_id, prompt, trial, supported_tasks=TASKS, tokenization_kwargs=tokenization_kwargs
        )
        if checked.prompt_embeds is not None:
            raise VLLMValidationError("prompt embeddings are not served here", parameter="prompt_embeds")
        if checked.mm_features:
            raise VLLMValidationError("multi-modal inputs are not served here", parameter="messages")
        if getattr(params, "prompt_logprob_token_ids", None) is not None:
            raise VLLMValidationError("prompt_logprob_token_ids is not served here")
        return checked

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("pooling")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Does nothing: a request ends by closing its generator, and nothing of it outlives that."""

    # ------------------------------------------------------------------------------------ health

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        """Never: replicas come and go, and the ingress stays."""
        return False

    @property
    def dead_error(self) -> BaseException:
        return EngineDeadError()

    async def check_health(self) -> None:
        """Raises EngineDeadError, which `/health` answers with 503, while no replica can decode."""
        if not self._ready():
            raise EngineDeadError()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    async def is_tracing_enabled(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def is_sleeping(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Replicas log their own."""

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to clean up: a caller's `kv_transfer_params` never reach an engine."""

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()


# ---------------------------------------------------------------------------------------- in


def _request(
    checked: EngineCoreRequest, params: SamplingParams, request_id: str, priority: int, reasoning: dict[str, Any]
) -> Request:
    assert checked.sampling_params is not None and checked.sampling_params.max_tokens is not None
    max_tokens = checked.sampling_params.max_tokens
    tenant = context.tenant.get()
    extra = {name: value for name, value in (params.extra_args or {}).items() if name not in INTERNAL_ARGS}
    outgoing = copy.copy(params)
    outgoing.output_kind = RequestOutputKind.DELTA
    outgoing.max_tokens = max_tokens
    outgoing.extra_args = {**extra, **reasoning} or None
    try:
        sampling = msgspec.msgpack.encode(outgoing)
    except (TypeError, ValueError, OverflowError) as error:
        raise VLLMValidationError(f"sampling parameters cannot be passed on: {error}") from None
    return Request(
        # The application's id may come from a header: made unique, so that nobody meets another's request.
        id=f"{request_id[:MAX_ID_CHARS]}-{secrets.token_hex(4)}",
        prompt_token_ids=tuple(checked.prompt_token_ids or ()),
        max_tokens=max_tokens,
        n=params.n,
        sampling=sampling,
        cache_salt=_salt(tenant, checked.cache_salt),
        priority=priority,
        tenant=tenant,
        decode_only="prompt_logprobs" if params.prompt_logprobs is not None else "",
    )


def _salt(tenant: str, wished: str | None) -> str | None:
    """Invariant 9: what one tenant cached is not found by another, whatever salt it sends."""
    return f"{len(tenant)}:{tenant}:{wished or ''}" if tenant else wished


# ---------------------------------------------------------------------------------------- out


def _request_output(output: Output, request_id: str, text: str | None, token_ids: list[int]) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=token_ids,
        prompt_logprobs=None if output.prompt_logprobs is None else [_logprobs(at) for at in output.prompt_logprobs],
        outputs=[_completion_output(choice) for choice in output.choices],
        finished=output.finished,
        num_cached_tokens=output.cached_tokens,
    )


def _completion_output(choice: ChoiceOutput) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        cumulative_logprob=choice.cumulative_logprob,
        logprobs=None if choice.logprobs is None else [_logprobs(at) for at in choice.logprobs],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _logprobs(at: LogprobsAtPosition | None) -> dict[int, Logprob] | None:
    if at is None:
        return None
    return {one.token_id: Logprob(one.logprob, one.rank, one.text) for one in at}


# ---------------------------------------------------------------------------------------- administration


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not available through this server")


def _refusing(name: str) -> Callable[..., Coroutine[Any, Any, NoReturn]]:
    async def refuse(self: PdEngineClient, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name)

    refuse.__name__ = name
    return refuse


# Versions differ in which administrative methods the protocol demands (profiling, sleep, weights, LoRA, ...). They act
# on one engine, and here there are many: each refuses by name, which the application answers with 501.
for _name in PdEngineClient.__abstractmethods__:
    setattr(PdEngineClient, _name, _refusing(_name))
PdEngineClient.__abstractmethods__ = frozenset()
