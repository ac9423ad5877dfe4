"""The type of what torch hands to the forward and the backward of an autograd function."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """Only for annotations. It declares what torch adds at run time; functions derive a class from it that declares the
    attributes which their forward sets for their backward."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    saved_tensors: tuple[Any, ...]
    """What ``save_for_backward`` was given: tensors, and None where it was given None."""
    needs_input_grad: tuple[bool, ...]


Gradients = tuple[Tensor | None, ...]
"""One for each argument of the forward; None for those without a gradient."""
