"""Types for the forward and the backward of autograd functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """The type of ``ctx``, for annotations only. It declares attributes that torch adds at run
    time, and ``settings``, which forward sets for backward."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    saved_tensors: tuple[Any, ...]
    """The arguments of ``save_for_backward``: tensors or None."""
    needs_input_grad: tuple[bool, ...]
    settings: tuple[Any, ...]
    """The values other than tensors that backward needs."""


Gradients = tuple[Tensor | None, ...]
"""One gradient for each argument of the forward; None for an argument without a gradient."""
