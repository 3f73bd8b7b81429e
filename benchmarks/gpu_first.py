"""First figures on GPUs: `python -m benchmarks.gpu_first [--model SHAPE] [--requests N] [--rate R] [--output TOKENS]`.

An 8-billion-parameter shape with dummy weights and long prompts that arrive at a low rate (Poisson). Variants, one
deployment each: KV handed over through Ray's object store, the same without checksums, and no hand-off at all (prompts
computed where they decode). Latencies are the client's; where the time went is from the application's own records.
With one GPU both engines share it, which the result says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import results_file
from benchmarks.gpu_config import gpu_config
from benchmarks.random_model import SHAPES, make_model
from pd_serve.ops.ask import wait_ready
from pd_serve.ops.check_host import visible_gpus
from pd_serve.ops.load import Summary, open_loop
from pd_serve.ops.local_cluster import GIB, LocalCluster

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "handed_over": {},
    "no_checksum": {"kv": {"checksum": False}},
    "local": {"routing": {"force": "prefill_on_decode"}},
}
WARM_UP = 3


def arrivals(rng: random.Random, requests: int, rate: float) -> Iterator[float]:
    """Seconds after the start at which each request is due."""
    moment = 0.0
    for _ in range(requests):
        yield moment
        moment += rng.expovariate(rate)


def body(rng: random.Random, model: str, prompt: int, output: int) -> dict[str, Any]:
    """A prompt that no cache has seen."""
    tokens = [rng.randrange(1000, 40000) for _ in range(prompt)]
    return {"model": model, "prompt": tokens, "max_tokens": output, "temperature": 0, "ignore_eos": True}


def load(base_url: str, options: argparse.Namespace, rng: random.Random) -> tuple[Summary, list[dict[str, Any]]]:
    """The client's figures and the application's records of the same requests, after a warm-up."""
    warm = [body(rng, options.model, options.prompt, options.output) for _ in range(WARM_UP)]
    asyncio.run(open_loop(base_url, warm, [float(number) for number in range(WARM_UP)], 300))
    bodies = [body(rng, options.model, options.prompt, options.output) for _ in range(options.requests)]
    summary = asyncio.run(open_loop(base_url, bodies, list(arrivals(rng, options.requests, options.rate)), 300))
    records = httpx.get(f"{base_url}/pd/records", params={"limit": options.requests}, timeout=30.0).json()
    return summary, records


def of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each part (median and largest), bytes of a hand-off, and how KV fared.

    `kv_wait_s` runs from the decode engine's allocation of blocks until the pages are there, and contains the prefill;
    `kv_copy_s` from then until they are checked and in the engine's cache.
    """
    kv = [record["kv"] for record in records if record["kv"]]
    outcomes = [report["outcome"] for report in kv]
    return {
        "ttft_s": _middle_and_most([record["ttft_s"] for record in records]),
        "prefill_s": _middle_and_most([record["prefill_s"] for record in records]),
        "kv_wait_s": _middle_and_most([report["wait_s"] for report in kv]),
        "kv_copy_s": _middle_and_most([report["copy_s"] for report in kv]),
        "kv_bytes": max((report["bytes"] for report in kv), default=0),
        "kv_outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
    }


def _middle_and_most(values: list[float | None]) -> dict[str, float] | None:
    there = [value for value in values if value is not None]
    return {"p50": statistics.median(there), "max": max(there)} if there else None


def gpu_names() -> list[str]:
    """Name and driver of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def measure(model: Path, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Bring one variant up, measure, take it down."""
    gpus = len(visible_gpus())
    config = gpu_config(model, gpus, options.kv_cache_gib, load_format="dummy", **VARIANTS[variant])
    base_url = f"http://127.0.0.1:{config['http_options']['port']}"
    started = time.monotonic()
    with LocalCluster(config, object_store_bytes=options.object_store_gib * GIB, logs=options.logs) as cluster:
        cluster.wait_running()
        wait_ready(base_url, 300.0)
        ready_s = time.monotonic() - started
        summary, records = load(base_url, options, random.Random(options.seed))
    found = of_records(records)
    print(
        f"{variant}: ready after {ready_s:.0f} s, TTFT p50 {summary.ttft.p50 * 1e3:.0f} ms, "
        f"TPOT p50 {summary.tpot.p50 * 1e3:.1f} ms, failed {summary.failed}, records {found}",
        flush=True,
    )
    return {"ready_s": ready_s, "client": msgspec.to_builtins(summary), "records": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=float, default=24.0)
    parser.add_argument("--object-store-gib", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args()
    gpus = min(2, len(visible_gpus()))
    result: dict[str, Any] = {
        "gpus": gpu_names(),
        "engines_share_a_gpu": gpus == 1,
        "load": {name: getattr(options, name) for name in ("model", "requests", "rate", "prompt", "output")},
        "variants": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(options.model, Path(directory) / options.model, weights=False)
        for variant in options.variants:
            result["variants"][variant] = measure(model, variant, options)
            path = results_file.write(options.name or f"gpu-first-{gpus}gpu", result)
    print(f"in {path}")


if __name__ == "__main__":
    main()
