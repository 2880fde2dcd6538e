"""bfloat16 in Triton's interpreter, which multiplies its bit patterns and truncates when it rounds.

The kernels of this project work around both, those of vLLM do not: without this, a decode step of
vLLM in bfloat16 is noise here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.interpreter import shorten

_create_dot = InterpreterBuilder.create_dot
_cast = InterpreterBuilder.cast_impl


def apply() -> None:
    """Correct the interpreter of this process."""
    InterpreterBuilder.create_dot = _create_wide_dot
    InterpreterBuilder.cast_impl = _cast_to_nearest
    shorten()


def _widen(operand: TensorHandle) -> TensorHandle:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _create_wide_dot(builder: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _create_dot(builder, _widen(a), _widen(b), *rest)


def _cast_to_nearest(builder: Any, source: TensorHandle, target: Any) -> TensorHandle:
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(builder, source, target)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
    return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
