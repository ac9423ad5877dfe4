"""Adding the gradients of micro-batches: on the device of the weights, or with
``--fsdp-cpu-offload`` in CPU memory, by a thread while the accelerator computes the next ones.
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
