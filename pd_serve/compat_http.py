"""vLLM's HTTP application, its arguments and the configuration behind it, in every version that we support.

0.26 and 0.32 differ in where these things live; `application` is the only way in. Where there may be no device, call
`compat.allow_no_device` before importing this module.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:  # 0.32
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.exceptions import GenerationError
except ImportError:  # 0.26
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.openai.engine.protocol import GenerationError

from pd_serve.config import AppConfig
from pd_serve.errors import ConfigError
from pd_serve.model_dir import resolve_model

TASKS = ("generate",)
"""What the application serves."""

__all__ = ["TASKS", "GenerationError", "application", "config_without_engine", "server_args"]


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"model.frontend_args or model.engine_args: vLLM says: {message}")


def server_args(config: AppConfig) -> Namespace:
    """What `vllm serve` would have parsed for this configuration.

    Raises:
        ConfigError: vLLM does not know an argument, or does not take its value; or the model is not there.
    """
    model = config.model
    options: dict[str, Any] = {
        **model.engine_args,
        "served_model_name": [model.served_name],
        "max_model_len": model.max_model_len,
        "dtype": model.dtype,
        **model.frontend_args,
    }
    parser = make_arg_parser(_Parser())
    args: Namespace = parser.parse_args([resolve_model(model.path), *_argv(parser, options)])
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.frontend_args: {error}") from None
    args.model = args.model_tag
    return args


def _argv(parser: FlexibleArgumentParser, options: Mapping[str, Any]) -> Iterator[str]:
    """The options as a command line, in the form that each of the parser's actions takes."""
    actions = {action.dest: action for action in parser._actions}
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        action = actions.get(name)
        if action is None:
            raise ConfigError(f"model.frontend_args or model.engine_args: vLLM has no argument {name!r}")
        if value is None:
            continue
        if isinstance(value, bool) and action.nargs == 0:
            if value or len(action.option_strings) > 1:
                yield flag if value else f"--no-{flag[2:]}"
        elif isinstance(value, list) and action.nargs in ("+", "*"):
            yield from (flag, *(_text(item) for item in value))
        elif isinstance(value, list):  # one that appends
            for item in value:
                yield f"{flag}={_text(item)}"
        else:
            yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def config_without_engine(args: Namespace) -> VllmConfig:
    """The engine configuration that rendering and validation need, made where there is no device to run on."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    structured = engine_args.structured_outputs_config
    if engine_args.reasoning_parser:
        structured.reasoning_parser = engine_args.reasoning_parser
    if engine_args.reasoning_parser_plugin:
        structured.reasoning_parser_plugin = engine_args.reasoning_parser_plugin
    model_config = engine_args.create_model_config()
    # As vLLM's own render server: nothing is computed here, so no quantization has to be supported here.
    model_config.quantization = None
    return VllmConfig(model_config=model_config, structured_outputs_config=structured)


async def application(client: EngineClient, args: Namespace) -> FastAPI:
    """vLLM's OpenAI application over `client`, ready for its lifespan to start."""
    if args.tool_parser_plugin and len(args.tool_parser_plugin) > 3:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin and len(args.reasoning_parser_plugin) > 3:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    app = build_app(args, TASKS, client.model_config)
    await init_app_state(client, app.state, args, TASKS)
    return app
