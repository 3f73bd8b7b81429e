"""The whole application behind HAProxy with direct ingress, on fake engines: answers, errors, and replicas that die."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.running import MODEL, Running, events, fake_args, text_of

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

HAPROXY = True
ARGS = fake_args(
    decode={"replicas": 2},
    limits={
        "max_running": 12,
        "max_queue": 4,
        "max_body_bytes": 100_000,
        "total_timeout_s": 60.0,
        "first_token_timeout_s": 30.0,
    },
)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer in OpenAI's shape; nothing of the machine shows in it."""
    assert response.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    assert "/home" not in response.text
    return error


# ------------------------------------------------------------------------------------------------ answers


def test_completions_streamed_or_not(running: Running) -> None:
    whole = running.complete(max_tokens=12)
    assert whole.status_code == 200
    assert whole.json()["usage"]["completion_tokens"] == 12
    with running.streaming(max_tokens=12) as (response, stream):
        assert response.status_code == 200
        assert text_of(stream) == whole.json()["choices"][0]["text"]


def test_chat_streamed_or_not(running: Running) -> None:
    whole = running.chat(temperature=0).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    streamed = running.chat(temperature=0, stream=True, stream_options={"include_usage": True})
    *chunks, last, done = streamed.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    usage = json.loads(last.removeprefix("data: "))["usage"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == whole["usage"][count]
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]


def test_events_come_as_they_are_made(running: Running) -> None:
    with running.streaming(max_tokens=100) as (_, stream):
        moments = [time.monotonic() for _ in stream]
    assert len(moments) > 50  # not a few large ones
    assert moments[len(moments) // 2] - moments[0] > 0.2  # 100 steps of 10 ms


def test_the_record_says_where_the_time_went(running: Running) -> None:
    running.complete(
        "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen ok"
    )
    (record,) = running.records()
    assert record["outcome"] == "ok"
    assert record["kv_outcome"] == "moved"
    assert record["kv_bytes"] > 0
    assert record["output_tokens"] == 8
    assert record["prefill_replica"].startswith("prefill-v1#")
    assert record["decode_replica"].startswith("decode-v1#")
    assert 0 < record["prefill_s"] <= record["ttft_s"]
    assert record["decode_s"] > 0


def test_ready_and_alive(running: Running) -> None:
    assert running.http.get("/livez").status_code == 200
    assert running.http.get("/health").status_code == 200
    assert running.http.get("/readyz").json() == {"ready": True, "pools": {"prefill": "ready", "decode": "ready"}}


def test_metrics_are_beside_vllms(running: Running) -> None:
    running.complete()
    lines = running.http.get("/metrics").text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if line.startswith("pd_"))
    assert float(samples['pd_requests_total{outcome="ok"}']) >= 1
    assert float(samples['pd_replicas{role="decode",state="ready"}']) == 2
    assert any(line.startswith("http_requests_total") for line in lines)


def test_each_request_is_a_line_of_the_ingress_log(running: Running) -> None:
    answered = running.complete("a word that no log may hold: " + "xyzzy " * 20).json()["id"]

    def lines() -> list[str]:
        return [line for line in running.replica_logs("ingress") if f'"id":"{answered}' in line]

    running.until(lines, 10)
    (line,) = lines()
    found = json.loads(line[line.index("{") :])
    assert (found["event"], found["outcome"], found["output_tokens"]) == ("request", "ok", 8)
    assert found["attempts"][0]["reason"]
    assert not [line for line in running.replica_logs("ingress") if "xyzzy" in line]


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status"),
    [({"temperature": -1}, 400), ({"logit_bias": {"999999": 1}}, 400), ({"prompt": [1] * 3000}, 400)],
)
def test_a_bad_request_is_a_plain_4xx(running: Running, fields: dict[str, Any], status: int, stream: bool) -> None:
    response = running.complete(**{"stream": stream, **fields})
    assert response.status_code == status
    assert error_of(response)["code"] == status


def test_what_does_not_exist_is_404_in_the_same_shape(running: Running) -> None:
    assert error_of(running.http.get("/v1/nothing"))["code"] == 404
    assert error_of(running.http.get("/v1/completions"))["code"] == 405
    assert error_of(running.complete(model="other"))["code"] == 404


def test_a_body_that_is_too_large_is_413(running: Running) -> None:
    assert error_of(running.complete("x" * 200_000))["code"] == "request_too_large"
    chunks = (b"x" * 50_000 for _ in range(4))
    response = running.http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert response.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_requests_are_429_and_say_when_to_come_back(running: Running, stream: bool) -> None:
    def ask(_: int) -> httpx.Response:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        return httpx.post(running.http.base_url.join("/v1/completions"), json=body, timeout=60)

    with ThreadPoolExecutor(30) as pool:
        responses = list(pool.map(ask, range(30)))
    refused = [response for response in responses if response.status_code != 200]
    assert len(responses) - len(refused) >= 16  # those that ran and those that waited
    assert refused
    for response in refused:
        assert response.status_code == 429
        assert error_of(response)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1


# ------------------------------------------------------------------------------------------------ leaving


def leave_early(running: Running, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=running.http.base_url) as client, pytest.raises(httpx.ReadTimeout):
        if stream:
            with client.stream("POST", "/v1/completions", json=body, timeout=10) as response:
                for number, _ in enumerate(events(response)):
                    if number == 5:
                        raise httpx.ReadTimeout("enough")
        else:
            client.post("/v1/completions", json=body, timeout=0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(running: Running, stream: bool) -> None:
    leave_early(running, stream)
    running.until(lambda: running.records()[0]["outcome"] == "cancelled", 5)
    running.until(lambda: running.busy() == 0, 5)


# ------------------------------------------------------------------------------------------------ dying


def test_a_decode_replica_that_dies_takes_down_only_what_it_streamed(running: Running) -> None:
    ends: list[str] = []

    def stream() -> None:
        with running.streaming(max_tokens=300, ignore_eos=True) as (_, stream):
            found = list(stream)
        ends.append("ok" if "error" not in found[-2] else json.loads(found[-2])["error"]["code"])
        assert found[-1] == "[DONE]"

    threads = [threading.Thread(target=stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    running.until(lambda: sum(replica["stats"]["running"] for replica in running.replicas("decode")) == 6, 10)
    running.kill("decode-v1")
    for thread in threads:
        thread.join(20)
    assert sorted(set(ends)) == ["ok", "replica_lost"]
    assert len(ends) == 6
    assert running.complete().status_code == 200  # the other one serves on
    running.until(lambda: running.count_ready("decode") == 2, 90)
    assert running.complete().status_code == 200


def test_without_prefill_replicas_prompts_are_computed_where_they_decode(running: Running) -> None:
    running.until(lambda: running.count_ready("prefill") == 1, 30)
    running.kill("prefill-v1")
    running.until(lambda: running.http.get("/readyz").status_code == 503, 10)
    assert running.http.get("/readyz").json()["pools"]["prefill"] != "ready"
    assert running.http.get("/readyz").json()["pools"]["decode"] == "ready"
    assert running.complete().status_code == 200
    (record,) = running.records()
    assert record["attempts"][-1]["reason"] == "no_prefill_replica"
    running.until(lambda: running.http.get("/readyz").status_code == 200, 90)
    assert running.complete("a prompt that nobody has seen before " * 8).status_code == 200
    assert running.records()[0]["kv_outcome"] == "moved"


def test_what_runs_is_finished_before_the_application_is_gone(running: Running) -> None:
    finished: list[str] = []

    def stream() -> None:
        with running.streaming(max_tokens=400, ignore_eos=True) as (_, stream):
            finished.append(text_of(stream))

    thread = threading.Thread(target=stream)
    thread.start()
    running.until(lambda: sum(replica["stats"]["running"] for replica in running.replicas("decode")) == 1, 10)
    running.stop()
    thread.join(20)
    assert len(finished) == 1
