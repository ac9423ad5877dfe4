"""The interface of losses that plug-ins register for ``--loss-type``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from slime.algorithms.sequences import Reduce, Reducer
    from slime.backends.loss_inputs import TokenBatch
    from slime.config.args import Args


class LossType(ABC):
    """A loss, registered with ``register("loss", name, place, flags=place_of_its_flags)``.

    Its module is imported in processes without torch, so torch is imported inside of functions.
    Nothing else of a run follows from the loss: a ``resolver`` of the plug-in sets the rollout
    function and the data source.

    Args:
        own: The section of the flags that it brings; None if it brings none.
    """

    whole_rollouts: ClassVar[bool] = False
    """Whether all samples of a rollout must be in one micro-batch, next to each other and in their
    order.
    """
    needs_reference: ClassVar[bool] = False
    """Whether it reads ``TokenBatch.ref_log_probs``."""
    scores_responses: ClassVar[bool] = False
    """Whether the run trains a model with a head of one score in place of the head of the language
    model. ``TokenBatch.values`` has the score that is read before each response token; there are no
    log-probs.
    """

    has_rewards: ClassVar[bool] = True
    """Whether samples have rewards, and not only a mark of which response is the chosen one."""
    needs_logits: ClassVar[bool] = False
    """Whether it reads ``TokenBatch.logits``."""

    def __init__(self, own: object) -> None:
        self.own = own

    def prepare(self, args: Args, device: torch.device) -> list[tuple[str, Tensor]]:
        """Load what the loss has besides the model, once, before the first step. Only with FSDP.

        Returns:
            The tensors of it that change in the course of a run, whole and equal on all ranks.
            Snapshots have them, and a resume fills them.
        """
        return []

    def after_step(self, named: Sequence[tuple[str, Tensor]]) -> None:  # noqa: B027  # most have no state
        """Follow the model after each optimizer step; ``named`` are its parameters, maybe sharded."""

    @abstractmethod
    def compute(
        self, tokens: TokenBatch, mean: Reducer, reduce: Reduce
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and metrics of a micro-batch, as sums over its rollouts.

        Args:
            tokens: Its tensors are ``[R]``, and 0 for masked tokens.
            mean: The reduction of the run, of ``[R]``.
            reduce: Sums over the ranks that hold other tokens of the same samples.
        """
