"""docs/metrics.md and docs/errors.md are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.errors import http_table
from pd_serve.observe.metrics import METRICS, REPLICA_COUNTS, REPLICA_GAUGES
from pd_serve.ops.reference_docs import errors_page, metrics_page, pages


@pytest.mark.parametrize("name", ["metrics.md", "errors.md"])
def test_the_page_is_current(name: str) -> None:
    assert Path("docs", name).read_text(encoding="utf-8") == pages()[name], "run `make docs`"


def test_every_row_has_a_sentence() -> None:
    rows = [line for page in pages().values() for line in page.splitlines() if line.startswith("| ")]
    tables = [METRICS, REPLICA_GAUGES, REPLICA_COUNTS, http_table()]
    assert len(rows) == sum(len(table) + 1 for table in tables)
    for row in rows:
        if not row.startswith(("| name", "| error")):
            assert row.rstrip("| ").endswith("."), row


def test_names_are_those_that_are_exported() -> None:
    assert "| `pd_fallbacks_total` | counter | reason |" in metrics_page()
    assert "| `pd_ttft_seconds` | histogram |" in metrics_page()
    assert "| Overloaded | 429 | `rate_limit_error` | `overloaded` |" in errors_page()
