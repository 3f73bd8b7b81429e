"""What `pd-serve conformance` sends: fresh prompts at the edges of KV blocks, every way of asking for the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

MAX_TOKENS = (1, 2, 3, 16)
VOCABULARY = range(1000, 40000)
"""Token ids to draw prompts from; clear of the special tokens at either end of usual vocabularies."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request that both servers must answer alike."""

    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    group: int
    """Cases of one group are sent at once; a group of one is sent alone."""

    def body(self, model: str) -> dict[str, object]:
        """Body of a completions request: greedy, with token ids in the answer."""
        body: dict[str, object] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": self.stream,
            "return_token_ids": True,
        }
        return body | ({"stream_options": {"include_usage": True}} if self.stream else {})

    def __str__(self) -> str:
        how = "streamed" if self.stream else "whole"
        return f"{len(self.prompt)} tokens in, at most {self.max_tokens} out, {how}"


def edge_lengths(block_size: int) -> tuple[int, ...]:
    """Prompt lengths in tokens around the edges of KV blocks of `block_size` tokens, and two plain ones."""
    b = block_size
    return (1, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 200, 700)


def block_edge_cases(block_size: int, prompts: int, seed: int, at_once: int = 8) -> list[Case]:
    """`prompts` lengths in turn x MAX_TOKENS x streamed or not x alone or `at_once` together; no prompt twice."""
    rng = random.Random(seed)
    lengths = edge_lengths(block_size)
    plain = [
        (lengths[number % len(lengths)], max_tokens, stream)
        for number in range(prompts)
        for max_tokens in MAX_TOKENS
        for stream in (False, True)
    ]
    alone = [_case(rng, *what, group=number) for number, what in enumerate(plain)]
    rng.shuffle(plain)
    together = [_case(rng, *what, group=len(plain) + number // at_once) for number, what in enumerate(plain)]
    return alone + together


def _case(rng: random.Random, length: int, max_tokens: int, stream: bool, group: int) -> Case:
    prompt = tuple(rng.choice(VOCABULARY) for _ in range(length))
    return Case(prompt=prompt, max_tokens=max_tokens, stream=stream, group=group)


def groups(cases: list[Case]) -> Iterator[list[Case]]:
    """The cases by group, in order."""
    by_group: dict[int, list[Case]] = {}
    for case in cases:
        by_group.setdefault(case.group, []).append(case)
    yield from by_group.values()
