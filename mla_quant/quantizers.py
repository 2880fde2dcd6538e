"""The ModelOpt backend: quantize-dequantize along the contraction axis of an operand.

A `TensorQuantizer` of this backend carries in `backend_extra_args` which operand it serves and in
which format, so that ModelOpt saves and restores both.
"""

from __future__ import annotations

from typing import Any

import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
    is_registered_quant_backend,
    register_quant_backend,
)
from torch import Tensor

from mla_quant.errors import CalibrationError
from mla_quant.formats import FORMATS, OperandFormat
from mla_quant.recipes import BACKEND, OPERAND_AXIS
from mla_quant.reference import quantize_dequantize

DEFAULT_P_AMAX = 1.0
"""P is 2^(score - M) with M at least every score, so it never exceeds this."""


class _StraightThrough(torch.autograd.Function):
    """Rounded values forward; backward, the gradient passes where nothing was clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, amax: Tensor) -> Tensor:
        ctx.save_for_backward(x.abs() <= amax)
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None


def operand_format(quantizer: TensorQuantizer) -> OperandFormat:
    """The format a quantizer of this backend rounds to; "none" if it is disabled."""
    extra = quantizer_settings(quantizer)
    return FORMATS[extra["format"]] if quantizer.is_enabled and extra else FORMATS["none"]


def quantizer_settings(quantizer: TensorQuantizer) -> dict[str, Any]:
    """`backend_extra_args` of a quantizer of this backend; empty for any other."""
    if getattr(quantizer, "backend", None) != BACKEND:
        return {}
    return dict(quantizer.backend_extra_args)


def quantizer_amax(quantizer: TensorQuantizer, name: str) -> Tensor | float:
    """The amax in use.

    Raises:
        CalibrationError: It was never set (P alone has a default).
    """
    amax = getattr(quantizer, "_amax", None)
    if amax is None:
        if quantizer_settings(quantizer).get("operand") == "p":
            return DEFAULT_P_AMAX
        raise CalibrationError(
            f"{name} has no amax: it was never calibrated. Run a forward loop with data through "
            "mtq.quantize, load settings that hold it, or disable the quantizer"
        )
    found: Tensor = amax.float()
    return found


def _backend(inputs: Tensor, quantizer: TensorQuantizer) -> Tensor:
    extra = quantizer.backend_extra_args
    operand, fmt = extra["operand"], FORMATS[extra["format"]]
    if not fmt.is_quantized:
        return inputs
    if operand == "linear":
        amax: Tensor | float = quantizer._get_amax(inputs).float()
        axis = -1
    else:
        amax = quantizer_amax(quantizer, f"quantizer of operand {operand!r}")
        axis = OPERAND_AXIS[operand]
    rounded = quantize_dequantize(
        inputs,
        fmt,
        amax,
        axis=axis,
        segments=getattr(quantizer, "segments", None),
        reciprocal=operand == "p",
    ).to(inputs.dtype)
    if inputs.requires_grad and torch.is_grad_enabled():
        bound = torch.as_tensor(amax, device=inputs.device)
        return _StraightThrough.apply(inputs, rounded, bound)  # type: ignore[no-any-return,no-untyped-call]
    return rounded


def register_backend() -> None:
    """Make the backend known to ModelOpt; calling it again does nothing."""
    if not is_registered_quant_backend(BACKEND):
        register_quant_backend(BACKEND, _backend)
