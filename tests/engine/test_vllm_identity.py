from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pd_serve.engine.vllm_identity import identity

ARGUMENTS = {"dtype": "float32", "block_size": 16, "max_num_seqs": 4}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"layers": 2, "transformers_version": "1"}))
    (directory / "tokenizer.json").write_text("{}")
    header = b'{"w":{}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3_000_000))
    return directory


def of(model: Path, version: str = "0.32.0", **changes: object) -> str:
    return identity(str(model), ARGUMENTS | changes, version)


def test_the_same_model_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps({"layers": 2, "transformers_version": "2", "_name_or_path": "x"}))
    (copy / "README.md").write_text("other words")
    assert of(copy) == of(model)
    assert of(model, max_num_seqs=5) == of(model)


@pytest.mark.case("B70")
@pytest.mark.case("B71")
def test_invariant_6_whatever_changes_the_kv_changes_the_identity(model: Path) -> None:
    seen = {of(model), of(model, version="0.26.0"), of(model, dtype="bfloat16"), of(model, block_size=32)}
    seen.add(of(model, tensor_parallel_size=2))
    weights = model / "model.safetensors"
    for offset in (0, 1_500_000, 2_900_000):  # a fine-tuned twin: same names, same shapes, other numbers
        content = bytearray(weights.read_bytes())
        content[16 + offset : 16 + offset + 20_000] = b"\1" * 20_000
        weights.write_bytes(content)
        seen.add(of(model))
    (model / "tokenizer.json").write_text("{ }")
    seen.add(of(model))
    (model / "config.json").write_text(json.dumps({"layers": 3}))
    seen.add(of(model))
    assert len(seen) == 10


def test_a_hub_name_without_files_stands_for_itself() -> None:
    names = {identity(name, ARGUMENTS, "1") for name in ("nobody/nothing-a", "nobody/nothing-b")}
    assert len(names) == 2
