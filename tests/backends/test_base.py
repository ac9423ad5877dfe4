"""Which forward passes a run's flags ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.base import TrainNeeds
from slime.backends.train_loop import score_rollout
from slime.data.fields import RankBatch
from tests.make_args import make_args as resolved_args


def needs(**changes: Any) -> TrainNeeds:
    """One optimizer step per rollout, unless ``changes`` say otherwise; also names of
    ``--custom-config-path``.
    """
    own = {name: changes.pop(name) for name in ("tis_batch_normalize",) if name in changes}
    shape = dict(num_steps_per_rollout=1, rollout_batch_size=8, n_samples_per_prompt=8)
    args = resolved_args(**(shape | changes))
    for name, value in own.items():
        setattr(args, name, value)
    return TrainNeeds.from_args(args)


def batch(steps: int = 1, **entries: Any) -> RankBatch:
    return RankBatch({"global_batch_sizes": [8] * steps} | entries)


@pytest.mark.parametrize(("kept", "weights"), [(True, "old_actor"), (False, "actor")])
def test_old_log_probs_are_those_of_the_kept_weights(kept: bool, weights: str) -> None:
    asked: list[str] = []

    def log_probs(batch: RankBatch, model: str, with_entropy: bool) -> dict[str, list[str]]:
        asked.append(model)
        return {"log_probs": [f"of {model}"]}

    backend: Any = SimpleNamespace(
        role="actor", needs=needs(keep_old_actor=kept), log_probs=log_probs
    )
    entries, _ = score_rollout(backend, batch(steps=2))
    assert entries == {"log_probs": [f"of {weights}"]} and asked == [weights]


def test_the_default_run_reuses_current_log_probs() -> None:
    assert not needs().recomputes_old_log_probs(batch())


@pytest.mark.parametrize(
    "changes",
    [
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
    assert needs(**changes).recomputes_old_log_probs(batch(rollout_log_probs=[]))


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
    steps = changes.get("num_steps_per_rollout", 1)
    assert not needs(**changes).recomputes_old_log_probs(batch(steps, rollout_log_probs=[]))


def test_several_steps_ask_for_a_forward_pass() -> None:
    assert needs().recomputes_old_log_probs(batch(steps=2))


def test_the_engines_log_probs_may_be_absent() -> None:
    """Functions of users may return text alone."""
    engine = needs(use_rollout_logprobs=True)
    assert engine.recomputes_old_log_probs(batch())
    assert not engine.recomputes_old_log_probs(batch(rollout_log_probs=[]))


def test_reference_entropy_and_logits() -> None:
    assert not needs().ref_log_probs
    assert needs(kl_coef=0.1).ref_log_probs and needs(use_kl_loss=True).ref_log_probs
    assert not needs(use_kl_loss=True, loss_type="sft_loss").ref_log_probs
    assert needs().entropy and not needs(loss_type="sft_loss").entropy
    assert not needs().entropy_grad and needs(entropy_coef=0.01).entropy_grad
    assert needs(loss_type="custom_loss").logits and not needs().logits


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
    assert needs(**changes).skips_zero_advantages is skippable
