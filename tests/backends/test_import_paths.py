"""The helpers of custom losses and corrections at their documented paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends import loss
from slime.backends.loss_inputs import LossSettings, TokenBatch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
from slime.backends.megatron_utils.loss import (
    get_log_probs_and_entropy,
    get_responses,
    policy_loss_function,
)
from tests.make_args import make_args

VOCAB = 11


def micro_batch() -> tuple[dict[str, Any], torch.Tensor]:
    """Two samples of 5 and 4 tokens, with responses of 3 and 2; the entries of the batch of a
    custom loss.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB, (n,), generator=generator) for n in (5, 4)]
    lengths = [3, 2]
    batch: dict[str, Any] = {"tokens": tokens, "unconcat_tokens": tokens, "total_lengths": [5, 4]}
    batch |= {
        "response_lengths": lengths,
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([1, 1])],
    }
    batch |= {"rollout_mask_sums": [2.0, 2.0], "sample_indices": [0, 1]}
    for name in ("log_probs", "advantages", "ref_log_probs"):
        batch[name] = [torch.randn(n, generator=generator) - 1 for n in lengths]
    return batch, torch.randn(5, VOCAB, generator=generator, requires_grad=True)


def shapes(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}


def test_log_probs_and_entropy_of_responses() -> None:
    batch, logits = micro_batch()
    args = make_args()
    rows = list(get_responses(logits, args=args, **shapes(batch)))
    assert [tuple(part.shape) for part, _ in rows] == [(3, VOCAB), (2, VOCAB)]
    assert [ids.tolist() for _, ids in rows] == [
        batch["tokens"][0][2:].tolist(),
        batch["tokens"][1][2:].tolist(),
    ]
    empty, found = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **shapes(batch))
    assert empty.numel() == 0 and found["log_probs"][0].requires_grad
    distribution = torch.distributions.Categorical(logits=logits)
    targets = torch.cat([ids for _, ids in rows])
    torch.testing.assert_close(torch.cat(found["log_probs"]), distribution.log_prob(targets))
    torch.testing.assert_close(torch.cat(found["entropy"]), distribution.entropy())
    assert "entropy" not in get_log_probs_and_entropy(logits, args=args, **shapes(batch))[1]


def test_what_the_helpers_cannot_do_is_refused() -> None:
    batch, logits = micro_batch()
    with pytest.raises(ValueError, match=r"4 rows.*5 response"):
        list(get_responses(logits[:4], args=make_args(), **shapes(batch)))
    split = make_args(megatron={"context_parallel_size": 2})
    with pytest.raises(ValueError, match=r'use batch\["targets"\]'):
        list(get_responses(logits, args=split, **shapes(batch)))


@pytest.mark.parametrize(
    "flags", [{}, {"entropy_coef": 0.1}, {"use_kl_loss": True, "kl_loss_coef": 0.2}]
)
def test_the_policy_loss_of_the_flags(flags: dict[str, Any]) -> None:
    batch, logits = micro_batch()
    args = make_args(loss_type="custom_loss", custom_loss_function_path="os.path.join", **flags)
    mine, metrics = policy_loss_function(args, batch, logits, lambda x: x.sum())
    scored = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **shapes(batch))[1]
    tokens = TokenBatch(
        response_lengths=[3, 2], total_lengths=[5, 4], loss_mask=torch.cat(batch["loss_masks"]),
        rollout_mask_sums=torch.tensor([2.0, 2.0]), log_probs=torch.cat(scored["log_probs"]),
        entropy=torch.cat(scored["entropy"]) if "entropy_coef" in flags else None,
        old_log_probs=torch.cat(batch["log_probs"]), advantages=torch.cat(batch["advantages"]),
        ref_log_probs=torch.cat(batch["ref_log_probs"]),
    )  # fmt: skip
    settings = LossSettings.from_args(make_args(**flags))
    whole, _ = loss.compute_loss(settings, tokens, num_rollouts=2, num_tokens=4)
    torch.testing.assert_close(mine / 2, whole)
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (mine / 2, whole)
    ]
    torch.testing.assert_close(*gradients)
    assert {"pg_loss", "pg_clipfrac"} <= set(metrics)


def test_whole_responses_pass_through() -> None:
    values = torch.arange(3.0)
    assert (
        all_gather_with_cp(values, 5, 3) is values
        and slice_log_prob_with_cp(values, 5, 3) is values
    )
    with pytest.raises(ValueError, match=r"2 values.*3 tokens"):
        all_gather_with_cp(values[:2], 5, 3)
