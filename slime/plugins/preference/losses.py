"""Losses of pairs of responses.

DPO: Rafailov et al., "Direct Preference Optimization" (2023), eq. 7; with label smoothing, Mitchell,
"A note on DPO with noisy preferences" (2023), eq. 3. Reward models: Ouyang et al., "Training language
models to follow instructions with human feedback" (2022), eq. 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from slime.algorithms.sequences import sequence_sums
from slime.backends.loss_type import LossType

from .config import PreferenceFlags

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Reduce, Reducer
    from slime.backends.loss_inputs import TokenBatch


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
        chosen, rejected = ratios[0::2], ratios[1::2]
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
