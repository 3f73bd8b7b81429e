"""Tests of public failure cases carry their number in their name, by which `make cases` finds them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import cases_in, pytest_collection_modifyitems

PROMISED = [f"B{number:02}" for number in (1, 2, 3, 4, 5, 7, 8, 9, 19, 20, 36, 37, 38, 40)]
ROOT = Path(__file__).parent


def named_tests() -> list[tuple[str, str]]:
    """(file, name) of every test function that carries a case."""
    return [
        (str(file.relative_to(ROOT)), node.name)
        for file in ROOT.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_b")
    ]


@pytest.mark.parametrize("case", PROMISED)
def test_each_promised_case_has_a_test_of_the_whole_application(case: str) -> None:
    assert any(case in cases_in(name) for file, name in named_tests() if file.startswith("api/"))


def test_a_name_may_carry_several_cases() -> None:
    assert cases_in("test_b16_b17_kv_is_lost[a_b99_c]") == ["B16", "B17"]
    assert cases_in("test_bad_input") == []
    assert cases_in("test_b1_and_b123_are_no_cases") == []


def test_every_collected_test_of_a_case_is_marked(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marked = [marker.args[0] for marker in item.iter_markers("case")]
        assert set(cases_in(item.name)) <= set(marked), item.nodeid


def test_the_mark_comes_from_the_name(request: pytest.FixtureRequest) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="test_b05_x", callobj=lambda: None)
    pytest_collection_modifyitems([item])
    assert [marker.args for marker in item.iter_markers("case")] == [("B05",)]
