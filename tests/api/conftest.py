"""The demo and vLLM's own server, each up once for all tests here, in float32 so that their answers are equal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pd_serve.config import AppConfig
from pd_serve.ops.conformance_run import reference_of
from pd_serve.ops.local_cluster import free_port
from pd_serve.ops.models import resolve_model
from tests.api.ask import Server
from tests.api.deployment import Deployment

ROOT = Path(__file__).parents[2]
START_S = 300.0
STOP_S = 60.0


def demo_config(port: int) -> dict[str, Any]:
    """configs/local.yaml as it is shipped, but in float32 and on a free port."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "local.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["model"]["dtype"] = "float32"
    return config


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    port, directory = free_port(), tmp_path_factory.mktemp("demo")
    config, log = directory / "float32.yaml", directory / "up.log"
    config.write_text(yaml.safe_dump(demo_config(port)))
    with log.open("w") as output:
        command = [sys.executable, "-m", "pd_serve.cli", "up", str(config), "--logs", str(directory / "logs")]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}", log)
        args = AppConfig.model_validate(demo_config(port)["applications"][0]["args"])
        yield Deployment(f"http://127.0.0.1:{port}", args.model.served_name, args.model.block_size)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()


def _wait_ready(process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{base_url}/readyz", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not ready: {log.read_text()[-3000:]}")


@pytest.fixture(scope="package")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = AppConfig.model_validate(demo_config(free_port())["applications"][0]["args"])
    with reference_of(args, free_port(), tmp_path_factory.mktemp("reference") / "vllm.log") as base_url:
        yield Server(base_url, args.model.served_name)


@pytest.fixture(scope="package")
def model_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(resolve_model("demo"), "config.json").read_text())
    return config


@pytest.fixture(scope="package")
def eos_token_id(model_config: dict[str, Any]) -> int:
    eos = model_config["eos_token_id"]
    return int(eos[0] if isinstance(eos, list) else eos)


@pytest.fixture(scope="package")
def kv_bytes_per_token(model_config: dict[str, Any]) -> int:
    """K and V of every layer in float32."""
    heads, hidden = model_config["num_attention_heads"], model_config["hidden_size"]
    return 2 * 4 * int(model_config["num_hidden_layers"] * model_config["num_key_value_heads"] * (hidden // heads))
