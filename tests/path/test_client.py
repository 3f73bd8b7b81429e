"""The engine client over a scripted path: what goes in, what comes out, what is refused (cases B14, B26)."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import pytest

from pd_serve.compat import REASONING_ARG, take_reasoning
from pd_serve.config import AppConfig
from pd_serve.errors import InvalidRequest, Overloaded, PdServeError, ReplicaLost
from pd_serve.model_dir import demo_dir
from pd_serve.path import context, failure
from pd_serve.types import ChoiceDelta, Delta, Request, TokenLogprob

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not demo_dir().is_dir(), reason="the demo model is not there: run `pd-serve model fetch`"),
]


class ScriptedPath:
    """In place of the request path: remembers requests, gives deltas or an error."""

    def __init__(self, *script: Delta | PdServeError) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.closed = 0

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request)
        try:
            for item in self.script:
                if isinstance(item, PdServeError):
                    raise item
                yield item
                await asyncio.sleep(0)
        finally:
            self.closed += 1


HELLO = (
    Delta("r", (ChoiceDelta(0, "Hel", (1, 2)),), cached_tokens=16),
    Delta("r", (ChoiceDelta(0, "lo", (3,), "stop", "o"),), finished=True),
)


@pytest.fixture(scope="module")
def args() -> Namespace:
    from pd_serve.compat_http import server_args

    return server_args(AppConfig())


@pytest.fixture(scope="module")
def config(args: Namespace) -> Any:
    from pd_serve.compat_http import config_without_engine

    return config_without_engine(args)


@pytest.fixture
def client(config: Any) -> Any:
    from pd_serve.path.client import PdEngineClient

    return PdEngineClient(config, ScriptedPath(*HELLO), lambda: True)  # type: ignore[arg-type]


def params(kind: str = "DELTA", **fields: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(output_kind=RequestOutputKind[kind], **{"max_tokens": 8, **fields})


def tokens(count: int = 5) -> Any:
    return {"type": "token", "prompt_token_ids": list(range(1, count + 1)), "prompt": "the text"}


async def outputs(client: Any, sampling: Any, prompt: Any = None, **options: Any) -> list[Any]:
    return [out async for out in client.generate(prompt or tokens(), sampling, "app-id", **options)]


def sent(client: Any) -> Request:
    """The only request that reached the path."""
    (request,) = client._path.requests
    return request


def sent_sampling(client: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    return msgspec.msgpack.decode(sent(client).sampling, type=SamplingParams)


# ------------------------------------------------------------------------------------------------ out


async def test_deltas_become_request_outputs(client: Any) -> None:
    first, last = await outputs(client, params())
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("app-id", "the text", [1, 2, 3, 4, 5])
    assert (first.outputs[0].text, list(first.outputs[0].token_ids), first.finished) == ("Hel", [1, 2], False)
    assert (last.outputs[0].text, last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("lo", "stop", "o")
    assert (first.num_cached_tokens, last.num_cached_tokens, last.finished) == (16, 16, True)


@pytest.mark.parametrize(("kind", "texts"), [("CUMULATIVE", ["Hel", "Hello"]), ("FINAL_ONLY", ["Hello"])])
async def test_the_kind_that_the_application_wants(client: Any, kind: str, texts: list[str]) -> None:
    assert [out.outputs[0].text for out in await outputs(client, params(kind))] == texts


async def test_logprobs_have_vllms_form(client: Any) -> None:
    at = (TokenLogprob(7, -0.5, 1, "x"), TokenLogprob(8, -1.5, 2, None))
    done = Delta("r", (ChoiceDelta(0, "x", (7,), "stop", logprobs=(at,)),), finished=True, prompt_logprobs=(None, at))
    client._path.script = (done,)
    (out,) = await outputs(client, params("FINAL_ONLY", logprobs=2, prompt_logprobs=2))
    (position,) = out.outputs[0].logprobs
    assert {key: (one.logprob, one.rank, one.decoded_token) for key, one in position.items()} == {
        7: (-0.5, 1, "x"),
        8: (-1.5, 2, None),
    }
    assert out.prompt_logprobs[0] is None
    assert out.prompt_logprobs[1][8].rank == 2


# ------------------------------------------------------------------------------------------------ in


async def test_what_reaches_the_path(client: Any) -> None:
    await outputs(client, params("FINAL_ONLY", temperature=0.5, stop=["x"], seed=3), priority=2)
    request, sampling = sent(client), sent_sampling(client)
    assert (request.prompt_token_ids, request.max_tokens, request.n, request.priority) == ((1, 2, 3, 4, 5), 8, 1, 2)
    assert request.decode_only == ""
    assert (sampling.output_kind.name, sampling.temperature, sampling.stop, sampling.seed) == ("DELTA", 0.5, ["x"], 3)


async def test_ids_are_unique_whatever_the_client_called_its_request(client: Any) -> None:
    for _ in range(2):
        await outputs(client, params())
    one, other = client._path.requests
    assert one.id != other.id
    client._path.requests.clear()
    async for _ in client.generate(tokens(), params(), "x" * 10_000):
        pass
    assert len(sent(client).id) < 200


async def test_no_max_tokens_means_all_that_is_left(client: Any) -> None:
    await outputs(client, params(max_tokens=None))
    assert sent(client).max_tokens == AppConfig().model.max_model_len - 5
    assert sent_sampling(client).max_tokens == sent(client).max_tokens


@pytest.mark.case("B26")
async def test_a_callers_kv_transfer_params_never_leave(client: Any) -> None:
    wish = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1}
    sampling = params(extra_args={"kv_transfer_params": wish, "ec_transfer_params": wish, "other": 1})
    await outputs(client, sampling)
    assert sent_sampling(client).extra_args == {"other": 1}
    assert b"10.0.0.9" not in sent(client).sampling
    assert sampling.extra_args["kv_transfer_params"] == wish  # the caller's object is not ours to change


async def test_prompt_logprobs_are_planned_on_decode(client: Any) -> None:
    await outputs(client, params(prompt_logprobs=1))
    assert sent(client).decode_only == "prompt_logprobs"


async def test_validation_leaves_the_sampling_parameters_as_they_were(client: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    sampling = params(structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    await outputs(client, sampling)
    assert sampling.structured_outputs._backend is None
    assert sent_sampling(client).structured_outputs._backend is None
    assert sent_sampling(client).structured_outputs.regex == "[a-z]+"


async def test_what_a_reasoning_parser_knows_goes_along(client: Any) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    await outputs(client, params(), reasoning_ended=False, reasoning_parser_kwargs=kwargs)
    known = sent_sampling(client).extra_args
    assert known == {REASONING_ARG: {"reasoning_ended": False, "reasoning_parser_kwargs": kwargs}}
    at_the_engine = sent_sampling(client)
    assert take_reasoning(at_the_engine) == known[REASONING_ARG]
    assert at_the_engine.extra_args is None


async def test_tenants_do_not_share_a_salt(client: Any) -> None:
    salts = set()
    for tenant, wish in [("", None), ("a", None), ("b", None), ("", "1:a:"), ("a", "b"), ("ab", "")]:
        token = context.tenant.set(tenant)
        await outputs(client, params(), {**tokens(), **({"cache_salt": wish} if wish is not None else {})})
        context.tenant.reset(token)
        assert client._path.requests[-1].tenant == tenant
        salts.add((tenant != "", client._path.requests[-1].cache_salt))
    assert len(salts) == 6


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {999_999: 1.0}}, "logit_bias"),
        ({"logprobs": 500}, "logprobs"),
        ({"stop_token_ids": [999_999]}, "stop_token_ids"),
        ({"max_tokens": None, "min_tokens": 100_000}, "min_tokens"),
    ],
)
async def test_wrong_sampling_parameters_cost_no_hop(client: Any, fields: dict[str, Any], named: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=named):
        await outputs(client, params(**fields))
    assert client._path.requests == []


def _embeds() -> Any:
    import torch

    return {"type": "embeds", "prompt_embeds": torch.zeros(4, 576)}


async def _input_stream() -> AsyncGenerator[Any, None]:
    yield tokens()


@pytest.mark.parametrize("make", [_embeds, _input_stream, lambda: tokens(5000), lambda: tokens(0)])
async def test_prompts_that_are_not_served_are_refused(client: Any, make: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError):
        await outputs(client, params(), make())
    assert client._path.requests == []


async def test_adapters_are_refused(client: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="LoRA"):
        await outputs(client, params(), lora_request=object())


async def test_administration_is_refused_by_name(client: Any) -> None:
    for name in ("sleep", "start_profile", "reset_prefix_cache", "add_lora"):
        with pytest.raises(NotImplementedError, match=name):
            await getattr(client, name)()


# ------------------------------------------------------------------------------------------------ errors


async def test_a_fault_of_the_request_is_vllms_validation_error(client: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    client._path.script = (InvalidRequest("no such thing", param="n"),)
    with failure.watched() as failed, pytest.raises(VLLMValidationError) as raised:
        await outputs(client, params())
    assert raised.value.parameter == "n"
    assert isinstance(failed.error, InvalidRequest)


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=3), ReplicaLost("gone")])
async def test_other_errors_keep_their_status_and_are_noted(client: Any, error: PdServeError) -> None:
    from pd_serve.compat_http import GenerationError

    client._path.script = (HELLO[0], error)
    with failure.watched() as failed, pytest.raises(GenerationError) as raised:
        await outputs(client, params())
    assert raised.value.status_code == error.status
    assert failed.error is error


async def test_closing_the_generator_ends_the_request(client: Any) -> None:
    generator = client.generate(tokens(), params(), "id")
    await anext(generator)
    await generator.aclose()
    assert client._path.closed == 1


async def test_health_follows_readiness(config: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from pd_serve.path.client import PdEngineClient

    ready = [True]
    client = PdEngineClient(config, ScriptedPath(), lambda: ready[0])  # type: ignore[arg-type]
    await client.check_health()
    ready[0] = False
    with pytest.raises(EngineDeadError):
        await client.check_health()
