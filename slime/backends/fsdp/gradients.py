"""Adding the gradients of micro-batches, and mixed precision on one rank: float32 master weights, and
copies in the dtype of the passes while a pass runs.

FSDP gathers, casts and reduces for each micro-batch, through buffers that on one rank are only
copied to another place. Here each gradient is added to that of its master weight as soon as a layer
is done, and with ``--no-fsdp-reshard-after-forward`` weights are cast once for all micro-batches.

With ``--fsdp-cpu-offload`` the masters, their gradients and the optimizer are in CPU memory. When a
pass first needs a layer, its weights are cast there, into pinned memory, and copied to the GPU.
Gradients are copied to the CPU by a stream of their own, and added there by a thread meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from slime.backends.collectives import local
from slime.models.fused import fused_on_cuda

ROW = 1024
"""Elements of a row, as which gradients are added on a GPU."""
PIECE = 2**22
"""Elements that are cast at once on the CPU. torch would cast a whole gradient into new memory, which
the kernel clears page by page: some 45 ms for a layer of Qwen3-4B, of which a backward takes 14.
"""
LARGE = 2**24
"""Elements from which that is up to 1.5 times faster on an H200. The call takes 0.05 ms longer."""


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


Gradients = list[tuple[nn.Parameter, Tensor]]
"""Parameters, and what is added to their gradients."""


@torch.no_grad()
def add_all(gradients: Gradients) -> None:
    """Add the gradients, of any dtype, to those of the parameters, which have their own dtype."""
    first = [(x, grad) for x, grad in gradients if x.grad is None]
    if first:
        wide = [torch.empty_like(x) for x, _ in first]
        torch._foreach_copy_(wide, [grad for _, grad in first])  # one kernel for many casts
    for parameter, grad in gradients:
        if parameter.grad is not None:
            add_gradient(parameter.grad, grad)
    for i, (parameter, _) in enumerate(first):
        parameter.grad = wide[i]


class _Adder:
    """Work for a thread, in the order in which it is given."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._running: deque[Future[None]] = deque()

    def _start(self, work: Callable[[], None]) -> None:
        self._running.append(self._thread.submit(work))

    def wait(self, besides: int = 0) -> None:
        """Wait for all work, or all but the last ``besides`` calls."""
        while len(self._running) > besides:
            self._running.popleft().result()


class HostGradients(_Adder):
    """Adds gradients from the accelerator to those of parameters in CPU memory."""

    def __init__(self, device: torch.device, calls: int) -> None:
        """
        Args:
            calls: The calls of :meth:`add` for a micro-batch. So many are added later at most,
                because theirs is pinned memory.
        """
        super().__init__()
        self.device = device
        self._calls = calls
        self._wide = torch.empty(PIECE)
        self._memory: dict[nn.Parameter, Tensor] = {}
        """Gradients, whose memory is used again in the next step."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def finish(self) -> None:
        """Wait for all gradients, and for the device: the next pass writes the pinned memory from
        which weights are copied to it.
        """
        self.wait()
        if self._stream is not None:
            torch.cuda.synchronize()

    def add(self, gradients: Gradients) -> None:
        """Start to add. The gradients are copied to pinned memory after the work that is queued
        now, so the caller may drop them.
        """
        self.wait(self._calls - 1)
        copied = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            found: Gradients = []
            with torch.cuda.stream(self._stream):
                for parameter, grad in gradients:
                    host = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
                    found.append((parameter, host.copy_(grad, non_blocking=True)))
                    grad.record_stream(self._stream)
            gradients, copied = found, self._stream.record_event()
        self._start(partial(self._add, gradients, copied))

    @torch.no_grad()
    def _add(self, gradients: Gradients, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        for parameter, grad in gradients:
            if parameter.grad is None:
                if parameter not in self._memory:
                    self._memory[parameter] = torch.empty_like(parameter)
                parameter.grad = self._memory[parameter].copy_(grad)
                continue
            pieces = parameter.grad.view(-1).split(PIECE), grad.reshape(-1).split(PIECE)
            for total, piece in zip(*pieces, strict=True):
                total += self._wide[: len(piece)].copy_(piece)


class ShardGradients(_Adder):
    """The gradients of FSDP's shards in CPU memory.

    FSDP lets the accelerator go on while it copies the gradient of a shard that has none. To
    another gradient it adds, after it has waited for the copy to pageable memory. So within a pass
    the shards have those of one micro-batch only.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Add up the gradients of all micro-batches within the context, and those that are there
        at its start.
        """
        self._sums = self._take()
        try:
            yield
        finally:
            self.wait()
            for parameter, total in self._sums.items():
                parameter.grad = total
            self._sums = {}

    def end_backward(self) -> None:
        """Start to add the gradients of a micro-batch."""
        self.wait()
        self._start(partial(self._add, self._take()))

    def _take(self) -> dict[nn.Parameter, Tensor]:
        found = {x: x.grad for x in self._parameters if x.grad is not None}
        for parameter in found:
            parameter.grad = None
        return found

    @torch.no_grad()
    def _add(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        for parameter, grad in gradients.items():
            total = self._sums.setdefault(parameter, grad)
            if total is not grad:
                local(total).add_(local(grad))


class _Group:
    """Parameters whose copies are made, and whose gradients are collected, together."""

    def __init__(self, gradients: HostGradients | None) -> None:
        """
        Args:
            gradients: What adds them if the masters are in CPU memory and the copies on its device.
        """
        self.gradients = gradients
        self.host: list[Tensor] = []
        """The values of such copies in CPU memory."""
        self.fresh = False
        """Whether these are the values of the masters, which do not change while a pass runs."""
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
        device = master.device
        if self.gradients is not None:
            device = self.gradients.device
            pinned = device.type == "cuda"
            self.host.append(torch.empty(master.shape, dtype=dtype, pin_memory=pinned))
        empty = torch.empty_like(master, dtype=dtype, device=device, requires_grad=False)
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
    def fill(self) -> None:
        """Give the copies memory and the values of the masters."""
        if self.filled or not self.copies:
            return
        self.filled = True
        if self.host and not self.fresh:
            torch._foreach_copy_(self.host, [x.detach() for x in self.masters])
            self.fresh = True
        for copy, master in zip(self.copies, self.masters, strict=True):
            if copy.shape != master.shape:  # an adapter of another rank is in the layers
                copy.data = torch.empty_like(master, dtype=copy.dtype, device=copy.device)
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        # Autograd has saved the copies for the backward pass, and must not take the same values,
        # written once more, for a change.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.copies)):
            if self.gradients is None:
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
        if self.gradients is None:
            add_all(done)
        elif done:
            self.gradients.add(done)
        self.end_backward()

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
        self._active = False
        self._gradients = None if device is None else HostGradients(device, len(layers) + 1)
        self.layers = [_Group(self._gradients) for _ in layers]
        self.rest = _Group(self._gradients)
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
        for layer, group in zip(layers, self.layers, strict=True):
            group.frees = not keep
            self._follow(layer, group)

    def _follow(self, layer: nn.Module, group: _Group) -> None:
        """Fill the copies of a layer before its forward, and, unless they are kept, free them
        afterwards and fill them again before its backward."""

        def before(*_: object) -> None:
            if self._active:
                group.fill()

        def after(module: nn.Module, inputs: object, output: object) -> None:
            if not self._active or not group.frees:
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
            group.fresh = False
        self.rest.fill()
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
            if self._gradients is not None:
                self._gradients.finish()

    def end_backward(self) -> None:
        """Collect the gradients of groups of which not every parameter got one."""
        for group in [*self.layers, self.rest]:
            group.collect()
            if group.frees:
                group.free()
