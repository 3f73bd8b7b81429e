from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The engines of `pair` are shared: tests that kill them come last."""
    items.sort(key=lambda item: "test_vllm_deaths" in item.nodeid)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this test session's own."""
    import ray

    os.environ.setdefault("RAY_worker_niceness", "0")
    directory = tempfile.mkdtemp(prefix="pdr", dir=tempfile.gettempdir())
    ray.init(
        address="local",
        _temp_dir=directory,
        include_dashboard=False,
        num_cpus=4,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def pair(ray_cluster: None) -> Iterator[object]:
    """One prefill and one decode engine for the whole session: starting them is what costs."""
    from tests.engine.vllm_pair import Pair

    pair = Pair()
    yield pair
    pair.close()
