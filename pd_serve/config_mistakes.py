"""What pydantic found, in a user's words: what is wrong, what is allowed, and which name was probably meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from pd_serve.config_yaml import KeyPath, show_path, type_name

_SHOWN = 40

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "list_type": "a list",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def explain(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[KeyPath, str]]:
    """(path under `model`, what is wrong) of each thing that pydantic found."""
    for found in error.errors(include_url=False):
        kind = found["type"]
        path = _real_path(model, found["loc"])
        context: Mapping[str, Any] = found.get("ctx") or {}
        if kind == "extra_forbidden":
            yield path, unknown_key(model, path)
        elif kind == "missing":
            yield path, "is required"
        elif kind == "value_error":
            yield path, str(context.get("error", found["msg"]))
        else:
            yield path, _wrong_value(kind, found["input"], context, found["msg"])


def _wrong_value(kind: str, value: Any, context: Mapping[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}, got {shown(value)}{_hint(kind, value)}"
    if value is None:
        return "must not be empty (null); give a value, or leave the key out for its default"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"must be {words} {context.get(bound):g}, got {shown(value)}"
    if kind == "literal_error":
        return f"must be {context.get('expected')}, got {shown(value)}{_nearest_literal(value, context)}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_too_long":
        return f"must have at most {context.get('max_length')} characters"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} has characters that are not allowed here (letters, digits, '.', '_' and '-' are)"
    return f"{message[:1].lower()}{message[1:]}, got {shown(value)}"


def _hint(kind: str, value: Any) -> str:
    if value is None:
        return "; give a value, or leave the key out for its default"
    if kind == "string_type":
        return f"; YAML reads it as {type_name(value)}: put it in quotes" if not isinstance(value, dict | list) else ""
    if isinstance(value, str) and kind.startswith(("int", "float", "bool")):
        return f"; write {value} without quotes" if _reads_as(kind, value) else ""
    return ""


def _reads_as(kind: str, text: str) -> bool:
    if kind.startswith("bool"):
        return text in {"true", "false"}
    try:
        float(text)
    except ValueError:
        return False
    return True


def _nearest_literal(value: Any, context: Mapping[str, Any]) -> str:
    allowed = str(context.get("expected", "")).replace(" or ", ", ").split(", ")
    near = difflib.get_close_matches(f"'{value}'", allowed, 1)
    return f"; did you mean {near[0]}?" if near else ""


def shown(value: Any) -> str:
    """A value as a message shows it: short, and with its type where that is the point."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return type_name(value)
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# ------------------------------------------------------------------------------------------------ names


def unknown_key(model: type[BaseModel], path: KeyPath) -> str:
    """Text for a key that does not exist at `path`: where it belongs, its nearest name, or what is allowed."""
    key = str(path[-1])
    here = model_at(model, path[:-1])
    names = list(here.model_fields) if here else []
    places = [show_path(place) for place in places_of(model, key) if place[:-1] != path[:-1]]
    return unknown_name(key, names, places)


def unknown_name(key: str, names: list[str], places: list[str] | None = None, what: str = "unknown key") -> str:
    """Text for a name that is not in `names`; `places` are full paths where the very same name is right."""
    if key.lower() in (lowered := {name.lower(): name for name in names}):
        return f"{what}; did you mean {lowered[key.lower()]}?"
    if places:
        return f"{what} here; it belongs at {' or '.join(places)}"
    near = difflib.get_close_matches(key.lower(), names, 1, 0.6)
    if near:
        return f"{what}; did you mean {near[0]}?"
    return f"{what}; allowed: {', '.join(sorted(names))}" if names else f"{what}; nothing is allowed here"


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model that describes the mapping at `path`, or None when that is not a mapping of ours."""
    current: type[BaseModel] | None = model
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        current = model_in(field.annotation) if field else None
    return current


def places_of(model: type[BaseModel], key: str, prefix: KeyPath = ()) -> list[KeyPath]:
    """Every path under `model` whose last key is `key`."""
    found: list[KeyPath] = [(*prefix, key)] if key in model.model_fields else []
    for name, field in model.model_fields.items():
        below = model_in(field.annotation)
        if below is not None:
            found += places_of(below, key, (*prefix, name))
    return found


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field's type is, or that is one of its alternatives."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        for member in typing.get_args(annotation):
            inner = model_in(member)
            if inner is not None:
                return inner
    return None


def _real_path(model: type[BaseModel], location: tuple[str | int, ...]) -> KeyPath:
    """`location` without the names of union members that pydantic puts into it."""
    path: KeyPath = ()
    for number, part in enumerate(location):
        here = model_at(model, path)
        last = number == len(location) - 1
        if here is not None and part not in here.model_fields and not last:
            continue
        if here is None and path and isinstance(part, str) and last and _is_union_tag(part):
            continue
        path = (*path, part)
    return path


def _is_union_tag(part: str) -> bool:
    return part in {"int", "float", "str", "bool"} or part.startswith(("literal[", "constrained-", "list[", "dict["))
