"""The step of a distributed optimizer without a float32 copy of all gradients, also for main parameters on the CPU.

With ``--optimizer-cpu-offload``, main parameters and moments are in CPU memory. megatron-core's own
``HybridDeviceOptimizer`` is not used for this, because it offloads nothing unless a fraction is given, keeps each
gradient until the next call of ``step``, and cannot load a state whose main parameters are float32. Here torch's Adam
remains the inner optimizer. :func:`offload_main_parameters` replaces a fraction of the float32 main parameters by
tensors in CPU memory before the first step, so that their moments are created there, too. :class:`StreamedGradients`
copies each gradient to the device of its main parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

PIECE_BYTES = 2**30


class _Pair(NamedTuple):
    model: Tensor
    main: Tensor
    start: int
    end: int

    def gradient(self) -> Tensor:
        """Return the gradient as a view of the buffer, on the device of the model."""
        gradient: Tensor = self.model.main_grad  # type: ignore[attr-defined]
        return gradient.view(-1)[self.start : self.end]


class StreamedGradients:
    """Computes the gradient norm and the step of an optimizer piece by piece.

    Megatron copies all gradients of a ``--grad-reduce-in-bf16`` buffer to float32 at once, which takes another four
    bytes per parameter. Here the norm is that of the buffer, and one piece after the other is copied, used and freed
    for the step. Gradients of main parameters in CPU memory (``--optimizer-cpu-offload``) are copied through a pinned
    buffer of the size of a piece.

    Args:
        optimizer: One of Megatron's distributed optimizers.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        self._host: Tensor | None = None

    @property
    def pieces(self) -> list[list[_Pair]]:
        """Groups of parameters whose gradients are in float32 at the same time. They are computed again for each use,
        because loading a checkpoint may replace tensors."""
        return [] if self.optimizer.is_stub_optimizer else _pieces(self.optimizer)

    def squared_norm(self) -> float:
        """Return the squared norm of this optimizer's gradients over all ranks. This is a collective operation."""
        total = torch.zeros(1, device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        for piece in self.pieces:
            gradients = [pair.gradient() for pair in piece if self._counts(pair.main)]
            if gradients:
                total += torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()
        torch.distributed.all_reduce(total, group=self.optimizer.get_grad_stats_parallel_group())
        return float(total)

    def _counts(self, main: Tensor) -> bool:
        """Return whether a gradient counts on this rank, by Megatron's rule (``get_main_grads_for_grad_norm``): each
        parameter of the whole model counts once."""
        group = getattr(self.optimizer, "tp_group", None)
        return bool(param_is_not_shared(main)) and bool(param_is_not_tensor_parallel_duplicate(main, group))

    def step(self, scale: float) -> None:
        """Update the main parameters with the gradients times ``scale``. The parameters of the model do not change."""
        for _ in self._in_turn(scale):
            self.optimizer.optimizer.step()

    def _in_turn(self, scale: float) -> Iterator[None]:
        """Yield once per piece, while the main parameters of the piece have their gradients, on their own device."""
        for piece in self.pieces:
            start = 0
            for pair, gradient in zip(piece, _scaled([pair.gradient() for pair in piece], scale), strict=True):
                if gradient.device != pair.main.device:
                    host = self._host_memory(piece)[start : start + gradient.numel()]
                    start += gradient.numel()
                    pair.main.grad = host.copy_(gradient, non_blocking=True)
                else:
                    pair.main.grad = gradient
            # The optimizer runs on the CPU and would read the pinned buffer before the copies have arrived.
            if start:
                torch.cuda.current_stream().synchronize()
            yield
            for pair in piece:
                pair.main.grad = None

    def _host_memory(self, piece: list[_Pair]) -> Tensor:
        """Return a pinned float32 buffer for the gradients of a piece. All pieces use the same buffer."""
        numel = sum(pair.main.numel() for pair in piece)
        if self._host is None or self._host.numel() < numel:
            self._host = torch.empty(numel, dtype=torch.float32, pin_memory=True)
        return self._host


def _scaled(gradients: list[Tensor], scale: float) -> list[Tensor]:
    """Return gradients in float32 times ``scale``. The given tensors do not change, and are returned if they are those.

    One kernel converts many tensors: a conversion of each by itself takes twice as long on an H200.
    """
    if scale == 1.0 and all(x.dtype == torch.float32 for x in gradients):
        return gradients
    scaled = [torch.empty_like(x, dtype=torch.float32) for x in gradients]
    torch._foreach_copy_(scaled, gradients)
    if scale != 1.0:
        torch._foreach_mul_(scaled, scale)
    return scaled


@torch.no_grad()
def offload_main_parameters(optimizer: DistributedOptimizer, fraction: float) -> int:
    """Replace main parameters by copies in CPU memory.

    Args:
        optimizer: The optimizer, before its first step.
        fraction: The fraction of this rank's elements in ``optimizer`` to replace. Whole parameters are replaced, in
            order, until this fraction is reached.

    Returns:
        The number of elements that were replaced.
    """
    if optimizer.is_stub_optimizer:
        return 0
    groups = [*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups]
    wanted = fraction * sum(main.numel() for group in groups for main in group)
    moved: dict[int, Tensor] = {}
    count = 0
    for group in groups:
        for place, main in enumerate(group):
            if count < wanted:
                group[place] = moved[id(main)] = _on_cpu(main)
                count += main.numel()
    # Megatron keeps the groups from which it created torch's optimizer. They would keep the old parameters in memory.
    made_from = [ranges["orig_group"] for ranges in optimizer.opt_group_ranges]
    for inner_group in [*optimizer.optimizer.param_groups, *made_from]:
        inner_group["params"] = [moved.get(id(main), main) for main in inner_group["params"]]
    for model_group in optimizer.model_float16_groups:
        for model in model_group:
            model.main_param = moved.get(id(model.main_param), model.main_param)
    return count


def _on_cpu(main: Tensor) -> Tensor:
    """Copy a main parameter to the CPU, with the attributes that Megatron's gradient norm needs."""
    copy = main.detach().to("cpu", copy=True)
    tensor_parallel.copy_tensor_model_parallel_attributes(copy, main)
    if hasattr(main, "shared"):
        copy.shared = main.shared  # type: ignore[attr-defined]
    return copy


def _pieces(optimizer: DistributedOptimizer) -> list[list[_Pair]]:
    models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
    mains = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
    pieces: list[list[_Pair]] = []
    size = PIECE_BYTES
    for model_group, main_group in zip(models, mains, strict=True):
        for model, main in zip(model_group, main_group, strict=True):
            if size >= PIECE_BYTES:
                pieces.append([])
                size = 0
            # A distributed optimizer has a flat range of each parameter, which may end within a row.
            own = optimizer._get_model_param_range_map(model)["param"]
            pieces[-1].append(_Pair(model, main, own.start, own.end))
            size += 4 * own.size
    return pieces
