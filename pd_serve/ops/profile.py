"""`pd-serve profile`: measures how long an engine's steps take, and makes a profile for the simulator of it.

The engine runs alone in this process, without Ray and without a hand-off, and is asked through the same seam as in a
deployment. Steps are measured from outside: a prompt's step is the time to its only token, a decode step is the gap
between two tokens while all sequences of the batch generate.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from pd_serve.config import AppConfig
from pd_serve.config_file import load_config
from pd_serve.engine.base import Engine, EngineDescription
from pd_serve.errors import ConfigError
from pd_serve.model_dir import resolve_model
from pd_serve.ops.check_model import text_part
from pd_serve.sim.fit import Fit, MeasuredStep, fit_steps, predicted
from pd_serve.sim.profile import Overheads, Profile
from pd_serve.types import Request, Role

VOCABULARY = 1000
"""Token ids below this are in every model's vocabulary and are not special ones of ours."""
FIRST_TOKEN_ID = 100
Progress = Callable[[str], None]


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    prompts: tuple[int, ...]
    """Lengths of prompts of which nothing is cached; none longer than one step computes."""
    prefixes: tuple[int, ...]
    """Cached tokens in front of prompts, to tell attention from the rest."""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Prompt lengths of the sequences that generate."""
    repeats: int = 3
    steps: int = 24
    """Decode steps of a batch that are looked at."""


def shapes_for(described: EngineDescription, max_num_batched_tokens: int) -> Shapes:
    """Shapes that the engine can hold, four to five of each kind."""
    longest = min(described.max_model_len - 64, described.kv_tokens_total // 2)
    step = min(longest, max_num_batched_tokens)
    batches = tuple(batch for batch in (1, 4, 16, 64, 256) if batch <= described.max_num_seqs)
    contexts = tuple(max(longest * share // 64, 8) for share in (1, 8, 24, 48))
    return Shapes(
        prompts=tuple(sorted({max(step * share // 16, 2) for share in (1, 2, 4, 8, 16)})),
        prefixes=(longest // 2 // described.block_size * described.block_size,),
        batches=batches,
        contexts=tuple(sorted(set(contexts))),
    )


async def measure(
    engine: Engine, described: EngineDescription, shapes: Shapes, rng: random.Random, say: Progress
) -> list[MeasuredStep]:
    """Measured steps of a started engine that nobody else uses."""
    ask = _Asker(engine, rng)
    await ask.prompt(shapes.prompts[0])  # the first request of a life is slower
    rows: list[MeasuredStep] = []
    for prefix, length in itertools.product((0, *shapes.prefixes), shapes.prompts):
        if prefix + length < described.max_model_len:
            rows.append(await _prompt_step(ask, prefix, length, shapes.repeats))
            say(f"prompt of {rows[-1].tokens} after {rows[-1].context}: {1000 * rows[-1].seconds:.1f} ms")
    for batch, context in itertools.product(shapes.batches, shapes.contexts):
        if batch * (context + shapes.steps + batch) <= described.kv_tokens_total:
            rows.append(await _decode_step(ask, batch, context, shapes.steps))
            say(f"{batch} sequences with {rows[-1].context} tokens of KV: {1000 * rows[-1].seconds:.2f} ms")
    return rows


async def _prompt_step(ask: _Asker, prefix: int, length: int, repeats: int) -> MeasuredStep:
    """The median of some prompts of this length behind a cached prefix."""
    measured = []
    for _ in range(repeats):
        cached = ask.tokens(prefix)
        if prefix:
            await ask.one((*cached, *ask.tokens(1)), 1)
        measured.append(await ask.one((*cached, *ask.tokens(length)), 1))
    hits = {answer.cached for answer in measured}
    found = min(hits)
    seconds = statistics.median(answer.moments[0] - answer.asked for answer in measured if answer.cached == found)
    return MeasuredStep(tokens=prefix + length - found, batch=1, context=found, seconds=seconds)


async def _decode_step(ask: _Asker, batch: int, context: int, steps: int) -> MeasuredStep:
    """The median gap between tokens while all sequences of the batch generate."""
    output = steps + 2 * batch + 2  # while the last prompt is computed, the first sequences generate already
    answers = await asyncio.gather(*(ask.one(ask.tokens(context), output) for _ in range(batch)))
    begins, ends = max(answer.moments[0] for answer in answers), min(answer.moments[-1] for answer in answers)
    gaps, generated = [], []
    for answer in answers:
        for number, (before, after) in enumerate(itertools.pairwise(answer.moments), 1):
            if begins <= before and after <= ends:
                gaps.append(after - before)
                generated.append(number)
    if not gaps:
        raise ConfigError(f"{batch} sequences of {context} tokens never generated together")
    mean = round(statistics.mean(generated))
    return MeasuredStep(tokens=0, batch=batch, context=batch * (context + mean), seconds=statistics.median(gaps))


class _Answer:
    """One request as it was seen."""

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.moments: list[float] = []
        """When each token came."""
        self.cached = 0


class _Asker:
    """Sends prompts of random tokens, which nothing is cached of unless it was sent before."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng
        self._numbers = itertools.count()

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(count))

    async def prompt(self, length: int) -> None:
        await self.one(self.tokens(length), 2)

    async def one(self, prompt: tuple[int, ...], output: int) -> _Answer:
        sampling = {"max_tokens": output, "ignore_eos": True, "temperature": 0.0, "detokenize": False}
        request = Request(
            id=f"profile-{next(self._numbers)}",
            prompt_token_ids=prompt,
            max_tokens=output,
            sampling=msgspec.msgpack.encode(sampling),
        )
        answer = _Answer(time.monotonic())
        deltas = self._engine.decode(request)
        async with aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                now = time.monotonic()
                answer.moments.extend(now for choice in delta.choices for _ in choice.token_ids)
                answer.cached = max(answer.cached, delta.cached_tokens or 0)
        return answer


# ------------------------------------------------------------------------------------ a profile of it


def profile(config: str, role: Role, name: str, hardware: str, output: Path, seed: int, say: Progress) -> Profile:
    """Measure the engine of one pool of the config, and write its profile.

    Raises:
        ConfigError: the config is wrong, or the model's shape is not known.
        EngineFailed: the engine does not start, or fails.
    """
    app = load_config(config)
    kv_bytes = kv_bytes_per_token(app)
    measured = asyncio.run(measure_engine(app, role, random.Random(seed), say))
    for line in table(measured.rows, measured.fit):
        say(line)
    model = f"{app.model.served_name}, {app.model.dtype}, TP {app.pools[role.value].tensor_parallel_size}"
    found = make_profile(name, hardware, model, kv_bytes, measured)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return found


def kv_bytes_per_token(config: AppConfig) -> int:
    """Bytes of one token's keys and values in all layers, from the model's config.json.

    Raises:
        ConfigError: it is not there, or describes another kind of attention.
    """
    try:
        shape = text_part(json.loads((Path(resolve_model(config.model.path)) / "config.json").read_text("utf-8")))
        heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        size = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        layers = shape["num_hidden_layers"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: its config.json does not give the size of its KV: {error}") from error
    kind = config.model.kv_cache_dtype if config.model.kv_cache_dtype != "auto" else config.model.dtype
    kind = str(shape.get("dtype") or shape.get("torch_dtype") or "bfloat16") if kind == "auto" else kind
    return int(2 * layers * heads * size * (4 if kind == "float32" else 1 if kind.startswith("fp8") else 2))


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found about one engine."""

    described: EngineDescription
    rows: list[MeasuredStep]
    fit: Fit
    start_s: float
    warmup_s: float


async def measure_engine(config: AppConfig, role: Role, rng: random.Random, say: Progress) -> Measured:
    """Start the engine of one pool, measure it, and end it.

    Raises:
        EngineFailed: it does not start, or fails.
        ConfigError: its steps cannot be told apart.
    """
    pool = config.pools[role.value]
    alone = config.model_copy(update={"prefill": None, "decode": pool})
    engine = _engine(alone)
    began = time.monotonic()
    say("starting the engine")
    described = await engine.start()
    try:
        started = time.monotonic()
        await _Asker(engine, rng).prompt(16)
        warm = time.monotonic()
        rows = await measure(engine, described, shapes_for(described, pool.max_num_batched_tokens), rng, say)
    finally:
        await engine.close()
    return Measured(
        described=described, rows=rows, fit=fit_steps(rows), start_s=started - began, warmup_s=warm - started
    )


def _engine(config: AppConfig) -> Engine:
    if config.engine == "fake":
        raise ConfigError("the fake engine's times are in the config; there is nothing to measure")
    from pd_serve.engine.vllm import VllmEngine

    return VllmEngine(config, Role.DECODE, ray_address="")


def make_profile(name: str, hardware: str, model: str, kv_bytes_per_token: int, measured: Measured) -> Profile:
    """A profile with no costs but those of the engine: what the path and hand-offs cost is measured on a deployment."""
    fit, rows = measured.fit, measured.rows
    prompts, decodes = sum(row.tokens > 0 for row in rows), sum(row.tokens == 0 for row in rows)
    least = "least squares on relative errors"
    how = {
        "prefill_base_s, prefill_token_s, prefill_attention_s": f"{prompts} prompt steps, the engine alone: {least},"
        f" {fit.prefill_error:.1%} root mean square, {fit.prefill_worst:.1%} at worst.",
        "decode_base_s, decode_sequence_s, decode_context_s": f"{decodes} batches, the engine alone: {least},"
        f" {fit.decode_error:.1%} root mean square, {fit.decode_worst:.1%} at worst.",
        "kv_tokens": "As the engine reported.",
        "kv_bytes_per_token": "From the model's shape.",
        "start_s, warmup_s": "One start; the first request.",
        "ingress_s, prefill_leg_s, decode_leg_s, handoff_s, handoff_byte_s": "Not measured: 0.",
    }
    return Profile(
        name=name,
        hardware=hardware,
        model=model,
        measured=how,
        steps=fit.steps,
        block_size=measured.described.block_size,
        kv_tokens=measured.described.kv_tokens_total,
        kv_bytes_per_token=kv_bytes_per_token,
        start_s=measured.start_s,
        warmup_s=measured.warmup_s,
        overheads=Overheads(),
    )


def table(rows: Sequence[MeasuredStep], fit: Fit) -> list[str]:
    """Measured and fitted times, one line a step."""
    lines = []
    for row in rows:
        what = f"{row.tokens} prompt tokens after {row.context}" if row.tokens else f"{row.batch} with {row.context} KV"
        found = predicted(fit.steps, row)
        lines.append(f"{what}: measured {1000 * row.seconds:.2f} ms, fitted {1000 * found:.2f} ms")
    return lines
