"""Asks an engine's worker what its configuration has come to."""

from __future__ import annotations

from typing import Any

from pd_serve.kv.connector_extension import KvExtension

PROBE = "tests.gpu.probe.Probe"


class Probe(KvExtension):
    """vLLM mixes this into its worker."""

    def pd_test_probe(self) -> dict[str, Any]:
        import torch
        from vllm.compilation.counter import compilation_counter

        worker: Any = self
        parameters = worker.model_runner.model.named_parameters()
        return {
            "device": worker.device.type,
            "uuid": str(torch.cuda.get_device_properties(worker.device).uuid),
            "visible": torch.cuda.device_count(),
            "cudagraph_mode": worker.vllm_config.compilation_config.cudagraph_mode.name,
            "graphs": compilation_counter.num_cudagraph_captured,
            "expert_parallel": worker.parallel_config.enable_expert_parallel,
            "experts_here": sorted({weights.shape[0] for name, weights in parameters if name.endswith("w13_weight")}),
        }
