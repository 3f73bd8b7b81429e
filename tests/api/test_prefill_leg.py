"""The caller's fields and the prefill leg (cases B01 to B05 and B08), ours against vLLM's own server."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.api.ask import Server, assert_parity
from tests.api.deployment import Deployment

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_fresh = itertools.count(1)


def words(tokens: int = 40) -> list[int]:
    """A prompt that no cache has seen."""
    rng = random.Random(f"prefill-leg-{next(_fresh)}")
    return [rng.randrange(1000, 40000) for _ in range(tokens)]


def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me about the number {next(_fresh)} and all that it is good for."}]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_b01_min_tokens_stays_on_the_decode_leg(path: str, demo: Deployment, reference: Server) -> None:
    prompt = {"prompt": words()} if path == COMPLETIONS else {"messages": messages()}
    whole, _ = assert_parity(
        demo.server, reference, path, {**prompt, "max_tokens": 20, "min_tokens": 10, "temperature": 0}
    )
    assert whole["usage"]["completion_tokens"] >= 10
    demo.assert_moved(1)


def test_b02_stream_options_do_not_reach_the_prefill_leg(demo: Deployment) -> None:
    body = {"messages": messages(), "max_tokens": 8, "stream_options": {"include_usage": True}}
    before = demo.counters()
    events = demo.server.events(CHAT, body)
    after = demo.counters()
    assert [event["choices"] for event in events if event.get("usage")] == [[]]
    assert after["moved"] - before["moved"] == 1
    assert after["fallbacks"] == before["fallbacks"]


def test_b03_prefill_generates_one_token_whatever_names_the_limit(demo: Deployment, reference: Server) -> None:
    for limits in ({"max_completion_tokens": 24}, {"max_completion_tokens": 24, "max_tokens": 12}):
        body = {"messages": messages(), "temperature": 0, "ignore_eos": True, **limits}
        assert_parity(demo.server, reference, CHAT, body)
        record = demo.records(1)[0]
        assert record["attempts"][-1]["prefill"]["generated_tokens"] == 1


def _first_greedy(reference: Server, prompt: list[int]) -> tuple[int, str]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    choice = reference.whole(COMPLETIONS, body)["choices"][0]
    return choice["token_ids"][0], choice["text"]


@pytest.mark.parametrize("kind", ["ignore_eos", "min_tokens", "stop", "stop_token_ids", "eos_first"])
def test_b04_prefills_own_token_never_ends_the_request(
    kind: str, demo: Deployment, reference: Server, eos_token_id: int
) -> None:
    """Invariant 3: prefill's stop or end-of-text is not the answer."""
    prompt = words()
    token, text = _first_greedy(reference, prompt)
    force_eos = {"logit_bias": {str(eos_token_id): 100}, "max_tokens": 5}
    more = {
        "ignore_eos": {**force_eos, "ignore_eos": True},
        "min_tokens": {**force_eos, "min_tokens": 5},
        "stop": {"stop": [text], "max_tokens": 5},
        "stop_token_ids": {"stop_token_ids": [token], "max_tokens": 5},
        "eos_first": force_eos,
    }[kind]
    whole, _ = assert_parity(demo.server, reference, COMPLETIONS, {"prompt": prompt, "temperature": 0, **more})
    choice = whole["choices"][0]
    if kind in ("ignore_eos", "min_tokens"):
        assert whole["usage"]["completion_tokens"] == 5
    else:
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    demo.assert_quiet()


def test_b05_kv_really_moves(demo: Deployment, kv_bytes_per_token: int) -> None:
    """Twenty fresh prompts of 200 tokens: all moved, bytes as computed by hand, decode computes next to nothing."""
    before = demo.counters()
    for _ in range(20):
        demo.server.whole(COMPLETIONS, {"prompt": words(200), "max_tokens": 2, "temperature": 0})
    after = demo.counters()
    assert after["moved"] - before["moved"] == 20
    assert after["fallbacks"] == before["fallbacks"]
    block = demo.block_size
    blocks = -(-199 // block)  # all that a prompt of 200 tokens needs but, perhaps, the block of its last token
    assert 20 * blocks * block * kv_bytes_per_token == after["kv_bytes"] - before["kv_bytes"]
    for record in demo.records(20):
        assert record["cached_tokens"] == 0
        assert record["attempts"][-1]["prefill"]["computed_tokens"] >= 199


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16])
def test_b08_no_token_is_lost_or_doubled_at_the_seam(max_tokens: int, demo: Deployment, reference: Server) -> None:
    """Invariant 3."""
    block = demo.block_size
    for tokens in (1, 2, block - 1, block, block + 1, 3 * block):
        body = {"prompt": words(tokens), "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        whole, streamed = assert_parity(demo.server, reference, COMPLETIONS, body)
        choice = whole["choices"][0]
        assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
        assert choice["token_ids"] == streamed[0]["token_ids"]
        assert choice["text"] == streamed[0]["text"]
