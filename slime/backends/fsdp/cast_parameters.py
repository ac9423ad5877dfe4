"""Mixed precision on one rank: float32 master weights, and copies in the dtype of the passes while a pass runs.

FSDP does the same, but gathers, casts and reduces for each micro-batch, through buffers that on one rank are only
copied to another place. Here weights are cast once for all micro-batches of a step, and each gradient is added to that
of its master weight as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class CastParameters:
    """The parameters of a module that another dtype replaces during a pass.

    Between passes the module has its master weights, so that loading, saving, swapping and updating them need not know
    of the copies, and the copies take no memory.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """
        Args:
            module: The module, on its final device. Its parameters must remain the same objects; their values may
                change between passes.
            dtype: The dtype of the passes. Parameters that have it already, such as the frozen base of an adapter, are
                left alone.
        """
        self.masters: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []
        self._places: list[tuple[nn.Module, str, int]] = []
        """Each module and name that has a parameter, tied ones several times, with its index."""
        found: dict[nn.Parameter, int] = {}
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.dtype == dtype or not parameter.is_floating_point():
                    continue
                if parameter not in found:
                    found[parameter] = len(self.masters)
                    self.masters.append(parameter)
                    self.copies.append(self._copy_of(parameter, dtype))
                self._places.append((owner, name, found[parameter]))
        self._free()

    def _copy_of(self, master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        empty = torch.empty_like(master, dtype=dtype, requires_grad=False)
        copy = nn.Parameter(empty, requires_grad=master.requires_grad)
        if master.requires_grad:
            copy.register_post_accumulate_grad_hook(lambda done: _add_gradient(master, done))
        return copy

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the module compute with its parameters in the dtype of the passes, and collect gradients for the master
        weights, in their dtype."""
        for copy in self.copies:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        with torch.no_grad():
            if self.masters:
                torch._foreach_copy_([copy.detach() for copy in self.copies], [x.detach() for x in self.masters])
        self._install(self.copies)
        try:
            yield
        finally:
            self._install(self.masters)
            self._free()

    def _install(self, parameters: list[nn.Parameter]) -> None:
        for owner, name, index in self._places:
            owner._parameters[name] = parameters[index]

    def _free(self) -> None:
        for copy in self.copies:
            copy.grad = None  # only after an error within a backward pass
            copy.untyped_storage().resize_(0)


@torch.no_grad()
def _add_gradient(master: nn.Parameter, copy: Tensor) -> None:
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad.add_(copy.grad)
    copy.grad = None
