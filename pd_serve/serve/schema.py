"""Serve's own part of a config file, checked against the installed Serve, which itself ignores unknown keys."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from pd_serve.config_mistakes import explain, model_in, unknown_name
from pd_serve.config_yaml import KeyPath


def serve_mistakes(config: Mapping[str, Any]) -> list[tuple[KeyPath, str]]:
    """(path, what is wrong) for everything in a Serve config that Serve would refuse or silently ignore."""
    from ray.serve.schema import ServeDeploySchema

    return [*_unknown(ServeDeploySchema, config, ()), *_wrong(ServeDeploySchema, dict(config), ())]


def _unknown(model: type[BaseModel], value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if not isinstance(value, Mapping):
        return
    fields = {**model.model_fields, **{field.alias: field for field in model.model_fields.values() if field.alias}}
    for key, child in value.items():
        field = fields.get(key)
        if field is None:
            yield (*at, key), unknown_name(str(key), list(model.model_fields))
        elif isinstance(child, list):
            inner = _item_model(field.annotation)
            for number, item in enumerate(child):
                if inner is not None:
                    yield from _unknown(inner, item, (*at, key, number))
        elif (inner := model_in(field.annotation)) is not None:
            yield from _unknown(inner, child, (*at, key))
            if any(typing.get_origin(each) is dict for each in typing.get_args(field.annotation)):
                # Serve itself looks inside only when it deploys.
                yield from _wrong(inner, child, (*at, key))


def _wrong(model: type[BaseModel], value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if value is None:
        return
    try:
        model.model_validate(value)
    except ValidationError as error:
        for path, text in explain(error, model):
            yield (*at, *path), text


def _item_model(annotation: Any) -> type[BaseModel] | None:
    """The model of a list's items, also inside Optional."""
    if typing.get_origin(annotation) is list:
        return model_in(typing.get_args(annotation)[0])
    for member in typing.get_args(annotation):
        inner = _item_model(member)
        if inner is not None:
            return inner
    return None
