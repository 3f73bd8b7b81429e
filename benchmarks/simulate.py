"""How fast the simulator is: `python -m benchmarks.simulate [--router NAME ...] [--replicas N] [--requests N]`.

The shared-prefix chat workload (mean output 200 tokens) on H200 replicas, one prefill to one decode, at 70 % of what
the decode pool can do. Time is processor time of this process: other work on the machine does not count, though it
slows the caches. Where the time goes is measured by a profiler in a second, shorter run.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import results_file
from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.routing import RoutingRules
from pd_serve.sim.clock import Streams
from pd_serve.sim.cluster import Cluster
from pd_serve.sim.options import DEFAULT_LINKS
from pd_serve.sim.profile import load_profile
from pd_serve.sim.report import report
from pd_serve.sim.rules import PathRules, PoolRules
from pd_serve.sim.spec import PoolSpec, Spec
from pd_serve.sim.workloads.single import shared_prefix_chat
from pd_serve.sim.workloads.times import poisson

GOAL_S = 60.0
INGRESSES = 8
RATE_PER_DECODE = 14.0
"""Requests a second: 70 % of the 20 that a decode replica can do when its KV is full (170 sequences of 4,100 tokens,
42 ms a step, 200 steps a request)."""
PARTS = {
    "decisions": ("policy/routing", "sim/views", "pd_serve/types"),
    "engines": ("sim/engine", "sim/scheduler", "sim/batch", "sim/stretch", "sim/blocks", "sim/sequence", "sim/profile"),
    "requests": ("sim/request", "sim/ingress", "sim/timeouts", "sim/attempt", "policy/admission", "policy/lifecycle"),
    "replicas and hand-offs": ("sim/replica", "sim/kv_side", "sim/network", "kv/ledger", "policy/room"),
    "events": ("sim/clock",),
    "counting": ("sim/collect", "sim/histogram", "sim/outcome"),
    "workload": ("sim/workloads", "random.py"),
}


def make_spec(replicas: int, router: str, seed: int) -> Spec:
    """A cluster of so many replicas."""
    profile = load_profile("h200-qwen3-8b")
    rules = PoolRules(max_num_seqs=256, max_num_batched_tokens=8192, enable_prefix_caching=True, gpus=1)
    prefill = replicas // 2
    return Spec(
        prefill=PoolSpec(replicas=prefill, profile=profile, rules=rules),
        decode=PoolSpec(replicas=replicas - prefill, profile=profile, rules=rules),
        path=PathRules(
            admission=AdmissionRules(max_running=100_000, max_queue=100_000),
            routing=RoutingRules(min_handoff_tokens=profile.block_size),
            router=router,
            first_token_timeout_s=120.0,
            total_timeout_s=600.0,
            no_replica_timeout_s=10.0,
            lease_s=60.0,
            settle_at_blocks=False,
            recompute=True,
            max_model_len=32_768,
            max_tokens=1024,
        ),
        ingresses=INGRESSES,
        links=DEFAULT_LINKS,
        seed=seed,
    )


def cluster(replicas: int, requests: int, router: str, seed: int) -> Cluster:
    """A cluster and its workload, not yet run."""
    spec, streams = make_spec(replicas, router, seed), Streams(seed)
    rate = RATE_PER_DECODE * spec.decode.replicas
    return Cluster(spec, islice(shared_prefix_chat(poisson(rate, streams.get("arrivals")), streams), requests))


def measure(replicas: int, requests: int, router: str, seed: int) -> dict[str, Any]:
    """Run once; times, memory on the way, and what the simulation found."""
    process = psutil.Process()
    gc.collect()
    run = cluster(replicas, requests, router, seed)
    memory = [process.memory_info().rss]
    wall, cpu = time.perf_counter(), time.process_time()
    while not run.over:
        run.run(until=run.clock.now + 1.0)
        memory.append(process.memory_info().rss)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = msgspec.to_builtins(report(run))
    return {
        "router": router,
        "replicas": replicas,
        "requests": requests,
        "cpu_s": cpu,
        "wall_s": wall,
        "events": run.clock.events,
        "events_per_cpu_s": run.clock.events / cpu,
        "us_per_request": cpu / requests * 1e6,
        "virtual_s": run.clock.now,
        "virtual_tokens": found["pools"]["decode"]["itl"]["count"] + found["ttft"]["count"],
        "rss_mib": {
            "at_start": memory[0] / 2**20,
            "at_quarters": [memory[len(memory) * quarter // 4 - 1] / 2**20 for quarter in (1, 2, 3, 4)],
            "peak": max(memory) / 2**20,
        },
        "found": {key: found[key] for key in ("outcomes", "ttft", "tpot", "hit_rate", "slo_attainment", "waits")},
    }


def where_time_goes(replicas: int, requests: int, router: str, seed: int) -> dict[str, float]:
    """Share of the profiled time by part; what is built into Python counts for its caller."""
    run = cluster(replicas, requests, router, seed)
    profiler = cProfile.Profile()
    profiler.runcall(run.run)
    shares = dict.fromkeys([*PARTS, "other"], 0.0)
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, _, _), (_, _, own, _, callers) in stats.items():
        if file == "~":
            for (caller, _, _), (_, _, seconds, _) in callers.items():
                shares[part_of(caller)] += seconds
        else:
            shares[part_of(file)] += own
    total = sum(shares.values())
    return {part: seconds / total for part, seconds in shares.items()}


def part_of(file: str) -> str:
    path = Path(file).as_posix()
    return next((part for part, places in PARTS.items() if any(place in path for place in places)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", nargs="+", default=["least_loaded"])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    runs = []
    for router in options.router:
        run = measure(options.replicas, options.requests, router, options.seed)
        run["where"] = where_time_goes(options.replicas, max(options.requests // 10, 1), router, options.seed)
        runs.append(run)
        parts = ", ".join(f"{part} {share:.0%}" for part, share in run["where"].items())
        print(
            f"{router}: {options.replicas} replicas, {options.requests:,} requests in {run['cpu_s']:.1f} s"
            f" ({run['wall_s']:.1f} s on the clock), {run['events_per_cpu_s']:,.0f} events/s,"
            f" {run['rss_mib']['peak']:.0f} MiB; {parts}",
            flush=True,
        )
    slowest = max(run["cpu_s"] for run in runs)
    summary = {"slowest_cpu_s": slowest, "goal_s": GOAL_S, "reached": slowest <= GOAL_S}
    print(f"{summary} in {results_file.write('simulate', {'summary': summary, 'runs': runs})}")


if __name__ == "__main__":
    main()
