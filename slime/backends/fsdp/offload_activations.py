"""Recompute activations from layer inputs that wait in CPU memory (``--offload-activations``).

Activation checkpointing keeps the input of every layer on the GPU until its backward pass. Here it is copied to pinned
CPU memory on a second CUDA stream, while the layer computes, and back when the layer is recomputed. The values are
copied exactly, so that loss and gradients are those of plain checkpointing to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def checkpoint_offloaded(function: Callable[..., Any], hidden: Tensor, *rest: Any) -> Any:
    """Run a layer, and again in its backward pass, without keeping its first input on the device in between.

    It has the signature of the function that layers of transformers call for checkpointing.
    """
    if not torch.is_grad_enabled():
        return function(hidden, *rest)
    stash, first = _Stash(hidden), [hidden]

    def run(*others: Any) -> Any:
        # The closure must not hold the input after the first run. Gradients reach it through the graph of that run; the
        # second run only makes the values that this graph has not kept.
        return function(first.pop() if first else stash.fetch(), *others)

    return checkpoint(run, *rest, use_reentrant=False)


class _Stash:
    """The values of a tensor in CPU memory."""

    def __init__(self, tensor: Tensor) -> None:
        source = tensor.detach()
        self._device, self._needs_grad = tensor.device, tensor.requires_grad
        if not source.is_cuda:
            self._host = source.clone()
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream = _copy_stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # its memory is not given away before the copy is made
        self._copied = stream.record_event()

    def fetch(self) -> Tensor:
        """Return the values on the device of the tensor."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            return self._host.to(self._device, non_blocking=True).requires_grad_(self._needs_grad)
        return self._host.requires_grad_(self._needs_grad)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
