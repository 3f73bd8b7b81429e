"""A prefill and a decode engine, each in a Ray actor of its own, as Serve replicas would hold them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from typing import Any

import ray

from pd_serve import compat
from pd_serve.config import AppConfig
from pd_serve.engine.base import EngineDescription
from pd_serve.engine.vllm import VllmEngine
from pd_serve.errors import ErrorInfo, PdServeError
from pd_serve.types import Delta, EngineStats, Handoff, PrefillResult, Request, Role, hash_tokens

BLOCK = 32
FAULTS = "tests.engine.vllm_faults.FaultExtension"


def config(**kv: Any) -> AppConfig:
    """Small caches, so that they can be filled, and prompts that take several steps of prefill."""
    engine_args = {"worker_extension_cls": FAULTS}
    return AppConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32", "block_size": BLOCK, "max_model_len": 1024},
            "prefill": {"cpu_kv_cache_gib": 0.25, "max_num_batched_tokens": 256, "engine_args": engine_args},
            "decode": {"cpu_kv_cache_gib": 0.06, "engine_args": engine_args},
            "kv": {"lease_s": 20.0, **kv},
        }
    )


@ray.remote(num_cpus=1, max_concurrency=200)
class EngineActor:
    """Runs an engine on the actor's event loop. Errors come back as data."""

    def __init__(self, config: dict[str, Any], role: str) -> None:
        address = ray.get_runtime_context().gcs_address
        self._engine = VllmEngine(AppConfig.model_validate(config), Role(role), address)
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def start(self) -> EngineDescription:
        return await self._engine.start()

    async def prefill(self, request: Request, handoff: Handoff) -> PrefillResult | ErrorInfo:
        return await self._run(request.id, self._engine.prefill(request, handoff))

    async def decode(
        self, request: Request, handoff: Handoff | None = None, emitted: tuple[int, ...] = ()
    ) -> list[Delta] | ErrorInfo:
        return await self._run(request.id, self._collect(request, handoff, emitted))

    async def _collect(self, request: Request, handoff: Handoff | None, emitted: tuple[int, ...]) -> list[Delta]:
        return [delta async for delta in self._engine.decode(request, handoff, emitted)]

    async def _run(self, request_id: str, work: Any) -> Any:
        task = self._tasks[request_id] = asyncio.create_task(work)
        try:
            return await task
        except asyncio.CancelledError:
            return ErrorInfo("Cancelled", "cancelled")
        except PdServeError as error:
            return error.to_wire()
        finally:
            del self._tasks[request_id]

    async def cancel(self, request_id: str) -> bool:
        task = self._tasks.get(request_id)
        return task.cancel() if task is not None else False

    async def withdraw(self, handoff_id: str, reason: str) -> None:
        await self._engine.withdraw(handoff_id, reason)

    async def grant(self, request: Request) -> ErrorInfo | None:
        return await self._run(request.id, self._engine.grant(request))

    async def revoke(self, request_id: str) -> None:
        self._engine.revoke(request_id)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def kv_counts(self) -> list[dict[str, Any]]:
        return await self._engine.kv_counts()

    async def health(self) -> ErrorInfo | None:
        return await self._run("health", self._engine.health())

    async def rpc(self, method: str, *args: Any) -> Any:
        return (await self._engine._engine.llm.collective_rpc(method, args=args))[0]

    async def reset_prefix_cache(self) -> None:
        await self._engine._engine.llm.reset_prefix_cache()

    async def child_pids(self) -> list[int]:
        return compat.engine_pids(self._engine._engine.llm)

    async def pid(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        await self._engine.close()


def environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def actor(config: AppConfig, role: Role) -> Any:
    options = {"runtime_env": {"env_vars": environment()}}
    return EngineActor.options(**options).remote(config.model_dump(), role.value)


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 12,
    *,
    n: int = 1,
    cache_salt: str | None = None,
    **fields: Any,
) -> Request:
    fields = {"temperature": 0.0, "ignore_eos": True} | fields
    sampling = compat.encode_sampling(compat.new_sampling(max_tokens=max_tokens, n=n, **fields))
    return Request(
        id=request_id,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        n=n,
        sampling=sampling,
        cache_salt=cache_salt,
    )


def handoff(request: Request, source: EngineDescription, target: EngineDescription, lease_s: float = 20.0) -> Handoff:
    return Handoff(
        id=f"h-{request.id}",
        prompt_tokens=len(request.prompt_token_ids),
        prompt_hash=hash_tokens(request.prompt_token_ids, request.cache_salt),
        source=source.kv,
        target=target.kv,
        lease_s=lease_s,
    )


class Pair:
    """A prefill and a decode engine, and shorthands for what tests do with them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.prefill = actor(config(), Role.PREFILL)
        self.decode = actor(config(), Role.DECODE)
        self.source, self.target = ray.get([self.prefill.start.remote(), self.decode.start.remote()])
        self.quiet = self.held()

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(engine.close.remote(), timeout=20)

    def request(self, prompt: list[int], max_tokens: int = 12, **options: Any) -> Request:
        return request(f"r{next(self._numbers)}", prompt, max_tokens, **options)

    def handoff(self, request: Request, lease_s: float = 20.0) -> Handoff:
        return handoff(request, self.source, self.target, lease_s)

    def aggregated(self, *requests: Request) -> list[list[Delta]]:
        """Each computed by the decode engine alone, all at once, on an empty prefix cache."""
        self.forget_prefixes()
        return ray.get([self.decode.decode.remote(r.leg("a")) for r in requests])

    def both(self, *requests: Request, lease_s: float = 20.0) -> list[tuple[PrefillResult, list[Delta]]]:
        """Each handed over, all at once."""
        handoffs = [self.handoff(r, lease_s) for r in requests]
        decoded = [self.decode.decode.remote(r.leg("d"), h) for r, h in zip(requests, handoffs, strict=True)]
        computed = [self.prefill.prefill.remote(r.leg("p"), h) for r, h in zip(requests, handoffs, strict=True)]
        return list(zip(ray.get(computed), ray.get(decoded), strict=True))

    def forget_prefixes(self) -> None:
        ray.get([self.prefill.reset_prefix_cache.remote(), self.decode.reset_prefix_cache.remote()])

    def fault(self, engine: Any, fault: str = "", value: float = 0.0) -> None:
        ray.get(engine.rpc.remote("pd_test_fault", fault, value))

    def held(self) -> dict[str, Any]:
        """Everything that must be the same again when nothing is under way."""
        stats = ray.get([self.prefill.stats.remote(), self.decode.stats.remote()])
        inside = ray.get([e.rpc.remote("pd_test_scheduler") for e in (self.prefill, self.decode)])
        counts = ray.get([self.prefill.kv_counts.remote(), self.decode.kv_counts.remote()])
        loading = sum(rank["loading"] + rank["takes"]["held"] for side in counts for rank in side)
        return {"stats": stats, "inside": inside, "loading": loading}

    def assert_quiet(self, within_s: float = 5.0) -> None:
        """Case check Q: nothing is held anywhere."""
        until = time.monotonic() + within_s
        while (held := self.held()) != self.quiet and time.monotonic() < until:
            time.sleep(0.05)
        assert held == self.quiet
        for counts in ray.get([self.prefill.kv_counts.remote(), self.decode.kv_counts.remote()]):
            for side in ("gives", "takes"):
                total = counts[0][side]
                ended = total["done"] + total["cancelled"] + sum(total["failed"].values())
                assert total["started"] == ended + total["held"]
