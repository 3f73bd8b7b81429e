"""Workloads of single requests: chat behind shared system prompts, retrieval, batch."""

from __future__ import annotations

from collections.abc import Iterator

from pd_serve.sim.clock import Streams
from pd_serve.sim.workloads.arrival import UNIT_TOKENS, Arrival
from pd_serve.sim.workloads.lengths import Zipf, exponential, lognormal, pareto, unit_id


def shared_prefix_chat(
    times: Iterator[float], streams: Streams, applications: int = 64, mean_output: float = 200.0
) -> Iterator[Arrival]:
    """Many applications, each with its own system prompt, and what their users say.

    Sources: user text and answers as in Azure's conversation trace of 2023 (Splitwise, arXiv:2311.18677: medians of
    1,020 prompt and 129 output tokens; an exponential with mean 200 has median 139); output lengths are exponential in
    production (ServeGen, arXiv:2505.09999). System prompts of 1,024 to 4,096 tokens, popularity by Zipf with exponent
    1, are our choice. They end at whole units: a trace in this format cannot say more.
    """
    popularity, rng = Zipf(applications, 1.0), streams.get("chat")
    shapes = streams.get("system_prompts")
    prompts = [
        tuple(unit_id("system", application, number) for number in range(shapes.randint(2, 8)))
        for application in range(applications)
    ]
    for number, at in enumerate(times):
        application = popularity.draw(rng)
        prefix = prompts[application]
        user = lognormal(rng, 1020, 3000, 12_288)
        yield Arrival(
            at=at,
            prompt_tokens=len(prefix) * UNIT_TOKENS + user,
            output_tokens=exponential(rng, mean_output, 2048),
            units=prefix + _own_units(number, user),
        )


def rag(times: Iterator[float], streams: Streams, documents: int = 10_000) -> Iterator[Arrival]:
    """Questions of about a hundred tokens behind two retrieved documents.

    Source: RAGCache (arXiv:2404.12457): 3 % of the documents get 60 % of the requests (Zipf with exponent 0.96 over
    10,000), documents add a thousand tokens and more to a question of a hundred; a document's KV is only of use behind
    the same documents. Document lengths (512 to 2,048 tokens, whole units) are our choice.
    """
    popularity, rng = Zipf(documents, 0.96), streams.get("rag")
    shapes = streams.get("documents")
    lengths = [shapes.choice((1, 1, 2, 2, 3, 4)) for _ in range(documents)]
    for number, at in enumerate(times):
        first, second = popularity.draw(rng), popularity.draw(rng)
        units: tuple[int, ...] = (unit_id("instruction"),)
        units += tuple(unit_id("document", first, unit) for unit in range(lengths[first]))
        units += tuple(unit_id("document", first, second, unit) for unit in range(lengths[second]))
        question = lognormal(rng, 100, 250, 1024)
        yield Arrival(
            at=at,
            prompt_tokens=len(units) * UNIT_TOKENS + question,
            output_tokens=exponential(rng, 150, 1024),
            units=units + _own_units(number, question),
        )


def batch(times: Iterator[float], streams: Streams) -> Iterator[Arrival]:
    """Work without shared prefixes, some of it long.

    Source: ServeGen (arXiv:2505.09999): input lengths are a mixture of a lognormal body and a Pareto tail, output
    lengths are exponential. The parameters (median 1,500 as in Azure's code trace of 2023, arXiv:2311.18677; a tenth
    in the tail) are our choice.
    """
    rng = streams.get("batch")
    for number, at in enumerate(times):
        prompt = pareto(rng, 4000, 1.5, 30_000) if rng.random() < 0.1 else lognormal(rng, 1500, 4000, 16_384)
        yield Arrival(
            at=at,
            prompt_tokens=prompt,
            output_tokens=exponential(rng, 300, 2048),
            units=_own_units(number, prompt),
        )


def _own_units(number: int, tokens: int) -> tuple[int, ...]:
    """Units that no other request has."""
    first = (1 << 48) + (number << 12)
    return tuple(range(first, first - (-tokens // UNIT_TOKENS)))
