"""A private Ray with nothing on it, until standard input ends: `python -m tests.ops.bare_ray`. Prints
the environment with which Ray's tools reach it, as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile

from pd_serve.ops.local_cluster import free_port
from pd_serve.serve import cluster, processes
from pd_serve.serve.local_ray import LocalRay, local_environment, start_local


def main() -> None:
    processes.adopt_orphans()
    temp = tempfile.mkdtemp(prefix="pd-", dir="/tmp")
    local = LocalRay(
        temp_dir=temp, num_cpus=2, object_store_bytes=1 << 29, metrics_port=free_port(), stats_port=free_port()
    )
    os.environ.update(local_environment(local))
    try:
        address = start_local(local)
        known = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
        print(json.dumps({"RAY_ADDRESS": address, **known}), flush=True)
        sys.stdin.read()
    finally:
        cluster.disconnect()
        processes.end_descendants(grace_s=1.0)
        shutil.rmtree(temp, ignore_errors=True)


if __name__ == "__main__":
    main()
