"""``--optimizer-cpu-offload``: main parameters and moments of the distributed optimizer in CPU memory.

megatron-core's own ``HybridDeviceOptimizer`` is not used: it offloads nothing unless a fraction is given, keeps each
gradient for the next call of ``step``, and cannot load a state whose main parameters are float32. Here torch's Adam
stays the inner optimizer. A share of the float32 main parameters is replaced by tensors in CPU memory before the first
step, so that their moments are made there, too; :class:`~slime.backends.megatron.streamed_gradients.StreamedGradients`
brings each gradient to the device of its main parameter.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@torch.no_grad()
def offload_main_parameters(optimizer: DistributedOptimizer, fraction: float) -> int:
    """Replace main parameters by copies in CPU memory.

    Args:
        optimizer: before its first step.
        fraction: of this rank's elements in ``optimizer``; parameters move whole and in order until it is reached.

    Returns:
        The number of elements that moved.
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
    # Megatron keeps the groups that it made torch's optimizer from. They would keep the replaced parameters alive.
    made_from = [ranges["orig_group"] for ranges in optimizer.opt_group_ranges]
    for inner_group in [*optimizer.optimizer.param_groups, *made_from]:
        inner_group["params"] = [moved.get(id(main), main) for main in inner_group["params"]]
    for model_group in optimizer.model_float16_groups:
        for model in model_group:
            model.main_param = moved.get(id(model.main_param), model.main_param)
    return count


def _on_cpu(main: Tensor) -> Tensor:
    """A copy of a main parameter, with what Megatron's gradient norm asks of it."""
    copy = main.detach().to("cpu", copy=True)
    tensor_parallel.copy_tensor_model_parallel_attributes(copy, main)
    if hasattr(main, "shared"):
        copy.shared = main.shared  # type: ignore[attr-defined]
    return copy
