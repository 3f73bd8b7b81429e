"""The whole application on GPUs, with an ingress that Ray gives none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_serve.ops.check_host import visible_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def app(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    from benchmarks.gpu_config import gpu_config
    from pd_serve.ops.ask import wait_ready
    from pd_serve.ops.local_cluster import LocalCluster

    config = gpu_config(models / "small", len(visible_gpus()), 1.0, model={"max_model_len": 4096})
    base_url = f"http://127.0.0.1:{config['http_options']['port']}"
    # As on any Ray cluster: who asks for no GPU sees none.
    env = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    with LocalCluster(config, env=env, logs=tmp_path_factory.mktemp("logs")) as cluster:
        cluster.wait_running()
        wait_ready(base_url, 120.0)
        with httpx.Client(base_url=base_url, timeout=60.0) as client:
            yield client


def ask(app: httpx.Client, tokens: int, **fields: Any) -> dict[str, Any]:
    prompt = [random.randrange(1000, 40000) for _ in range(tokens)]
    body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    answer = app.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_prompt_is_computed_on_one_engine_and_decoded_on_the_other(app: httpx.Client) -> None:
    answer = ask(app, 1000)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1000, 8)
    [record] = app.get("/pd/records", params={"limit": 1}).json()
    assert record["kv_outcome"] == "moved"
    assert (
        record["kv_bytes"] == 63 * 16 * 4 * 2 * 2 * 64 * 2
    )  # blocks, tokens, layers, k and v, heads, head size, bytes


def test_chat_works_where_no_gpu_is_seen(app: httpx.Client) -> None:
    messages = [{"role": "user", "content": "w1001 w1002 w1003"}]
    answer = app.post("/v1/chat/completions", json={"model": "small", "messages": messages, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].startswith("w")
