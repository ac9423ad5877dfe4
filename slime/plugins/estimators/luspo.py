"""LUSPO: GSPO whose sequences weigh as much as they have tokens, so that long ones do not learn
less per token.

Source: arXiv 2602.05261.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from slime.algorithms.algorithm import Row
from slime.algorithms.grpo import Gspo
from slime.algorithms.sequences import Reducer, constant_reducer

if TYPE_CHECKING:
    from torch import Tensor


class Luspo(Gspo):
    """GSPO with the sum over the tokens of a response in place of their mean.

    The loss of a sequence is the same at each of its tokens, so that the sum is length × loss of
    the sequence.

    Source: arXiv 2602.05261, the objective.
    """

    zero_advantage_has_no_gradient = True  # the reduction is linear
    needs_old_log_probs = False  # in a first step the ratio is 1, with the same gradient
    forbids: ClassVar[Mapping[str, str]] = {
        "calculate_per_token_loss": "the estimator sums over tokens, the flag divides by their number"
    }
    row = Row(
        "as `grpo`",
        "that of `gspo`, summed over the tokens of each response",
        "small clips, as for `gspo`",
        "arXiv 2602.05261",
    )

    def pg_reducer(self, mask: Tensor, default: Reducer) -> Reducer:
        return constant_reducer(mask, 1.0)
