"""docs/config.md, made from the config types: every key with its type, default and the sentence beside it."""

from __future__ import annotations

import ast
import inspect
import json
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pd_serve import config
from pd_serve.config import AppConfig
from pd_serve.config_mistakes import model_in

_HEAD = """\
# Configuration

<!-- Made from pd_serve/config.py by `pd-serve config-docs`. Do not edit. -->

One YAML file is both Ray Serve's config and ours: the keys below stand under `applications[0].args`; the rest of the
file is [Serve's](https://docs.ray.io/en/latest/serve/production-guide/config.html). `pd-serve check FILE` finds every
mistake in it, with its line. All keys have defaults; unknown keys are refused.

`${NAME}` in a value under `args` is replaced by that environment variable (`$${NAME}` is not). A variable that is not
set is a mistake.
"""

# How deployment guides and other servers call what is configured here.
_OTHER_NAMES = (
    ("model_path", "model.path", ""),
    ("tensor_parallel", "prefill.tensor_parallel_size, decode.tensor_parallel_size", "GPUs one engine is split over"),
    ("expert_parallel", "model.engine_args.enable_expert_parallel", "vLLM's; experts over the tensor-parallel group"),
    ("max_context_len", "model.max_model_len", ""),
    ("max_batch_size", "prefill.max_num_seqs, decode.max_num_seqs", "sequences in one engine step"),
    ("max_running_requests", "limits.max_running", "per ingress replica"),
    ("max_concurrent_requests", "limits.max_running, limits.max_queue", "running, and waiting behind them"),
    (
        "kv_cache_ratio",
        "prefill.gpu_memory_utilization, decode.gpu_memory_utilization",
        "weights included; on CPU cpu_kv_cache_gib",
    ),
    ("draft_tokens", "decode.engine_args.speculative_config.num_speculative_tokens", "vLLM's speculative decoding"),
    ("enable_graph_capture", "prefill.enforce_eager, decode.enforce_eager", "false captures CUDA graphs"),
    ("enable_prefix_cache", "prefill.enable_prefix_caching, decode.enable_prefix_caching", ""),
    (
        "device_ids",
        "prefill.env.CUDA_VISIBLE_DEVICES, decode.env.CUDA_VISIBLE_DEVICES",
        "Ray hands out GPUs by num_gpus; this narrows them",
    ),
)


def render() -> str:
    """The whole page, as Markdown."""
    parts = [_HEAD, *_sections(AppConfig, "", "The application"), _other_names()]
    return "\n".join(parts)


def _sections(model: type[BaseModel], prefix: str, title: str) -> Iterator[str]:
    """A table of the model's keys, then one for each kind of mapping among them."""
    sentences = _sentences(model)
    yield f"## {title}\n"
    if model.__doc__ and prefix:
        yield f"{inspect.cleandoc(model.__doc__)}\n"
    yield "| key | type | default | |"
    yield "|---|---|---|---|"
    below: dict[type[BaseModel], list[str]] = {}
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None:
            yield f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {sentences.get(name, '')} |"
        else:
            below.setdefault(inner, []).append(name)
    for inner, names in below.items():
        for name in names:
            sentence = sentences.get(name) or inspect.cleandoc(inner.__doc__ or "").partition("\n")[0]
            yield f"| `{prefix}{name}` | [keys](#{_anchor(names)}) | | {sentence} |"
    yield ""
    for inner, names in below.items():
        yield from _sections(inner, f"{prefix}{'|'.join(names)}.".replace("|", r"\|"), ", ".join(names))


def _anchor(names: list[str]) -> str:
    return "-".join(names)


def _sentences(model: type[BaseModel]) -> dict[str, str]:
    """The string under each field of the class, in one line."""
    source = ast.parse(inspect.getsource(config))
    body = next(node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    found = {}
    for statement, after in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _is_text(after):
            found[statement.target.id] = " ".join(ast.literal_eval(after.value).split())  # type: ignore[attr-defined]
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _type(field: FieldInfo) -> str:
    bounds = [_bound(item) for item in field.metadata]
    return _type_name(field.annotation) + "".join(f", {bound}" for bound in bounds if bound)


def _type_name(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        bounds = [bound for item in annotation.__metadata__ for bound in _field_bounds(item)]
        return _type_name(inner[0]) + "".join(f", {bound}" for bound in bounds)
    if origin is typing.Literal:
        return ", ".join(f"`{member}`" for member in inner)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join("`null`" if member is type(None) else _type_name(member) for member in inner)
    if origin is dict or annotation is dict:
        return "mapping" if not inner or inner[1] is Any else f"mapping to {_type_name(inner[1])}"
    if origin in {list, tuple}:
        return f"list of {_type_name(inner[0])}"
    return {int: "whole number", float: "number", str: "text", bool: "true/false"}.get(annotation, str(annotation))


def _field_bounds(item: Any) -> list[str]:
    return [bound for part in getattr(item, "metadata", [item]) if (bound := _bound(part))]


def _bound(item: Any) -> str:
    for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        if getattr(item, name, None) is not None:
            return f"{sign} {getattr(item, name):g}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{json.dumps(value)}`" if not isinstance(value, str) or not value else f"`{value}`"


def _other_names() -> str:
    lines = [
        "## Names that other guides use\n",
        "| elsewhere | here | |",
        "|---|---|---|",
        *(
            f"| {other} | {', '.join(f'`{name}`' for name in ours.split(', '))} | {note} |"
            for other, ours, note in _OTHER_NAMES
        ),
        "",
    ]
    return "\n".join(lines)
