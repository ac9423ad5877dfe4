"""Losses of preferences: of pairs of responses (DPO, reward models), and of responses that are desirable
or not, each by itself (KTO).

DPO: Rafailov et al., "Direct Preference Optimization" (2023), eq. 7; with label smoothing, Mitchell,
"A note on DPO with noisy preferences" (2023), eq. 3. Reward models: Ouyang et al., "Training language
models to follow instructions with human feedback" (2022), eq. 1. KTO: Ethayarajh et al., "KTO: Model Alignment as
Prospect Theoretic Optimization" (2024), eq. 7 and 8; its reference point is the KL to the reference on
prompts with responses of other prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slime.algorithms.sequences import sequence_means, sequence_sums
from slime.backends.loss_type import LossType
from slime.data.sample import Group, Sample, flatten
from slime.plugins.preference import PreferenceFlags

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Reduce, Reducer
    from slime.backends.loss_inputs import TokenBatch
    from slime.config.args import Args


def log_ratios(tokens: TokenBatch) -> Tensor:
    """Return log π(y|x) − log π_ref(y|x) of each response of a micro-batch, ``[n]``, with
    gradient.
    """
    if tokens.log_probs is None or tokens.ref_log_probs is None:
        raise ValueError("a loss on preferences needs log_probs and ref_log_probs")
    return sequence_sums(tokens.log_probs - tokens.ref_log_probs, tokens.response_lengths)


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Return −(1 − s) log σ(β (c − r)) − s log σ(−β (c − r)) per pair, ``[n]``.

    Args:
        chosen, rejected: :func:`log_ratios` of the two responses of each pair, ``[n]``.
        smoothing: s, the share of pairs that are labelled the wrong way round.
    """
    from torch.nn.functional import logsigmoid

    margin = beta * (chosen - rejected)
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


class Dpo(LossType):
    """``--loss-type dpo``, on rollouts of two samples: the chosen response and the rejected one."""

    whole_rollouts: ClassVar[bool] = True
    has_rewards: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True

    def compute(
        self, tokens: TokenBatch, mean: Reducer, reduce: Reduce
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(self.own, PreferenceFlags)
        beta = self.own.dpo_beta
        ratios = log_ratios(tokens)
        chosen = ratios[0::2]
        rejected = ratios[1::2]
        loss = dpo_loss(chosen, rejected, beta, self.own.dpo_label_smoothing).sum()
        return loss, {
            "preference_accuracy": (chosen > rejected).to(ratios.dtype).sum(),
            "preference_margin": beta * (chosen - rejected).sum(),
            "chosen_reward": beta * chosen.sum(),
            "rejected_reward": beta * rejected.sum(),
        }


class BradleyTerry(LossType):
    """``--loss-type reward_model``: −log σ(s_chosen − s_rejected), where s is the score of a head
    on the last token of a response.
    """

    whole_rollouts: ClassVar[bool] = True
    has_rewards: ClassVar[bool] = False
    scores_responses: ClassVar[bool] = True

    def compute(
        self, tokens: TokenBatch, mean: Reducer, reduce: Reduce
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from torch.nn.functional import logsigmoid

        assert tokens.values is not None, "scores_responses"
        # The mask is 1 at one token of each sample, whose value is the score.
        scores = sequence_sums(tokens.values, tokens.response_lengths)
        margin = scores[0::2] - scores[1::2]
        return -logsigmoid(margin).sum(), {
            "preference_accuracy": (margin > 0).to(margin.dtype).sum(),
            "preference_margin": margin.sum(),
        }


WEIGHT_KEY = "kto_weight"
"""The key of ``Sample.train_metadata``: the weight in the loss, negative for an undesirable response;
0 for a mismatched one."""


def with_mismatched(groups: Sequence[Group], desirable: float, undesirable: float) -> list[Group]:
    """Add to each row, for each of its responses, the same prompt with the response before it in the
    batch, which is not trained. The first one gets the last.

    A row is one rollout, so the weights of its responses are divided by their number.
    """
    real = [sample for group in groups for sample in flatten(group)]
    before = dict(zip(map(id, real), [real[-1], *real[:-1]], strict=True))
    whole: list[Group] = []
    for group in groups:
        samples = flatten(group)
        for sample in samples:
            weight = desirable if sample.reward else -undesirable
            sample.train_metadata = {WEIGHT_KEY: weight / len(samples)}
        whole.append([[*samples, *(_mismatched(one, before[id(one)]) for one in samples)]])
    return whole


def _mismatched(sample: Sample, other: Sample) -> Sample:
    made = copy.copy(sample)
    prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
    made.tokens = prompt + other.tokens[len(other.tokens) - other.response_length :]
    made.response = other.response
    made.response_length = other.response_length
    made.loss_mask = [0] * other.response_length
    made.train_metadata = {WEIGHT_KEY: 0.0}
    return made


def set_reference_point(args: Args, rollout_data: dict[str, Any]) -> None:
    """Set the reference point as the advantages, and the weights as the returns, of each sample
    (``--custom-advantage-function-path``).

    The reference point is the mean of log π − log π_ref of the mismatched responses of the whole
    rollout, on all ranks, and at least 0.
    """
    import torch
    import torch.distributed as dist

    from slime.backends.collectives import DataParallelReduce

    weights = [entry[WEIGHT_KEY] for entry in rollout_data["metadata"]]
    gaps = [
        float((rollout_data["log_probs"][i] - rollout_data["ref_log_probs"][i]).double().sum())
        for i, weight in enumerate(weights)
        if not weight
    ]
    parallel = dist.is_initialized()
    on_gpu = parallel and dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    ranks = DataParallelReduce(dist.get_world_size() if parallel else 1, device)
    total, count = ranks.total([sum(gaps), float(len(gaps))])
    point = max(total / max(count, 1.0), 0.0)
    lengths = rollout_data["response_lengths"]
    rollout_data["advantages"] = [torch.full((n,), point) for n in lengths]
    rollout_data["returns"] = [torch.full((n,), w) for n, w in zip(lengths, weights, strict=True)]


def kto_loss(ratios: Tensor, weights: Tensor, point: Tensor, beta: float) -> Tensor:
    """Return abs(w) (1 − σ(β (r − z))) of desirable and abs(w) (1 − σ(β (z − r))) of undesirable
    responses, ``[n]``.

    Args:
        ratios: r, :func:`log_ratios`, ``[n]``.
        weights: w, negative for undesirable responses, ``[n]``.
        point: z, ``[n]``.
    """
    return weights.abs() * (-beta * weights.sign() * (ratios - point)).sigmoid()


class Kto(LossType):
    """``--loss-type kto``."""

    needs_reference: ClassVar[bool] = True
    has_rewards: ClassVar[bool] = False

    def compute(
        self, tokens: TokenBatch, mean: Reducer, reduce: Reduce
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from slime.backends.loss import WEIGHT

        assert isinstance(self.own, PreferenceFlags)
        assert tokens.advantages is not None and tokens.returns is not None, "the reference point"
        ratios = log_ratios(tokens)
        # Both are the same at each token of a sample, and 0 where it is masked.
        point, weights = (
            sequence_means(x, tokens.loss_mask, tokens.response_lengths)
            for x in (tokens.advantages, tokens.returns)
        )
        metrics = {}
        rewards = self.own.kto_beta * ratios
        for name, kind, values in (
            ("chosen_reward", weights > 0, rewards),
            ("rejected_reward", weights < 0, rewards),
            ("kto_reference_point", weights != 0, point),
        ):
            metrics[name] = (values * kind).sum()
            metrics[name + WEIGHT] = kind.to(values.dtype).sum()
        return kto_loss(ratios, weights, point, self.own.kto_beta).sum(), metrics
