"""vLLM's argument lists, read without importing it, are those that it has."""

from __future__ import annotations

import dataclasses

import pytest

from pd_serve import compat_args


@pytest.mark.vllm
def test_engine_arguments_are_the_fields_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = compat_args.engine_arguments()
    assert known is not None
    assert set(known) == {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}


@pytest.mark.vllm
def test_frontend_arguments_are_arguments_of_the_installed_server() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = compat_args.frontend_arguments()
    parser = make_arg_parser(FlexibleArgumentParser())
    assert known is not None
    assert set(known) <= {action.dest for action in parser._actions}


@pytest.mark.parametrize(
    ("annotation", "value", "right"),
    [
        ("int", 3, True),
        ("int", True, False),
        ("int", "3", False),
        ("float", 3, True),
        ("bool", True, True),
        ("bool", 1, False),
        ("str | None", None, True),
        ("str | None", "a", True),
        ("str | None", 3, False),
        ("int | None", None, True),
        ("list[int] | None", [1], True),
        ("list[int] | None", {"a": 1}, False),
        ("dict[str, Any]", {"a": 1}, True),
        ("dict[str, Any]", "a", False),
        ("Literal['a', 'b']", "a", True),
        ("Literal['a', 'b']", "c", False),
        ("SomeConfig", {"a": 1}, True),
        ("not a type (", 1, True),
    ],
)
def test_plain_types_are_judged_and_others_left_to_vllm(annotation: str, value: object, right: bool) -> None:
    assert compat_args.accepts(annotation, value) is right
