"""Quantized attention for multi-head latent attention (MLA) models.

    import modelopt.torch.quantization as mtq
    from mla_quant import NVFP4_MLA_CFG

    model = mtq.quantize(model, NVFP4_MLA_CFG, forward_loop)

Importing the package is light; the first access to a config or function below imports ModelOpt
and registers MLA attention with it.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_CONFIGS = {
    "NVFP4_MLA_CFG": "nvfp4_mla",
    "FP8_MLA_CFG": "fp8_mla",
    "NVFP4_MLA_2TO4_CFG": "nvfp4_mla_2to4",
}

_FUNCTIONS = {
    "quantize": "mla_quant.calibration",
    "set_form": "mla_quant.attention",
    "use_form": "mla_quant.attention",
    "load_quantized": "mla_quant.checkpoint",
    "export_checkpoint": "mla_quant.checkpoint",
    "verify_checkpoint": "mla_quant.checkpoint",
    "load_recipe": "mla_quant.recipes",
}

__all__ = ["__version__", *_CONFIGS, *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name in _CONFIGS:
        from mla_quant.plugin import register_with_modelopt
        from mla_quant.recipes import load_recipe, to_modelopt_config

        register_with_modelopt()
        return to_modelopt_config(load_recipe(_CONFIGS[name]))
    if name in _FUNCTIONS:
        from importlib import import_module

        return getattr(import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'mla_quant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
