"""The calibration kernel counts what the observers count in plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from mla_quant.formats import NVFP4
from mla_quant.observers import Observer, _collect_in_one_pass, collect_together


def pair(axis: int, device: torch.device) -> tuple[Observer, Observer]:
    """One for the kernel, on the device under test, and one for torch, on the CPU."""
    return (
        Observer("k", NVFP4, axis, "max", 99.9, device),
        Observer("k", NVFP4, axis, "max", 99.9, torch.device("cpu")),
    )


def assert_equal(a: Observer, b: Observer) -> None:
    for key, value in b.state().items():
        assert torch.equal(a.state()[key].cpu(), value), key


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 64, 40), (1, 2, 77, 200), (2, 1, 333, 16)])
@pytest.mark.parametrize("masked", [None, "tokens", "pairs"])
def test_same_statistics(axis, shape, masked, device) -> None:
    generator = torch.Generator().manual_seed(0)
    kernel, plain = pair(axis, device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape, generator=generator) * torch.logspace(-12, 8, shape[-1])
        x = x.to(dtype)
        x.view(-1)[::7] = 0.0
        x.view(-1)[3::29] = math.nan
        x.view(-1)[5::31] = -math.inf
        valid = None
        if masked == "tokens":
            valid = torch.rand(shape[0], 1, shape[2], 1, generator=generator) > 0.3
        elif masked == "pairs":
            valid = torch.rand(1, 1, shape[2], shape[3], generator=generator) > 0.3
        mask = None if valid is None else valid.to(device)
        _collect_in_one_pass(kernel, x.to(device), mask)
        collect_together([(plain, x, valid)])
    assert_equal(kernel, plain)


@pytest.mark.parametrize("axis", [-1, -2])
def test_strides_and_few_dimensions(axis, device) -> None:
    kernel, plain = pair(axis, device)
    x = torch.randn(2, 100, 3, 48)
    _collect_in_one_pass(kernel, x.to(device).transpose(1, 2), None)
    _collect_in_one_pass(kernel, x[0, :, 0].to(device), None)
    plain.collect(x.transpose(1, 2))
    plain.collect(x[0, :, 0])
    assert_equal(kernel, plain)


def test_nothing_valid_changes_nothing(device) -> None:
    kernel, _ = pair(-1, device)
    before = {key: value.clone() for key, value in kernel.state().items()}
    x = torch.full((1, 1, 20, 16), math.nan, device=device)
    _collect_in_one_pass(kernel, x, torch.zeros(1, 1, 20, 1, dtype=torch.bool, device=device))
    for key, value in before.items():
        assert torch.equal(kernel.state()[key], value), key
