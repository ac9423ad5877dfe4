"""The reference: plain transformers and autograd, one sample at a time, on one rank in float32 on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from slime.plugins.tools.verify.batch import RandomSample


@dataclass
class Scores:
    """What a model computes for the fixed batch.

    Attributes:
        log_probs: By position of the sample in the batch, float32 ``[response_length]``.
        weights: By name in the checkpoint.
        gradients: The same, of the loss.
    """

    log_probs: dict[int, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    grad_norm: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def reference_scores(
    folder: Path, samples: list[RandomSample], with_gradients: bool = True, trust_remote_code: bool = False
) -> Scores:
    """Return the scores of the policy-gradient loss −Σᵢ rewardᵢ · meanₜ(ratio) / n, where each ratio is 1.

    The mean is over the tokens in the mask of the sample.
    """
    from transformers import AutoModelForCausalLM

    from slime.backends.fsdp.hf_weights import iter_hf_weights

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
    ).eval()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # a response may contain the padding token, which is trained like any other
    found = Scores()
    if with_gradients:
        found.weights = {name: t.detach().clone() for name, t in iter_hf_weights(model, torch.float32)}
    for position, sample in enumerate(samples):
        tokens, mask = torch.tensor(sample["tokens"]), torch.tensor(sample["mask"], dtype=torch.float32)
        with torch.set_grad_enabled(with_gradients):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            scored = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0][-len(mask) :]
            ratio = (scored - scored.detach()).exp()
            loss = -sample["reward"] * (ratio * mask).sum() / mask.sum().clamp(min=1) / len(samples)
        found.log_probs[position] = scored.detach()
        if with_gradients:
            found.loss += float(loss.detach())
            loss.backward()
    if with_gradients:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for buffer in model.buffers():  # they have no gradient, and may have other names in the checkpoint
                buffer.data = torch.full_like(buffer, math.inf) if buffer.is_floating_point() else buffer
        gradients = {name: t.detach().clone() for name, t in iter_hf_weights(model, torch.float32)}
        found.gradients = {name: g for name, g in gradients.items() if not g.isinf().all()}
        found.grad_norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in found.gradients.values()))
    return found
