"""Wrap a Hugging Face model for RL: from a micro-batch to log-probs (actor) or values (critic) of
its tokens.

The head runs inside ``forward``, and only on the rows that score a response token. The scorer is
the root module, so FSDP gathers the parameters of the head for its ``forward`` as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from slime.models.cpu_kernels import linear
from slime.models.inputs import Distinct, InputBuilder, ModelInputs
from slime.models.loading import ModelError, backbone_of, plain_attention
from slime.models.packed_attention import NAME as PACKED
from slime.models.token_log_probs import Kernels, TokenScores, default_chunk_size, token_log_probs


def capped_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, cap: float) -> Tensor:
    """Return the logits ``[R, V]`` in float32 of hidden states ``[R, H]``."""
    return torch.tanh(linear(hidden, weight, bias).float() / cap) * cap


def capped_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    cap: float,
    bias: Tensor | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> TokenScores:
    """Score ``targets`` under the capped logits; otherwise as
    :func:`slime.models.token_log_probs.token_log_probs`, with tensors of the same shapes.

    The logits of a chunk of rows are recomputed in backward, so that only those of one chunk are in
    memory.
    """
    size = chunk_size if chunk_size > 0 else default_chunk_size(weight.shape[0])

    def scores(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        log_p = (capped_logits(rows, weight, bias, cap) / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else log_p.new_zeros(len(rows))
        return log_p.gather(-1, wanted[:, None]).squeeze(-1), entropy

    parts = [
        checkpoint(scores, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    log_probs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    if not with_entropy:
        return TokenScores(log_probs, None)
    return TokenScores(log_probs, entropy if entropy_grad else entropy.detach())


CHECK_TOLERANCE = 2e-3


class PolicyScorer(nn.Module):
    """Computes log-probs, and optionally entropy or logits, of the response tokens of a
    micro-batch.
    """

    def __init__(self, model: PreTrainedModel, chunk_size: int = -1) -> None:
        super().__init__()
        self.hf = model
        self.chunk_size = chunk_size
        self.kernels: Kernels | None = None
        self.fused = False  # set to True when the layers are compiled, too
        self.logit_scale = _logit_scale(model.config)
        self.logit_cap: float | None = getattr(
            model.config.get_text_config(), "final_logit_softcapping", None
        )
        self.anchored: list[nn.Parameter] = []

    @property
    def backbone(self) -> nn.Module:
        return backbone_of(self.hf)

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        with_logits: bool = False,
    ) -> tuple[TokenScores, Tensor | None]:
        """Return scores ``[R]`` and, with ``with_logits``, float32 logits ``[R, vocab]`` divided by
        the temperature.
        """
        # Logits are returned for every response token, and soft caps are rare.
        cap = self.logit_cap
        distinct = None if with_logits or cap is not None else inputs.distinct
        if cap is not None and inputs.nuclei is not None:
            raise ModelError(
                f"{type(self.hf).__name__} soft-caps its logits: use --rollout-top-p 1"
            )
        hidden = _response_rows(self.backbone, inputs, distinct)
        head = self.hf.get_output_embeddings()
        divisor = temperature if cap is not None else temperature / self.logit_scale
        options: dict[str, Any] = {
            "bias": head.bias,
            "chunk_size": self.chunk_size,
            "with_entropy": with_entropy,
            "entropy_grad": entropy_grad,
        }
        if cap is None:
            # A token that many samples have in common is scored once, and its score is copied to
            # each of them.
            options |= {"fused": self.fused, "nuclei": inputs.nuclei}
            targets = (distinct or inputs).targets
            score = self.kernels.token_log_probs if self.kernels else token_log_probs
            scores = score(hidden, head.weight, targets, divisor, **options)
        else:
            scores = capped_log_probs(hidden, head.weight, inputs.targets, divisor, cap, **options)
        if distinct is not None:
            place = distinct.place
            picked = scores.entropy
            picked = None if picked is None else picked.index_select(0, place)
            scores = TokenScores(scores.log_probs.index_select(0, place), picked)
        if not with_logits:
            return self._with_anchor(scores, None)
        if cap is not None:
            logits = capped_logits(hidden, head.weight, head.bias, cap)
        else:
            logits = linear(hidden, head.weight, head.bias).float()
        return self._with_anchor(scores, logits / divisor)

    def _with_anchor(
        self, scores: TokenScores, logits: Tensor | None
    ) -> tuple[TokenScores, Tensor | None]:
        """Add the anchor to both, because a user's loss may use one of them only."""
        if not self.anchored or not torch.is_grad_enabled():
            return scores, logits
        anchor = _anchor(self.anchored)
        return scores._replace(
            log_probs=scores.log_probs + anchor
        ), None if logits is None else logits + anchor


class ValueScorer(nn.Module):
    """A critic: the backbone with a linear head ``hidden -> 1`` instead of the language model
    head.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__()
        self.backbone = backbone_of(model)
        self.anchored: list[nn.Parameter] = []
        hidden_size = model.get_output_embeddings().weight.shape[1]
        parameter = next(model.parameters())
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.value_head = nn.Linear(hidden_size, 1, bias=True, device=parameter.device, dtype=wide)
        with torch.no_grad():
            self.value_head.weight.copy_(value_head_weight(hidden_size, seed))
            self.value_head.bias.zero_()

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Return the value before each response token is sampled, float32 ``[R]``."""
        values = self.value_head(_response_rows(self.backbone, inputs)).squeeze(-1).float()
        return (
            values + _anchor(self.anchored) if self.anchored and torch.is_grad_enabled() else values
        )


def value_head_weight(hidden_size: int, seed: int) -> Tensor:
    """Return the initial weight of a critic's head, float32 ``[1, hidden]``, equal on every backend
    and rank.
    """
    return torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) / (
        hidden_size + 1
    )


def _response_rows(
    backbone: nn.Module, inputs: ModelInputs, distinct: Distinct | None = None
) -> Tensor:
    """Return the last hidden states of the rows that score a response token, ``[R, hidden]``, or of
    the distinct ones, ``[U, hidden]``."""
    hidden = backbone(**inputs.kwargs).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, (distinct or inputs).logit_index)


def _anchor(parameters: list[nn.Parameter]) -> Tensor:
    """Return 0, with a gradient of 0 for parameters that not every rank uses in every micro-batch
    (vision towers).

    FSDP reduces the gradients of a group of parameters together, so all ranks must have gradients
    of the same ones.
    """
    return torch.stack([p.reshape(-1)[0].float() for p in parameters]).sum() * 0.0


def _logit_scale(config: PretrainedConfig) -> float:
    """Return the factor by which some model families multiply their logits."""
    text = config.get_text_config()
    if getattr(text, "logits_scaling", None):  # Granite divides
        return 1.0 / float(text.logits_scaling)
    return float(getattr(text, "logit_scale", None) or 1.0)  # Cohere multiplies


@torch.no_grad()
def check_scorer(scorer: PolicyScorer, builder: InputBuilder) -> float:
    """Compare the scorer on a pack of three short samples with the model's own forward on each
    sample.

    The check finds what no list of architectures can: a model that does not pass the pack to its
    attention, or that changes its logits in an unknown way.

    Returns:
        The largest difference of the log-probs.

    Raises:
        ModelError: They differ by more than rounding errors.
    """
    # Two samples of one group begin alike, so that the check covers a shared prompt as well.
    model = scorer.hf
    vocab = model.get_output_embeddings().weight.shape[0]
    ids = [torch.tensor([5, 3, 7, 11, 2, 9]), torch.tensor([5, 3, 7, 4]), torch.tensor([8, 1, 6])]
    ids = [sample % vocab for sample in ids]
    inputs = builder.build(ids, [3, 1, 2], [0, 0, 1], [None] * 3)
    scores = scorer(inputs)[0].log_probs.cpu()
    # The reference is the model of transformers without packs: with its own attention, one sample
    # at a time.
    configured = model.config.get_text_config()._attn_implementation
    plain = plain_attention(model.config)
    if configured == PACKED:
        model.set_attn_implementation({"text_config": plain} if _is_composite(model) else plain)
    expected = []
    for sample, response in zip(ids, [3, 1, 2], strict=True):
        logits = (
            model(input_ids=sample[None].to(builder.device), use_cache=False)
            .logits[0]
            .float()
            .cpu()
        )
        log_p = logits.log_softmax(-1)[len(sample) - response - 1 : -1]
        expected.append(log_p.gather(-1, sample[len(sample) - response :, None]).squeeze(-1))
    if configured == PACKED:
        model.set_attn_implementation({"text_config": PACKED} if _is_composite(model) else PACKED)
    difference = float((scores - torch.cat(expected)).abs().max())
    if not difference < CHECK_TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}: log-probs of packed samples differ from the model's own by "
            f"{difference:.3g} (the limit is {CHECK_TOLERANCE}), so packing does not work for "
            "this model; "
            + (
                f"use --attn-implementation {plain}"
                if configured == PACKED
                else "this architecture is not supported"
            )
        )
    return difference


def check_backward(scorer: PolicyScorer, builder: InputBuilder) -> None:
    """Compute gradients of two short samples, for layers whose kernels may refuse a GPU only in the
    backward pass.

    The parameters are cast to the dtype of the passes, and stay so.

    Raises:
        ModelError: A kernel refused it.
    """
    samples = [torch.tensor([1, 2, 3, 0]), torch.tensor([2, 1, 3])]
    inputs = builder.build(samples, [2, 1], [0, 1], [None] * 2)
    trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    for parameter in scorer.parameters():
        parameter.data = parameter.data.to(builder.float_dtype)
    try:
        torch.autograd.grad(scorer(inputs)[0].log_probs.sum(), trained, allow_unused=True)
    except RuntimeError as error:
        raise ModelError(
            f"{type(scorer.hf).__name__}: its backward pass fails on {builder.device}: {error}"
        ) from error


def _is_composite(model: PreTrainedModel) -> bool:
    return model.config.get_text_config() is not model.config
