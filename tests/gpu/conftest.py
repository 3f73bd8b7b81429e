"""These tests need a GPU: `pytest -m gpu`. They make their own models, and run on one GPU or on two."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.random_model import make_model
from pd_serve.ops.check_host import visible_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not visible_gpus():
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `small` and `small-moe`, with saved weights: two engines that load one agree on it."""
    directory = tmp_path_factory.mktemp("models")
    for shape in ("small", "small-moe"):
        make_model(shape, directory / shape, weights=True)
    return directory


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this module's own, with all GPUs."""
    import ray

    os.environ.setdefault("RAY_worker_niceness", "0")
    directory = tempfile.mkdtemp(prefix="pdr", dir=tempfile.gettempdir())
    ray.init(
        address="local",
        _temp_dir=directory,
        include_dashboard=False,
        num_cpus=8,
        object_store_memory=512 * 2**20,
        log_to_driver=True,
    )
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
