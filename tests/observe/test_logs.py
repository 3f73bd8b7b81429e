"""Structured logs: one line of JSON for each finished record, with the path's decisions and never a word of content."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest

from pd_serve.observe.logs import log_record, log_through
from pd_serve.path.record import Record
from pd_serve.types import ChoiceDelta, Delta, KvOutcome, KvReport, Plan, Request

SECRET = "the-answer"


def finished(kv: KvReport, outcome: str = "ok") -> Record:
    record = Record.open(Request(id="cmpl-7", prompt_token_ids=(31337,) * 20, max_tokens=4, tenant="team-a"))
    record.admitted_at = 0.001
    record.attempt(Plan(decode="d1", prefill="p1", reason="least_loaded", scores={"d1": 0.5}))
    record.add(Delta("cmpl-7", (ChoiceDelta(0, SECRET, (4242,), "length"),), finished=True, kv=kv))
    record.close(outcome)  # type: ignore[arg-type]
    return record


def test_a_line_says_who_where_why_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pd_serve.records")
    log_record(finished(KvReport(outcome=KvOutcome.MOVED, bytes=640, copy_s=0.01)))
    (logged,) = caplog.records
    assert (logged.name, logged.levelname) == ("pd_serve.records", "INFO")
    assert "\n" not in logged.getMessage()
    line = json.loads(logged.getMessage())
    assert (line["event"], line["id"], line["tenant"], line["outcome"]) == ("request", "cmpl-7", "team-a", "ok")
    assert line["attempts"][0]["decode_replica"] == "d1"
    assert line["attempts"][0]["prefill_replica"] == "p1"
    assert line["attempts"][0]["reason"] == "least_loaded"
    assert (line["kv"]["bytes"], line["kv"]["copy_s"]) == (640, 0.01)
    assert line["first_token_at"] <= line["finished_at"]
    assert line["fallbacks"] == []


def test_b05_a_fallback_is_a_warning_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pd_serve.records")
    log_record(finished(KvReport(outcome=KvOutcome.RECOMPUTED, reason="checksum")))
    (logged,) = caplog.records
    assert logged.levelname == "WARNING"
    assert json.loads(logged.getMessage())["fallbacks"] == ["checksum"]


def test_content_is_in_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for outcome in ("ok", "failed", "cancelled", "shed"):
        log_record(finished(KvReport(outcome=KvOutcome.MOVED), outcome))
    assert len(caplog.records) == 4
    for forbidden in (SECRET, "31337", "4242"):
        assert forbidden not in caplog.text


def test_lines_go_where_the_replica_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pd_serve"), "parent", logging.root)
    host, lines = logging.getLogger("some.host"), list[str]()
    host.setLevel(logging.INFO)
    log_through("some.host")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    host.addHandler(handler)  # after `log_through`, as when Ray Serve configures its logger anew
    log_record(finished(KvReport(outcome=KvOutcome.MOVED)))
    assert [msgspec.json.decode(line)["id"] for line in lines] == ["cmpl-7"]
