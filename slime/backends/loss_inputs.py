"""The inputs of the loss: its settings, and a micro-batch as flat tensors over response tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from slime.algorithms.algorithm import Algorithm, custom_setting
from slime.algorithms.off_policy import TisResult, vanilla_tis_function
from slime.algorithms.sequences import Reducer, keep_where
from slime.backends.loss_type import LossType
from slime.config.algorithm import create_algorithm
from slime.config.args import Args
from slime.config.flag import own_section
from slime.config.hooks import load_function
from slime.data.fields import BY_NAME, LOSS_FIELDS, RankBatch
from slime.registry import load, parts

T = TypeVar("T")


def require(value: T | None, what: str, why: str) -> T:
    """Return an entry of a batch. Raises ValueError if the batch lacks it, and says ``why`` it is
    needed.
    """
    if value is None:
        raise ValueError(f"{why} needs {what}, which the batch does not have")
    return value


@dataclass(frozen=True)
class LossSettings:
    """The settings of :func:`compute_loss`, read from the flags once."""

    loss_type: str
    algorithm: Algorithm
    per_token: bool
    """``--calculate-per-token-loss``."""
    entropy_coef: float
    kl: KlLoss | None
    """None without ``--use-kl-loss``."""
    use_rollout_logprobs: bool
    observation_coef: float
    """``--observation-loss-coef``."""
    opsm_delta: float | None
    """None without ``--use-opsm``."""
    correction: Correction | None
    """None if there is neither a correction for the engine's probabilities nor a measurement of the
    mismatch.
    """
    value_clip: float
    pg_reducer: Callable[..., Reducer] | None
    """The function of ``--custom-pg-loss-reducer-function-path``."""
    custom_loss: Callable[..., tuple[Tensor, Mapping[str, object]]] | None
    """The function of ``--custom-loss-function-path``."""
    registered: LossType | None
    """The loss of a plug-in that ``loss_type`` names; None for the losses of the core."""
    args: Args
    """For custom functions only."""
    token_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """With the loss type ``token_sum``, which no flag has: a loss of
    :mod:`slime.algorithms.token_losses` with its options.
    """

    @property
    def metrics_vary(self) -> bool:
        """Whether a function of the user makes metrics, which may depend on the samples of a
        micro-batch.
        """
        return self.custom_loss is not None or (
            self.correction is not None and self.correction.is_custom
        )

    @classmethod
    def from_args(cls, args: Args) -> LossSettings:
        """Read the flags."""
        # The functions of the user are loaded here, once, so that a wrong path ends the run before
        # its first step.
        registered = parts("loss").get(args.loss_type)
        reducer = args.custom_pg_loss_reducer_function_path
        tis = args.custom_tis_function_path
        applies = bool(args.use_tis or custom_setting(args, "use_rs", False))
        custom_loss = args.custom_loss_function_path
        kl = None
        if args.use_kl_loss:
            kl = KlLoss(args.kl_loss_coef, args.kl_loss_type, args.use_unbiased_kl)
        correction = None
        if applies or args.get_mismatch_metrics:
            correction = Correction(
                function=load_function(tis) if tis else vanilla_tis_function,
                applies=applies,
                by_default=bool(args.use_tis) and "use_tis" not in args.explicit,
                is_custom=bool(tis),
            )
        of_plugin = None
        if registered is not None:
            of_plugin = load(registered.target)(own_section(registered, args))
        return cls(
            loss_type=args.loss_type,
            algorithm=create_algorithm(args),
            per_token=args.calculate_per_token_loss,
            entropy_coef=args.entropy_coef,
            kl=kl,
            use_rollout_logprobs=args.use_rollout_logprobs,
            observation_coef=args.observation_loss_coef,
            opsm_delta=args.opsm_delta if args.use_opsm else None,
            correction=correction,
            value_clip=args.value_clip,
            pg_reducer=load_function(reducer) if reducer else None,
            custom_loss=load_function(custom_loss) if custom_loss else None,
            registered=of_plugin,
            args=args,
        )


@dataclass(frozen=True)
class KlLoss:
    """The settings of the KL to the reference as a term of the loss."""

    coefficient: float
    kind: str
    unbiased: bool
    """Whether to multiply the estimate by the importance ratio (``--use-unbiased-kl``)."""


@dataclass(frozen=True)
class Correction:
    """The settings of importance weights for tokens whose probabilities differ between engine and
    trainer.
    """

    function: Callable[..., TisResult]
    """The function of ``--custom-tis-function-path``; truncated importance sampling by default."""
    applies: bool
    """Whether the correction is applied. With ``--get-mismatch-metrics`` alone, the function only
    measures.
    """
    by_default: bool
    """Whether the correction is used without a flag. Then a rollout without the engine's log-probs
    is not corrected.
    """
    is_custom: bool
    """Whether the function is that of ``--custom-tis-function-path``."""


PER_TOKEN = ("log_probs", "entropy", "values", *LOSS_FIELDS.values())
"""The fields of :class:`TokenBatch` with one value per response token, without the mask."""


class Scores(NamedTuple):
    """The outputs of a model for the loss, per response token ``[R]``: log-probs or values."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    logits: Tensor | None = None
    """``[R, vocab]``, divided by the temperature; only if the loss needs them."""
    values: Tensor | None = None

    @property
    def trained(self) -> Tensor:
        """The output that always has a gradient: the values of a critic or the log-probs of an
        actor.
        """
        trained = self.log_probs if self.values is None else self.values
        assert trained is not None
        return trained


@dataclass
class TokenBatch:
    """The tensors of one micro-batch of n samples.

    Per-token tensors are ``[R]``: the concatenated response tokens of the samples, in their order.
    With context parallelism they are the part of this rank, and ``response_lengths`` are the
    lengths of this part, but ``total_lengths`` are those of whole sequences.
    """

    response_lengths: list[int]
    total_lengths: list[int]
    loss_mask: Tensor
    """``[R]``, of any numeric dtype; 1 for tokens that are trained."""
    rollout_mask_sums: Tensor
    """``[n]``: for each sample, the mask sum over all samples of its rollout in the whole batch."""
    log_probs: Tensor | None = None
    """``[R]``, with gradient; None only for the critic."""
    entropy: Tensor | None = None
    """``[R]``, with gradient if ``--entropy-coef`` is not 0."""
    old_log_probs: Tensor | None = None
    """Log-probs that the trainer recomputed before the first step; None for the current ones,
    detached.
    """
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    values: Tensor | None = None
    """``[R]``, with gradient: the values of the critic. If they are present, the loss is the value
    loss.
    """
    observation_masks: Tensor | None = None
    observation_log_probs: Tensor | None = None
    """``log_probs``, but 0 for all tokens other than those of ``observation_masks``, which are masked
    in the policy loss; made by :meth:`cleaned`."""
    opd_reverse_kl: Tensor | None = None
    staleness: Tensor | None = None
    """The number of steps between the weights that generated a token and those that are trained on
    it; -1 if it is not known."""
    mis_weight_mean: float | None = None
    logits: Tensor | None = None
    """``[R, vocab]``: the rows that score the response tokens, divided by the rollout temperature,
    with gradient. Only for losses that need them (``TrainNeeds.logits``)."""
    targets: Tensor | None = None
    """int64 ``[R]``: the response tokens; only together with ``logits``."""
    sample_entries: dict[str, Any] = field(default_factory=dict)
    """The entries of the rank batch for these samples (lists of length n). Entries per response token
    are the part of this rank."""

    @classmethod
    def from_rank_batch(
        cls,
        batch: RankBatch,
        indices: Sequence[int],
        *,
        log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
        logits: Tensor | None = None,
        targets: Tensor | None = None,
        device: torch.device | str | None = None,
        response_index: Sequence[Tensor] | None = None,
    ) -> TokenBatch:
        """Select the samples at ``indices``, in that order, and flatten their per-token entries.

        Args:
            batch: A rank batch over whole responses.
            device: The device of the loss; by default that of ``log_probs`` or ``values``.
            response_index: With context parallelism, the response tokens of each sample that this
                rank has.
        """
        # The loss is computed where the model's output is, and everything else is moved there.
        current = log_probs if log_probs is not None else values
        if device is None:
            device = "cpu" if current is None else current.device

        def flat(key: str) -> Tensor | None:
            entry = batch.get(key)
            if entry is None:
                return None
            parts = [torch.as_tensor(entry[i]) for i in indices]
            if response_index is not None:
                parts = [part[index] for part, index in zip(parts, response_index, strict=True)]
            return (torch.cat(parts) if parts else torch.zeros(0)).to(device, non_blocking=True)

        # Entries that the batch lacks stay None. The loss says which one it needs.
        loss_mask = flat("loss_masks")
        assert loss_mask is not None, "a rank batch always has loss_masks"
        sums = torch.tensor([float(batch["rollout_mask_sums"][i]) for i in indices])
        return cls(
            response_lengths=[int(batch["response_lengths"][i]) for i in indices]
            if response_index is None
            else [len(index) for index in response_index],
            total_lengths=[int(batch["total_lengths"][i]) for i in indices],
            loss_mask=loss_mask,
            rollout_mask_sums=sums.to(device, non_blocking=True),
            log_probs=log_probs,
            entropy=entropy,
            values=values,
            logits=logits,
            targets=targets,
            mis_weight_mean=batch.get("mis_weight_mean"),
            sample_entries=_sample_entries(batch, indices, response_index),
            **{field: flat(name) for name, field in LOSS_FIELDS.items()},
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 if the output of the model is float64."""
        current = self.log_probs if self.log_probs is not None else self.values
        return (
            torch.float32 if current is None else torch.promote_types(current.dtype, torch.float32)
        )

    def cleaned(self) -> TokenBatch:
        """Return the batch with per-token values in the compute dtype and 0 for masked tokens.

        So values of masked tokens (NaN, or −inf for a token outside the nucleus) affect neither
        loss nor gradient.

        Raises:
            ValueError: A per-token tensor does not have one entry per token of the mask.
        """
        dtype = self.compute_dtype
        changes: dict[str, Any] = {}
        observed = self.observation_masks
        if observed is not None and self.log_probs is not None:
            kept = keep_where(observed, self.log_probs.to(dtype))
            changes = {"observation_masks": observed, "observation_log_probs": kept}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in PER_TOKEN or item.name in changes or value is None:
                continue
            if value.shape != self.loss_mask.shape:
                raise ValueError(
                    f"TokenBatch.{item.name} has shape {tuple(value.shape)}, the mask "
                    f"{tuple(self.loss_mask.shape)}: both need one entry per response token"
                )
            changes[item.name] = keep_where(self.loss_mask, value.to(dtype))
        return replace(self, loss_mask=self.loss_mask.to(dtype), **changes)

    def split(self, x: Tensor) -> list[Tensor]:
        """Split a flat per-token tensor ``[R]`` into one tensor ``[response_length]`` per
        sample.
        """
        return list(x.split(self.response_lengths))


def _sample_entries(
    batch: RankBatch, picked: Sequence[int], response_index: Sequence[Tensor] | None
) -> dict[str, list[Any]]:
    """The entries per sample of ``TokenBatch.sample_entries``."""
    found = {}
    for key, entry in batch.items():
        per = BY_NAME[key].per if key in BY_NAME else "sample"
        if not isinstance(entry, list) or len(entry) != len(batch["tokens"]) or per == "batch":
            continue
        values = [entry[i] for i in picked]
        if response_index is not None and per == "response token":
            values = [
                torch.as_tensor(value)[own]
                for value, own in zip(values, response_index, strict=True)
            ]
        found[key] = values
    return found
