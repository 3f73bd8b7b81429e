"""A hash of everything but the page layout that two engines must agree on before KV of one is valid on the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json")
_NOT_IDENTITY = ("_name_or_path", "transformers_version")
_MATTERING_ARGS = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "tensor_parallel_size",
    "quantization",
    "load_format",
    "seed",
    "revision",
    "hf_overrides",
    "rope_scaling",
    "rope_theta",
    "attention_backend",
)
_SAMPLES = 256
_SAMPLE_BYTES = 4096


def identity(model: str, arguments: dict[str, Any], engine_version: str) -> str:
    """sha256, equal on two machines with the same files, arguments and engine version.

    Of each weights file its name, size, header and 256 pages spread over it are read: a fine-tuned twin of a model
    differs nearly everywhere, and reading all of a large model would take minutes.

    Args:
        model: a directory, or a hub name whose files lie in the hub's cache (else the name stands for them).
        arguments: the engine's.
    """
    digest = hashlib.sha256()
    facts = {name: arguments[name] for name in _MATTERING_ARGS if name in arguments}
    digest.update(json.dumps([engine_version, facts], sort_keys=True, default=str).encode())
    directory = _directory(model, arguments.get("revision"))
    if directory is None:
        digest.update(model.encode())
        return digest.hexdigest()
    for part in _parts(directory):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _directory(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        return None


def _parts(directory: Path) -> Iterator[bytes]:
    config = directory / "config.json"
    if config.is_file():
        content = json.loads(config.read_bytes())
        yield json.dumps({k: v for k, v in content.items() if k not in _NOT_IDENTITY}, sort_keys=True).encode()
    for name in _TOKENIZER_FILES:
        if (directory / name).is_file():
            yield hashlib.sha256(name.encode() + (directory / name).read_bytes()).digest()
    for file in sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin")):
        yield _weights(file)


def _weights(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name}:{size}".encode())
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little") if file.suffix == ".safetensors" else 0
        if header_bytes < size:
            digest.update(stream.read(header_bytes))
        start = stream.tell()
        step = max((size - start) // _SAMPLES, _SAMPLE_BYTES)
        for offset in range(start, size, step):
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
