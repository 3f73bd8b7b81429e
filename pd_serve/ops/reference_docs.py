"""docs/metrics.md and docs/errors.md, made from the tables in the code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from pd_serve import errors
from pd_serve.observe.metrics import MAX_LABEL_VALUES, METRICS, REPLICA_COUNTS, REPLICA_GAUGES, Metric

_METRICS_HEAD = f"""\
# Metrics

<!-- Made from pd_serve/observe/metrics.py by `pd-serve reference-docs`. Do not edit. -->

Every ingress replica answers `/metrics` with its own numbers, beside those of vLLM's HTTP application. A label has at
most {MAX_LABEL_VALUES} values; further ones are counted as `other`. Times are seconds.
"""

_ERRORS_HEAD = """\
# Errors

<!-- Made from pd_serve/errors.py by `pd-serve reference-docs`. Do not edit. -->

Every error leaves in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, whether it was streamed or not.
Once the first token is out, it is one event in the stream. `code` is the HTTP status where the table has none. What
vLLM's application refuses itself keeps vLLM's own words in the same shape.

| error | HTTP | type | code | |
|---|---|---|---|---|
"""

_ACCESS = """
Who may not ask is answered before the request is read (`gateway/access.py`): 401 `invalid_api_key`; 403 `no_api_keys`
when the server has none and is reachable from other machines; 403 `operator_only` for `/pd/replicas` with the key of
another tenant.
"""


def pages() -> dict[str, str]:
    """The pages by file name, as Markdown."""
    return {"metrics.md": metrics_page(), "errors.md": errors_page()}


def metrics_page() -> str:
    """Every metric with its kind, labels and meaning."""
    sections = [
        _METRICS_HEAD,
        "## Counted by an ingress\n\n" + _table(METRICS, "pd_"),
        "## Read off an ingress's view of its replicas\n\n" + _table(REPLICA_GAUGES, "pd_"),
        "## Counted by each replica\n\nIn the replica's own process; its method `stats` says them, and they are not in "
        "`/metrics`.\n\n" + _table(REPLICA_COUNTS, ""),
    ]
    return "\n".join(sections)


def _table(metrics: Mapping[str, Metric], prefix: str) -> str:
    rows = ["| name | kind | labels | |", "|---|---|---|---|"]
    for name, metric in metrics.items():
        exported = f"{prefix}{name}_total" if prefix and metric.kind == "counter" else f"{prefix}{name}"
        rows.append(f"| `{exported}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |")
    return "\n".join(rows) + "\n"


def errors_page() -> str:
    """Every typed error with its line of the HTTP table."""
    rows = []
    for name, status, kind, code in errors.http_table():
        meaning = " ".join((inspect.getdoc(vars(errors)[name]) or "").split())
        rows.append(f"| {name} | {status} | `{kind}` | {f'`{code}`' if code else ''} | {meaning} |\n")
    return _ERRORS_HEAD + "".join(rows) + _ACCESS
