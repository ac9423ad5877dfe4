"""The primitives of :class:`slime.Session` on one training rank: gradients that accumulate over
calls, and an optimizer step of its own settings.

All ranks must call every function together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.algorithms.token_losses import TOKEN_LOSSES
from slime.backends.base import Metrics, TrainNeeds
from slime.backends.loss_inputs import LossSettings
from slime.backends.micro_batches import ResponseValues
from slime.backends.shared import NonFiniteError
from slime.backends.train_loop import PhaseTimer, score
from slime.types import AdamSettings

if TYPE_CHECKING:
    from torch import Tensor

    from slime.backends.fsdp.backend import FsdpBackend
    from slime.data.fields import RankBatch


def forward_backward(
    backend: FsdpBackend, batch: RankBatch, loss: str, options: Mapping[str, float]
) -> tuple[Metrics, list[Tensor]]:
    """Add the gradients of a loss to those that are there.

    Args:
        batch: Its only step has the data of the call; it has advantages.
        loss: A name of :data:`TOKEN_LOSSES`, ``policy_loss`` for the loss of the flags, or the name
            of an estimator.
        options: Those of a loss of :data:`TOKEN_LOSSES`.

    Returns:
        The metrics, equal on all ranks, and the log-probs of the scored tokens of this rank's
        samples, float32 on the CPU.

    Raises:
        NonFiniteError: The loss is not finite. All gradients are dropped.
    """
    settings, needs = _settings_of(backend, loss, options)
    with _training_with(backend, settings, needs):
        # the reference, and the old log-probs, if the loss needs them
        score(backend, batch, PhaseTimer())
        scored = ResponseValues(batch, ["log_probs"], backend.device)
        shares, scheduled, trained = backend.accumulate(batch, 0, scored)
        _require_finite(backend, shares.get("loss", 0.0), "loss")
        metrics = backend.step_metrics(shares, batch, scheduled, trained)
    log_probs = scored.by_sample()["log_probs"]
    computed = {i for indices in trained for i in indices}
    if len(computed) < len(log_probs):
        # Samples without a gradient were skipped; their log-probs come from a pass without one.
        others = backend.log_probs(batch, temperature=needs.temperature)["log_probs"]
        log_probs = [x if i in computed else others[i] for i, x in enumerate(log_probs)]
    if settings.token_loss is not None:
        metrics = {"loss": metrics["loss"]}
    return metrics, log_probs


def optim_step(backend: FsdpBackend, adam: AdamSettings | None) -> Metrics:
    """Update the weights with the gradients that have accumulated, and drop these.

    Args:
        adam: None for the settings of the flags, with the learning rate of their schedule.

    Returns:
        ``grad_norm``, before it is clipped, and the learning rate ``lr``.

    Raises:
        NonFiniteError: The norm is not finite. The weights are unchanged, and the gradients are
            dropped.
    """
    optimizer = backend.optimizer
    norm = optimizer.grad_norm()
    _require_finite(backend, norm, "gradient norm")
    lr = optimizer.step(norm, adam)
    optimizer.zero_grad()
    return {"grad_norm": norm, "lr": lr}


def token_loss_sum(
    loss: str, options: Mapping[str, float], batch: RankBatch, log_probs: list[Tensor]
) -> float:
    """Return a loss of :data:`TOKEN_LOSSES` of log-probs that :func:`forward_backward` would have
    computed.
    """
    function, defaults = TOKEN_LOSSES[loss]
    weights = batch["advantages"]
    sampled = batch.get("rollout_log_probs") or log_probs
    parts = zip(log_probs, sampled, weights, strict=True)
    return float(sum(function(*part, {**defaults, **options}).sum() for part in parts))


def _settings_of(
    backend: FsdpBackend, loss: str, options: Mapping[str, float]
) -> tuple[LossSettings, TrainNeeds]:
    """Return the settings of a loss, and what it needs of the model."""
    args = backend.args
    if loss not in TOKEN_LOSSES:
        estimator = args.advantage_estimator if loss == "policy_loss" else loss
        args = args.with_values(loss_type="policy_loss", advantage_estimator=estimator)
        return LossSettings.from_args(args), TrainNeeds.from_args(args)
    function, defaults = TOKEN_LOSSES[loss]
    chosen = {**defaults, **options}

    def token_loss(log_probs: Tensor, sampled: Tensor, weights: Tensor) -> Tensor:
        return function(log_probs, sampled, weights, chosen)

    settings = replace(
        LossSettings.from_args(args), loss_type="token_sum", per_token=False, token_loss=token_loss
    )
    # Nothing but one pass, at temperature 1.
    needs = replace(
        TrainNeeds.from_args(args),
        ref_log_probs=False,
        teacher_log_probs=False,
        old_log_probs=False,
        trains=False,
        rollout_entropy=False,
        entropy=False,
        entropy_grad=False,
        logits=False,
        temperature=1.0,
        skips_zero_advantages=loss != "dro",  # whose distance has a gradient of its own
    )
    return settings, needs


@contextmanager
def _training_with(
    backend: FsdpBackend, settings: LossSettings, needs: TrainNeeds
) -> Iterator[None]:
    before = backend.loss_settings, backend.needs
    backend.loss_settings, backend.needs = settings, needs
    try:
        yield
    finally:
        backend.loss_settings, backend.needs = before


def _require_finite(backend: FsdpBackend, value: float, what: str) -> None:
    """Raise the same error on every rank, so that no rank waits for one that raised an error."""
    if all(math.isfinite(x) for x in backend.share_reduce.each(value)):
        return
    backend.optimizer.zero_grad()
    raise NonFiniteError(
        f"the {what} is {value}: the weights are unchanged, and all gradients since the last step "
        "are dropped. Look at the log-probs and advantages of the data, or lower the learning rate"
    )
