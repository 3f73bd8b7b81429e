"""What our path costs beside vLLM's own server: `python -m benchmarks.overhead [--turns N] [--engine vllm fake]`.

Both serve the same model with the same engine arguments, one server at a time, in turns; ours with the plan forced to
prefill-on-decode, so that only the path differs. For the fake engine the reference is vLLM's own HTTP application over
the same engine in one process, without Ray. The hand-off's cost is measured apart: the same deployment of ours with
and without it. Floor: an added network hop on this machine, about 0.1 ms each way.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks import results_file
from benchmarks.bare_fake import bare_fake
from pd_serve.config import AppConfig
from pd_serve.ops.ask import wait_ready
from pd_serve.ops.conformance_run import reference_of
from pd_serve.ops.load import Summary, closed_loop
from pd_serve.ops.local_cluster import LocalCluster, free_port

CONFIG = Path(__file__).parents[1] / "configs" / "local.yaml"
ALONE = {"requests": 40, "prompt": 64, "output": 16, "concurrency": 1}
MANY = {"requests": 192, "prompt": 64, "output": 32, "concurrency": 64}
HANDOFF = {"requests": 20, "prompt": 512, "output": 4, "concurrency": 1}


def serve_config(engine: str, *, force: str) -> dict[str, Any]:
    """configs/local.yaml for this measurement: room for 64 at once, plans forced or not."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["http_options"]["port"] = free_port()
    args = config["applications"][0]["args"]
    args["engine"] = engine
    args["routing"] = {"force": force}
    for role in ("prefill", "decode"):
        args[role]["max_num_seqs"] = 64
    args["limits"] = {"max_running": 256, "max_queue": 256}
    return config


@contextmanager
def ours(engine: str, *, force: str) -> Iterator[str]:
    """Our server, up inside the block."""
    config = serve_config(engine, force=force)
    base_url = f"http://127.0.0.1:{config['http_options']['port']}"
    with LocalCluster(config) as cluster:
        cluster.wait_running()
        wait_ready(base_url, 300.0, lambda: None)
        yield base_url


@contextmanager
def theirs(engine: str) -> Iterator[str]:
    """The reference, up inside the block."""
    app = AppConfig.model_validate(serve_config(engine, force="none")["applications"][0]["args"])
    if engine == "fake":
        with bare_fake(app, free_port()) as base_url:
            yield base_url
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        reference_of(app, free_port(), Path(directory, "vllm.log")) as base_url,
    ):
        yield base_url


def bodies(rng: random.Random, requests: int, prompt: int, output: int, **_: int) -> list[dict[str, Any]]:
    """Fresh prompts: no cache has seen them."""
    return [
        {
            "model": "smollm2",
            "prompt": [rng.randrange(1000, 40000) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(requests)
    ]


def load(base_url: str, shape: dict[str, int], rng: random.Random) -> Summary:
    """One run of a shape, after a warm-up of four requests at its concurrency."""
    warm = bodies(rng, min(4, shape["concurrency"] * 2), shape["prompt"], 2)
    asyncio.run(closed_loop(base_url, warm, shape["concurrency"], 300))
    return asyncio.run(closed_loop(base_url, bodies(rng, **shape), shape["concurrency"], 600))


def measure(base_url: str, rng: random.Random) -> dict[str, Summary]:
    return {"alone": load(base_url, ALONE, rng), "many": load(base_url, MANY, rng)}


def compare(engine: str, turns: int, rng: random.Random) -> dict[str, Any]:
    """Turns of reference and ours; the summary is the median over turns."""
    rows: list[dict[str, Any]] = []
    for turn in range(turns):
        row: dict[str, Any] = {"turn": turn}
        for who, server in (("reference", theirs(engine)), ("ours", ours(engine, force="prefill_on_decode"))):
            with server as base_url:
                row[who] = measure(base_url, rng)
            one, many = row[who]["alone"], row[who]["many"]
            failed = one.failed + many.failed
            print(
                f"{engine} turn {turn} {who:9}: TTFT at 1 {one.ttft.p50 * 1e3:.1f} ms, "
                f"TPOT {one.tpot.p50 * 1e3:.1f} ms, {many.output_tokens_per_s:.0f} tokens/s at 64, failed {failed}",
                flush=True,
            )
        rows.append(row)
    added = [(row["ours"]["alone"].ttft.p50 - row["reference"]["alone"].ttft.p50) * 1e3 for row in rows]
    ratios = [row["ours"]["many"].output_tokens_per_s / row["reference"]["many"].output_tokens_per_s for row in rows]
    summary = {"ttft_added_ms": statistics.median(added), "throughput_ratio": statistics.median(ratios)}
    return {"summary": summary, "turns": msgspec.to_builtins(rows)}


def handoff_cost(engine: str, rng: random.Random) -> dict[str, Any]:
    """TTFT of a 512-token prompt with and without the hand-off, in turn, one deployment each."""
    found = {}
    for name, force in (("local", "prefill_on_decode"), ("handed_over", "none")):
        with ours(engine, force=force) as base_url:
            found[name] = load(base_url, HANDOFF, rng)
        print(f"{engine} 512 tokens {name}: TTFT {found[name].ttft.p50 * 1e3:.1f} ms", flush=True)
    cost = (found["handed_over"].ttft.p50 - found["local"].ttft.p50) * 1e3
    return {"prompt_tokens": HANDOFF["prompt"], "ttft_added_ms": cost, **msgspec.to_builtins(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--engine", nargs="+", choices=["vllm", "fake"], default=["vllm", "fake"])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    result: dict[str, Any] = {}
    for engine in options.engine:
        result[engine] = compare(engine, options.turns, rng)
        result[engine]["handoff"] = handoff_cost(engine, rng)
    shapes = {"alone": ALONE, "many": MANY, "handoff": HANDOFF}
    summary = result[options.engine[0]]["summary"]
    path = results_file.write(
        f"overhead-{results_file.machine()}", {"summary": summary, "shapes": shapes, "engines": result}
    )
    print(f"{summary} in {path}")


if __name__ == "__main__":
    main()
