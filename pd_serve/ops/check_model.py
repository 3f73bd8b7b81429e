"""What can be known about a model without loading it: its own limits against the configured ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pd_serve.config import AppConfig
from pd_serve.config_yaml import KeyPath
from pd_serve.errors import ConfigError
from pd_serve.model_dir import is_hub_name, resolve_model

# Names under which model configs keep their longest sequence, as vLLM looks for them.
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
)
CPU_BLOCK = 32
_UNSCALED = {"default", "llama3", "longrope", "mrope", "su"}


def model_mistakes(app: AppConfig, skipped: list[str]) -> Iterator[tuple[KeyPath, str]]:
    """(path under args, what is wrong) about the model; what could not be looked at is added to `skipped`."""
    if app.engine == "fake":
        skipped.append("model: the fake engine loads none")
        return
    if is_hub_name(app.model.path):
        skipped.append(f"model: {app.model.path} is a hub name, looked up when an engine starts")
        return
    try:
        directory = Path(resolve_model(app.model.path))
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ConfigError as error:
        yield ("model", "path"), error.message.removeprefix("model.path: ")
        return
    except (OSError, ValueError) as error:
        yield ("model", "path"), f"its config.json cannot be read: {error}"
        return
    if not isinstance(config, dict):
        yield ("model", "path"), "its config.json is not a JSON object"
        return
    yield from _block_size(app)
    yield from _length(app, config)
    yield from _heads(app, text_part(config))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's config that describes its language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def longest(config: Mapping[str, Any]) -> int | None:
    """Most tokens that the model was made for, or None when its config does not say."""
    text = text_part(config)
    lengths: list[int] = [text[key] for key in _LENGTH_KEYS if isinstance(text.get(key), int)]
    if not lengths:
        return None
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(rope, dict):
        return min(lengths)
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("factor")
    if kind in _UNSCALED or not isinstance(factor, int | float):
        return min(lengths)
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original if isinstance(original, int) else min(lengths)) * factor)


def _block_size(app: AppConfig) -> Iterator[tuple[KeyPath, str]]:
    on_cpu = any(not pool.num_gpus for pool in app.pools.values())
    if on_cpu and app.model.block_size % CPU_BLOCK:
        text = f"is {app.model.block_size}; vLLM's attention on CPU needs a multiple of {CPU_BLOCK}"
        yield ("model", "block_size"), text


def _length(app: AppConfig, config: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    limit = longest(config)
    allowed = all(pool.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1" for pool in app.pools.values())
    overridden = "hf_overrides" in app.model.engine_args
    if limit is not None and app.model.max_model_len > limit and not allowed and not overridden:
        yield ("model", "max_model_len"), f"is {app.model.max_model_len}, but the model goes to {limit} tokens only"


def _heads(app: AppConfig, text: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    heads = text.get("num_attention_heads")
    for role, pool in app.pools.items():
        size = pool.tensor_parallel_size
        if isinstance(heads, int) and heads % size:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            yield (
                (role, "tensor_parallel_size"),
                f"is {size}, which does not divide the model's {heads} attention heads; these do: {fits}",
            )
