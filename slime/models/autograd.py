"""The type of what torch hands to the forward and the backward of an autograd function."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """Only for annotations: it declares what torch adds at run time, and what forward sets for backward."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    saved_tensors: tuple[Any, ...]
    """What ``save_for_backward`` was given: tensors, and None where it was given None."""
    needs_input_grad: tuple[bool, ...]
    settings: tuple[Any, ...]
    """What backward needs beside tensors."""


Gradients = tuple[Tensor | None, ...]
"""One for each argument of the forward; None for those without a gradient."""
