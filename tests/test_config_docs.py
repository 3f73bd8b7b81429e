"""docs/config.md is what the types say, and the names it points to exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve import compat_args
from pd_serve.config import AppConfig
from pd_serve.config_docs import _OTHER_NAMES, render
from pd_serve.config_mistakes import model_at


def test_the_page_is_current() -> None:
    assert Path("docs/config.md").read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_key_stands_on_the_page_with_a_sentence() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    for row in rows[: -len(_OTHER_NAMES)]:
        assert row.rstrip(" |").count("|") >= 4, f"no sentence: {row}"


@pytest.mark.parametrize("key", sorted({key for _, ours, _ in _OTHER_NAMES for key in ours.split(", ")}))
def test_names_that_other_guides_use_lead_to_keys_that_exist(key: str) -> None:
    parts = key.split(".")
    for place, part in enumerate(parts):
        model = model_at(AppConfig, tuple(parts[:place]))
        if model is None:  # below engine_args or env, which are open
            break
        assert part in model.model_fields, key
    if "engine_args" in parts:
        known = compat_args.engine_arguments()
        assert known is None or parts[parts.index("engine_args") + 1] in known
