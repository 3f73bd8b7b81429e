"""`serve run CONFIG` on a Ray that runs already does what `pd-serve up` does on its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pd_serve.ops.ask import last_record, stream_chat, wait_ready
from pd_serve.ops.local_cluster import free_port

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture
def access() -> Iterator[dict[str, str]]:
    """Environment that leads to a running Ray."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ops.bare_ray"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as ray:
        assert ray.stdout is not None
        assert ray.stdin is not None
        yield json.loads(ray.stdout.readline())
        ray.stdin.close()
        ray.wait(60)


def test_the_shipped_file_as_it_is_but_for_port_and_engine(access: dict[str, str], tmp_path: Path) -> None:
    config = yaml.safe_load(Path("configs/local.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    config["applications"][0]["args"]["engine"] = "fake"
    file = tmp_path / "local.yaml"
    file.write_text(yaml.safe_dump(config))
    serve = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(serve, env={**os.environ, **access}, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, 200)
        assert "".join(stream_chat(url, "smollm2", "What is the capital of France?", 8, 60))
        assert last_record(url)["prefill_replica"].startswith("prefill-v1#")
    finally:
        run.terminate()
        run.wait(60)
