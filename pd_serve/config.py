"""The configuration: frozen data, checked as a whole, and the only reader of pd_serve's environment variables.

vLLM's names are kept where vLLM has one. What our own code reads is typed here; everything else goes to the engine
through `engine_args`, checked against vLLM's own argument list by `pd-serve check`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Model(Part):
    """Which model is served, and how both pools load it."""

    path: Annotated[str, Field(min_length=1)] = "demo"
    """A local directory, a hub name, or `demo` for the SmolLM2-135M that `make setup` converts."""
    served_name: Annotated[str, Field(min_length=1)] = "smollm2"
    """The name that clients send as `model`."""
    max_model_len: Positive = 2048
    """Longest prompt plus output, in tokens."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights and, unless `kv_cache_dtype` says otherwise, of the KV cache."""
    block_size: Positive = 16
    """Tokens in one KV block; the same in both pools."""
    kv_cache_dtype: str = "auto"
    """vLLM's `--kv-cache-dtype`; the same in both pools."""
    engine_args: dict[str, Any] = {}
    """Further vLLM engine arguments for both pools, by vLLM's names with underscores."""
    frontend_args: dict[str, Any] = {}
    """Further arguments of vLLM's OpenAI server, such as `enable_auto_tool_choice` and `tool_call_parser`."""


class Pool(Part):
    """One pool of equal replicas."""

    replicas: Positive = 1
    """How many replicas, each one engine."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that Ray reserves for each replica."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for each replica, for all its tensor-parallel workers together. Replicas with a fraction
    of a GPU share one: give each its part of `gpu_memory_utilization`, or `kv_cache_memory_bytes` in `engine_args`."""
    tensor_parallel_size: Positive = 1
    """GPUs that one engine is split over."""
    max_num_seqs: Positive = 64
    """Most sequences that an engine runs at once."""
    max_num_batched_tokens: Positive = 2048
    """Most tokens in one engine step."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for weights and KV cache (ignored on CPU)."""
    cpu_kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """GiB of KV cache of an engine on CPU (vLLM's VLLM_CPU_KVCACHE_SPACE; ignored on GPU)."""
    enable_prefix_caching: bool = True
    """Keep the KV of earlier prompts and reuse it."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs (always so on CPU)."""
    engine_args: dict[str, Any] = {}
    """Further vLLM engine arguments for this pool; they win over `model.engine_args`."""
    env: dict[str, str] = {}
    """Environment variables of this pool's replicas, such as OMP_NUM_THREADS."""


class Kv(Part):
    """How KV moves from prefill to decode."""

    transport: Literal["auto", "object_store"] = "auto"
    """`object_store` goes through Ray's object store; `auto` picks the fastest that both sides have."""
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """When KV does not come or does not match: compute it on the decode replica (counted), or fail the request."""
    lease_s: Seconds = 60.0
    """After this long a hand-off that nobody finished is freed on every side."""
    checksum: bool = True
    """Check a checksum of the moved bytes before they are used."""


class Routing(Part):
    """Who gets a request."""

    policy: Literal["least_loaded"] = "least_loaded"
    """`least_loaded` takes the prefill and the decode replica with the least work of their kind."""
    min_handoff_tokens: Annotated[int, Field(ge=1)] | None = None
    """Shorter prompts are computed where they decode. Default: `model.block_size`, so that one full block exists."""
    force: Literal["none", "prefill_on_decode"] = "none"
    """`prefill_on_decode` never hands over; for measuring what the hand-off costs."""


class Limits(Part):
    """Bounds on what is accepted and on how long it may take."""

    max_running: Positive = 256
    """Requests that one ingress replica runs at once."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Requests that wait in one ingress replica; further ones are answered 429."""
    first_token_timeout_s: Seconds = 120.0
    """From arrival to the first token."""
    total_timeout_s: Seconds = 600.0
    """From arrival to the last token; also how long a leaving replica may finish its work."""
    no_replica_timeout_s: Seconds = 10.0
    """How long a request waits while no replica can take it, before it is answered 503."""
    max_body_bytes: Positive = 32 * 1024 * 1024
    """Larger HTTP bodies are answered 413."""


class Access(Part):
    """Who may ask. Without keys only a server on a loopback address answers."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """File with one `tenant:key` (or `key`) a line, readable on the ingress's nodes. The variable PD_SERVE_API_KEYS, in
    the same form, is read besides."""
    metrics_open: bool = False
    """`/metrics` needs no key."""


class FakeEngine(Part):
    """Timing of the fake engine (`engine: fake`), for trying a deployment without a model's compute."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 50_000.0
    """Prompt tokens that one engine computes in a second."""
    decode_step_s: Annotated[float, Field(ge=0)] = 0.01
    """Seconds of one decode step, whatever its batch."""
    kv_tokens: Positive = 65_536
    """Tokens of KV that one engine holds."""


class Ingress(Part):
    """The replicas that speak HTTP."""

    replicas: Positive = 1
    """How many ingress replicas."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that Ray reserves for each."""


class AppConfig(Part):
    """`applications[0].args` of the YAML file."""

    version: Name = "v1"
    """Names the deployments: `prefill-<version>` and `decode-<version>`."""
    engine: Literal["vllm", "fake"] = "vllm"
    """What computes: vLLM, or a timing model that behaves like one."""
    model: Model = Model()
    ingress: Ingress = Ingress()
    prefill: Pool | None = Pool()
    """`null` serves without a prefill pool: every prompt is computed where it decodes."""
    decode: Pool = Pool()
    kv: Kv = Kv()
    routing: Routing = Routing()
    limits: Limits = Limits()
    access: Access = Access()
    fake: FakeEngine = FakeEngine()

    @field_validator("version", mode="before")
    @classmethod
    def _version_is_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _consistent(self) -> AppConfig:
        if self.limits.first_token_timeout_s > self.limits.total_timeout_s:
            raise ValueError("limits.first_token_timeout_s is longer than limits.total_timeout_s")
        return self

    @property
    def min_handoff_tokens(self) -> int:
        """Prompt length in tokens from which a hand-off is worth planning."""
        return self.routing.min_handoff_tokens or self.model.block_size

    @property
    def pools(self) -> dict[str, Pool]:
        """The pools that exist, by role."""
        pools = {"decode": self.decode}
        return {"prefill": self.prefill, **pools} if self.prefill is not None else pools


def cache_dir() -> Path:
    """Where pd_serve keeps what it makes once: PD_SERVE_CACHE, else `~/.cache/pd_serve`."""
    return Path(os.environ.get("PD_SERVE_CACHE") or "~/.cache/pd_serve").expanduser()


def api_keys_text() -> str:
    """API keys from the variable PD_SERVE_API_KEYS, one `tenant:key` a line; empty when it is not set."""
    return os.environ.get("PD_SERVE_API_KEYS", "")
