"""Whole KV pages in and out of an engine's cache.

Every layer arrives as a logical `[blocks, ...]` view whatever its physical layout, so indexing dimension 0 moves whole
pages and never has to know how a page is laid out inside. A page is never cut by token: on CPU its inside is packed
for one instruction set, so both sides must also agree on `packing`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence

import torch


class Gathered:
    """Pages on their way out: a copy on the host, complete once `pages` returns."""

    def __init__(self, host: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        self._host = host
        self._copied = copied

    @property
    def nbytes(self) -> int:
        return self._host.numel()

    def pages(self) -> memoryview:
        """uint8 [layers * blocks * page_bytes]; waits for the device, so not to be called in the step loop."""
        if self._copied is not None:
            self._copied.synchronize()
        return memoryview(self._host.numpy().reshape(-1))


class KvBlocks:
    """The KV cache of one rank, as pages.

    Args:
        kv_caches: layer name to cache, as vLLM registers it with a connector.
        packing: how the inside of a page is laid out, where the shape alone does not say it.

    Raises:
        ValueError: there is no layer, or the layers' pages differ in size.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], packing: str = "") -> None:
        layers = _distinct(kv_caches)
        if not layers:
            raise ValueError("the engine has no KV cache that could be moved")
        if len({(tuple(t.shape), t.dtype) for t in layers.values()}) > 1:
            raise ValueError("layers with different page sizes cannot be moved yet")
        self._layers = list(layers.values())
        first = self._layers[0]
        self._page_shape = tuple(first.shape[1:])
        self._facts = {
            "layers": list(layers),
            "page_shape": self._page_shape,
            "dtype": str(first.dtype),
            "packing": packing,
        }
        self._side = torch.cuda.Stream(first.device) if first.is_cuda else None
        # Pages that arrive lie in read-only memory, and are only read.
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        first = self._layers[0]
        return first[0].numel() * first.element_size()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers."""
        return self.page_bytes * self.layers

    def layout(self) -> str:
        """sha256 over everything that both sides must agree on for pages to be exchangeable."""
        return hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()

    def gather(self, block_ids: Sequence[int]) -> Gathered:
        """Copy these blocks of all layers out. The blocks may be freed as soon as this returns."""
        first = self._layers[0]
        shape = (self.layers, len(block_ids), *self._page_shape)
        index = self._index(block_ids)
        if not first.is_cuda:
            host = torch.empty(shape, dtype=first.dtype)
            for layer, out in zip(self._layers, host, strict=True):
                torch.index_select(layer, 0, index, out=out)
            return Gathered(_as_bytes(host), None)
        # In the order of the engine's own stream: later steps cannot overwrite the blocks before they are read.
        device = torch.empty(shape, dtype=first.dtype, device=first.device)
        for layer, out in zip(self._layers, device, strict=True):
            torch.index_select(layer, 0, index, out=out)
        host = torch.empty(shape, dtype=first.dtype, pin_memory=True)
        host.copy_(device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Gathered(_as_bytes(host), copied)

    def fence(self) -> torch.cuda.Event | None:
        """A mark in the engine's stream: `scatter` waits until everything queued before it has run."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def scatter(
        self, pages: memoryview, skip: int, block_ids: Sequence[int], fence: torch.cuda.Event | None = None
    ) -> None:
        """Copy all blocks of `pages` but the first `skip` into these blocks of all layers, and wait for it.

        Args:
            pages: uint8 [layers * (skip + len(block_ids)) * page_bytes].

        Raises:
            ValueError: the number of bytes does not fit.
        """
        blocks = skip + len(block_ids)
        if pages.nbytes != self.layers * blocks * self.page_bytes:
            raise ValueError("pages do not fit the blocks that they are for")
        first = self._layers[0]
        source = torch.frombuffer(pages, dtype=torch.uint8).view(first.dtype)
        source = source.view(self.layers, blocks, *self._page_shape)[:, skip:]
        if self._side is None:
            self._put(source, self._index(block_ids))
            return
        with torch.cuda.stream(self._side):
            if fence is not None:
                self._side.wait_event(fence)
            self._put(source.to(first.device), self._index(block_ids))
        self._side.synchronize()

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        """int64 [blocks] on the cache's device, without waiting for what the device computes."""
        index = torch.tensor(block_ids, dtype=torch.int64, pin_memory=self._side is not None)
        return index.to(self._layers[0].device, non_blocking=True)

    def _put(self, source: torch.Tensor, index: torch.Tensor) -> None:
        for layer, pages in zip(self._layers, source, strict=True):
            layer.index_copy_(0, index, pages)


def _distinct(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Layers by name, without those that share another one's cache."""
    seen: set[int] = set()
    layers: dict[str, torch.Tensor] = {}
    for name in sorted(kv_caches):
        cache = kv_caches[name]
        if not isinstance(cache, torch.Tensor):
            raise ValueError(f"layer {name} has a kind of cache that cannot be moved yet")
        if cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            layers[name] = cache
    return layers


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
