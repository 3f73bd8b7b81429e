"""First figures on GPUs: `python -m benchmarks.gpu_first [--model SHAPE] [--requests N] [--rate R] [--output TOKENS]`.

An 8-billion-parameter shape with dummy weights, long prompts that arrive at a low rate (Poisson), KV through Ray's
object store. Latencies are the client's; where the time went is from the application's own records. With one GPU both
engines share it, which the result says.
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

FIELDS = ("ttft_s", "prefill_s", "kv_s", "decode_s")
"""Of a record: seconds; `kv_s` is from the arrival of the pages to the end of the copy into the decode engine."""


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


def run(base_url: str, options: argparse.Namespace, rng: random.Random) -> tuple[Summary, list[dict[str, Any]]]:
    """The client's figures and the application's records of the same requests, after a warm-up."""
    warm = [body(rng, options.model, options.prompt, options.output) for _ in range(3)]
    asyncio.run(open_loop(base_url, warm, [0.0, 1.0, 2.0], 300))
    bodies = [body(rng, options.model, options.prompt, options.output) for _ in range(options.requests)]
    summary = asyncio.run(open_loop(base_url, bodies, list(arrivals(rng, options.requests, options.rate)), 300))
    records = httpx.get(f"{base_url}/pd/records", params={"limit": options.requests}, timeout=30.0).json()
    return summary, records


def of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest of each field; how KV fared."""
    found: dict[str, Any] = {}
    for name in FIELDS:
        values = [record[name] for record in records if record[name] is not None]
        found[name] = {"p50": statistics.median(values), "max": max(values)} if values else None
    waits = [record["kv"]["wait_s"] for record in records if record["kv"]]
    found["kv_wait_s"] = {"p50": statistics.median(waits), "max": max(waits)} if waits else None
    found["kv_bytes"] = sorted({record["kv_bytes"] for record in records})
    found["kv_outcomes"] = {o: [r["kv_outcome"] for r in records].count(o) for o in {r["kv_outcome"] for r in records}}
    return found


def gpu_names() -> list[str]:
    """Name and driver of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def serve(model: Path, options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Bring the application up, measure, take it down."""
    gpus = min(2, len(visible_gpus()))
    config = gpu_config(
        model,
        gpus,
        options.kv_cache_gib,
        load_format="dummy",
        kv={"checksum": options.checksum},
        ingress={"num_cpus": 1},
    )
    base_url = f"http://127.0.0.1:{config['http_options']['port']}"
    started = time.monotonic()
    with LocalCluster(config, object_store_bytes=options.object_store_gib * GIB, logs=options.logs) as cluster:
        cluster.wait_running()
        wait_ready(base_url, 300.0)
        ready_s = time.monotonic() - started
        print(f"ready after {ready_s:.0f} s", flush=True)
        summary, records = run(base_url, options, rng)
    return {
        "gpus": gpu_names(),
        "gpus_used": gpus,
        "engines_share_a_gpu": gpus == 1,
        "ready_s": ready_s,
        "client": msgspec.to_builtins(summary),
        "records": of_records(records),
        "args": config["applications"][0]["args"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=float, default=24.0)
    parser.add_argument("--object-store-gib", type=int, default=16)
    parser.add_argument("--no-checksum", dest="checksum", action="store_false")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(options.model, Path(directory) / options.model, weights=False)
        result = serve(model, options, rng)
    path = results_file.write(options.name or f"gpu-first-{result['gpus_used']}gpu", {**result, "shape": options.model})
    client = result["client"]
    print(
        f"TTFT p50 {client['ttft']['p50'] * 1e3:.0f} ms, TPOT p50 {client['tpot']['p50'] * 1e3:.1f} ms, "
        f"failed {client['failed']}, records {result['records']}, in {path}"
    )


if __name__ == "__main__":
    main()
