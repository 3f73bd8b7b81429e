"""Where a model's files are: the one function that turns `model.path` into what an engine loads."""

from __future__ import annotations

import re
from pathlib import Path

from pd_serve.config import cache_dir
from pd_serve.errors import ConfigError

DEMO = "demo"
DEMO_NAME = "smollm2-135m"
WEIGHTS = "model.safetensors"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def demo_dir() -> Path:
    """Directory of the converted demo model, whether it exists or not."""
    return cache_dir() / "models" / DEMO_NAME


def is_hub_name(path: str) -> bool:
    """Whether `path` can only be a name on a model hub (`owner/name` or `name`): nothing local is called so."""
    return path != DEMO and _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def resolve_model(path: str) -> str:
    """What the engine is given as its model: an absolute directory, or the hub name as it is.

    Raises:
        ConfigError: `demo` has not been fetched, or the local directory is missing or holds no `config.json`.
    """
    if is_hub_name(path):
        return path
    directory = demo_dir() if path == DEMO else Path(path).expanduser()
    if not directory.is_dir():
        hint = "run `pd-serve model fetch`" if path == DEMO else "no such directory"
        raise ConfigError(f"model.path: {path!r} is not at {directory}: {hint}", param="model.path")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path: {directory} holds no config.json", param="model.path")
    return str(directory.resolve())
