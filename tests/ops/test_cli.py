"""The command line: help worth reading, fast, and mistakes in one or two lines with the right exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from pd_serve.cli import app


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pd_serve.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**env, "PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "TERM": "dumb"},
    )


def commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [(name, below) for below in inner] if inner else [(name,)]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_each_command_says_what_it_does_and_gives_an_example(command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert f"Example: pd-serve {' '.join(command)}" in re.sub(r"\s+", " ", done.stdout)


def test_help_and_the_check_of_a_small_mistake_import_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from pd_serve.cli import app;"
        "CliRunner().invoke(app, ['--help']); import pd_serve.config_file, pd_serve.ops.check;"
        "print([name for name in ('ray', 'vllm', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_mistake_in_the_config_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(Path("configs/local.yaml").read_text().replace("max_num_seqs: 16\n", "max_num_seq: 16\n", 1))
    for command in ("check", "up"):
        done = run(command, str(file))
        assert done.returncode == 2
        assert done.stdout == ""
        assert re.fullmatch(
            r".*x\.yaml:\d+: prefill\.max_num_seq: unknown key; did you mean max_num_seqs\?\n", done.stderr
        )


def test_the_same_exit_code_for_a_file_that_is_not_there() -> None:
    done = run("check", "nothing.yaml")
    assert (done.returncode, done.stderr) == (2, "nothing.yaml: cannot be read: No such file or directory\n")


def test_a_missing_model_directory_stops_up_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(Path("configs/local.yaml").read_text().replace("path: demo", "path: /no/such/model"))
    done = run("up", str(file), "--port", "18999")
    assert done.returncode == 2
    assert re.fullmatch(r".*x\.yaml:\d+: model\.path: '/no/such/model' is not at .*: no such directory\n", done.stderr)


def test_up_refuses_what_this_machine_cannot_hold(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(Path("configs/local.yaml").read_text().replace("num_cpus: 0.8", "num_cpus: 640", 1))
    done = run("up", str(file), "--port", "18999")
    assert done.returncode == 2
    assert re.fullmatch(r".*prefill\.num_cpus: each replica needs 640 CPUs; the largest node has \d+\n", done.stderr)


def test_a_cluster_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    done = run("check", "configs/local.yaml", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("no Ray cluster at 127.0.0.1:1")


def test_version_names_what_is_installed() -> None:
    lines = dict(line.split(" ", 1) for line in run("version").stdout.splitlines())
    assert {"pd_serve", "python", "ray", "torch"} <= set(lines)
    assert lines["python"].startswith("3.11")
