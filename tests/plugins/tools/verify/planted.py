"""Ranks with a planted error, for ``test_verify.py``: each changes the code that it runs and then
verifies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from slime.backends.fsdp.backend import FsdpBackend
from slime.plugins.tools.local_ranks import Place
from slime.plugins.tools.verify.reference import Scores, VerifyJob, verify_rank


def swapped_gate_and_up(self: LlamaMLP, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def norm_without_weight(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def without_all_reduce(place: Place, job: VerifyJob) -> list[Scores]:
    """Two replicas whose gradients are not summed, as if the reduction after the last micro-batch
    was forgotten.
    """
    original = FsdpBackend.communicate_for

    def forgetful(self: Any, last: bool) -> None:
        original(self, last)
        if hasattr(self.scorer, "set_requires_all_reduce"):
            self.scorer.set_requires_all_reduce(False)

    FsdpBackend.communicate_for = forgetful  # type: ignore[method-assign]
    return verify_rank(place, job)


def without_sum_over_context(place: Place, job: VerifyJob) -> list[Scores]:
    """Context-parallel ranks that keep the gradients of the keys and values that other ranks
    read.
    """
    from slime.models.segments import GatherRows

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (group,) = ctx.settings
        return grads[0].chunk(group.size())[group.rank()].contiguous(), None

    GatherRows.backward = staticmethod(backward)  # type: ignore[method-assign]
    return verify_rank(place, job)


def without_sum_of_norms(place: Place, job: VerifyJob) -> list[Scores]:
    """Sequence-parallel ranks that keep the gradients of norms to themselves."""
    import importlib

    from slime.plugins.megatron import core

    core.prepare()
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalize._allreduce_non_tensor_model_parallel_grads = lambda *_, **__: None  # type: ignore[attr-defined]
    return verify_rank(place, job)


def without_sum_of_rows(place: Place, job: VerifyJob) -> list[Scores]:
    """Tensor-parallel ranks whose row-parallel layers return the sum over a part of the columns."""
    from slime.plugins.megatron import core

    core.prepare()
    from megatron.core.tensor_parallel import layers

    original, reduce = (
        layers.RowParallelLinear.forward,
        layers.reduce_from_tensor_model_parallel_region,
    )

    def forward(self: Any, x: Tensor) -> Any:
        layers.reduce_from_tensor_model_parallel_region = lambda x, *_, **__: x
        try:
            return original(self, x)
        finally:  # embeddings use the same function
            layers.reduce_from_tensor_model_parallel_region = reduce

    layers.RowParallelLinear.forward = forward
    return verify_rank(place, job)
