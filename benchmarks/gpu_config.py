"""configs/gpu-2.yaml with another model, for the GPUs that this machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pd_serve.ops.local_cluster import free_port

CONFIG = Path(__file__).parents[1] / "configs" / "gpu-2.yaml"
SHARED_UTILIZATION = 0.2
"""Of a GPU that several engines share: what vLLM wants to find free when one starts. The rest is given in bytes."""


def gpu_config(
    directory: Path, gpus: int, kv_cache_gib: float, *, load_format: str = "auto", **sections: dict[str, Any]
) -> dict[str, Any]:
    """The Serve config on a free port, for the model in `directory`, which is served under that directory's name.

    Args:
        gpus: with one, both engines share it.
        kv_cache_gib: KV cache of each engine. Fixed, because engines that start side by side on one GPU take each
            other's memory for their own.
        sections: further keys of parts of `args`, such as `kv` or `model`.
    """
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["http_options"]["port"] = free_port()
    args = config["applications"][0]["args"]
    args["model"] |= {"path": str(directory), "served_name": directory.name}
    args["model"]["engine_args"] = {"load_format": load_format}
    for role in ("prefill", "decode"):
        args[role]["num_gpus"] = 1 if gpus > 1 else 0.5
        args[role]["gpu_memory_utilization"] = SHARED_UTILIZATION
        engine_args = args[role].setdefault("engine_args", {})
        engine_args["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    for name, section in sections.items():
        args[name] = {**args.get(name, {}), **section}
    return config
