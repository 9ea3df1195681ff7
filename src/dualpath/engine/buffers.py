"""Two layers of KV for one prefill batch: the double buffer of layerwise prefill.

Even layers live in the first half, odd layers in the second. Each half has the rows of the whole
batch, one request after another, cached rows before new ones. On the CPU host memory and device memory
are the same; on CUDA each half has a pinned host twin, and copies run on two streams of their own, one a
direction. There a layer's copy in waits only for the attention that read the half before, so it runs while
the layer between computes; computing waits for the copy in of its own layer and for no other copy.

Ownership: the buffer owns its memory; host views that were given out keep it alive (a late write of a
failed load then hits memory that no one reads). This module knows no requests.
The CUDA half is written to torch's documented interface; tests check the order of its streams and events on
stand-ins, and none runs on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dualpath.engine.hostmem import host_bytes
from dualpath.kv.layout import KVLayout

__all__ = ["CudaLayerBuffers", "HostLayerBuffers", "LayerBuffers", "layer_buffers"]

RESIDENT_LAYERS = 2


class LayerBuffers(ABC):
    """Rows `[start, stop)` below are of one half; `layer` picks the half."""

    def __init__(self, layout: KVLayout, tokens: int, device: torch.device) -> None:
        self.layout = layout
        self.tokens = tokens
        self._rows = torch.zeros(
            (RESIDENT_LAYERS, tokens, layout.row_elements),
            dtype=getattr(torch, layout.dtype),
            device=device,
        )

    @property
    def device_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """On the device, `[stop - start, row_elements]`."""
        return self._rows[layer % RESIDENT_LAYERS, start:stop]

    @abstractmethod
    def host_rows(self, layer: int, start: int, stop: int) -> memoryview:
        """Host bytes to load into or to hand over from."""

    @abstractmethod
    def before_load(self, layer: int) -> None:
        """Return when the half's host bytes may be overwritten by a load.

        All that reads the half's device rows so far has been called (it may not have run yet).
        """

    @abstractmethod
    def loaded(self, layer: int, start: int, stop: int) -> None:
        """Host bytes are there: bring them to the device before what is computed next."""

    @abstractmethod
    def computed(self, layer: int, start: int, stop: int) -> None:
        """New rows are on the device: bring them to the host."""

    @abstractmethod
    def wait_computed(self, layer: int) -> None:
        """Return when what `computed` brings is in host memory. From any thread."""


class HostLayerBuffers(LayerBuffers):
    """On the CPU: loads go straight to where attention reads."""

    def host_rows(self, layer: int, start: int, stop: int) -> memoryview:
        return host_bytes(self.rows(layer, start, stop))

    def before_load(self, layer: int) -> None:
        pass

    def loaded(self, layer: int, start: int, stop: int) -> None:
        pass

    def computed(self, layer: int, start: int, stop: int) -> None:
        pass

    def wait_computed(self, layer: int) -> None:
        pass


class CudaLayerBuffers(LayerBuffers):
    """On CUDA: pinned twins, a copy stream for each direction, events for each half.

    `_free`: the device rows of a half may be overwritten; `_in`: they have been; `_out`: the host has them.
    """

    def __init__(self, layout: KVLayout, tokens: int, device: torch.device) -> None:
        super().__init__(layout, tokens, device)
        self._device = device
        self._host = torch.zeros(self._rows.shape, dtype=self._rows.dtype, pin_memory=True)
        self._copies_in = torch.cuda.Stream(device)
        self._copies_out = torch.cuda.Stream(device)
        self._free = [torch.cuda.Event() for _ in range(RESIDENT_LAYERS)]
        self._in = [torch.cuda.Event() for _ in range(RESIDENT_LAYERS)]
        self._out = [torch.cuda.Event() for _ in range(RESIDENT_LAYERS)]

    def host_rows(self, layer: int, start: int, stop: int) -> memoryview:
        return host_bytes(self._host[layer % RESIDENT_LAYERS, start:stop])

    def before_load(self, layer: int) -> None:
        half = layer % RESIDENT_LAYERS
        self._in[half].synchronize()
        self._free[half].record(torch.cuda.current_stream(self._device))

    def loaded(self, layer: int, start: int, stop: int) -> None:
        half = layer % RESIDENT_LAYERS
        self._copies_in.wait_event(self._free[half])
        with torch.cuda.stream(self._copies_in):
            self._rows[half, start:stop].copy_(self._host[half, start:stop], non_blocking=True)
            self._in[half].record(self._copies_in)
        torch.cuda.current_stream(self._device).wait_event(self._in[half])

    def computed(self, layer: int, start: int, stop: int) -> None:
        half = layer % RESIDENT_LAYERS
        self._copies_out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies_out):
            self._host[half, start:stop].copy_(self._rows[half, start:stop], non_blocking=True)
            self._out[half].record(self._copies_out)

    def wait_computed(self, layer: int) -> None:
        self._out[layer % RESIDENT_LAYERS].synchronize()


def layer_buffers(layout: KVLayout, tokens: int, device: torch.device) -> LayerBuffers:
    """The buffers for a device."""
    kind = CudaLayerBuffers if device.type == "cuda" else HostLayerBuffers
    return kind(layout, tokens, device)
