"""Let a model compute what depends on a row alone, as trainer and as engine."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.models.autograd import Context
from slime.models.segments import PackSegments
from slime.models.token_log_probs import (
    FusedTokenScores,
    Kernels,
    ScoreOptions,
    TokenScores,
    fused_chunk_size,
)
from slime.plugins.embedded.attention import StepContext, current_step
from slime.plugins.true_on_policy import functions


def use_exact_kernels(model: PreTrainedModel) -> Kernels:
    """Exchange the forward of all layers of a dense Llama or Qwen model, and return how its tokens
    are scored.

    The model then takes packs (``slime_pack``) or steps of the embedded engine only.
    """
    for module in model.modules():
        kind = type(module).__name__
        new: Any = next((new for end, new in _FORWARDS.items() if kind.endswith(end)), None)
        if new is not None:
            module.forward = types.MethodType(new, module)
        elif kind.endswith("RotaryEmbedding"):
            # A GPU may compute other frequencies than the CPU, on which some models are made.
            module.inv_freq.copy_(type(module)(module.config).inv_freq)  # type: ignore[arg-type,operator]
    return Kernels(token_log_probs, functions.score)


def _linear(self: nn.Linear, input: Tensor) -> Tensor:
    return functions.linear(input, self.weight, self.bias)


class _Layer(nn.Module):
    """What the forward functions read of norms, MLPs and attention."""

    weight: Tensor
    variance_epsilon: float
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    head_dim: int
    layer_idx: int
    scaling: float


def _norm(self: _Layer, hidden_states: Tensor) -> Tensor:
    return functions.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp(self: _Layer, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(functions.swiglu(self.gate_proj(x), self.up_proj(x)))
    return out


def _attention(
    self: _Layer,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    slime_pack: PackSegments | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    rows = hidden_states[0]
    q, k, v = (
        proj(rows).unflatten(-1, (-1, self.head_dim))
        for proj in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        q = self.q_norm(q)
        k = self.k_norm(k)
    cos, sin = (x[0] for x in position_embeddings)
    q = functions.rotate(q, cos, sin)
    k = functions.rotate(k, cos, sin)
    if slime_pack is not None:
        out = _in_pack(q, k, v, slime_pack, self.scaling)
    else:
        step = current_step()
        assert step is not None, "these kernels need a pack or a step of the embedded engine"
        out = _in_step(self.layer_idx, q, k, v, step, self.scaling)
    result: Tensor = self.o_proj(out.flatten(1))
    return result[None], None


_FORWARDS = {"Linear": _linear, "RMSNorm": _norm, "MLP": _mlp, "Attention": _attention}


def _in_pack(q: Tensor, k: Tensor, v: Tensor, pack: PackSegments, scale: float) -> Tensor:
    if pack.kv_index is not None:
        k = k.index_select(0, pack.kv_index)
        v = v.index_select(0, pack.kv_index)
    starts = pack.cu_seqlens_q, pack.cu_seqlens_k
    spans = torch.stack([part for x in starts for part in (x[:-1], x.diff())]).long()
    return functions.attend(q, k, v, spans, (pack.max_q, pack.max_k), scale, starts)


def _in_step(
    layer: int, q: Tensor, k: Tensor, v: Tensor, step: StepContext, scale: float
) -> Tensor:
    cache = step.cache
    index = step.write_index
    cache.write(layer, index, k, v)
    if step.lengths is not None:  # each row attends to the first positions of its slot
        rows = torch.arange(len(index), device=index.device)
        first = index - (step.lengths - 1)
        spans = torch.stack((rows, torch.ones_like(rows), first, step.lengths))
        longest = 1
    else:
        segments = [
            (x.start, x.end - x.start, x.slot * cache.capacity, x.length) for x in step.segments
        ]
        table = torch.tensor(segments).t().contiguous()
        spans = table.to(index.device)
        longest = int(table[1].max())
    keys = cache.keys[layer].flatten(0, 1)
    values = cache.values[layer].flatten(0, 1)
    return functions.attend(q, keys, values, spans, (longest, 0), scale)


# The scores of tokens.


class _Scores(FusedTokenScores):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor]:
        temperature = 1 / options.inverse_temperature
        divisors = torch.full_like(targets, temperature, dtype=torch.float32)
        found = []
        logits = None
        for start in range(0, len(hidden), options.chunk_size):
            part = slice(start, start + options.chunk_size)
            logits = functions.linear(hidden[part], weight, bias)
            found.append(torch.stack(functions.score(logits, targets[part], divisors[part])))
        log_probs, log_sums, entropy = torch.cat(found, 1)
        # The backward pass begins with the last chunk.
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy, logits)
        ctx.settings = options
        return log_probs, entropy


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    **unused: object,
) -> TokenScores:
    """As :func:`slime.models.token_log_probs.token_log_probs`, without nuclei."""
    if functions.kernels_for(hidden) is not None:
        if chunk_size < 0:
            chunk_size = fused_chunk_size(len(weight), 2, torch.is_grad_enabled())
        options = ScoreOptions(1.0 / temperature, chunk_size, with_entropy, entropy_grad, None)
        log_probs, entropy = _Scores.apply(hidden, weight, bias, targets, options)
    else:
        logits = functions.linear(hidden, weight, bias)
        divisors = torch.full_like(targets, temperature, dtype=torch.float32)
        log_probs, _, entropy = functions.score(logits, targets, divisors)
    entropy = entropy if entropy_grad else entropy.detach()
    return TokenScores(log_probs, entropy if with_entropy else None)
