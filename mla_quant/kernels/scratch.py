"""Scratch that decode kernels need between their launches: its shapes, and who hands it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]
Allocate = Callable[[Shapes, torch.device], list[Tensor]]
"""Hands out tensors of any content, which may be reused after the call that asked for them."""


def allocate_scratch(wanted: Shapes, device: torch.device) -> list[Tensor]:
    """Scratch from torch's allocator."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]


def partial_shapes(ranges: int, rows: int, width: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ranges leave to be combined: sums, reference points, denominators.

    Args:
        ranges: Into which keys are split, over all launches.
        rows: Query tokens × heads of all sequences.
        width: Of V.
    """
    places = (ranges, rows)
    return [((*places, width), torch.float32), (places, torch.float32), (places, torch.float32)]
