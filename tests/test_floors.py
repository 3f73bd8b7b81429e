"""What import-linter's patterns are too coarse to hold: which modules touch vLLM, and who reads our environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = sorted(Path("pd_serve").rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that a module imports anywhere, but for type checking alone."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imported(node)
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def test_in_engine_and_kv_only_the_modules_named_for_it_import_vllm() -> None:
    allowed = re.compile(r"pd_serve/(engine/vllm\w*|kv/connector\w*)\.py")
    for file in MODULES:
        if file.parts[1] in {"engine", "kv"} and "vllm" in imported(ast.parse(file.read_text())):
            assert allowed.fullmatch(file.as_posix()), f"{file} imports vllm"


@pytest.mark.parametrize("file", MODULES, ids=str)
def test_no_environment_variable_is_read_at_import(file: Path) -> None:
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If):
            continue
        assert not _reads_environment(statement), f"{file}:{statement.lineno}"


def test_only_config_reads_our_own_variables() -> None:
    """Others may look at vLLM's, Ray's or the system's; a name that begins with PD_SERVE_ is config's to read."""
    for file in MODULES:
        if file.name == "config.py" and len(file.parts) == 2:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if _reads_environment(node, deep=False):
                assert "PD_SERVE_" not in ast.unparse(node), f"{file}:{node.lineno}"  # type: ignore[attr-defined]


def _reads_environment(node: ast.AST, deep: bool = True) -> bool:
    nodes = ast.walk(node) if deep else [node]
    reads = (ast.unparse(each.func) for each in nodes if isinstance(each, ast.Call))
    if any(read in {"os.getenv", "os.environ.get", "environ.get", "getenv"} for read in reads):
        return True
    nodes = ast.walk(node) if deep else [node]
    return any(isinstance(each, ast.Subscript) and ast.unparse(each.value) == "os.environ" for each in nodes)
