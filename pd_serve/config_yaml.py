"""YAML with line numbers, and `${NAME}` placeholders: what a configuration file says, and where it says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
"""Where a value stands in a document: keys and list positions from the root."""

_PLACEHOLDER = re.compile(r"\$?\$\{([^}]*)\}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, order=True)
class Mistake:
    """One thing that is wrong: the line it stands on, what it is about, what to do."""

    line: int
    path: KeyPath
    text: str

    def show(self, file: str, hide: KeyPath = ()) -> str:
        """`file:line: full.key.path: text`; `hide` is a prefix of the path that is left out."""
        below = len(self.path) > len(hide) and self.path[: len(hide)] == hide
        path = self.path[len(hide) :] if below else self.path
        about = f"{show_path(path)}: " if path else ""
        return f"{file}:{self.line}: {about}{self.text}"


@dataclass
class Document:
    """The values of a file, the line of each, and what is wrong with it as YAML."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """Line of the value at `path`, or of the nearest part around it that is in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def add(self, path: KeyPath, text: str, line: int | None = None) -> None:
        self.mistakes.append(Mistake(self.line(path) if line is None else line, path, text))


def show_path(path: KeyPath) -> str:
    """`applications[0].args` for `("applications", 0, "args")`."""
    shown = ""
    for part in path:
        shown += f"[{part}]" if isinstance(part, int) else f".{part}" if shown else part
    return shown


def parse(text: str) -> Document:
    """Read one YAML document. Never raises: what is wrong is in `mistakes`."""
    document = Document()
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            document.add((), "the file is empty; it needs `applications:` with one application")
        else:
            document.lines[()] = root.start_mark.line + 1
            document.value = _Reader(loader, document).read(root, ())
    except yaml.MarkedYAMLError as error:
        _syntax(document, error, text)
    except yaml.YAMLError as error:
        document.add((), f"not readable as YAML: {' '.join(str(error).split())}")
    finally:
        loader.dispose()
    return document


def _syntax(document: Document, error: yaml.MarkedYAMLError, text: str) -> None:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    tabs = [number for number, content in enumerate(text.splitlines(), 1) if re.match(r" *\t", content)]
    for number in tabs:
        document.add((), "a tab is used to indent; YAML allows spaces only", number)
    if line not in tabs:
        context = f" ({error.context})" if error.context else ""
        on_line = text.splitlines()[line - 1 : line]
        hint = "; put ${...} in quotes inside { } and [ ]" if on_line and "${" in on_line[0] else ""
        document.add((), f"not readable as YAML: {error.problem}{context}{hint}", line)


class _Reader:
    """Builds plain values from YAML nodes, and notes the line of each."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self._loader = loader
        self._document = document
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        if any(node is outer for outer in self._open):
            self._document.add(path, "an alias refers to what it stands in", node.start_mark.line + 1)
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._item(child, (*path, number)) for number, child in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.pop()

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self._document.lines[path] = node.start_mark.line + 1
        return self.read(node, path)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or str(error)
            self._document.add(path, f"{node.value!r} is not understood: {problem}", node.start_mark.line + 1)
            return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._refuse_duplicates(node, path)
        self._loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is not None:
                below = (*path, key)
                self._document.lines[below] = key_node.start_mark.line + 1
                values[key] = self.read(value_node, below)
        return values

    def _refuse_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first: dict[str, int] = {}
        for key_node, _value in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE or not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in first:
                text = f"is given twice; the first is on line {first[key_node.value]}"
                self._document.add((*path, key_node.value), text, line)
            first.setdefault(key_node.value, line)

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        key = self._loader.construct_object(node, deep=True) if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(key, str):
            return key
        shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        text = f"the key {shown} is read as {type_name(key)}, not as text; put it in quotes"
        self._document.add(path, text, node.start_mark.line + 1)
        return None


def type_name(value: Any) -> str:
    """How a user would call what YAML made of a value."""
    if value is None:
        return "nothing (null)"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), f"a {type(value).__name__}")


# ----------------------------------------------------------------------------------------- placeholders


def expand(value: Any, env: Mapping[str, str]) -> tuple[Any, list[tuple[KeyPath, str]]]:
    """Replace `${NAME}` in every text of `value` by that environment variable; `$${NAME}` stays as `${NAME}`.

    A text that is one placeholder and nothing else becomes what YAML reads in its place (`${N}` with N=4 is the
    number 4), so the same file means the same whether pd_serve or Serve reads it first.

    Returns:
        The new value, and (path, what is wrong) for every placeholder that cannot be replaced.
    """
    problems: list[tuple[KeyPath, str]] = []
    return _expand(value, (), env, problems), problems


def _expand(value: Any, path: KeyPath, env: Mapping[str, str], problems: list[tuple[KeyPath, str]]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(child, (*path, key), env, problems) for key, child in value.items()}
    if isinstance(value, list):
        return [_expand(child, (*path, number), env, problems) for number, child in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    bad = _unusable(value, env)
    if bad:
        problems.extend((path, text) for text in bad)
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    if whole and not value.startswith("$$"):
        return _as_yaml_scalar(env[whole[1]])
    return _PLACEHOLDER.sub(lambda match: match[0][1:] if match[0].startswith("$$") else env[match[1]], value)


def _unusable(text: str, env: Mapping[str, str]) -> list[str]:
    bad = []
    for match in _PLACEHOLDER.finditer(text):
        name = match[1]
        if match[0].startswith("$$") or name in env:
            continue
        named = _ENV_NAME.fullmatch(name)
        bad.append(f"the environment variable {name} is not set" if named else f"${{{name}}} does not name a variable")
    return bad


def _as_yaml_scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float) else text
