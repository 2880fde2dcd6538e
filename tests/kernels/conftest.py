"""Kernels run compiled where there is a CUDA device, and under Triton's interpreter elsewhere."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    from tests import interpreter

    interpreter.shorten()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
