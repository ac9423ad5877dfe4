"""Mamba-2 mixers (Nemotron-H, Granite 4, Bamba; beside attention in Falcon-H1). Source: Dao and Gu 2024, https://arxiv.org/abs/2405.21060."""

from __future__ import annotations

import math

import torch
from torch import nn

from slime.models.layer_kinds.kind import with_state


def _bound_time_steps(mixer: nn.Module) -> None:
    """Bound the time steps ``softplus(dt + bias)`` from below in decode as well, as transformers does in prefill and
    training only. Otherwise the engine's log-probs of Nemotron-H differ from the trainer's by 1e-3."""
    limit = getattr(mixer, "time_step_limit", (0.0, math.inf))
    if limit[0] <= 0:
        return
    smallest = math.log(math.expm1(limit[0]))  # the inverse of softplus

    def bounded(projection: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        bias = mixer.dt_bias
        assert isinstance(bias, torch.Tensor)
        rest, steps = output.split([output.shape[-1] - len(bias), len(bias)], -1)
        return torch.cat([rest, torch.maximum(steps, (smallest - bias).to(steps.dtype))], -1)

    projection = mixer.in_proj
    assert isinstance(projection, nn.Module)
    projection.register_forward_hook(bounded)


MIXERS = ("Mamba2Mixer", "MambaLayer", "BambaMixer", "FalconH1Mixer")
KIND = with_state("Mamba-2", ("linear_attention", "hybrid"), MIXERS, _bound_time_steps)
