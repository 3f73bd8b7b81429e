"""Whatever differs between the vLLM versions that are supported (0.26 with CUDA, 0.32 on CPU), and nothing else may.

Every import of vLLM is inside a function: importing this module costs nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


# --------------------------------------------------------------------------------------------- engine


REASONING_ARG = "pd_serve_reasoning"
"""Name of the reasoning parser's state among a request's `extra_args`, on the way to the engine only."""


def engine_version() -> str:
    """vLLM's version, equal for its builds for different hardware."""
    import vllm

    return str(vllm.__version__).split("+")[0]


def encode_sampling(params: SamplingParams) -> bytes:
    """`SamplingParams` as msgpack, for `Request.sampling`."""
    return msgspec.msgpack.encode(params)


def decode_sampling(data: bytes) -> SamplingParams:
    """The `SamplingParams` that `encode_sampling` was given; the engine's defaults for empty data.

    Raises:
        msgspec.MsgspecError: the data is not a `SamplingParams` of this version.
        ValueError, VLLMValidationError: its values contradict each other.
    """
    from vllm import SamplingParams

    return msgspec.msgpack.decode(data, type=SamplingParams) if data else SamplingParams()


def new_sampling(**fields: Any) -> SamplingParams:
    """Sampling parameters with these fields, and the engine's defaults for all others."""
    from vllm import SamplingParams

    return SamplingParams(**fields)


def as_deltas(params: SamplingParams, max_tokens: int, n: int) -> SamplingParams:
    """The same parameters, with outputs that hold what is new since the last one."""
    from vllm.sampling_params import RequestOutputKind

    params.output_kind = RequestOutputKind.DELTA
    params.max_tokens = max_tokens
    params.n = n
    return params


def put_reasoning(ended: bool | None, parser_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """What the engine's grammar has to know of a reasoning parser, as `extra_args` for the way to the engine."""
    if ended is None and parser_kwargs is None:
        return {}
    return {REASONING_ARG: {"reasoning_ended": ended, "reasoning_parser_kwargs": parser_kwargs}}


def take_reasoning(params: SamplingParams) -> dict[str, Any]:
    """Take out of `extra_args` what `put_reasoning` put there: keyword arguments of `AsyncLLM.generate`."""
    extra_args = dict(params.extra_args or {})
    reasoning: dict[str, Any] = extra_args.pop(REASONING_ARG, {})
    params.extra_args = extra_args or None
    return reasoning


def is_request_error(error: BaseException) -> bool:
    """Whether the engine refused the request itself: 0.32 has a class for that, 0.26 raises ValueErrors."""
    from vllm import exceptions

    return isinstance(error, getattr(exceptions, "VLLMClientError", ValueError))


def engine_pids(llm: AsyncLLM) -> list[int]:
    """Processes that the engine's front end has started."""
    manager = getattr(llm.engine_core.resources, "engine_manager", None)
    processes: list[multiprocessing.process.BaseProcess] = getattr(manager, "processes", None) or []
    return [process.pid for process in processes if process.pid is not None]


def end_processes(pids: list[int], patience_s: float = 5.0) -> None:
    """Wait for these processes to end, and kill those that do not. Blocks."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# --------------------------------------------------------------------------------------------- front end


def allow_no_device() -> None:
    """Let vLLM's front end work on a machine without a device, such as an ingress's.

    A build for GPUs that finds none cannot even make an argument parser. To be called before the modules of vLLM that
    it matters to are imported: they keep the platform that they find.
    """
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()


# --------------------------------------------------------------------------------------------- KV connector


def tensor_parallel_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def kv_packing(vllm_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """How the inside of a page is packed, where its shape does not say so: on CPU, for one instruction set."""
    cache = next(iter(kv_caches.values()), None)
    if cache is None or cache.device.type != "cpu" or cache.dim() != 4:
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, head_size = vllm_config.model_config.dtype, cache.shape[3] // 2
    return "cpu:" + str(_get_attn_isa(dtype, cache.shape[2], head_size, vllm_config.cache_config.cache_dtype))
