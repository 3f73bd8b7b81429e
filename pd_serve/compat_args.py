"""vLLM's own argument lists, read from its source without importing it (an import takes seconds).

Names only, with each argument's type as its source has it; values are vLLM's to judge, but for plain types.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

# Where the classes are: vLLM 0.32, then 0.26.
_ENGINE = (("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),)
_FRONTEND = (
    ("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs", "FrontendArgs")),
    ("entrypoints/openai/cli_args.py", ("BaseFrontendArgs", "FrontendArgs")),
)
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}

Arguments = dict[str, str]
"""Name of each argument, and its type annotation as text."""


def engine_arguments() -> Arguments | None:
    """What `AsyncEngineArgs` takes, or None when vLLM is not installed here."""
    return _fields(_ENGINE)


def frontend_arguments() -> Arguments | None:
    """What vLLM's OpenAI server takes beside engine arguments, or None when vLLM is not installed here."""
    return _fields(_FRONTEND)


def accepts(annotation: str, value: object) -> bool:
    """Whether `value` may be of the annotated type. True when the type is not a plain one or a Literal."""
    try:
        return _accepts(ast.parse(annotation, mode="eval").body, value)
    except SyntaxError:
        return True


def _accepts(node: ast.expr, value: object) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _accepts(node.left, value) or _accepts(node.right, value)
    if isinstance(node, ast.Constant) and node.value is None:
        return value is None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return accepts(node.value, value)
    if isinstance(node, ast.Name) and node.id in _PLAIN:
        if isinstance(value, bool):
            return node.id == "bool"
        return isinstance(value, _PLAIN[node.id])
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _accepts_generic(node.value.id, node.slice, value)
    return True


def _accepts_generic(name: str, inner: ast.expr, value: object) -> bool:
    if name == "Literal":
        members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        return any(isinstance(member, ast.Constant) and member.value == value for member in members)
    if name in {"list", "set", "tuple"}:
        return isinstance(value, list)
    if name == "dict":
        return isinstance(value, dict)
    return True


def _fields(places: tuple[tuple[str, tuple[str, ...]], ...]) -> Arguments | None:
    spec = importlib.util.find_spec("vllm")
    roots = spec.submodule_search_locations if spec else None
    for root in roots or ():
        for file, classes in places:
            path = Path(root, file)
            if path.is_file():
                return _fields_of(path, classes)
    return None


def _fields_of(path: Path, classes: tuple[str, ...]) -> Arguments:
    fields: Arguments = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    fields[statement.target.id] = ast.unparse(statement.annotation)
    return {name: annotation for name, annotation in fields.items() if not name.startswith("_")}
