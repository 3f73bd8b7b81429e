"""What is known of one kind of engine: how long its steps take, what it holds, how long it needs to start."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from pd_serve.errors import ConfigError


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one engine step, as a sum (see `step_s`). All terms are at least 0."""

    prefill_base_s: float
    """Of a step that computes prompt tokens, whatever their number."""
    prefill_token_s: float
    """For each prompt token in the step."""
    prefill_attention_s: float
    """For each pair of a prompt token in the step and a token before it."""
    decode_base_s: float
    """Of a step that generates, whatever its batch."""
    decode_sequence_s: float
    """For each sequence that generates."""
    decode_context_s: float
    """For each token of KV that the generating sequences read."""


class Overheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request costs outside of engine steps."""

    ingress_s: float = 0.0
    """From the arrival of a request until it is planned: HTTP, template, tokenizing."""
    prefill_leg_s: float = 0.0
    """From the arrival of a prefill leg at its replica until the engine has it."""
    decode_leg_s: float = 0.0
    """The same for a decode leg."""
    handoff_s: float = 0.0
    """Of one hand-off, whatever its size."""
    handoff_byte_s: float = 0.0
    """For each byte of it: gathering and scattering together; the link is apart."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of engine on one kind of machine, holding one model."""

    name: str
    hardware: str
    model: str
    measured: dict[str, str]
    """How each number came to be, by its name."""
    steps: StepTimes
    block_size: int
    kv_tokens: int
    """Tokens of KV that one engine holds."""
    kv_bytes_per_token: int
    start_s: float
    """From the decision to start a replica until its engine is there."""
    warmup_s: float
    """From then until it takes requests."""
    overheads: Overheads = Overheads()


def step_s(times: StepTimes, prompt_tokens: int, attention: float, sequences: int, context: int) -> float:
    """Seconds of one step.

    Args:
        prompt_tokens: prompt tokens that it computes.
        attention: pairs of those with the tokens before them (see `attention_pairs`).
        sequences: sequences that generate one token each.
        context: tokens of KV that these sequences have.
    """
    base = times.prefill_base_s if prompt_tokens else 0.0
    if sequences and times.decode_base_s > base:
        base = times.decode_base_s  # one pass over the weights serves both
    return (
        base
        + times.prefill_token_s * prompt_tokens
        + times.prefill_attention_s * attention
        + times.decode_sequence_s * sequences
        + times.decode_context_s * context
    )


def attention_pairs(context: int, tokens: int) -> float:
    """Pairs of each of `tokens` new tokens with those before it, `context` of which are there already."""
    return tokens * (context + tokens / 2)


def load_profile(name: str) -> Profile:
    """The profile in the file `name`, or the one that ships under that name.

    Raises:
        ConfigError: there is no such profile, or it is not one.
    """
    try:
        return msgspec.json.decode(_read(name), type=Profile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"profile {name}: {error}") from error


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    files = resources.files("pd_serve.sim").joinpath("profiles").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def _read(name: str) -> bytes:
    if name in shipped_profiles():
        return resources.files("pd_serve.sim").joinpath("profiles", f"{name}.json").read_bytes()
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no profile {name}; shipped are {', '.join(shipped_profiles())}")
    return path.read_bytes()
