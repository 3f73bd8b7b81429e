from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The engines of `pair` are shared: tests that kill them come last of those in this directory."""
    places = [place for place, item in enumerate(items) if "tests/engine/" in item.nodeid]
    ours = sorted((items[place] for place in places), key=lambda item: "test_vllm_deaths" in item.nodeid)
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of these tests' own, gone before others start theirs."""
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


@pytest.fixture(scope="package")
def pair(ray_cluster: None) -> Iterator[object]:
    """One prefill and one decode engine for all tests here: starting them is what costs."""
    from tests.engine.vllm_pair import Pair

    pair = Pair()
    yield pair
    pair.close()
