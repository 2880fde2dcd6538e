"""What importing the package costs, and what its names give."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_import_is_light() -> None:
    code = (
        "import sys, mla_quant; "
        "print(sorted({'torch', 'triton', 'transformers', 'modelopt', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    import mla_quant

    for name in mla_quant.__all__:
        assert getattr(mla_quant, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'NVFP5_MLA_CFG'"):
        _ = mla_quant.NVFP5_MLA_CFG


def test_configs_are_copies() -> None:
    import mla_quant

    mla_quant.NVFP4_MLA_CFG["quant_cfg"].clear()
    assert mla_quant.NVFP4_MLA_CFG["quant_cfg"], "changing one must not change the next"
