"""What every test has in common: no network, no leftover randomness, no threads under xdist."""

from __future__ import annotations

import os

# Before any test imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run under the interpreter then. Triton decides when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
