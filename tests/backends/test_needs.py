"""Which forward passes a run's flags ask for (contract 5.4)."""

from __future__ import annotations

from typing import Any

import pytest

from slime.backends.needs import (
    entropy_needs_gradient,
    needs_entropy,
    needs_logits,
    needs_old_log_probs,
    needs_ref_log_probs,
    steps_per_rollout,
    zero_advantage_groups_skippable,
)
from slime.config.args import Args
from tests.make_args import make_args as resolved_args


def make_args(**changes: Any) -> Args:
    """One optimizer step per rollout, unless ``changes`` say otherwise; also names of ``--custom-config-path``."""
    own = {name: changes.pop(name) for name in ("tis_batch_normalize",) if name in changes}
    shape = dict(num_steps_per_rollout=1, rollout_batch_size=8, n_samples_per_prompt=8)
    if "global_batch_size" in changes:
        shape["num_steps_per_rollout"] = None
    args = resolved_args(**(shape | changes))
    for name, value in own.items():
        args.declare(name, value)
    return args


def test_the_default_run_reuses_current_log_probs() -> None:
    assert not needs_old_log_probs(make_args())


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_steps_per_rollout=2),
        dict(num_steps_per_rollout=None, global_batch_size=32),
        dict(loss_type="custom_loss"),
        dict(kl_coef=0.1),
        dict(advantage_estimator="ppo"),
        dict(advantage_estimator="gspo"),
        dict(keep_old_actor=True),
        dict(use_opd=True),
        dict(get_mismatch_metrics=True),
        dict(get_mismatch_metrics=True, use_rollout_logprobs=True),
        dict(tis_batch_normalize=True),
        dict(use_routing_replay=True),
    ],
    ids=str,
)
def test_each_of_these_asks_for_a_forward_pass(changes: dict[str, Any]) -> None:
    assert needs_old_log_probs(make_args(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(use_kl_loss=True, kl_loss_coef=0.001),
        dict(use_tis=True),
        dict(advantage_estimator="cispo"),
        dict(num_steps_per_rollout=2, use_rollout_logprobs=True),
        dict(use_routing_replay=True, use_rollout_routing_replay=True),
        dict(loss_type="sft_loss", num_steps_per_rollout=4),
        dict(loss_type="custom_loss", compute_advantages_and_returns=False),
    ],
    ids=str,
)
def test_these_do_not(changes: dict[str, Any]) -> None:
    assert not needs_old_log_probs(make_args(**changes))


def test_the_batch_knows_better_than_the_flags() -> None:
    args = make_args()
    assert steps_per_rollout(args, {"global_batch_sizes": [8, 8]}) == 2
    assert needs_old_log_probs(args, {"global_batch_sizes": [8, 8]})
    engine = make_args(use_rollout_logprobs=True)
    assert needs_old_log_probs(engine, {"global_batch_sizes": [8]})  # text-only hooks: the engine's are absent
    assert not needs_old_log_probs(engine, {"global_batch_sizes": [8], "rollout_log_probs": []})


def test_reference_entropy_and_logits() -> None:
    assert not needs_ref_log_probs(make_args())
    assert needs_ref_log_probs(make_args(kl_coef=0.1)) and needs_ref_log_probs(make_args(use_kl_loss=True))
    assert not needs_ref_log_probs(make_args(use_kl_loss=True, loss_type="sft_loss"))
    assert needs_entropy(make_args()) and not needs_entropy(make_args(loss_type="sft_loss"))
    assert not entropy_needs_gradient(make_args()) and entropy_needs_gradient(make_args(entropy_coef=0.01))
    assert needs_logits(make_args(loss_type="custom_loss")) and not needs_logits(make_args())


@pytest.mark.parametrize(
    ("changes", "skippable"),
    [
        ({}, True),
        (dict(use_kl_loss=True), True),
        (dict(use_kl_loss=True, kl_loss_coef=0.001), False),
        (dict(entropy_coef=0.01), False),
        (dict(loss_type="sft_loss"), False),
        (dict(custom_pg_loss_reducer_function_path="a.b"), False),
        (dict(custom_tis_function_path="mine.tis"), False),
        (dict(custom_tis_function_path="slime.backends.megatron_utils.loss.icepop_function"), True),
        (dict(custom_tis_function_path="slime.algorithms.mis:compute_mis_weights"), True),
        (dict(skip_zero_advantage_groups=False), False),
    ],
    ids=str,
)
def test_when_zero_advantage_means_zero_gradient(changes: dict[str, Any], skippable: bool) -> None:
    assert zero_advantage_groups_skippable(make_args(**changes)) is skippable
