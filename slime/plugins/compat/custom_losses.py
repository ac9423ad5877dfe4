"""Helpers for users' loss functions, with the names and arguments of older releases.

A loss function gets logits of another form than in older releases: ``[R, vocab]``, one row for each
response token of the micro-batch, already divided by the rollout temperature. The helpers below
hide this difference. They take the keyword arguments of older releases and return what these
returned; see docs/en/coming_from.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime.algorithms.sequences import IDENTITY
from slime.backends.loss import LOSSES
from slime.backends.loss_inputs import LossSettings, TokenBatch
from slime.config.layout import ParallelLayout
from slime.data.fields import BY_NAME, RankBatch

if TYPE_CHECKING:
    from slime.config.args import Args


def get_responses(
    logits: Tensor,
    *,
    args: Args,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each sample the rows of its response, ``[response_length, vocab]``, and its
    response tokens.

    Args:
        logits: ``[R, vocab]``, as the loss function got them.
        unconcat_tokens: The tokens of each sample, ``batch["unconcat_tokens"]``.

    Raises:
        ValueError: ``logits`` do not have one row per response token, or context parallelism splits
            the responses.
    """
    if ParallelLayout.from_args(args).cp > 1:
        raise ValueError(
            'with --context-parallel-size above 1, use batch["targets"] and '
            'batch["current_log_probs"]'
        )
    if logits.shape[0] != sum(response_lengths):
        raise ValueError(
            f"logits have {logits.shape[0]} rows for {sum(response_lengths)} response tokens"
        )
    start = 0
    for tokens, total, length in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        if len(tokens) != total or length > total:
            raise ValueError(
                f"{len(tokens)} tokens for a sample of {total}, {length} of them in the response"
            )
        targets = torch.as_tensor(tokens, device=logits.device)[total - length :]
        yield logits[start : start + length], targets
        start += length


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Args,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return an empty tensor, and ``log_probs`` (with ``with_entropy`` also ``entropy``): one
    tensor per sample.

    Both have gradients and are those of the tempered distribution, since ``logits`` are divided by
    the temperature.
    """
    found: dict[str, list[Tensor]] = {"log_probs": []}
    if with_entropy:
        found["entropy"] = []
    responses = get_responses(
        logits,
        args=args,
        unconcat_tokens=unconcat_tokens,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
    )
    for rows, targets in responses:
        all_log_probs = torch.log_softmax(rows.float(), dim=-1)
        found["log_probs"].append(all_log_probs.gather(-1, targets.long()[:, None])[:, 0])
        if with_entropy:
            found["entropy"].append(-(all_log_probs.exp() * all_log_probs).sum(-1))
    return logits.new_zeros(0), found


def policy_loss_function(
    args: Args,
    batch: Mapping[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy loss of the flags, for loss functions that add a term to it.

    Args:
        batch: As the loss function got it.
        sum_of_sample_mean: Not used, since the flags determine the reduction; it is the same.

    Returns:
        The loss before the division by the rollouts (or tokens) of the step, and its metrics.
    """
    scored = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=args.entropy_coef != 0,
    )[1]

    entries = RankBatch({name: batch[name] for name in BY_NAME if name in batch})
    tokens = TokenBatch.from_rank_batch(
        entries,
        range(len(batch["loss_masks"])),
        log_probs=torch.cat(scored["log_probs"]),
        entropy=torch.cat(scored["entropy"]) if "entropy" in scored else None,
    )
    settings = LossSettings.from_args(
        args.with_values(loss_type="policy_loss", custom_loss_function_path=None)
    )
    loss, metrics = LOSSES["policy_loss"](settings, tokens.cleaned(), IDENTITY)
    return loss, metrics
