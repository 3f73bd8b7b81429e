"""Writes a benchmark's result: figures with the machine, the versions and the command that made them."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from pd_serve.ops.versions import versions

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """A name for result files: the number of cores and the kind of accelerator."""
    return f"cpu{psutil.cpu_count()}"


def describe_machine() -> dict[str, Any]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Write `benchmarks/results/<name>.json`; figures that do not exist become null."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    head = {
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": versions(),
    }
    path.write_text(json.dumps(_finite({**head, **result}), indent=1) + "\n")
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
