"""The application on a private Ray, with fake engines: once behind HAProxy, once behind Ray Serve's own proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_serve.model_dir import demo_dir
from tests.serve.running import Running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="the demo model is not there: run `pd-serve model fetch`")
    for item in items:
        in_here = item.path.is_relative_to(Path(__file__).parent)
        if in_here and "running" in getattr(item, "fixturenames", ()) and not demo_dir().is_dir():
            item.add_marker(missing)


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """The application that the module's `ARGS` describe; `HAPROXY` says what stands in front of it."""
    with Running(request.module.ARGS, haproxy=request.module.HAPROXY) as running:
        running.wait_ready(120)
        yield running
