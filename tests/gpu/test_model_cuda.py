"""Calibrating, exporting and verifying on CUDA."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import modelopt.torch.quantization as mtq
import pytest
import torch

import mla_quant
from mla_quant.attention import quant_mla_layers, set_form
from mla_quant.cli import main
from mla_quant.evaluation import quantizers_off
from mla_quant.plugin import sync_observers
from mla_quant.reference import matmul_fp32
from tests.models import FAMILIES, loop, make_model, token_ids

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_mla" / "model"


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_off_is_bit_identical_and_on_agrees_with_the_cpu(family, attn) -> None:
    """fp32 on both: the CPU's and CUDA's sums differ in the last bits, and a value within that of
    a rounding tie may go either way; a flip changes one of thousands of terms."""
    model = make_model(family, attn=attn)
    ids = token_ids()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mtq.quantize(model, mla_quant.NVFP4_MLA_CFG, loop(ids))
    with torch.no_grad():
        on_cpu = {}
        for form in ("projected", "absorbed"):
            set_form(model, form)
            on_cpu[form] = model(ids, use_cache=False).logits
        original = make_model(family, attn=attn).cuda()
        model = model.cuda()
        with quantizers_off(model):
            plain = original(ids.cuda(), use_cache=False).logits
            assert torch.equal(model(ids.cuda(), use_cache=False).logits, plain)
        for form, want in on_cpu.items():
            set_form(model, form)
            got = model(ids.cuda(), use_cache=False).logits.cpu()
            effect = (want - plain.cpu()).norm()
            assert (got - want).norm() < 0.1 * effect, form


def test_calibration_on_cuda_finds_the_amax_of_the_cpu() -> None:
    ids = token_ids(4, 50)
    amax = {}
    for device in ("cpu", "cuda"):
        model = make_model().to(device)
        model = mtq.quantize(model, mla_quant.NVFP4_MLA_CFG, loop(ids.to(device)))
        for name, module in quant_mla_layers(model).items():
            for operand in module.enabled_operands():
                amax[device, name, operand] = float(module.quantizer(operand).amax)
    for (device, name, operand), value in amax.items():
        if device == "cuda":
            assert value == pytest.approx(amax["cpu", name, operand], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_absorbed_products_are_accumulated_and_returned_in_fp32(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 4, 33, 128, generator=generator) * 3).to(dtype).cuda()
    w = torch.randn(4, 128, 512, generator=generator).to(dtype).cuda()
    got = matmul_fp32(x, w)
    want = x.double() @ w.double()
    assert got.dtype == torch.float32
    bound = 128 * 2.0**-24 * (x.double().abs() @ w.double().abs())
    assert bool(((got.double() - want).abs() <= bound).all())


def test_observers_sync_through_nccl() -> None:
    """One process is enough to run every collective on the GPU's backend."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    try:
        model = make_model().cuda()
        model = mtq.quantize(model, {**mla_quant.NVFP4_MLA_CFG, "algorithm": None})
        for module in quant_mla_layers(model).values():
            module.start_observing("max", 99.99, torch.device("cuda"))
        loop(token_ids().cuda())(model)
        observers = [
            o for m in quant_mla_layers(model).values() for o in (m.observers or {}).values()
        ]
        before = [{k: v.clone() for k, v in o.state().items()} for o in observers]
        sync_observers(model)
        for state, observer in zip(before, observers, strict=True):
            assert observer.seen
            for key, value in observer.state().items():
                assert torch.equal(value, state[key])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("recipe", ["nvfp4_mla", "nvfp4_mla_2to4"])
def test_command_line_on_the_example_model(tmp_path, recipe, capsys) -> None:
    out, report = tmp_path / "out", tmp_path / "report"
    common = ["--device", "cuda"]
    arguments = ["calibrate", str(EXAMPLE), "--recipe", recipe, "--data", "example"]
    assert main([*arguments, "--out", str(out), "--num-samples", "32", *common]) == 0
    assert main(["verify", str(out), *common]) == 0
    assert main(["verify", str(out), "--device", "cpu"]) == 0
    capsys.readouterr()
    arguments = ["evaluate", str(out), "--data", "example:heldout", "--out", str(report), "--json"]
    assert main([*arguments, "--num-samples", "16", *common]) == 0
    measured = json.loads(capsys.readouterr().out)
    rows = {row["form"]: row for row in measured["accuracy"]}
    assert set(rows) == {"original", "projected", "absorbed", "decode"}
    assert rows["original"]["perplexity"] < 30
    for form in ("projected", "absorbed", "decode"):
        assert 0 < rows[form]["kl_mean"] < 0.5
