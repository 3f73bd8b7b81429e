"""What every test shares. Pure tests import neither Ray nor vLLM, and neither does this file."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import settings

# A busy machine is no finding.
settings.register_profile("pd_serve", deadline=None, max_examples=100)
settings.load_profile("pd_serve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that is named after a public failure case is one of it."""
    for item in items:
        for case in cases_in(item.name):
            item.add_marker(pytest.mark.case(case))


def cases_in(name: str) -> list[str]:
    """The cases that a test's name carries: `test_b16_b17_kv_is_lost[x]` is a test of B16 and B17."""
    return [case.upper() for case in re.findall(r"(?<=_)b\d\d(?=_)", name.partition("[")[0])]


@pytest.fixture
def full_length() -> bool:
    """Whether cases run at the length that their description gives, or short."""
    return os.environ.get("PD_SERVE_CASES") == "full"
