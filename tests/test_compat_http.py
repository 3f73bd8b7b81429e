"""A configuration becomes vLLM's own server arguments."""

from __future__ import annotations

from typing import Any

import pytest

from pd_serve.config import AppConfig
from pd_serve.errors import ConfigError
from pd_serve.model_dir import demo_dir

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not demo_dir().is_dir(), reason="the demo model is not there: run `pd-serve model fetch`"),
]


def parsed(**model: Any) -> Any:
    from pd_serve.compat_http import server_args

    return server_args(AppConfig.model_validate({"model": model}))


def test_what_the_configuration_types_has_arguments_of_its_own() -> None:
    args = parsed(served_name="mine", max_model_len=512, dtype="float32")
    assert (args.model, args.served_model_name, args.max_model_len, args.dtype) == (
        str(demo_dir().resolve()),
        ["mine"],
        512,
        "float32",
    )


def test_further_arguments_in_every_form_that_the_parser_takes() -> None:
    args = parsed(
        frontend_args={
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "served_model_name": ["one", "two"],
            "middleware": ["a.b", "c.d"],
            "default_chat_template_kwargs": {"k": [1, {"x": "y=z"}]},
            "chat_template": None,
            "disable_log_stats": True,
        },
        engine_args={
            "max_logprobs": 7,
            "enable_prefix_caching": False,
            "structured_outputs_config": {"backend": "xgrammar"},
        },
    )
    assert (args.enable_auto_tool_choice, args.tool_call_parser) == (True, "hermes")
    assert args.served_model_name == ["one", "two"]
    assert args.middleware == ["a.b", "c.d"]
    assert args.default_chat_template_kwargs == {"k": [1, {"x": "y=z"}]}
    assert (args.max_logprobs, args.enable_prefix_caching, args.disable_log_stats) == (7, False, True)
    assert args.structured_outputs_config.backend == "xgrammar"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"frontend_args": {"tool_parser": "hermes"}}, "tool_parser"),
        ({"engine_args": {"max_logprobs": "many"}}, "max-logprobs"),
        ({"frontend_args": {"enable_auto_tool_choice": True}}, "tool-call-parser"),
        ({"path": "/nonexistent/model"}, "no such directory"),
    ],
)
def test_mistakes_are_config_errors(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(**model)


def test_the_config_needs_no_device_and_knows_the_reasoning_parser() -> None:
    from pd_serve.compat_http import config_without_engine

    config = config_without_engine(parsed(max_model_len=512, engine_args={"reasoning_parser": "qwen3"}))
    assert config.model_config.max_model_len == 512
    assert config.structured_outputs_config.reasoning_parser == "qwen3"
