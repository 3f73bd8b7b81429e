"""What is refused, and how: empty prompts, token ids, limits, JSON (cases B26, B36, B37, B38, B40)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.ask import Server, assert_parity, check_error, visible
from tests.api.deployment import Deployment

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def alive_after(demo: Deployment) -> Any:
    """Invariant 10: whatever a test sends, the next plain request works."""
    yield
    answer = demo.server.whole(COMPLETIONS, {"prompt": "One, two,", "max_tokens": 2, "temperature": 0})
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], None])
def test_b36_nothing_to_run_is_refused(prompt: Any, demo: Deployment) -> None:
    check_error(demo.server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}), 400)


def test_b36_empty_chats(demo: Deployment, reference: Server) -> None:
    check_error(demo.server.post(CHAT, {"messages": [], "max_tokens": 2}), 400)
    check_error(demo.server.post(CHAT, {"max_tokens": 2}), 400)
    for content in ("", []):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
        ours, theirs = demo.server.post(CHAT, body), reference.post(CHAT, body)
        assert ours.status_code == theirs.status_code
        if ours.status_code == 200:
            assert visible(ours.json()) == visible(theirs.json())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [-1]},
        {"prompt": [999_999_999]},
        {"prompt": [2**63]},
        {"prompt": [1.5]},
        {"prompt": ["1", 2]},
        {"prompt": [[1], [2, -3]]},
        {"prompt": "a", "logit_bias": {"999999": 1}},
        {"prompt": "a", "logit_bias": {"abc": 1}},
        {"prompt": "a", "stop_token_ids": [999_999], "min_tokens": 1},
        {"prompt": "a", "allowed_token_ids": []},
    ],
)
def test_b37_token_ids_outside_the_vocabulary(fields: dict[str, Any], demo: Deployment, reference: Server) -> None:
    """400 before any engine runs; where vLLM's own server answers, ours gives the same answer."""
    body = {"max_tokens": 2, "temperature": 0, **fields}
    ours, theirs = demo.server.post(COMPLETIONS, body), reference.post(COMPLETIONS, body)
    assert ours.status_code < 500
    if ours.status_code == 200:
        assert theirs.status_code == 200
        assert visible(ours.json()) == visible(theirs.json())
    else:
        check_error(ours, 400)


def test_b37_token_ids_equal_their_text(demo: Deployment) -> None:
    text = "The quick brown fox jumps over the lazy dog, and then it sleeps until the next morning comes around again."
    ids = demo.server.post("/tokenize", {"prompt": text}).json()["tokens"]
    body = {"max_tokens": 8, "temperature": 0}
    by_text = demo.server.whole(COMPLETIONS, {"prompt": text, **body})
    by_ids = demo.server.whole(COMPLETIONS, {"prompt": ids, **body})
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]
    assert by_ids["usage"]["prompt_tokens"] == len(ids) == by_text["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("limit", [0, None, -1, 1.0, "5", 10**12, True])
def test_b38_odd_limits_are_never_a_500_and_equal_vllms_rule(
    path: str, limit: Any, demo: Deployment, reference: Server
) -> None:
    prompt = {"prompt": "One, two,"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {**prompt, "max_tokens": limit, "temperature": 0, "stop": ["\n", "."]}
    ours, theirs = demo.server.post(path, body), reference.post(path, body)
    assert ours.status_code == theirs.status_code < 500
    if ours.status_code == 200:
        assert visible(ours.json()) == visible(theirs.json())
    else:
        check_error(ours, 400)


def test_b38_null_is_absent(demo: Deployment) -> None:
    body = {"prompt": "One, two,", "temperature": 0}
    absent = demo.server.whole(COMPLETIONS, body)
    assert visible(demo.server.whole(COMPLETIONS, {**body, "max_tokens": None})) == visible(absent)


BODIES: dict[str, bytes] = {
    "empty": b"",
    "open brace": b"{",
    "list": b"[]",
    "null": b"null",
    "number": b"123",
    "string": b'"x"',
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "deep": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "utf-16": '{"prompt": '.encode("utf-16"),
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_b40_bodies_that_are_not_json_objects(path: str, name: str, demo: Deployment) -> None:
    response = demo.server.http.post(path, content=BODIES[name], headers={"content-type": "application/json"})
    check_error(response, (400, 413, 415, 422))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/chat/completions", 405),
    ],
)
def test_b40_unknown_paths_and_methods(method: str, path: str, status: int, demo: Deployment) -> None:
    check_error(demo.server.http.request(method, path), status)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_b40_content_types(content_type: str | None, demo: Deployment) -> None:
    body = json.dumps({"model": demo.server.model, "prompt": "One", "max_tokens": 1}).encode()
    headers = {} if content_type is None else {"content-type": content_type}
    request = httpx.Request("POST", f"{demo.server.base_url}{COMPLETIONS}", content=body, headers=headers)
    response = demo.server.http.send(request)
    assert response.status_code in (200, 400, 415, 422), response.text
    if response.status_code != 200:
        check_error(response, response.status_code)


WRONG_TYPES = {
    "prompt": {"a": 1},
    "max_tokens": "many",
    "temperature": "hot",
    "n": "two",
    "stop": 5,
    "stream": "perhaps",
    "logprobs": "all",
    "seed": "x",
    "logit_bias": [1],
    "response_format": "json",
    "stream_options": 3,
}


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_b40_wrong_types(field: str, demo: Deployment) -> None:
    check_error(demo.server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, field: WRONG_TYPES[field]}), 400)


def test_b26_callers_cannot_name_a_hand_off(demo: Deployment, reference: Server) -> None:
    """Invariant 10: nobody outside can make an engine take KV from somewhere."""
    evil = {
        "do_remote_prefill": True,
        "remote_host": "10.0.0.9",
        "remote_port": 1,
        "remote_block_ids": [0, 1, 2],
        "remote_engine_id": "x",
        "pd_serve": {"role": "decode", "handoff": {"id": "stolen"}},
    }
    before = demo.counters()
    body = {"prompt": list(range(3000, 3050)), "max_tokens": 4, "temperature": 0}
    ours = demo.server.post(COMPLETIONS, {**body, "kv_transfer_params": evil})
    if ours.status_code == 200:
        assert visible(ours.json()) == visible(reference.whole(COMPLETIONS, body))
        assert demo.counters()["fallbacks"] == before["fallbacks"]
    else:
        check_error(ours, 400)
    nested = demo.server.post(COMPLETIONS, {**body, "vllm_xargs": {"kv_transfer_params": "x"}})
    assert nested.status_code in (200, 400)
    assert_parity(demo.server, reference, COMPLETIONS, {**body, "prompt": list(range(4000, 4050))})


def test_unknown_models_are_404(demo: Deployment) -> None:
    response = demo.server.http.post(COMPLETIONS, json={"model": "nope", "prompt": "a", "max_tokens": 1})
    error = check_error(response, 404)
    assert "nope" in error["message"]
