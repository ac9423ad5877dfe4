"""Mixed precision on one rank: float32 master weights, and copies in the dtype of the passes while
a pass runs.

FSDP does the same, but gathers, casts and reduces for each micro-batch, through buffers that on one
rank are only copied to another place. Here each gradient is added to that of its master weight as
soon as a layer is done, and with ``--no-fsdp-reshard-after-forward`` weights are cast once for all
micro-batches of a step.

With ``--fsdp-cpu-offload`` the masters, their gradients and the optimizer are in CPU memory. At the
start of a pass the weights are cast there, into pinned memory, from which each layer is copied to
the GPU when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slime.models.fused import fused_on_cuda

ROW = 1024
"""Elements of a row, as which gradients are added on a GPU."""
LARGE = 2**24
"""Elements from which that is faster: up to 1.5 times on an H200. The call itself takes 0.05 ms
longer.
"""


@fused_on_cuda
def _add_rows(total: Tensor, grad: Tensor) -> None:
    total.add_(grad)


def add_gradient(total: Tensor, grad: Tensor) -> None:
    """Add ``grad`` to ``total``, of any shape and dtype, as ``total.add_(grad)`` does.

    torch's own kernel for two dtypes loads one element at a time. On a GPU large gradients go
    through a compiled one, with the same results, as rows of a fixed length: only so does its
    compiler know that loads are aligned.
    """
    rows = grad.is_contiguous() and total.is_contiguous() and grad.numel() % ROW == 0
    if grad.is_cuda and grad.numel() >= LARGE and rows:
        _add_rows(total.view(-1, ROW), grad.view(-1, ROW))
    else:
        total.add_(grad)


class _Group:
    """Parameters whose copies are made, and whose gradients are collected, together."""

    def __init__(self, device: torch.device | None = None) -> None:
        """
        Args:
            device: The device of the copies, if it is another one than that of the masters, which
                are in CPU memory.
        """
        self.device = device
        self.host: list[Tensor] = []
        """With ``device``, the values of the copies in CPU memory."""
        self.masters: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []
        self.filled = self.in_backward = False
        self.trained = self.missing = 0
        """The number of trained parameters, and of gradients that the backward pass has not made
        yet.
        """
        self.frees = False
        """Whether the copies are freed when all gradients are there."""

    def add(self, master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        empty = torch.empty_like(master, dtype=dtype, device=self.device, requires_grad=False)
        if self.device is not None:
            pinned = self.device.type == "cuda"
            self.host.append(
                torch.empty(master.shape, dtype=dtype, device=master.device, pin_memory=pinned)
            )
        copy = nn.Parameter(empty, requires_grad=master.requires_grad)
        copy.untyped_storage().resize_(0)
        if master.requires_grad:
            copy.register_post_accumulate_grad_hook(self._arrived)
            self.trained += 1
            self.missing += 1
        self.masters.append(master)
        self.copies.append(copy)
        return copy

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast masters in CPU memory there. They do not change while a pass runs."""
        if self.host:
            torch._foreach_copy_(self.host, [x.detach() for x in self.masters])

    @torch.no_grad()
    def fill(self) -> None:
        """Give the copies memory and the values of the masters."""
        if self.filled or not self.copies:
            return
        self.filled = True
        for copy, master in zip(self.copies, self.masters, strict=True):
            if copy.shape != master.shape:  # an adapter of another rank is in the layers
                copy.data = torch.empty_like(master, dtype=copy.dtype, device=copy.device)
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        # Autograd has saved the copies for the backward pass, and must not take the same values,
        # written once more, for a change.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.copies)):
            if self.device is None:
                torch._foreach_copy_(
                    [copy.detach() for copy in self.copies], [x.detach() for x in self.masters]
                )
            for copy, values in zip(self.copies, self.host, strict=True) if self.host else ():
                copy.detach().copy_(values, non_blocking=True)

    def free(self) -> None:
        self.filled = False
        for copy in self.copies:
            copy.untyped_storage().resize_(0)

    def start_backward(self) -> None:
        self.fill()
        self.in_backward = True

    def _arrived(self, copy: Tensor) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.collect()
            # The backward of a frozen parameter's layer may need it after the last gradient.
            if self.frees and self.trained == len(self.copies):
                self.free()

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the copies to those of the masters, in the dtype of the masters."""
        done = [
            (x, copy.grad)
            for x, copy in zip(self.masters, self.copies, strict=True)
            if copy.grad is not None
        ]
        if self.device is not None:
            done = self._on_cpu(done)
        first = [(x, grad) for x, grad in done if x.grad is None]
        if first:
            wide = [torch.empty_like(x) for x, _ in first]
            torch._foreach_copy_(wide, [grad for _, grad in first])  # one kernel for many casts
        for master, grad in done:
            if master.grad is not None:
                add_gradient(master.grad, grad)
        for i, (master, _) in enumerate(first):
            master.grad = wide[i]
        self.end_backward()

    def _on_cpu(
        self, gradients: list[tuple[nn.Parameter, Tensor]]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        assert self.device is not None
        on_cuda = self.device.type == "cuda"
        found = []
        for master, grad in gradients:
            host = torch.empty(grad.shape, dtype=grad.dtype, device="cpu", pin_memory=on_cuda)
            found.append((master, host.copy_(grad, non_blocking=True)))
        if on_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        return found

    def end_backward(self) -> None:
        for copy in self.copies:
            copy.grad = None
        self.in_backward = False
        self.missing = self.trained


class CastParameters:
    """The parameters of a module that another dtype replaces during a pass.

    Between passes the module has its master weights, so that loading, saving, swapping and updating
    them need not know of the copies, and the copies take no memory.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        layers: Sequence[nn.Module],
        keep: bool,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            module: The module, on its final device. Its parameters must remain the same objects;
                their values may change between passes.
            dtype: The dtype of the passes. Parameters that have it already, such as the frozen base
                of an adapter, are left alone.
            layers: Modules within ``module``, each with a group of its own.
            keep: Keep the copies of the layers for the whole pass. Otherwise they have memory only
                during the forward and the backward of their layer.
            device: The device of the passes if all parameters are in CPU memory; None if they are
                on that device.
        """
        self._keep = keep
        self._active = False
        self._offloaded_on_cuda = device is not None and device.type == "cuda"
        self.layers = [_Group(device) for _ in layers]
        self.rest = _Group(device)
        """What belongs to no layer, or to several: it has copies for the whole pass."""
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        """Each module and name that has a parameter, tied ones several times, with the parameter
        and its copy.
        """
        inside = {
            owner: group
            for layer, group in zip(layers, self.layers, strict=True)
            for owner in layer.modules()
        }
        groups: dict[nn.Parameter, set[_Group]] = {}
        names: list[tuple[nn.Module, str, nn.Parameter]] = []
        for owner in module.modules():
            for name, master in owner.named_parameters(recurse=False):
                if (master.dtype != dtype or device is not None) and master.is_floating_point():
                    groups.setdefault(master, set()).add(inside.get(owner, self.rest))
                    names.append((owner, name, master))
        copies = {
            x: (next(iter(found)) if len(found) == 1 else self.rest).add(x, dtype)
            for x, found in groups.items()
        }
        self._places = [(owner, name, master, copies[master]) for owner, name, master in names]
        for layer, group in zip(layers, self.layers, strict=True) if not keep else ():
            group.frees = True
            self._follow(layer, group)

    def _follow(self, layer: nn.Module, group: _Group) -> None:
        """Fill the copies of a layer before its forward and backward, and free them afterwards."""

        def before(*_: object) -> None:
            if self._active:
                group.fill()

        def after(module: nn.Module, inputs: object, output: object) -> None:
            if not self._active:
                return
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(lambda grad: group.start_backward())
            # otherwise activation checkpointing runs the forward within the backward
            if not group.in_backward:
                group.free()

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the module compute with its parameters in the dtype of the passes within the
        context.
        """
        for group in [*self.layers, self.rest]:
            group.refresh()
        for group in [*self.layers, self.rest] if self._keep else [self.rest]:
            group.fill()
        for owner, name, _, copy in self._places:
            owner._parameters[name] = copy
        self._active = True
        try:
            yield
        finally:
            self._active = False
            for owner, name, master, _ in self._places:
                owner._parameters[name] = master
            for group in [*self.layers, self.rest]:
                group.end_backward()
                group.free()
            if self._offloaded_on_cuda:
                # the next pass writes the memory from which copies may still be in progress
                torch.cuda.synchronize()

    def end_backward(self) -> None:
        """Collect the gradients of groups of which not every parameter got one."""
        for group in [*self.layers, self.rest]:
            group.collect()
            if group.frees:
                group.free()
