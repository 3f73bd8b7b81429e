"""`pd-serve up`: the demo as a user meets it, from the first line to the last process."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from pd_serve.ops.local_cluster import free_port
from pd_serve.serve.processes import shared_memory_of
from tests.ops.running import Up, living, running

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(420)]

LOCAL = Path("configs/local.yaml")


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """The demo's file with the fake engine in place of vLLM."""
    file = tmp_path / "fake.yaml"
    file.write_text(LOCAL.read_text().replace("      version: v1\n", "      version: v1\n      engine: fake\n"))
    return file


def curls_of_the_readme() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(curl .*?)```", Path("README.md").read_text(), re.DOTALL)
    return [command for block in blocks for command in split_commands(block)]


def split_commands(block: str) -> list[list[str]]:
    """Each `curl ...` of a shell block as arguments; one may go over several lines inside quotes."""
    return [shlex.split(part, comments=True) for part in re.split(r"\n(?=curl )", block.strip())]


def curl(command: list[str], port: int) -> str:
    moved = [argument.replace(":8000", f":{port}") for argument in command]
    done = subprocess.run([*moved, "-sS", "--fail", "--max-time", "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{moved}: {done.stderr}"
    return done.stdout


def nothing_left(up: Up, below: list[object], temp_dirs: set[Path], shared: set[Path]) -> None:
    assert living(below) == []  # type: ignore[arg-type]
    assert [path for path in temp_dirs | shared if path.exists()] == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", up.port))


def footprint(up: Up) -> tuple[list[object], set[Path], set[Path]]:
    below = up.below()
    lines = (" ".join(process.cmdline()) for process in below)
    temp_dirs = {Path(found) for line in lines for found in re.findall(r"(\S*/pd-[^/\s]+)/session_", line)}
    temp_dirs = {Path(str(path).split("=")[-1]) for path in temp_dirs}
    shared = {path for process in below for path in shared_memory_of(process.pid)}
    assert temp_dirs
    return list(below), temp_dirs, shared


def test_every_curl_of_the_readme_works_and_ctrl_c_leaves_nothing(fake: Path, tmp_path: Path) -> None:
    with running(fake, free_port(), tmp_path / "log") as up:
        up.wait_for(r"ready at http://127\.0\.0\.1:\d+", 300)
        assert re.search(r"prefill pool: ready after [\d.]+ s", up.text)
        assert re.search(r"prefill  \d+ ms on prefill-v1", up.text)
        answers = [curl(command, up.port) for command in curls_of_the_readme()]
        assert len(answers) == 4
        assert json.loads(answers[0])["choices"][0]["message"]["role"] == "assistant"
        assert json.loads(answers[1])["ready"] is True
        assert "pd_" in answers[2]
        assert json.loads(answers[3])[0]["outcome"] == "ok"
        left = footprint(up)
        assert up.end(signal.SIGINT) == 0
        nothing_left(up, *left)


def test_with_api_keys_it_still_asks_and_others_need_one(fake: Path, tmp_path: Path) -> None:
    with running(fake, free_port(), tmp_path / "log", PD_SERVE_API_KEYS="team:long-enough-key") as up:
        up.wait_for(r"ready at http://127\.0\.0\.1:\d+", 300)
        assert re.search(r"prefill  \d+ ms on prefill-v1", up.text)
        records = ["curl", f"http://127.0.0.1:{up.port}/pd/records"]
        with pytest.raises(AssertionError, match="401"):
            curl(records, up.port)
        assert curl([*records, "-H", "Authorization: Bearer long-enough-key"], up.port)
        assert "long-enough-key" not in up.text


def test_a_stop_during_the_start_leaves_nothing(fake: Path, tmp_path: Path) -> None:
    with running(fake, free_port(), tmp_path / "log") as up:
        up.wait_for("Ray: ready", 120)
        left = footprint(up)
        assert up.end(signal.SIGTERM) == 130
        nothing_left(up, *left)


def test_an_engine_that_cannot_start_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    file = tmp_path / "x.yaml"
    file.write_text(LOCAL.read_text().replace("path: demo", f"path: {model}"))
    with running(file, free_port(), tmp_path / "log") as up:
        up.wait_for("Ray: ready", 120)
        left = footprint(up)
        assert up.process.wait(300) == 1
        last = up.text.strip().splitlines()[-1]
        assert last.startswith("pd did not start: ")
        assert "Traceback" not in up.text
        nothing_left(up, *left)


def test_the_demo_answers_with_prefill_and_decode_apart(tmp_path: Path) -> None:
    with running(LOCAL, free_port(), tmp_path / "log") as up:
        up.wait_for("ready at", 400)
        text = up.text
        assert "Paris" in text
        assert re.search(r"prefill  \d+ ms on prefill-v1", text)
        assert re.search(r"KV       1\.\d+ MB in \d+ ms", text), "its prompt is longer than one block"
        assert re.search(r"decode   [\d.]+ tokens/s \(\d+ tokens\) on decode-v1", text)
        left = footprint(up)
        assert up.end(signal.SIGINT) == 0
        nothing_left(up, *left)
