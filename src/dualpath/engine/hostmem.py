"""Host memory as tensors and tensors as host memory, without copying.

Tensors stay on the CPU here; bytes are those of `dualpath.kv.layout` rows. Copies between the views
release the interpreter lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualpath.kv.layout import KVLayout

__all__ = ["block_tensor", "host_bytes", "layer_tensor"]


def host_bytes(rows: Tensor) -> memoryview:
    """The writable bytes of a contiguous CPU tensor; they live as long as the view."""
    if not rows.is_contiguous():
        raise ValueError(f"rows of shape {tuple(rows.shape)} are not contiguous")
    flat: npt.NDArray[np.uint8] = rows.view(torch.uint8).view(-1).numpy()
    return flat.data


def block_tensor(block: memoryview, layout: KVLayout) -> Tensor:
    """A Full Block's bytes as `[n_layers, block_tokens, row_elements]`; a slot may be longer."""
    count = layout.n_layers * layout.block_tokens * layout.row_elements
    flat = torch.frombuffer(block, dtype=getattr(torch, layout.dtype), count=count)
    return flat.view(layout.n_layers, layout.block_tokens, layout.row_elements)


def layer_tensor(rows: memoryview, layout: KVLayout) -> Tensor:
    """Bytes of rows of one layer as `[tokens, row_elements]`."""
    flat = torch.frombuffer(rows, dtype=getattr(torch, layout.dtype))
    return flat.view(-1, layout.row_elements)
